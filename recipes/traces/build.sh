#!/usr/bin/env bash
# Makes the traces that ship (nereus_plugins/data/traces) from the series beside this file.
# SOURCES.md says where the series come from; `nereus trace show NAME` what each trace assumes.
set -euo pipefail
cd "$(dirname "$0")/series"
out=${1:-../../../nereus_plugins/data/traces}
mkdir -p "$out"

lengths=(--lengths orz_response_length_digitised.csv --run ORZ-32B)
tail=(--tail servegen_deepseek_r1_hist.csv)

build() {
    local name=$1
    shift
    nereus trace build -o "$out/$name.json" "${lengths[@]}" "${tail[@]}" "$@" >/dev/null
}

build growth --availability bamboo_gcp_a100x1-east1b.csv --gpus-max 256 --steps 1000
build churn --availability bamboo_aws_p3_events.csv --shape steady --gpus-max 256 --steps 600
build falling --shape reversed --gpus-max 128 --steps 600
build oscillating --shape oscillating:40 --gpus-max 128 --steps 600
build stationary --shape steady --gpus-max 128 --steps 600
build fixed-gpus --gpus-max 128 --steps 1089
build thousand --availability stairs:128:8 --gpus-max 1024 --steps 1000 --model llama3-8b
build growth-by-clock --availability bamboo_gcp_a100x1-east1b.csv --gpus-max 256 --steps 1000 --wall-clock
