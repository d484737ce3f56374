"""The proofs, each run on every rank. They go through the same code as a live job's transitions.

Every function takes a `Bench` first and returns a list of `Check`s as dicts, the same on all ranks.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nereus_plugins.emu.table import ShardTable
from nereus_plugins.gtg.execute import RankTransition, TransitionAborted, TransitionOptions
from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.selftest import oracle
from nereus_plugins.selftest.cases import FAILURE, SOAK, Case, cases
from nereus_plugins.selftest.compare import State, differences, whole_state
from nereus_plugins.selftest.ranks import Bench
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control
from nereus_plugins.transport.groups import live_group_count
from nereus_plugins.transport.metadata import gather_tables

UNIT = "model"
STAGING_BYTES = 8 << 10  # of a staged transition: the models are small
BEFORE, AFTER, IN_TARGET = 2, 3, 2  # optimizer steps
# Phases before the commit record; "park" and "fetch" are those of a staged transition.
FAILING_PHASES = (
    "free_gradients",
    "build",
    "describe",
    "plan",
    "agree",
    "move",
    "verify",
    "commit",
)
FAILING_STAGED = ("park", "build", "move", "verify")


@dataclass(frozen=True)
class Check:
    """One thing shown, or not.

    Attributes:
        proof: what kind ("moved bit-exact", ...).
        subject: for what (layouts, phase).
        passed: whether it holds.
        seconds: time it took on this rank.
        detail: what was found; why it failed.
    """

    proof: str
    subject: str
    passed: bool
    seconds: float
    detail: str = ""


class Notebook:
    """Collects checks. A check counts as passed only where it passed on every rank."""

    def __init__(self, bench: Bench, control: Control) -> None:
        self.bench = bench
        self._control = control
        self.checks: list[Check] = []
        self._clock = time.perf_counter()

    def note(self, proof: str, subject: object, found: list[str], detail: str = "") -> None:
        """`found` says what is wrong; nothing means passed. Collective."""
        votes = self._control.vote("check", not found, "; ".join(found[:3]))
        wrong = [f"rank {v.rank}: {v.payload}" for v in votes if not v.ok]
        now = time.perf_counter()
        self.checks.append(
            Check(proof, str(subject), not wrong, now - self._clock, "; ".join(wrong) or detail)
        )
        self._clock = now

    def dump(self) -> list[dict[str, Any]]:
        return [asdict(c) for c in self.checks]


@dataclass(frozen=True)
class Budget:
    """Device memory that holds the old state or the new one, but not both.

    Attributes:
        nbytes: on each device.
        target: shard table of the target layout on all ranks.
    """

    nbytes: int
    target: ShardTable


class _Driver:
    """Runs transitions of one job, as a trainer's driver would."""

    def __init__(self, bench: Bench, control: Control) -> None:
        self.bench = bench
        self.control = control
        self.epoch = 0

    def move(self, job: Any, layout: Layout, *, budget: Budget | None = None) -> int:
        """One transition, committed and released; bytes that this rank received.

        With a budget it must be staged through host memory.
        """
        self.epoch += 1
        transition = RankTransition(
            {UNIT: job},
            rank=self.bench.rank,
            world=self.bench.world,
            control=self.control,
            options=TransitionOptions(
                timeout_s=self.bench.timeout_s,
                memory_budget_bytes=budget.nbytes if budget else None,
                staging_bytes=STAGING_BYTES if budget else None,
            ),
        )
        predicted = {UNIT: budget.target} if budget else None
        report = transition.prepare({UNIT: layout}, self.epoch, predicted)
        wanted = "staged" if budget else "intact"
        if report.mode != wanted:
            raise RuntimeError(f"the transition was {report.mode}, not {wanted}")
        transition.commit()
        transition.release()
        return report.units[UNIT].bytes_received


def make_job(case: Case, layout: Layout, bench: Bench, seed: int) -> Any:
    """A job of the case's back end and model."""
    if case.backend == "megatron":
        from nereus_plugins.selftest.megatron_job import MegatronJob, MegatronModel

        megatron = MegatronModel(**case.model)
        return MegatronJob(UNIT, megatron, layout, seed=seed, device=bench.device)
    if case.backend == "deepspeed":
        from nereus_plugins.selftest.deepspeed_job import DeepSpeedJob, DeepSpeedModel

        deepspeed = DeepSpeedModel(**case.model)
        return DeepSpeedJob(UNIT, deepspeed, layout, seed=seed, device=bench.device)
    from nereus_plugins.selftest.fsdp2_job import Fsdp2Job, Fsdp2Model

    return Fsdp2Job(UNIT, Fsdp2Model(**case.model), layout, seed=seed, device=bench.device)


def _train(job: Any, first: int, steps: int) -> list[float | None]:
    return [job.train_step(s) for s in range(first, first + steps)]


def _same_losses(a: list[float | None], b: list[float | None]) -> list[str]:
    return [] if a == b else [f"losses {a} and {b}"]


# -- 1. bit-exact ------------------------------------------------------------------------------


def bit_exact(bench: Bench, backend: str, quick: bool, at_least: int = 1) -> list[dict[str, Any]]:
    """Moves, round trips and checkpoints, for the pairs that `cases` names for this many ranks."""
    return pairs_bit_exact(bench, cases(backend, bench.world, at_least=at_least, quick=quick))


def pairs_bit_exact(bench: Bench, pairs: Sequence[Case]) -> list[dict[str, Any]]:
    """`bit_exact` for the given pairs."""
    control = Control(bench.rank, bench.world, timeout_s=bench.timeout_s)
    notes = Notebook(bench, control)
    driver = _Driver(bench, control)
    never_moved: dict[str, tuple[State, list[float | None]]] = {}
    for case in pairs:
        key = f"{case.model} {case.source}"
        if key not in never_moved:
            never_moved[key] = _plain_runs(case, bench, notes)
        _one_case(case, bench, notes, driver, never_moved[key])
    return notes.dump()


def _plain_runs(case: Case, bench: Bench, notes: Notebook) -> tuple[State, list[float | None]]:
    """Two runs that never move; bitwise equal, or nothing below means anything."""
    runs = []
    for _ in range(2):
        job = make_job(case, case.source, bench, seed=1)
        losses = _train(job, 0, BEFORE + AFTER)
        runs.append((whole_state(job.described(), bench.device), losses))
        job.close()
    wrong = differences(runs[0][0], runs[1][0]) + _same_losses(runs[0][1], runs[1][1])
    model = str(case).split(":")[0]
    notes.note("two plain runs equal", f"{model}: {case.source}", wrong)
    return runs[0]


def _one_case(
    case: Case,
    bench: Bench,
    notes: Notebook,
    driver: _Driver,
    never_moved: tuple[State, list[float | None]],
) -> None:
    device = bench.device
    job = make_job(case, case.source, bench, seed=1)
    losses = _train(job, 0, BEFORE)
    before = whole_state(job.described(), device)
    received = driver.move(job, case.target)
    after = whole_state(job.described(), device)
    notes.note("moved bit-exact", case, differences(before, after), f"{received} bytes in")
    driver.move(job, case.source)
    losses += _train(job, BEFORE, AFTER)
    end = whole_state(job.described(), device)
    wrong = differences(never_moved[0], end) + _same_losses(never_moved[1], losses)
    notes.note("there and back, then 3 steps", case, wrong)
    if case.checkpoint:
        wrong, detail = _against_checkpoint(case, job, bench, driver)
        notes.note("equal to a checkpoint", case, wrong, detail)
    job.close()


def _against_checkpoint(
    case: Case, job: Any, bench: Bench, driver: _Driver
) -> tuple[list[str], str]:
    """Save in the source layout, move; load into a fresh job in the target layout; train both."""
    folder = bench.folder / "checkpoint"
    if bench.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    save, load = _ORACLES[case.backend]
    start = time.perf_counter()
    save(job, folder)
    saved = time.perf_counter()
    driver.move(job, case.target)
    moved = time.perf_counter()
    loaded = make_job(case, case.target, bench, seed=77)
    built = time.perf_counter()
    load(loaded, folder)
    through_disk = time.perf_counter() - built + saved - start
    states = [whole_state(j.described(), bench.device) for j in (job, loaded)]
    wrong = differences(*states)
    first = BEFORE + AFTER
    wrong += _same_losses(_train(job, first, IN_TARGET), _train(loaded, first, IN_TARGET))
    states = [whole_state(j.described(), bench.device) for j in (job, loaded)]
    wrong += differences(*states)
    loaded.close()
    return wrong, f"move {moved - saved:.2f} s, checkpoint {through_disk:.2f} s"


_Oracle = tuple[Callable[[Any, Path], None], Callable[[Any, Path], None]]
_ORACLES: dict[str, _Oracle] = {
    "megatron": (oracle.save_megatron, oracle.load_megatron),
    "fsdp2": (oracle.save_fsdp2, oracle.load_fsdp2),
    "deepspeed": (oracle.save_deepspeed, oracle.load_deepspeed),
}


# -- 2. failures -------------------------------------------------------------------------------


@contextmanager
def _fault(text: str) -> Iterator[None]:
    os.environ[ENVIRONMENT_VARIABLE] = text
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]


def failures(bench: Bench, backend: str) -> list[dict[str, Any]]:
    """A rank raises in each phase, of an intact and of a staged transition: everyone aborts, and
    trains on in the old layout alike."""
    control = Control(bench.rank, bench.world, timeout_s=bench.timeout_s)
    notes = Notebook(bench, control)
    driver = _Driver(bench, control)
    case = FAILURE[backend]
    job = make_job(case, case.source, bench, seed=1)
    twin = make_job(case, case.source, bench, seed=1)
    _train(job, 0, 1)
    _train(twin, 0, 1)
    budget = staging_budget(job, case.target, bench)
    kinds: list[tuple[str, str, Budget | None]] = []
    kinds += [(phase, "raise", None) for phase in FAILING_PHASES]
    kinds += [("verify", "corrupt", None)]
    kinds += [(phase, "raise", budget) for phase in FAILING_STAGED]
    for step, (phase, kind, room) in enumerate(kinds, start=1):
        wrong = []
        before = whole_state(job.described(), bench.device)
        said = ""
        with _fault(f"step={phase},rank=1,kind={kind}"):
            try:
                driver.move(job, case.target, budget=room)
                wrong.append("the transition was not aborted")
            except TransitionAborted as error:
                said = str(error)
        if job.layout() != case.source:
            wrong.append(f"layout is {job.layout()}")
        wrong += differences(before, whole_state(job.described(), bench.device))
        wrong += _same_losses(_train(job, step, 1), _train(twin, step, 1))
        end = [whole_state(j.described(), bench.device) for j in (job, twin)]
        wrong += differences(*end)
        how = f"{kind} in {phase}{' (staged)' if room else ''}"
        notes.note(f"{how}: old layout trains on", case, wrong, said)
    before = whole_state(job.described(), bench.device)
    driver.move(job, case.target, budget=budget)
    after = whole_state(job.described(), bench.device)
    notes.note("then a staged transition", case, differences(before, after))
    driver.move(job, case.source)
    after = whole_state(job.described(), bench.device)
    notes.note("then one back", case, differences(before, after))
    job.close()
    twin.close()
    return notes.dump()


def staging_budget(job: Any, target: Layout, bench: Bench) -> Budget:
    """Collective. A budget that forces a transition of `job` to `target` through host memory."""
    everyone = dist.group.WORLD
    assert everyone is not None
    # As built, where a job would take the prediction of its model's spec.
    built = job.build(target)
    tables = [gather_tables(unit.described().table(bench.rank), everyone) for unit in (job, built)]
    job.release(built)
    sizes = [
        [int(table.storages.of_rank(r).nbytes.sum()) for r in range(bench.world)]
        for table in tables
    ]
    larger = max(max(pair) for pair in zip(*sizes, strict=True))
    both = max(sum(pair) for pair in zip(*sizes, strict=True))
    nbytes = larger + 8 * STAGING_BYTES
    if nbytes >= both:
        raise RuntimeError("the model is too small to need staging")
    return Budget(nbytes, tables[1])


def killed(bench: Bench, backend: str, phase: str) -> list[dict[str, Any]]:
    """Rank 1 is killed in a phase; what the others say, and how long they took to say it."""
    control = Control(bench.rank, bench.world, timeout_s=bench.timeout_s)
    case = FAILURE[backend]
    job = make_job(case, case.source, bench, seed=1)
    _train(job, 0, 1)
    start = time.perf_counter()
    with _fault(f"step={phase},rank=1,kind=kill"):
        try:
            _Driver(bench, control).move(job, case.target)
            passed, said = False, "the transition went on without rank 1"
        except TransitionAborted as error:
            passed, said = error.lost_ranks == (1,), str(error)
    seconds = time.perf_counter() - start
    return [asdict(Check(f"rank killed in {phase}: no hang", str(case), passed, seconds, said))]


# -- 3. again and again ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Usage:
    """What this process uses after a transition."""

    seconds: float
    files: int
    threads: int
    memory_mb: float
    device_mb: float
    groups: int


def soak(bench: Bench, backend: str, transitions: int, steps: int = 1) -> list[dict[str, Any]]:
    """Many transitions in one process: nothing grows, and the state stays bit-exact.

    Args: steps: of training before each transition.
    """
    control = Control(bench.rank, bench.world, timeout_s=bench.timeout_s)
    notes = Notebook(bench, control)
    driver = _Driver(bench, control)
    layouts = [lay for lay in SOAK[backend] if lay.world_size <= bench.world]
    model = {} if backend == "fsdp2" else {"bf16": True}
    job = make_job(Case(backend, model, layouts[0], layouts[0]), layouts[0], bench, seed=1)
    usage: list[_Usage] = []
    wrong: list[str] = []
    for i in range(1, transitions + 1):
        _train(job, 1 + (i - 1) * steps, steps)
        watched = i % 10 == 1
        before = whole_state(job.described(), bench.device) if watched else None
        dist.barrier()
        start = time.perf_counter()
        driver.move(job, layouts[i % len(layouts)])
        dist.barrier()
        usage.append(_measure(time.perf_counter() - start, bench.device))
        if before is not None:
            wrong += differences(before, whole_state(job.described(), bench.device))
    subject = f"{backend}: {transitions} transitions, {transitions * steps} steps"
    notes.note("state bit-exact, every tenth", subject, wrong)
    for field, slack, unit in (
        ("groups", 0, ""),
        ("files", 2, ""),
        ("threads", 4, ""),
        ("memory_mb", 24, " MB"),
        ("device_mb", 8, " MB"),
    ):
        notes.note(f"{field} flat", subject, *_flat(usage, field, len(layouts), slack, unit))
    notes.note("time flat", subject, *_flat_time(usage, len(layouts)))
    job.close()
    return notes.dump()


def _thirds(usage: list[_Usage], field: str, cycle: int) -> tuple[list[Any], list[Any]]:
    """A field after the first whole cycle of layouts: its first third and its last."""
    values = [getattr(u, field) for u in usage[cycle:]] or [getattr(u, field) for u in usage]
    third = max(1, len(values) // 3)
    return values[:third], values[-third:]


def _flat(
    usage: list[_Usage], field: str, cycle: int, slack: float, unit: str
) -> tuple[list[str], str]:
    first, last = (max(part) for part in _thirds(usage, field, cycle))
    detail = f"{first:g} -> {last:g}{unit}"
    return ([] if last <= first + slack else [f"grows: {detail}"]), detail


def _flat_time(usage: list[_Usage], cycle: int) -> tuple[list[str], str]:
    # The machine may be busy with other things: medians, and a factor of two.
    first, last = (statistics.median(part) for part in _thirds(usage, "seconds", cycle))
    detail = f"median {first:.3f} -> {last:.3f} s"
    return ([] if last <= 2 * first + 0.1 else [f"grows: {detail}"]), detail


def _measure(seconds: float, device: torch.device) -> _Usage:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    on_device = torch.cuda.memory_allocated(device) / 1e6 if device.type == "cuda" else 0.0
    return _Usage(
        seconds=seconds,
        files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        memory_mb=pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        device_mb=on_device,
        groups=live_group_count(),
    )
