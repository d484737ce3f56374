#!/usr/bin/env bash
# GRPO of Llama-3-8B with OpenRLHF, training and generation on GPUs of their own; NODES nodes (default 1) of
# eight 80 GB GPUs.
# usage: [NODES=8] llama3-8b_grpo_separate.sh MODEL_DIR PROMPTS REWARD RUN_DIR [options of either]
# PROMPTS: a data set with "input" and "label"; REWARD: a file with reward_func, or a URL.
# Not run by us: see README.md.
set -euo pipefail
model=$1 prompts=$2 reward=$3 run=$4
shift 4
nodes=${NODES:-1}

# Half of the GPUs train. After step 100 the actor leaves a half of those to whoever needs them.
"${PYTHON:-python}" -m nereus_openrlhf.cli \
  --nereus.enable --nereus.run_dir "$run/nereus" \
  --nereus.schedule "{50: {actor: {sharding: zero2}},
                      100: {actor: {dp: $((2 * nodes)), sharding: zero3}}}" \
  --actor.model_name_or_path "$model" --reward.remote_url "$reward" \
  --data.prompt_dataset "$prompts" --data.input_key input --data.label_key label \
  --data.max_len 5120 --data.max_samples 100000 \
  --rollout.max_new_tokens 4096 --rollout.batch_size $((64 * nodes)) \
  --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 4 \
  --train.batch_size $((128 * nodes)) --train.micro_batch_size 2 \
  --algo.advantage.estimator group_norm --algo.kl.init_coef 0 \
  --actor.adam.lr 5e-7 --actor.gradient_checkpointing_enable \
  --ds.zero_stage 3 --ds.packing_samples \
  --actor.num_nodes "$nodes" --actor.num_gpus_per_node 4 \
  --vllm.num_engines $((4 * nodes)) --vllm.tensor_parallel_size 1 \
  --vllm.gpu_memory_utilization 0.9 --vllm.sync_backend nccl \
  --ckpt.path "$run/checkpoints" --ckpt.output_dir "$run/final" --ckpt.save_steps 50 \
  --logger.tensorboard_dir "$run/tensorboard" \
  "$@"
