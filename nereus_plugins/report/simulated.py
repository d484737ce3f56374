"""Every policy on a trace under several seeds; what is finished is kept and not run again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nereus_plugins.controller.journal import FILE as DECISIONS_FILE
from nereus_plugins.sim import run as running
from nereus_plugins.sim.constants import Constants
from nereus_plugins.sim.truth import TruthSpec
from nereus_plugins.sim.world import World
from nereus_plugins.spec import SpecError
from nereus_plugins.trace import files
from nereus_plugins.trace.conditions import Trace
from nereus_plugins.trace.record import RECORDS_FILE

from .compare import ORACLE
from .figures import figures, read_run
from .versions import code_sha256, versions

RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be simulated; every policy meets the same seeds."""

    trace: Trace
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    truth: TruthSpec
    constants: Constants

    def fingerprint(self, policy: str, seed: int) -> str:
        """sha256 of everything that one result follows from."""
        parts = {
            "trace": self.trace.to_dict(),
            "policy": policy,
            "seed": seed,
            "truth": dataclasses.asdict(self.truth),
            "constants": dataclasses.asdict(self.constants),
            "versions": versions(),
            "code": code_sha256(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def folder_of(out: Path, policy: str, seed: int) -> Path:
    """The run directory of one policy under one seed."""
    return out / "runs" / policy / f"seed-{seed}"


def run_all(
    request: Request, out: Path | None, jobs: int, say: Callable[[str], None]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Figures by policy and seed.

    Args:
        out: where records and results are kept, and taken from where they are of this request;
            None: nowhere.
        jobs: processes; a seed's policies run in one.
        say: told of each that is done.

    Raises: OSError; SpecError where a trace cannot be simulated at all.
    """
    count = len(request.policies) * len(request.seeds)
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in request.policies}
    for done, (policy, seed, result, kept) in enumerate(_results(request, out, jobs), start=1):
        found[policy][seed] = result
        end = f"stopped: {result['stopped']}" if result["stopped"] else _short(result)
        say(f"[{done}/{count}] {policy}, seed {seed}{' (kept)' if kept else ''}: {end}")
    return found


def _short(result: dict[str, Any]) -> str:
    return f"{result['step_s_mean']:.2f} s a step, {result['run_s'] / 3600:.2f} h"


_One = tuple[str, int, dict[str, Any], bool]


def _results(request: Request, out: Path | None, jobs: int) -> Iterator[_One]:
    one_seed = functools.partial(_seed, request, out)
    if jobs == 1 or len(request.seeds) == 1:
        for seed in request.seeds:
            yield from one_seed(seed)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        parts = [pool.submit(_listed, request, out, seed) for seed in request.seeds]
        try:
            for part in concurrent.futures.as_completed(parts):
                yield from part.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _listed(request: Request, out: Path | None, seed: int) -> list[_One]:
    return list(_seed(request, out, seed))


def _seed(request: Request, out: Path | None, seed: int) -> Iterator[_One]:
    """One world for all policies: they share the transitions that were compiled. The oracle, which
    looks at what the others do, comes last."""
    world: World | None = None
    for policy in sorted(request.policies, key=lambda name: name == ORACLE):
        kept = None if out is None else _kept(request, out, policy, seed)
        if kept is not None:
            yield policy, seed, kept, True
            continue
        if world is None:
            world = World(
                request.trace, seed=seed, truth=request.truth, constants=request.constants
            )
        if out is not None:
            result = _simulate(world, policy, folder_of(out, policy, seed))
            _keep(request, out, policy, seed, result)
        else:
            with tempfile.TemporaryDirectory(prefix="nereus-ab-") as folder:
                result = _simulate(world, policy, Path(folder))
        yield policy, seed, result, False


def _simulate(world: World, policy: str, folder: Path) -> dict[str, Any]:
    """The run's figures; where it cannot even begin, `stopped` says why and there are no others."""
    # Of a run that was interrupted, or of another request.
    for name in (RESULT_FILE, RECORDS_FILE, DECISIONS_FILE):
        (folder / name).unlink(missing_ok=True)
    try:
        result = running.run(world, policy, folder).to_dict()
    except SpecError as error:
        return {"stopped": f"at the start: {error}"}
    try:
        return figures(read_run(folder)) | result
    except SpecError:
        return result  # it stopped before the first step's end


def _keep(request: Request, out: Path, policy: str, seed: int, result: dict[str, Any]) -> None:
    folder = folder_of(out, policy, seed)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"fingerprint": request.fingerprint(policy, seed), "result": result}
    files.replace(folder / RESULT_FILE, (json.dumps(content, indent=1), "\n"))


def _kept(request: Request, out: Path, policy: str, seed: int) -> dict[str, Any] | None:
    """A finished result of this very request; None where there is none, or it is of another."""
    folder = folder_of(out, policy, seed)
    try:
        content = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        if content["fingerprint"] != request.fingerprint(policy, seed):
            return None
        result: dict[str, Any] = content["result"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = "steps" not in result or (folder / RECORDS_FILE).exists()
    return result if whole else None
