#!/usr/bin/env bash
# PPO with critic and KL reference of Llama-3-8B with Megatron-core and vLLM; NODES nodes
# (default 1) of eight 80 GB GPUs.
# usage: [NODES=8] llama3-8b_ppo_megatron.sh MODEL_DIR DATA_DIR RUN_DIR [Hydra overrides]
# Not run by us: see README.md.
set -euo pipefail
model=$1 data=$2 run=$3
shift 3
nodes=${NODES:-1}
ARR=actor_rollout_ref
# What actor, reference and critic have in common: they share Megatron's groups.
layout() {
  echo "$1".megatron.{tensor_model_parallel_size=4,use_distributed_optimizer=True,vanilla_mbridge=True,param_offload=True}
}
recompute() {
  echo "+$1".megatron.override_transformer_config.recompute_{granularity=full,method=uniform,num_layers=1}
}

# TP4 -> TP4 PP2 -> TP2 PP2.
# shellcheck disable=SC2046 # words on purpose
"${PYTHON:-python}" -m verl.trainer.main_ppo model_engine=megatron \
  +nereus=on nereus.run_dir="$run/nereus" \
  '++nereus.schedule={50: {tp: 4, pp: 2}, 100: {tp: 2, pp: 2}}' \
  $(layout $ARR.actor) $(layout $ARR.ref) $(layout critic) \
  $(recompute $ARR.actor) $(recompute critic) \
  trainer.nnodes="$nodes" trainer.n_gpus_per_node=8 trainer.total_training_steps=150 \
  trainer.default_local_dir="$run/checkpoints" trainer.save_freq=50 trainer.test_freq=10 \
  algorithm.adv_estimator=gae \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  data.train_batch_size=$((256 * nodes)) data.max_prompt_length=1024 data.max_response_length=2048 \
  $ARR.model.path="$model" $ARR.actor.use_kl_loss=True $ARR.actor.optim.lr=1e-6 \
  $ARR.actor.megatron.optimizer_offload=True \
  $ARR.actor.ppo_mini_batch_size=$((128 * nodes)) $ARR.actor.use_dynamic_bsz=True \
  $ARR.actor.ppo_max_token_len_per_gpu=8192 \
  $ARR.rollout.name=vllm $ARR.rollout.tensor_model_parallel_size=2 \
  $ARR.rollout.gpu_memory_utilization=0.5 \
  critic.model.path="$model" critic.optim.lr=1e-5 critic.megatron.optimizer_offload=True \
  critic.ppo_mini_batch_size=$((128 * nodes)) critic.use_dynamic_bsz=True \
  critic.ppo_max_token_len_per_gpu=8192 \
  "$@"
