"""`nereus selftest`: the proofs that moving state is bit-exact and failures are safe, run here.

The same code on CPU (gloo) and on GPUs (NCCL, one GPU a rank); on one machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nereus_plugins.selftest.proofs import Check

BACKENDS = ("megatron", "fsdp2", "deepspeed")
_PACKAGES = {"megatron": "megatron.core", "fsdp2": "torch", "deepspeed": "deepspeed"}
CPU_RANKS = 4
MOST_RANKS = 64  # each a process of this machine, with torch in it
MOST_TRANSITIONS = 10**6
LIMIT_S = 1800.0
KILL_TIMEOUT_S = 10.0
SNAPSHOTS = "nereus_plugins.selftest.snapshots"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proofs and print a table. Exit status: 0 all passed, 1 not, 2 cannot run here."""
    args = _parser().parse_args(argv)
    if not 0 <= args.transitions <= MOST_TRANSITIONS:
        return _cannot(f"--transitions must be 0 to {MOST_TRANSITIONS}, got {args.transitions}")
    if args.ranks is not None and not 2 <= args.ranks <= MOST_RANKS:
        return _cannot(f"--ranks must be 2 to {MOST_RANKS}, got {args.ranks}")
    if not _installed("torch"):
        return _cannot("torch is not installed; pip install 'nereus-plugins[megatron]'")
    import torch

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return _cannot("--device cuda, but torch sees no CUDA device")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    ranks = (gpus or CPU_RANKS) if args.ranks is None else args.ranks
    if ranks < 2 or (gpus and ranks > gpus):
        return _cannot(
            f"{ranks} ranks cannot run here: it takes at least 2, and a GPU for each; set --ranks, "
            "or --device cpu"
        )
    backends: tuple[str, ...] = BACKENDS if args.backend == "all" else (args.backend,)
    for missing in [b for b in backends if not _installed(_PACKAGES[b])]:
        _say(f"{missing}: not installed; pip install 'nereus-plugins[{missing}]'", args.json)
        backends = tuple(b for b in backends if b != missing)
    if not backends:
        return 2
    checks: list[Check] = []
    for backend in backends:
        _say(f"{backend}: {ranks} ranks on {device}", args.json)
        for check in prove(
            backend, ranks, device=device, transitions=args.transitions, quick=args.quick
        ):
            _say(_row(check), args.json)
            checks.append(check)
    failed = [c for c in checks if not c.passed]
    if args.json:
        summary = {
            "device": device,
            "ranks": ranks,
            "passed": len(checks) - len(failed),
            "failed": len(failed),
            "checks": [asdict(c) for c in checks],
        }
        print(json.dumps(summary))
    else:
        print(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or not checks else 0


def prove(
    backend: str, ranks: int, *, device: str, transitions: int, quick: bool
) -> Iterator[Check]:
    """All proofs of one back end on this machine, as they are done.

    Args:
        backend: one of `BACKENDS`.
        ranks: processes for the layouts to be laid over.
        device: "cpu" or "cuda".
        transitions: how many the repeated-transition proof makes; 0 leaves it out.
        quick: fewer pairs of layouts.
    """
    yield from run("failures", backend, 2, device=device)
    for phase in ("move", "commit"):
        yield from run_killed(backend, phase, device=device)
    yield from run("bit_exact", backend, ranks, quick, device=device)
    yield from run("restored", backend, ranks, quick, device=device, module=SNAPSHOTS)
    if ranks >= 4:
        from nereus_plugins.selftest.snapshots import run_restarted

        yield from run_restarted(backend, device=device, limit_s=LIMIT_S)
    if transitions:
        yield from run("soak", backend, ranks, transitions, device=device)


def run(
    name: str,
    backend: str,
    ranks: int,
    *args: object,
    device: str,
    module: str = "nereus_plugins.selftest.proofs",
    limit_s: float = LIMIT_S,
) -> list[Check]:
    """Run a proof of `module` on `ranks` ranks; a rank that fails, or takes longer than `limit_s`,
    is a failed check."""
    from nereus_plugins.selftest.proofs import Check
    from nereus_plugins.selftest.ranks import run_on_ranks

    with tempfile.TemporaryDirectory(prefix="nereus-selftest-") as folder:
        ended = run_on_ranks(
            f"{module}:{name}",
            ranks,
            backend,
            *args,
            device=device,
            folder=Path(folder),
            limit_s=limit_s,
        )
    broken = [e for e in ended if e.error is not None or e.value is None]
    checks = [Check(**c) for c in (ended[0].value or [])]
    for end in broken[:1]:
        said = (end.error or f"process ended with {end.exitcode}").strip()
        checks.append(Check(name, f"{backend}: rank {end.rank}", False, 0.0, said))
    return checks


def run_killed(backend: str, phase: str, *, device: str) -> list[Check]:
    """Kill rank 1 of 2 in a phase; the other must end by itself, saying why."""
    from nereus_plugins.selftest.proofs import Check
    from nereus_plugins.selftest.ranks import run_on_ranks

    with tempfile.TemporaryDirectory(prefix="nereus-selftest-") as folder:
        survivor, victim = run_on_ranks(
            "nereus_plugins.selftest.proofs:killed",
            2,
            backend,
            phase,
            device=device,
            folder=Path(folder),
            limit_s=LIMIT_S,
            timeout_s=KILL_TIMEOUT_S,
        )
    name = f"rank killed in {phase}: no hang"
    if victim.exitcode == 0 or victim.value is not None:
        said = victim.error or "it was not killed"
        return [Check(name, f"{backend}: rank 1", False, 0.0, said)]
    if survivor.value is None:
        said = survivor.error or f"process ended with {survivor.exitcode}"
        return [Check(name, f"{backend}: rank 0", False, 0.0, said)]
    return [Check(**c) for c in survivor.value]


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is not there
        return False


def _cannot(why: str) -> int:
    print(f"nereus selftest: {why}", file=sys.stderr)
    return 2


def _row(check: Check) -> str:
    verdict = "ok  " if check.passed else "FAIL"
    detail = " ".join(check.detail.split()) if check.passed else check.detail
    if check.passed and len(detail) > 80:
        detail = detail[:77] + "..."
    return f"  {verdict} {check.seconds:6.1f} s  {check.proof:42}  {check.subject}  {detail}"


def _say(text: str, as_json: bool) -> None:
    """To the table; with --json to stderr, so that stdout is one JSON object."""
    print(text.rstrip(), file=sys.stderr if as_json else sys.stdout, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nereus selftest",
        description="Prove on this machine that moving training state between parallel layouts is "
        "bit-exact, that a failed transition leaves the old layout training on, that snapshots are "
        "restored into any layout, and that repeated transitions leak nothing.",
    )
    parser.add_argument("--backend", choices=(*BACKENDS, "all"), default="all")
    parser.add_argument(
        "--ranks", type=int, help=f"processes; default: number of GPUs, or {CPU_RANKS} on CPU"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--transitions", type=int, default=50, help="for the repeated-transition proof (0: none)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer pairs of layouts")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser
