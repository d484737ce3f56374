#!/usr/bin/env bash
# 8B PPO on clusters of A100, H100 and H20, 8 to 256 GPUs: GPUs fixed, responses growing; simulated.
# usage: clusters.sh [directory] [nereus ab options]
#   CLUSTERS="h100-64 h20-16" POLICIES=verl_tuned,nereus SEEDS=1 recipes/ab/clusters.sh compared
# A name is GPU-COUNT; any GPU that `nereus plan` knows will do. Mixed GPUs cannot be simulated (no
# trace has them): for those, what the planner expects (MIXED="A:COUNT+B:COUNT ...").
# What is finished is kept in the directory: the same command again goes on.
set -euo pipefail
directory=${1:-clusters}
shift || true
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
"$python" -c 'import nereus_plugins' 2>/dev/null || {
  echo "clusters.sh: $python has no Nereus; in a clone: ./dev run $0, or set PYTHON" >&2
  exit 2
}
nereus() { "$python" -m nereus_plugins.cli "$@"; }
clusters=${CLUSTERS:-a100_80gb-8 a100_80gb-64 a100_80gb-256 h100_80gb-8 h100_80gb-64 h100_80gb-256 h20-16 h20-128}
mixed=${MIXED-h100_80gb:32+h20:32 a100_80gb:32+h100_80gb:32}
policies=${POLICIES:-openrlhf_default,openrlhf_tuned,verl_static,verl_tuned,dp_scaling,nereus}
mkdir -p "$directory/traces"
failed=0
for cluster in $clusters; do
  echo "== $cluster"
  trace=$directory/traces/$cluster.json
  nereus trace build -o "$trace" --lengths "$here/../traces/series/orz_response_length_digitised.csv" \
    --run ORZ-32B --tail "$here/../traces/series/servegen_deepseek_r1_hist.csv" \
    --steps "${STEPS:-200}" --gpu "${cluster%-*}" --gpus-max "${cluster##*-}" \
    --model llama3-8b --algorithm ppo --prompts 128 --samples 8 >/dev/null
  nereus ab --trace "$trace" --policies "$policies" --seeds "${SEEDS:-3}" \
    --baseline "${BASELINE:-${policies%%,*}}" -o "$directory/$cluster" "$@" || failed=$?
done
for pools in $mixed; do
  echo "== $pools: the planner's estimate, not simulated, responses up to ${LONGEST:-8192} tokens"
  first=${pools%%+*} second=${pools##*+}
  common=(--model llama3-8b --algorithm ppo --backend megatron --prompts 128 --samples 8
    --prompt-tokens 512 --response-tokens "${LONGEST:-8192}" --json)
  for name in "both kinds" "$first" "$second"; do
    one=$first also=()
    if [ "$name" = "both kinds" ]; then also=(--also "$second"); fi
    if [ "$name" = "$second" ]; then one=$second; fi
    nereus plan --gpu "${one%:*}" --gpus "${one#*:}" "${also[@]}" "${common[@]}" | "$python" -c "
import json, sys
print(f'{sys.argv[1]:20} {json.load(sys.stdin)[\"estimate\"][\"iteration_s\"]:8.1f} s an iteration')" "$name"
  done
done
exit "$failed"
