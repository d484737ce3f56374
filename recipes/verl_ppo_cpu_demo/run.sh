#!/usr/bin/env bash
# verl's main_ppo on CPU with two layout changes. usage: run.sh [directory] [Hydra overrides]
set -euo pipefail
directory=$(realpath -m "${1:-nereus-demo}")
shift || true
python=${PYTHON:-python}
"$python" -c 'import nereus_verl' 2>/dev/null || {
  echo "run.sh: $python has no Nereus; in a clone: ./dev run $0, or set PYTHON" >&2
  exit 2
}

"$python" - "$directory/task" <<'PY'
import sys
from pathlib import Path
from nereus_cpu.task import make_task
make_task(Path(sys.argv[1]), layers=2)
PY
here=$(cd "$(dirname "$0")/../.." && pwd)
ray=$(mktemp -d)
trap 'rm -rf "$ray"' EXIT

export VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda VERL_FILE_LOGGER_PATH=$directory/metrics.jsonl
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONHASHSEED=0
export TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0

ARR=actor_rollout_ref
megatron() { # engine config: no TransformerEngine and no fused CUDA kernels on CPU
  local m=$1.megatron t=$1.megatron.override_transformer_config
  echo $m.tensor_model_parallel_size=2 $m.pipeline_model_parallel_size=1 $m.dtype=bfloat16 \
    $m.vanilla_mbridge=True $m.use_distributed_optimizer=True $m.use_remove_padding=False \
    $m.seed=1 $m.sequence_parallel=False ++$t.sequence_parallel=False ++$t.use_cpu_initialization=True \
    ++$t.attention_backend=local ++$t.gradient_accumulation_fusion=False \
    ++$t.masked_softmax_fusion=False ++$t.bias_activation_fusion=False \
    ++$t.bias_dropout_fusion=False ++$t.apply_rope_fusion=False ++$t.persist_layer_norm=False
}

"$python" -m verl.trainer.main_ppo \
  model_engine=megatron $(megatron $ARR.actor) $(megatron $ARR.ref) $(megatron critic) \
  +nereus=on '++nereus.schedule={7: {pp: 2}, 13: {dp: 4}}' nereus.run_dir="$directory/records" \
  trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=4 trainer.logger='["console","file"]' \
  trainer.total_training_steps=20 trainer.total_epochs=1000 trainer.val_before_train=False \
  trainer.resume_mode=disable trainer.save_freq=-1 trainer.test_freq=-1 \
  trainer.default_local_dir="$directory/checkpoints" \
  trainer.v1.sampler.custom_sampler.path=pkg://nereus_cpu.replay_buffer \
  trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer \
  algorithm.adv_estimator=gae \
  data.train_files="$directory/task/train.parquet" data.val_files="$directory/task/test.parquet" \
  data.train_batch_size=32 data.max_prompt_length=64 data.max_response_length=16 data.seed=1 \
  data.dataloader_num_workers=0 data.filter_overlong_prompts=False \
  $ARR.model.path="$directory/task/model" $ARR.model.use_remove_padding=False \
  +$ARR.model.override_config.attn_implementation=sdpa \
  $ARR.model.enable_gradient_checkpointing=False \
  $ARR.actor.ppo_mini_batch_size=8 $ARR.actor.ppo_micro_batch_size_per_gpu=8 \
  $ARR.actor.optim.lr=2e-2 $ARR.actor.use_torch_compile=False \
  $ARR.rollout.name=hf_cpu $ARR.rollout.n=4 $ARR.rollout.seed=1 $ARR.rollout.max_num_seqs=128 \
  $ARR.rollout.tensor_model_parallel_size=4 $ARR.rollout.log_prob_micro_batch_size_per_gpu=8 \
  $ARR.rollout.agent.num_workers=1 $ARR.rollout.agent.default_agent_loop=seeded_single_turn \
  $ARR.rollout.agent.agent_loop_config_path="$here/adapters/cpu/nereus_cpu/agent_loop.yaml" \
  critic.model.path="$directory/task/model" critic.model.use_remove_padding=False \
  +critic.model.override_config.attn_implementation=sdpa \
  critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size_per_gpu=8 \
  critic.optim.lr=3e-3 \
  reward.num_workers=1 \
  reward.custom_reward_function.path="$here/adapters/cpu/nereus_cpu/reward.py" \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=4 \
  +ray_kwargs.ray_init.include_dashboard=False \
  +ray_kwargs.ray_init.object_store_memory=200000000 +ray_kwargs.ray_init._temp_dir="$ray" \
  hydra.run.dir="$directory/hydra" "$@"
