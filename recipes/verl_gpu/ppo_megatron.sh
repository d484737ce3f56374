#!/usr/bin/env bash
# PPO, Megatron-core, 8 GPUs. usage: ppo_megatron.sh MODEL_DIR GSM8K_DIR RUN_DIR [Hydra overrides]
# Not run by us: see README.md.
set -euo pipefail
model=$1 data=$2 run=$3
shift 3
ARR=actor_rollout_ref
layout() { echo $1.megatron.{tensor_model_parallel_size=4,use_distributed_optimizer=True,vanilla_mbridge=True}; }

python -m verl.trainer.main_ppo \
  +nereus=on nereus.run_dir="$run/nereus" \
  '++nereus.schedule={50: {tp: 2}, 100: {tp: 2, pp: 2}}' \
  model_engine=megatron $(layout $ARR.actor) $(layout $ARR.ref) $(layout critic) \
  trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.total_training_steps=150 \
  trainer.default_local_dir="$run/checkpoints" trainer.save_freq=50 trainer.test_freq=10 \
  algorithm.adv_estimator=gae \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
  $ARR.model.path="$model" $ARR.actor.use_kl_loss=True $ARR.actor.optim.lr=1e-6 \
  $ARR.actor.ppo_mini_batch_size=128 $ARR.actor.use_dynamic_bsz=True \
  $ARR.actor.ppo_max_token_len_per_gpu=16384 \
  $ARR.rollout.name=vllm $ARR.rollout.tensor_model_parallel_size=2 \
  $ARR.rollout.gpu_memory_utilization=0.5 \
  critic.model.path="$model" critic.optim.lr=1e-5 \
  "$@"
