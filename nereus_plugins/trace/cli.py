"""`nereus trace`: import a log, build a trace, show one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import ALGORITHMS, JobSpec
from nereus_plugins.spec import ClusterSpec, GlobalPlan, LengthDistribution, SpecError
from nereus_plugins.spec.layout import MOST_RANKS

from . import build, files, importing, logs, series
from .conditions import MOST_STEPS, Setting, Trace, find, shipped_folder

EPILOG = """examples:
  nereus trace import verl train.log -o run/records.jsonl
  nereus trace build --lengths orz_response_length_digitised.csv --run ORZ-32B \\
      --availability bamboo_gcp_a100x1-east1b.csv --tail servegen_deepseek_r1_hist.csv \\
      --gpus-max 256 --steps 1000 -o growth.json
  nereus trace build --records run/ --gpus-max 8 -o replay.json
  nereus trace show growth

A trace has no measured speed in it: conditions only (GPUs, lengths), which `nereus sim` runs jobs
through."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="nereus trace",
        description="Logs as records; series and records as traces of conditions.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="what", required=True, metavar="{import,build,show,list}")
    _import_options(commands.add_parser("import", help="a framework's or tracker's log as records"))
    _build_options(commands.add_parser("build", help="a trace from series, or from records"))
    show = commands.add_parser("show", help="what a trace holds, its sources and assumptions")
    show.add_argument("trace", help="a trace file, or the name of one that ships")
    show.add_argument("--json", action="store_true")
    commands.add_parser("list", help="traces that ship")
    return p


def _import_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("kind", choices=sorted(logs.KINDS))
    p.add_argument("file", type=Path, help="the log; for tensorboard also a folder")
    p.add_argument("-o", "--out", type=Path, required=True, help="where records go (.jsonl)")
    p.add_argument("--run", help="which run, of a file that holds several")
    p.add_argument("--samples", type=int, help="sequences of a step, where the log does not say")
    p.add_argument("--gpus", type=int, help="GPUs of the job, where the log does not say")
    p.add_argument("--plan", type=Path, help="the plan it ran in (YAML or JSON)")
    p.add_argument(
        "--ran-here",
        action="store_true",
        help="the job ran in this environment: the record names the versions of its packages",
    )


def _build_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--out", type=Path, required=True, help="where the trace goes (.json)")
    p.add_argument("--name", help="default: that of the file")
    p.add_argument("--seed", type=int, default=0, help="of the simulator's noise")
    one = p.add_argument_group("from series (CSV), or from records")
    one.add_argument("--records", type=Path, help="a run's records: its own conditions, replayed")
    one.add_argument("--lengths", type=Path, help="columns [run,] step, mean_response_tokens")
    one.add_argument("--run", help="which run of --lengths, where the file holds several")
    one.add_argument(
        "--availability",
        help="a file with columns t_s, instances (or instances_after_event); or stairs:FROM:COUNT; "
        "default: always --gpus-max",
    )
    one.add_argument(
        "--tail", type=Path, help="columns field, len_lo, len_hi_excl, share; default: log-normal"
    )
    one.add_argument(
        "--gpus-max",
        type=int,
        help="GPUs at the peak; default: the series' own, or the recorded job's",
    )
    one.add_argument("--steps", type=int, help="default: as many as the run has")
    one.add_argument("--shape", default="as-measured", help=", ".join(build.SHAPES))
    one.add_argument("--max-response", type=int, help="tokens at which responses are cut")
    one.add_argument(
        "--wall-clock", action="store_true", help="GPUs by seconds of the run, not by its steps"
    )
    job = p.add_argument_group("the job that meets these conditions")
    job.add_argument("--job", type=Path, metavar="FILE", help="models, algorithm, backend")
    job.add_argument("--cluster", type=Path, metavar="FILE", help="nodes, GPUs, links")
    job.add_argument("--model", default="qwen2.5-32b", help="default: %(default)s")
    job.add_argument("--algorithm", choices=ALGORITHMS, default="ppo")
    job.add_argument("--backend", choices=("megatron", "fsdp"), default="megatron")
    job.add_argument("--gpu", default="a100_80gb", help="default: %(default)s")
    job.add_argument("--gpus-per-node", type=int, default=8)
    job.add_argument("--prompts", type=int, default=128, help="prompts of an iteration")
    job.add_argument("--samples", type=int, default=64, help="responses to each prompt")
    job.add_argument("--mini-batch", type=int, help="prompts of an optimizer step; default: all")
    job.add_argument("--prompt-tokens", type=int, default=512)


def _setting(args: argparse.Namespace, gpus: int) -> Setting:
    if args.cluster is not None:
        cluster = ClusterSpec.load(args.cluster)
    else:
        per_node = min(args.gpus_per_node, gpus)
        cluster = cluster_of(args.gpu, -(-gpus // per_node) * per_node, per_node)
    if args.job is not None:
        job = JobSpec.load(args.job)
    else:
        critic = read_model(args.model, value_head=True) if args.algorithm == "ppo" else None
        job = JobSpec(
            read_model(args.model),
            algorithm=args.algorithm,
            critic=critic,
            reference=args.algorithm != "sft",
            backend=args.backend,
        )
    return Setting(
        job,
        cluster,
        LengthDistribution.fixed(args.prompt_tokens),
        args.prompts,
        args.samples,
        args.mini_batch,
    )


_MOST = {
    **dict.fromkeys(("gpus", "gpus_max", "gpus_per_node"), MOST_RANKS),
    "steps": MOST_STEPS,
}


def _positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and not 1 <= value <= _MOST.get(name, 10**9):
            raise SpecError(
                f"--{name.replace('_', '-')} must be 1 to {_MOST.get(name, 10**9)}, got {value}"
            )


def _import(args: argparse.Namespace) -> None:
    _positive(args, "samples", "gpus")
    files.check_out(args.out, "--out")
    plan = GlobalPlan.load(args.plan) if args.plan is not None else None
    found = importing.records(
        args.kind,
        args.file,
        run=args.run,
        samples=args.samples,
        gpus=args.gpus,
        plan=plan,
        ran_here=args.ran_here,
    )
    importing.write(found, args.out)
    print(f"{len(found) - 1} steps of {found[0].run_id} saved to {args.out}")  # type: ignore[attr-defined]
    for text in found[0].config.get("assumptions", ()):  # type: ignore[attr-defined]
        print(f"assumed: {text}")


def _most_gpus(args: argparse.Namespace) -> int:
    """GPUs of the series' peak, or that a recorded job had."""
    if args.records is not None:
        return build.read_recorded(args.records).gpus_max
    if args.availability is None or args.availability.startswith("stairs"):
        raise SpecError("--gpus-max is required where no series of GPUs is given")
    return series.read_availability(Path(args.availability)).peak


def _build(args: argparse.Namespace) -> None:
    _positive(args, "gpus_max", "steps", "max_response", "gpus_per_node", "prompts", "samples",
              "prompt_tokens", "mini_batch")  # fmt: skip
    files.check_out(args.out, "--out")
    if args.seed < 0:
        raise SpecError(f"--seed must be at least 0, got {args.seed}")
    if args.gpus_max is None:
        args.gpus_max = _most_gpus(args)
    name, setting = args.name or args.out.stem, _setting(args, args.gpus_max)
    if args.records is not None:
        own = ("lengths", "run", "availability", "tail", "steps", "max_response")
        for unused in own:
            if getattr(args, unused) is not None:
                option = f"--{unused.replace('_', '-')}"
                raise SpecError(f"--records has its own conditions: leave {option} out")
        made = build.from_records(name, setting, args.records, args.seed)
    else:
        if args.lengths is None:
            raise SpecError("--lengths is required (or --records)")
        made = build.compose(
            name,
            setting,
            build.Parts(
                gpus_max=args.gpus_max,
                lengths=args.lengths,
                run=args.run,
                availability=args.availability,
                shape=args.shape,
                tail=args.tail,
                steps=args.steps,
                max_response_tokens=args.max_response,
                wall_clock=args.wall_clock,
            ),
            args.seed,
        )
    made.save(args.out)
    print(text(made))
    print(f"saved to {args.out}")


def text(trace: Trace) -> str:
    """What a person must know of a trace."""
    means, counts = trace.mean_response_tokens, [count for _, count in trace.gpus]
    unit = "step" if trace.indexed_by == "step" else "second"
    lines = [
        f"{trace.name}: {trace.steps} steps, conditions by {unit}",
        f"  GPUs {min(counts)} to {max(counts)}, {len(counts) - 1} changes",
        f"  mean response {min(means):.0f} to {max(means):.0f} tokens, first {means[0]:.0f}, last "
        f"{means[-1]:.0f}; cut at {trace.max_response_tokens}",
        f"  {trace.note}",
    ]
    for source in trace.sources:
        origin = ", ".join(part for part in (source.origin, source.licence) if part)
        lines.append(f"  {source.what}: {source.file} ({source.used}); {origin or 'no origin'}")
    lines += [f"  assumed: {assumption}" for assumption in trace.assumptions]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 done, 2 wrong usage or bad input."""
    args = parser().parse_args(arguments)
    try:
        if args.what == "import":
            _import(args)
        elif args.what == "build":
            _build(args)
        elif args.what == "list":
            for path in sorted(shipped_folder().glob("*.json")):
                print(text(find(path.stem)).splitlines()[0])
        else:
            trace = find(args.trace)
            print(json.dumps(trace.to_dict()) if args.json else text(trace))
    except BrokenPipeError:
        raise
    except (SpecError, OSError) as error:
        print(f"nereus trace: {error}", file=sys.stderr)
        return 2
    return 0
