#!/usr/bin/env bash
# Simulated comparison on the shipped traces. usage: simulated.sh [directory] [nereus ab options]
#   SEEDS=3 TRACES="growth churn" POLICIES=static,nereus recipes/ab/simulated.sh compared --steps 200
# What is finished is kept in the directory: the same command again goes on.
set -euo pipefail
directory=${1:-compared}
shift || true
python=${PYTHON:-python}
"$python" -c 'import nereus_plugins' 2>/dev/null || {
  echo "simulated.sh: $python has no Nereus; in a clone: ./dev run $0, or set PYTHON" >&2
  exit 2
}
policies=${POLICIES:-static,dp_scaling,static_hindsight,nereus}
traces=${TRACES:-$("$python" -m nereus_plugins.cli trace list | cut -d: -f1)}
failed=0
for trace in $traces; do
  echo "== $trace"
  "$python" -m nereus_plugins.cli ab --trace "$trace" --policies "$policies" \
    --seeds "${SEEDS:-3}" --baseline "${BASELINE:-${policies%%,*}}" -o "$directory/$(basename "$trace" .json)" "$@" \
    || failed=$?
done
exit "$failed"
