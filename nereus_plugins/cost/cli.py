"""`nereus estimate`: will this plan fit, and how fast does it run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelSpec,
    ModelStage,
    SpecError,
    WorkloadSpec,
)
from nereus_plugins.spec.record import require_int

from .calibration import Calibration
from .estimate import estimate
from .explain import cluster_of, explanation, table, to_dict
from .job import ALGORITHMS, BACKENDS, JobSpec
from .models import find_model
from .pools import Pools

EPILOG = """examples:
  nereus estimate --model qwen2.5-7b --gpu h100 --gpus 8 --token-budget 16384 --recompute full
  nereus estimate --model qwen2.5-32b --gpu h20 --gpus 8 --backend megatron --tp 4 --pp 2 \\
      --offload-params --offload-optimizer --explain
  nereus estimate --job job.yaml --plan plan.yaml --cluster cluster.yaml --workload workload.yaml

Sizes of GPUs and kernels are datasheet values and measured tables; docs/cost-model.md says which,
what the model leaves out, and how far it was off on public measurements."""


def parser(*, states_plan: bool = True) -> argparse.ArgumentParser:
    """The options; without those that state a plan where a plan is what is asked for."""
    p = argparse.ArgumentParser(
        prog="nereus estimate",
        description="Seconds and peak memory of one iteration under a given plan.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = p.add_argument_group(
        "from files (YAML or JSON), each in place of the options it covers"
    )
    for name, what in (
        ("job", "models, algorithm, backend"),
        ("plan", "layout, knobs and devices of each model-stage"),
        ("cluster", "nodes, GPUs, links"),
        ("workload", "batch and lengths"),
    ):
        if name != "plan" or states_plan:
            files.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    p.add_argument("--calibration", type=Path, metavar="FILE", help="saved by nereus calibrate")
    job = p.add_argument_group("job")
    job.add_argument("--model", help="name of a model that ships, or path of its config.json")
    job.add_argument("--critic", help="critic model (ppo); default: the actor's shape")
    job.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    job.add_argument("--backend", choices=BACKENDS, default="fsdp")
    job.add_argument(
        "--cpu-adam", action="store_true", help="DeepSpeed's optimizer offload: updates on the host"
    )
    job.add_argument("--no-reference", action="store_true", help="no reference model")
    cluster = p.add_argument_group("cluster")
    cluster.add_argument("--gpu", help="h100, a100_40gb, h20, b200, ...")
    cluster.add_argument("--gpus", type=int, help="number of GPUs")
    cluster.add_argument("--gpus-per-node", type=int, default=8)
    if not states_plan:
        cluster.add_argument(
            "--also",
            action="append",
            default=[],
            metavar="NAME:COUNT",
            help="GPUs of another kind; may be given more than once",
        )
    if states_plan:
        _add_plan_options(p)
    work = p.add_argument_group("workload")
    work.add_argument("--prompts", type=int, default=512, help="prompts of an iteration")
    work.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    work.add_argument("--mini-batch", type=int, help="prompts of an optimizer step; default: all")
    work.add_argument("--prompt-tokens", type=int, default=512)
    work.add_argument("--response-tokens", type=int, default=2048, help="longest response")
    work.add_argument(
        "--median-response", type=float, help="median response; default: half of the longest"
    )
    work.add_argument("--response-sigma", type=float, default=0.6, help="of the log of lengths")
    out = p.add_argument_group("output")
    out.add_argument("--explain", action="store_true", help="every part and its formula")
    out.add_argument("--json", action="store_true")
    return p


def _add_plan_options(p: argparse.ArgumentParser) -> None:
    plan = p.add_argument_group("plan: one training layout for all trained models, one for rollout")
    for name in ("tp", "pp", "cp", "ep", "vpp", "ulysses"):
        plan.add_argument(f"--{name}", type=int, default=1)
    plan.add_argument("--sharding", help="none, zero1, zero2, zero3, fsdp; default by backend")
    plan.add_argument("--rollout-tp", type=int, help="tensor-parallel ranks of a rollout replica")
    plan.add_argument("--rollout-memory-fraction", type=float, default=0.6)
    plan.add_argument("--micro-batch", type=int, help="sequences in a micro-batch of one rank")
    plan.add_argument("--token-budget", type=int, help="packed tokens in a micro-batch of one rank")
    plan.add_argument("--recompute", choices=("none", "selective", "full"), default="full")
    plan.add_argument("--offload-params", action="store_true")
    plan.add_argument("--offload-optimizer", action="store_true")


def read_model(name: str, *, value_head: bool = False) -> ModelSpec:
    """A shape by name, or from a config.json."""
    if Path(name).exists():
        return ModelSpec.from_hf_config(name, value_head=value_head)
    model = find_model(name).model
    if not value_head:
        return model
    return dataclasses.replace(model, value_head=True, tied_embeddings=False)


def _need(value: object, option: str) -> None:
    if value is None:
        raise SpecError(f"{option} is required (or the file that covers it)")


def job_from(args: argparse.Namespace) -> JobSpec:
    if args.job is not None:
        return JobSpec.load(args.job)
    _need(args.model, "--model")
    critic = None
    if args.algorithm == "ppo":
        critic = read_model(args.critic or args.model, value_head=True)
    reference = not args.no_reference and args.algorithm != "sft"
    return JobSpec(
        read_model(args.model),
        algorithm=args.algorithm,
        critic=critic,
        reference=reference,
        backend=args.backend,
        cpu_adam=args.cpu_adam,
    )


def cluster_from(args: argparse.Namespace) -> ClusterSpec:
    if args.cluster is not None:
        return ClusterSpec.load(args.cluster)
    _need(args.gpu, "--gpu")
    _need(args.gpus, "--gpus")
    return cluster_of(args.gpu, args.gpus, args.gpus_per_node)


def pools_from(args: argparse.Namespace) -> ClusterSpec | Pools:
    """The cluster, and the GPUs of other kinds that `--also` names."""
    more = []
    for text in args.also:
        name, _, count = text.partition(":")
        if not count.isdigit():
            raise SpecError(f"--also {text}: write NAME:COUNT, such as a100:16")
        more.append(cluster_of(name, int(count), args.gpus_per_node))
    cluster = cluster_from(args)
    return Pools((cluster, *more)) if more else cluster


def workload_from(args: argparse.Namespace) -> WorkloadSpec:
    if args.workload is not None:
        return WorkloadSpec.load(args.workload)
    response = LengthDistribution.lognormal(
        args.response_tokens / 2 if args.median_response is None else args.median_response,
        args.response_sigma,
        max_tokens=args.response_tokens,
    )
    return WorkloadSpec(
        args.prompts,
        LengthDistribution.fixed(args.prompt_tokens),
        response,
        args.samples,
        args.mini_batch,
    )


def plan_from(args: argparse.Namespace, job: JobSpec, cluster: ClusterSpec) -> GlobalPlan:
    if args.plan is not None:
        return GlobalPlan.load(args.plan)
    for name in ("tp", "pp", "cp", "ulysses"):
        require_int("layout", name, getattr(args, name))
    world = cluster.world_size
    split = args.tp * args.pp * args.cp * args.ulysses
    if world % split:
        raise SpecError(
            f"tp*pp*cp*ulysses = {split} does not divide gpus = {world}: change --tp, --pp, --cp "
            "or --ulysses"
        )
    sharding = (
        args.sharding or {"megatron": "zero1", "fsdp": "fsdp", "deepspeed": "zero2"}[job.backend]
    )
    layout = Layout(
        tp=args.tp,
        pp=args.pp,
        dp=world // split,
        cp=args.cp,
        ep=args.ep,
        vpp=args.vpp,
        ulysses=args.ulysses,
        sequence_parallel=job.backend == "megatron" and args.tp > 1,
        sharding=sharding,
    )
    budget = args.token_budget
    if budget is None and args.micro_batch is None:
        budget = max(8192, args.prompt_tokens + args.response_tokens)
    sizes = {"micro_batch": args.micro_batch, "token_budget_tokens": budget}
    trained = Knobs(
        recompute=args.recompute,
        offload_params=args.offload_params,
        offload_optimizer=args.offload_optimizer,
        **sizes,
    )
    # verl keeps the reference in host memory between its passes (FSDP CPU offload).
    frozen = Knobs(offload_params=args.offload_params or job.backend == "fsdp", **sizes)
    assignments: dict[ModelStage, Assignment] = {}
    for stage in job.stages():
        if stage is ModelStage.ACTOR_GENERATE:
            tp = args.rollout_tp
            if tp is None:
                tp = min(args.tp, cluster.gpus_per_node)
            require_int("rollout", "tp", tp)
            if world % tp:
                raise SpecError(f"--rollout-tp {tp} does not divide gpus = {world}")
            assignments[stage] = Assignment(
                Layout(tp=tp, dp=world // tp),
                Knobs(rollout_memory_fraction=args.rollout_memory_fraction),
            )
        else:
            trains = stage in (ModelStage.ACTOR_TRAIN, ModelStage.CRITIC_TRAIN)
            assignments[stage] = Assignment(layout, trained if trains else frozen)
    return GlobalPlan(assignments, name="command line")


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 fits, 1 does not fit, 2 wrong usage or bad input."""
    args = parser().parse_args(arguments)
    try:
        job = job_from(args)
        cluster = cluster_from(args)
        learned = Calibration.load(args.calibration) if args.calibration else None
        plan = plan_from(args, job, cluster)
        result = estimate(job, plan, cluster, workload_from(args), learned)
    except (SpecError, OSError) as error:
        print(f"nereus estimate: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(to_dict(result)))
    else:
        print(table(result))
        if args.explain:
            print()
            print(explanation(result))
    return 0 if result.fits else 1
