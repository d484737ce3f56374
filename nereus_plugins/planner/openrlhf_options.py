"""Names of the options that OpenRLHF's PPO trainer takes, one release's.

Read from `openrlhf/cli/train_ppo_ray.py` of the wheel on PyPI: the first argument of every
`add_argument`, its two loops over actor and critic written out. Names only.
"""

VERSION = "0.11.2"
OPTIONS = frozenset(
    """
    actor.adam.betas actor.adam.eps actor.adam.lr actor.adam.weight_decay actor.aux_loss_coef
    actor.dual_clip actor.entropy_coef actor.eps_clip actor.eps_clip_low_high
    actor.freeze_visual_encoder actor.gradient_checkpointing_enable
    actor.gradient_checkpointing_reentrant actor.loss_agg_mode actor.lr_scheduler
    actor.lr_warmup_ratio actor.max_norm actor.min_lr_ratio actor.model_name_or_path
    actor.muon.lr actor.muon.momentum actor.muon.nesterov actor.muon.no_nesterov
    actor.muon.ns_steps actor.num_gpus_per_node actor.num_nodes actor.optim
    actor.policy_loss_type algo.advantage.estimator algo.advantage.gamma
    algo.advantage.is_correction_gating algo.advantage.is_correction_level
    algo.advantage.is_correction_mode algo.advantage.is_correction_threshold
    algo.advantage.lambd algo.advantage.no_std_norm algo.dynamic_filtering_enable
    algo.dynamic_filtering_range algo.kl.estimator algo.kl.horizon algo.kl.init_coef
    algo.kl.target algo.kl.unbiased_gradient algo.kl.use_loss ckpt.best_metric_key
    ckpt.disable_ds ckpt.load_enable ckpt.max_mem ckpt.max_num ckpt.output_dir ckpt.path
    ckpt.save_hf ckpt.save_steps critic.adam.betas critic.adam.eps critic.adam.lr
    critic.adam.weight_decay critic.freezing_steps critic.lr_scheduler critic.lr_warmup_ratio
    critic.max_norm critic.min_lr_ratio critic.model_name_or_path critic.muon.lr
    critic.muon.momentum critic.muon.nesterov critic.muon.no_nesterov critic.muon.ns_steps
    critic.num_gpus_per_node critic.num_nodes critic.optim critic.save_value_network
    critic.value_clip data.apply_chat_template data.dataloader_num_workers
    data.disable_fast_tokenizer data.image_key data.input_key data.input_template data.label_key
    data.max_images_per_prompt data.max_len data.max_samples data.prompt_dataset
    data.prompt_probs data.prompt_split ds.adam_offload ds.attn_implementation ds.deepcompile
    ds.enable_sleep ds.experts_implementation ds.grad_accum_dtype ds.load_in_4bit ds.lora.alpha
    ds.lora.dropout ds.lora.rank ds.lora.target_modules ds.overlap_comm ds.packing_samples
    ds.param_dtype ds.ring_attn_head_stride ds.ring_attn_size ds.tensor_parallel_size
    ds.use_liger_kernel ds.use_universal_ckpt ds.value_head_prefix ds.zero_stage ds.zpg
    eval.dataset eval.n_samples_per_prompt eval.split eval.steps eval.temperature local_rank
    logger.logging_steps logger.tensorboard_dir logger.wandb.group logger.wandb.key
    logger.wandb.org logger.wandb.project logger.wandb.run_name ref.num_gpus_per_node
    ref.num_nodes ref.offload reward.clip_range reward.model_name_or_path
    reward.normalize_enable reward.num_gpus_per_node reward.num_nodes reward.offload
    reward.overlong_buffer_len reward.overlong_penalty_factor reward.remote_url
    reward.stop_properly_penalty_coef rollout.batch_size rollout.max_new_tokens
    rollout.max_tokens_per_gpu rollout.micro_batch_size rollout.n_samples_per_prompt
    rollout.temperature rollout.top_p rollout.vllm_generate_batch_size train.agent_func_path
    train.async_enable train.async_queue_size train.batch_size train.colocate_actor_ref
    train.colocate_all train.colocate_critic_reward train.dynamic_batch_enable train.ema_beta
    train.enable_ema train.full_determinism_enable train.max_epochs train.max_tokens_per_gpu
    train.micro_batch_size train.num_episodes train.partial_rollout_enable train.seed use_ms
    vllm.enable_prefix_caching vllm.enable_sleep vllm.enforce_eager vllm.gpu_memory_utilization
    vllm.num_engines vllm.sync_backend vllm.sync_with_ray vllm.tensor_parallel_size
    """.split()  # noqa: SIM905
)
