#!/usr/bin/env bash
# verl's main_ppo on CPU over two Ray nodes, and a third that joins while the job trains.
# usage: run.sh [directory] [Hydra overrides]; SCHEDULE in the environment takes the place of the plan
set -euo pipefail
directory=$(realpath -m "${1:-nereus-nodes}")
shift || true
python=${PYTHON:-python}
ray=$(mktemp -d)
export TMPDIR=$ray # what all processes leave goes with it
trap 'rm -rf "$ray"' EXIT
"$python" -c 'import nereus_verl' 2>/dev/null || {
  echo "run.sh: $python has no Nereus; in a clone: ./dev run $0, or set PYTHON" >&2
  exit 2
}
here=$(cd "$(dirname "$0")/../.." && pwd)
"$python" - "$directory/task" <<'PY'
import sys
from pathlib import Path
from nereus_cpu.task import make_task
make_task(Path(sys.argv[1]), layers=2)
PY

export VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda VERL_FILE_LOGGER_PATH=$directory/metrics.jsonl
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONHASHSEED=0
export TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
# All nodes are on this host, each with an address of its own on the loopback interface; the cluster
# takes who knows its token.
export GLOO_SOCKET_IFNAME=lo RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$directory/ray_token
(umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH")
port=$("$python" -c 'import socket; print(socket.create_server(("127.0.0.2", 0)).getsockname()[1])')
head=127.0.0.2:$port

node() { # node <address> <logical GPUs: how many ranks it has room for> <CPUs> [options]
  RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 "$python" -m ray.scripts.scripts start --block \
    --node-ip-address="$1" --num-gpus="$2" --num-cpus="$3" --object-store-memory=200000000 \
    --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 "${@:4}" \
    >"$directory/node-$1.log" 2>&1 &
}
started() { # started <address>: wait until the node is
  for _ in $(seq 60); do
    grep -q 'Ray runtime started' "$directory/node-$1.log" && return
    sleep 1
  done
  echo "run.sh: node $1 did not start, see $directory/node-$1.log" >&2
  return 1
}
end() { # each node ends with the `ray start --block` that holds it, then its workers, which miss it
  trap '' EXIT INT TERM
  kill $(jobs -p) 2>/dev/null || true
  wait
  unset TMPDIR
  for _ in $(seq 200); do
    grep -qsaF "$ray" /proc/[0-9]*/cmdline /proc/[0-9]*/environ || break
    sleep 0.1
  done
  rm -rf "$ray" "$RAY_AUTH_TOKEN_PATH"
}
trap end EXIT
trap 'exit 130' INT TERM

node 127.0.0.2 1 12 --head --port="$port" --include-dashboard=false --temp-dir="$ray"
started 127.0.0.2
node 127.0.0.3 1 6 --address="$head" --include-log-monitor=false # the first node reads all logs
started 127.0.0.3

# The third node is not there when the job starts. It comes after the first step.
(
  trap 'kill $(jobs -p) 2>/dev/null; wait; exit' TERM
  until grep -qs '"nereus.step/' "$directory/records/records.jsonl"; do sleep 0.5; done
  node 127.0.0.4 2 12 --address="$head" --include-log-monitor=false
  wait
) &

schedule=${SCHEDULE-'{2: {ranks: 4}, 3: {ranks: 2, leave: [0, 1]}}'}
ARR=actor_rollout_ref
fsdp2() { # <part of the configuration> <its engine>
  echo $1.strategy=fsdp2 $2.use_torch_compile=False $2.model_dtype=fp32 $2.dtype=float32 \
    $2.seed=1 $2.full_determinism=True
}

RAY_ADDRESS=$head "$python" -m verl.trainer.main_ppo \
  $(fsdp2 $ARR.actor $ARR.actor.fsdp_config) $(fsdp2 critic critic.fsdp) \
  +nereus=on "++nereus.schedule=$schedule" \
  nereus.claim_timeout_s=120 nereus.run_dir="$directory/records" \
  trainer.device=cpu trainer.nnodes=2 trainer.n_gpus_per_node=1 trainer.logger='["console","file"]' \
  trainer.total_training_steps=4 trainer.total_epochs=1000 trainer.val_before_train=False \
  trainer.resume_mode=disable trainer.save_freq=-1 trainer.test_freq=-1 \
  trainer.default_local_dir="$directory/checkpoints" \
  trainer.v1.sampler.custom_sampler.path=pkg://nereus_cpu.replay_buffer \
  trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer \
  algorithm.adv_estimator=gae \
  data.train_files="$directory/task/train.parquet" data.val_files="$directory/task/test.parquet" \
  data.train_batch_size=8 data.max_prompt_length=64 data.max_response_length=16 data.seed=1 \
  data.dataloader_num_workers=0 data.filter_overlong_prompts=False \
  $ARR.model.path="$directory/task/model" $ARR.model.use_remove_padding=True \
  +$ARR.model.override_config.attn_implementation=cpu_packed \
  $ARR.model.enable_gradient_checkpointing=False \
  $ARR.actor.ppo_mini_batch_size=4 $ARR.actor.ppo_micro_batch_size_per_gpu=2 \
  $ARR.actor.optim.lr=2e-2 $ARR.actor.use_torch_compile=False \
  $ARR.rollout.name=hf_cpu $ARR.rollout.n=4 $ARR.rollout.seed=1 $ARR.rollout.max_num_seqs=32 \
  $ARR.rollout.tensor_model_parallel_size=1 $ARR.rollout.log_prob_micro_batch_size_per_gpu=2 \
  $ARR.rollout.agent.num_workers=1 $ARR.rollout.agent.default_agent_loop=seeded_single_turn \
  $ARR.rollout.agent.agent_loop_config_path="$here/adapters/cpu/nereus_cpu/agent_loop.yaml" \
  critic.model.path="$directory/task/model" critic.model.use_remove_padding=True \
  +critic.model.override_config.attn_implementation=cpu_packed \
  critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size_per_gpu=2 \
  critic.optim.lr=3e-3 \
  reward.num_workers=1 \
  reward.custom_reward_function.path="$here/adapters/cpu/nereus_cpu/reward.py" \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  hydra.run.dir="$directory/hydra" "$@" &
wait $! # which a signal ends, unlike a command in the foreground
