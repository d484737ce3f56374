"""A plan in the words of a framework's launch command."""

from __future__ import annotations

from nereus_plugins.cost.case import uneven_stages
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.spec import Assignment, GlobalPlan, ModelStage, SpecError

S = ModelStage
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def launch_flags(chosen: GlobalPlan, job: JobSpec) -> list[str]:
    """verl overrides, or OpenRLHF flags for DeepSpeed."""
    if job.backend == "deepspeed":
        return openrlhf_flags(chosen, job)
    return verl_overrides(chosen, job)


def verl_overrides(chosen: GlobalPlan, job: JobSpec) -> list[str]:
    """The plan as overrides of verl's PPO trainer.

    verl's own trainer runs all models on all GPUs; other placements need its pools configured.
    """
    # For Megatron the choice of verl's files for actor, reference and critic; it sets the strategy.
    engine = "model_engine=megatron" if job.backend == "megatron" else f"{_ACTOR}.strategy=fsdp"
    out = [engine, f"{_ACTOR}.use_dynamic_bsz=True"]
    for section, stage in (
        (_ACTOR, S.ACTOR_TRAIN),
        ("critic", S.CRITIC_TRAIN),
        ("actor_rollout_ref.ref", S.REF_LOGPROB),
    ):
        if stage in chosen.assignments:
            layers = job.model_of(stage).num_layers
            out += _verl_section(section, chosen.assignments[stage], job.backend, layers)
    rollout = chosen.assignments.get(S.ACTOR_GENERATE)
    if rollout is not None:
        out += [
            f"{_ROLLOUT}.tensor_model_parallel_size={rollout.layout.tp}",
            f"{_ROLLOUT}.gpu_memory_utilization={rollout.knobs.rollout_memory_fraction}",
        ]
    return out


def _verl_section(section: str, assignment: Assignment, backend: str, layers: int) -> list[str]:
    lay, knobs = assignment.layout, assignment.knobs
    trains = section in (_ACTOR, "critic")
    budget = "ppo_max_token_len_per_gpu" if trains else "log_prob_max_token_len_per_gpu"
    out = []
    if knobs.token_budget_tokens is not None:
        out.append(f"{section}.{budget}={knobs.token_budget_tokens}")
    elif knobs.micro_batch is not None:
        size = "ppo" if trains else "log_prob"
        dynamic = "use_dynamic_bsz" if trains else "log_prob_use_dynamic_bsz"
        out.append(f"{section}.{dynamic}=False")
        out.append(f"{section}.{size}_micro_batch_size_per_gpu={knobs.micro_batch}")
    if backend == "megatron":
        engine = f"{section}.megatron"
        out += [
            f"{engine}.tensor_model_parallel_size={lay.tp}",
            f"{engine}.pipeline_model_parallel_size={lay.pp}",
            f"{engine}.context_parallel_size={lay.cp}",
            f"{engine}.expert_model_parallel_size={lay.ep}",
            f"{engine}.virtual_pipeline_model_parallel_size={lay.vpp if lay.vpp > 1 else 'null'}",
            f"{engine}.param_offload={knobs.offload_params}",
        ]
        transformer = f"+{engine}.override_transformer_config"
        uneven = uneven_stages(layers, lay.pp)
        if uneven is not None:
            for place, count in zip(("first", "last"), uneven, strict=True):
                out.append(f"{transformer}.num_layers_in_{place}_pipeline_stage={count}")
        if trains:
            out.append(f"{engine}.optimizer_offload={knobs.offload_optimizer}")
            if knobs.recompute != "none":
                out.append(f"{transformer}.recompute_granularity={knobs.recompute}")
                if knobs.recompute == "full":
                    out.append(f"{transformer}.recompute_method=uniform")
                    out.append(f"{transformer}.recompute_num_layers=1")
        return out
    engine = f"{section}.fsdp" if section == "critic" else f"{section}.fsdp_config"
    out += [
        f"{section}.ulysses_sequence_parallel_size={lay.ulysses}",
        f"{engine}.fsdp_size={lay.shard_size or -1}",
        f"{engine}.param_offload={knobs.offload_params}",
    ]
    if trains:
        out.append(f"{engine}.optimizer_offload={knobs.offload_optimizer}")
        model = "critic.model" if section == "critic" else "actor_rollout_ref.model"
        out.append(f"{model}.enable_gradient_checkpointing={knobs.recompute == 'full'}")
    return out


def openrlhf_flags(chosen: GlobalPlan, job: JobSpec) -> list[str]:
    """The plan as flags of `openrlhf.cli.train_ppo_ray`, in the names of OpenRLHF 0.11.

    One ZeRO stage, one micro-batch, one recompute and one sleep setting hold for actor and critic:
    the actor's are given.

    Raises: SpecError where OpenRLHF cannot run the plan: no actor under ZeRO-2 or 3, or models on
        GPUs that its placements do not give them.
    """
    actor = chosen.assignments[S.ACTOR_TRAIN]
    lay, knobs = actor.layout, actor.knobs
    if lay.sharding not in ("zero2", "zero3"):
        raise SpecError(f"OpenRLHF runs ZeRO stages 2 and 3, the plan has {lay.sharding}")
    readers = [s for s in (S.REF_LOGPROB, S.REWARD_SCORE) if s in chosen.assignments]
    out = [f"--ds.zero_stage {lay.sharding[-1]}"]
    if job.packed:
        out.append("--ds.packing_samples")
    if lay.cp > 1:
        out.append(f"--ds.ring_attn_size {lay.cp}")
    if knobs.token_budget_tokens is not None:
        out.append("--train.dynamic_batch_enable")
        out.append(f"--train.max_tokens_per_gpu {knobs.token_budget_tokens}")
        # Old log-probabilities and values are read under the readers' budget too.
        budgets = [chosen.assignments[s].knobs.token_budget_tokens for s in readers]
        least = min((b for b in budgets if b is not None), default=knobs.token_budget_tokens)
        if least < knobs.token_budget_tokens:
            out.append(f"--rollout.max_tokens_per_gpu {least}")
    else:
        out.append(f"--train.micro_batch_size {knobs.micro_batch or 1}")
    if knobs.recompute == "full":
        out.append("--actor.gradient_checkpointing_enable")
    if job.cpu_adam:
        out.append("--ds.adam_offload")
    elif knobs.offload_optimizer:
        out.append("--ds.enable_sleep")
    if job.average:
        out.append("--train.enable_ema")
    for stage in readers:
        if chosen.assignments[stage].knobs.offload_params:
            out.append(f"--{stage.model}.offload")
    homes = {"actor": S.ACTOR_TRAIN, "critic": S.CRITIC_TRAIN, "ref": S.REF_LOGPROB,
             "reward": S.REWARD_SCORE}  # fmt: skip
    here = {n: chosen.assignments[s] for n, s in homes.items() if s in chosen.assignments}
    for name, one in here.items():
        nodes, per_node = _nodes(len(one.devices))
        out += [f"--{name}.num_nodes {nodes}", f"--{name}.num_gpus_per_node {per_node}"]
    if job.cpu_adam and "critic" in here and here["critic"].devices == actor.devices:
        # It moves nothing then, and lets actor and critic update one after the other.
        out.append("--ds.enable_sleep")
    rollout = chosen.assignments.get(S.ACTOR_GENERATE)
    if rollout is not None:
        out += [
            f"--vllm.num_engines {rollout.layout.dp}",
            f"--vllm.tensor_parallel_size {rollout.layout.tp}",
            f"--vllm.gpu_memory_utilization {rollout.knobs.rollout_memory_fraction}",
        ]
    places = {name: one.devices for name, one in here.items()}
    if rollout is not None:
        if {*places.values()} == {rollout.devices}:
            return [*out, "--train.colocate_all", "--vllm.enable_sleep"]
        places["vllm"] = rollout.devices
    pairs = {"ref": ("actor", "--train.colocate_actor_ref"),
             "reward": ("critic", "--train.colocate_critic_reward")}  # fmt: skip
    for name, (other, flag) in pairs.items():
        if name in places and places[name] == places.get(other):
            out.append(flag)
            del places[name]
    used = [device for devices in places.values() for device in devices]
    if len(used) > len(set(used)):
        raise SpecError(
            "OpenRLHF colocates all models, actor with reference, or critic with reward model; "
            f"the plan shares GPUs otherwise: {', '.join(sorted(places))}"
        )
    return out


def _nodes(gpus: int, per_node: int = 8) -> tuple[int, int]:
    """(nodes, GPUs on each) that hold so many GPUs."""
    return (gpus // per_node, per_node) if gpus % per_node == 0 else (1, gpus)
