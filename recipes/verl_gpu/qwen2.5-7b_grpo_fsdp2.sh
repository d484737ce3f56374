#!/usr/bin/env bash
# GRPO of Qwen2.5-7B with FSDP2 and vLLM; NODES nodes (default 1) of eight 80 GB GPUs.
# usage: [NODES=8] qwen2.5-7b_grpo_fsdp2.sh MODEL_DIR DATA_DIR RUN_DIR [Hydra overrides]
# Not run by us: see README.md.
set -euo pipefail
model=$1 data=$2 run=$3
shift 3
nodes=${NODES:-1}
ARR=actor_rollout_ref

# Full sharding -> state sharded within a node and replicated over nodes (on one node: over two
# halves) -> sequences cut in two, for responses that have grown.
"${PYTHON:-python}" -m verl.trainer.main_ppo \
  +nereus=on nereus.run_dir="$run/nereus" \
  "++nereus.schedule={50: {shard_size: $((nodes > 1 ? 8 : 4))}, 100: {ulysses: 2, token_budget_tokens: 12288}}" \
  trainer.nnodes="$nodes" trainer.n_gpus_per_node=8 trainer.total_training_steps=150 \
  trainer.default_local_dir="$run/checkpoints" trainer.save_freq=50 trainer.test_freq=10 \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  data.train_batch_size=$((256 * nodes)) data.max_prompt_length=1024 data.max_response_length=4096 \
  $ARR.model.path="$model" $ARR.model.use_remove_padding=True \
  $ARR.model.enable_gradient_checkpointing=True \
  $ARR.actor.strategy=fsdp2 $ARR.actor.optim.lr=1e-6 $ARR.actor.use_kl_loss=False \
  $ARR.actor.ppo_mini_batch_size=$((128 * nodes)) $ARR.actor.use_dynamic_bsz=True \
  $ARR.actor.ppo_max_token_len_per_gpu=16384 \
  $ARR.rollout.name=vllm $ARR.rollout.n=8 $ARR.rollout.tensor_model_parallel_size=2 \
  $ARR.rollout.gpu_memory_utilization=0.5 \
  "$@"
