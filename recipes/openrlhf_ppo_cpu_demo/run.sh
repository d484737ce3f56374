#!/usr/bin/env bash
# OpenRLHF's train_ppo_ray on CPU with two layout changes. usage: run.sh [directory] [options]
set -euo pipefail
directory=$(realpath -m "${1:-openrlhf-demo}")
shift || true
exec "${PYTHON:-python}" -m nereus_openrlhf.demo --dir "$directory" "$@"
