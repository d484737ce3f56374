"""What this adapter can change in an OpenRLHF job, what is coupled, and what it refuses by name.

Everything is decided from OpenRLHF's arguments, before a process exists. What is refused has not
been built and tested; a job that uses it is told the flag and the remedy, and does not start with
Nereus on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nereus_openrlhf import openrlhf_private
from nereus_openrlhf.config import STAGES, TRAINED
from nereus_plugins.job import Capabilities, Refusal, StageCapability
from nereus_plugins.spec import Layout, ModelStage, SpecError

STAGES_OF: Mapping[str, tuple[ModelStage, ...]] = {
    "actor": (ModelStage.ACTOR_TRAIN,),
    "critic": (ModelStage.CRITIC_VALUES, ModelStage.CRITIC_TRAIN),
    "ref": (ModelStage.REF_LOGPROB,),
    "reward": (ModelStage.REWARD_SCORE,),
}


class Refused(RuntimeError):
    """The job uses something that does not survive a transition. The message lists all of it."""


def _flag(*path: str) -> Callable[[Any], Any]:
    def value(args: Any) -> Any:
        for name in path:
            args = getattr(args, name, None)
        return args

    return value


def _above_one(value: Any) -> bool:
    return value is not None and int(value) > 1


_RULES: tuple[tuple[Refusal, Callable[[Any], bool]], ...] = (
    (
        Refusal(
            "asynchronous training",
            "--train.async_enable",
            "generation runs while the actor trains, so there is no boundary at which nothing uses "
            "the old layout",
            "leave it out",
        ),
        lambda args: bool(_flag("train", "async_enable")(args)),
    ),
    (
        Refusal(
            "ring attention",
            "--ds.ring_attn_size",
            "its groups are kept in globals of other packages, and flash-attn was not run",
            "set it to 1",
        ),
        lambda args: _above_one(_flag("ds", "ring_attn_size")(args)),
    ),
    (
        Refusal(
            "optimizer state in host memory",
            "--ds.adam_offload",
            "DeepSpeed's CPU Adam keeps it where it is not a box of device memory",
            "leave it out",
        ),
        lambda args: bool(_flag("ds", "adam_offload")(args)),
    ),
    (
        Refusal(
            "dynamic batches",
            "--train.dynamic_batch_enable",
            "another number of ranks cuts the batch in other optimizer steps; not tested",
            "leave it out",
        ),
        lambda args: bool(_flag("train", "dynamic_batch_enable")(args)),
    ),
    (
        Refusal(
            "LoRA and 4-bit weights",
            "--ds.lora.rank, --ds.load_in_4bit",
            "adapters and quantized weights have not been tested",
            "leave both out",
        ),
        lambda args: (
            int(_flag("ds", "lora", "rank")(args) or 0) > 0
            or bool(_flag("ds", "load_in_4bit")(args))
        ),
    ),
    (
        Refusal(
            "an optimizer other than Adam",
            "--actor.optim, --critic.optim",
            "only Adam's masters, moments and step counters are carried over",
            "set it to adam",
        ),
        lambda args: any(_flag(unit, "optim")(args) != "adam" for unit in TRAINED),
    ),
    (
        Refusal(
            "DeepCompile",
            "--ds.deepcompile",
            "compiled graphs hold a layout",
            "leave it out",
        ),
        lambda args: bool(_flag("ds", "deepcompile")(args)),
    ),
    (
        Refusal(
            "a second copy of ZeRO-3 weights in each node",
            "--ds.zpg",
            "it is state of its own",
            "set it to 1",
        ),
        lambda args: _above_one(_flag("ds", "zpg")(args)),
    ),
    (
        Refusal(
            "weights in host memory",
            "--ref.offload, --reward.offload",
            "they are not boxes of device memory",
            "leave both out",
        ),
        lambda args: bool(_flag("ref", "offload")(args) or _flag("reward", "offload")(args)),
    ),
    (
        Refusal(
            "several reward models",
            "--reward.model_name_or_path",
            "OpenRLHF 0.11 runs one",
            "give one, or --reward.remote_url",
        ),
        lambda args: "," in str(_flag("reward", "model_name_or_path")(args) or ""),
    ),
    (
        Refusal(
            "images",
            "--data.max_images_per_prompt",
            "vision models have not been tested",
            "leave it out",
        ),
        lambda args: int(_flag("data", "max_images_per_prompt")(args) or 0) > 0,
    ),
)


def all_refusals() -> tuple[Refusal, ...]:
    """Whether this job uses them or not."""
    return tuple(refusal for refusal, _ in _RULES)


def refused_by(args: Any) -> list[str]:
    """What of OpenRLHF's arguments keeps the job from being adapted, in words."""
    return [str(refusal) for refusal, found in _RULES if found(args)]


def units(args: Any) -> tuple[str, ...]:
    """The job's models."""
    found = ["actor"]
    if args.critic.model_name_or_path:
        found.append("critic")
    if args.algo.kl.init_coef > 0:
        found.append("ref")
    if not args.reward.remote_url:
        found.append("reward")
    return tuple(found)


def start_layout(args: Any, unit: str) -> Layout:
    """The layout that OpenRLHF builds a model in. Raises: SpecError naming the flags."""
    of_unit = getattr(args, unit)
    stage = args.ds.zero_stage
    if unit not in TRAINED and stage != 3:
        stage = 0
    sharding = next(name for name, number in STAGES.items() if number == stage)
    ranks, tp = of_unit.num_nodes * of_unit.num_gpus_per_node, args.ds.tensor_parallel_size
    if ranks % tp:
        raise SpecError(
            f"--{unit}.num_nodes * --{unit}.num_gpus_per_node = {ranks} must divide by "
            f"--ds.tensor_parallel_size {tp}"
        )
    return Layout(dp=ranks // tp, tp=tp, sharding=sharding)


def check_layouts(args: Any, layouts: Mapping[str, Layout], where: str) -> None:
    """Check that OpenRLHF and DeepSpeed would run these layouts.

    Raises: SpecError naming `where` and the flag that is in the way.
    """
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    batches = samples // args.rollout.micro_batch_size
    for unit, layout in layouts.items():
        dp = layout.dp
        if unit not in TRAINED and layout.sharding not in ("none", "zero3"):
            raise SpecError(
                f"{where}: {unit} does not train: its sharding is none or zero3, not "
                f"{layout.sharding}"
            )
        if unit in TRAINED and args.ds.enable_sleep and layout.sharding == "none":
            raise SpecError(
                f"{where}: {unit} with sharding=none: under --ds.enable_sleep DeepSpeed needs "
                "zero1, zero2 or zero3"
            )
        if unit == "actor" and args.train.enable_ema and layout.sharding == "zero3":
            raise SpecError(
                f"{where}: actor with sharding=zero3: under ZeRO-3 OpenRLHF never updates the "
                "moving average of --train.enable_ema (DeepSpeed drops what it writes to gathered "
                "weights); take none, zero1 or zero2, or leave --train.enable_ema out"
            )
        if layout.tp > 1 and layout.sharding == "zero3":
            raise SpecError(
                f"{where}: {unit} with tp={layout.tp} and sharding=zero3: OpenRLHF cannot gather "
                "such weights for vLLM; take zero1 or zero2, or tp=1"
            )
        if layout.tp > 1 and args.ds.param_dtype != "bf16":
            raise SpecError(
                f"{where}: {unit} with tp={layout.tp}: OpenRLHF needs --ds.param_dtype bf16 for it"
            )
        if batches % dp:
            raise SpecError(
                f"{where}: {unit} with dp={dp}: the {batches} micro-batches of a rollout "
                "(--rollout.batch_size * --rollout.n_samples_per_prompt / "
                f"--rollout.micro_batch_size) must divide by dp"
            )
        whole = args.train.micro_batch_size * dp
        if unit in TRAINED and args.train.batch_size % whole:
            raise SpecError(
                f"{where}: {unit} with dp={dp}: --train.batch_size {args.train.batch_size} must "
                f"divide by --train.micro_batch_size * dp = {whole}"
            )
    sizes = {unit: layout.tp for unit, layout in layouts.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{unit} tp={tp}" for unit, tp in sizes.items())
        raise SpecError(
            f"{where}: OpenRLHF has one --ds.tensor_parallel_size for all models, not {listed}; "
            "set tp of all"
        )
    for unit, layout in layouts.items():
        for other in openrlhf_private.colocated_with(args, unit):
            if other in layouts and layouts[other].world_size != layout.world_size:
                raise SpecError(
                    f"{where}: {unit} and {other} share GPUs (--train.colocate_*), so OpenRLHF "
                    f"has them on as many: {layout.world_size} and {layouts[other].world_size} "
                    "ranks (dp * tp); change both"
                )


def check_rollout(args: Any, actor: Layout, replicas: int, where: str) -> None:
    """Raises: SpecError where OpenRLHF would not run as many vLLM engines."""
    if not args.train.colocate_all:
        return
    start = args.vllm.num_engines
    if replicas != start or actor.world_size != start_layout(args, "actor").world_size:
        raise SpecError(
            f"{where}: under --train.colocate_all the engines sit on the actor's own GPUs, in one "
            "placement group: neither the number of ranks (dp * tp) nor rollout.replicas can "
            "change (sharding can)"
        )


def fewest_gpus(args: Any) -> int:
    """Without which the job cannot go on: one replica of each model, those that share GPUs counted
    once, and an engine."""
    groups = {openrlhf_private.colocated_with(args, unit) for unit in units(args)}
    return len(groups) * int(args.ds.tensor_parallel_size) + int(args.vllm.tensor_parallel_size)


def capabilities(args: Any) -> Capabilities:
    """As the planner needs it."""
    there = units(args)
    fixed = bool(args.train.colocate_all)
    # tp is not offered to the planner: it is one for all models, whose layouts may differ. Nor are
    # ZeRO's stages beside it: of these only some go with it.
    fields = frozenset() if fixed else frozenset({"dp"})
    if args.ds.tensor_parallel_size == 1:
        fields |= {"sharding"}
    stages = {stage: StageCapability(fields) for unit in there for stage in STAGES_OF[unit]}
    if args.train.enable_ema:  # the planner's other choice for it would be ZeRO-3
        stages[ModelStage.ACTOR_TRAIN] = StageCapability(fields - {"sharding"})
    if not fixed:
        stages[ModelStage.ACTOR_GENERATE] = StageCapability(frozenset({"dp"}))
    coupled = {frozenset(STAGES_OF["critic"])} if "critic" in there else set()
    return Capabilities(
        framework="openrlhf",
        framework_version=openrlhf_private.openrlhf_version(),
        stages=stages,
        coupled=tuple(coupled),
        devices_fixed=fixed,
        refused=all_refusals(),
        sharing_fixed=True,
        dp_divides=math.gcd(
            args.train.batch_size // args.train.micro_batch_size,
            args.rollout.batch_size
            * args.rollout.n_samples_per_prompt
            // args.rollout.micro_batch_size,
        ),
    )
