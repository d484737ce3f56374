"""What a transition takes in a real OpenRLHF job on CPU, against OpenRLHF's own way.

    ./dev env openrlhf
    .venvs/openrlhf/bin/python benchmarks/openrlhf_transition.py [--json] [--targets NAME,NAME]

One job (PPO with a critic, two ranks each in ZeRO-2, one vLLM engine) does so for each target:
after a step OpenRLHF's checkpoint is saved, the job goes to the target, and a step later back. Its
peer is OpenRLHF without Nereus, started again from that very checkpoint with the target's flags:

- transition: everything waits for it, from the saved step to the beginning of the next;
- relaunch: the checkpoint is saved (taken from the job's own records), a job is ended (SIGTERM,
  until its processes are gone), the next one is launched, loads, and begins its first step.

Which targets OpenRLHF can load into is a part of the answer: of those that it cannot, the reason
that it gives is reported, and no ratio. `ranks-universal` is DeepSpeed's own way around the number
of ranks: its converter, whose time counts, and --ds.use_universal_ckpt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_openrlhf import demo

from nereus_plugins.trace import installed
from nereus_plugins.trace.record import (
    TRANSITION_TIMER,
    Record,
    StepRecord,
    TransitionRecord,
    read_records,
)

START = {"dp": 2, "sharding": "zero2", "rollout": {"replicas": 1}}  # as demo.arguments says
JOB_TIMEOUT_S = 600.0
POLL_S = 0.05
PACKAGES = ("nereus-plugins", *installed.SOFTWARE["openrlhf"])


@dataclass(frozen=True)
class Target:
    """A layout. plan: for Nereus. flags: for OpenRLHF. universal: load a converted checkpoint."""

    plan: Mapping[str, Any]
    flags: str
    universal: bool = False


ONE_RANK = "--actor.num_gpus_per_node 1 --critic.num_gpus_per_node 1"
TARGETS: Mapping[str, Target] = {
    "zero1": Target({"sharding": "zero1"}, "--ds.zero_stage 1"),
    "engines": Target({"rollout": {"replicas": 2}}, "--vllm.num_engines 2"),
    "zero3": Target({"sharding": "zero3"}, "--ds.zero_stage 3"),
    "ranks": Target({"dp": 1}, ONE_RANK),
    "ranks-universal": Target({"dp": 1}, f"{ONE_RANK} --ds.use_universal_ckpt", universal=True),
}
DEFAULT = "zero1,engines"


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def measure(names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Raises: RuntimeError if the job failed, or a transition did not happen."""
    at = {name: 2 * i for i, name in enumerate(names, 1)}  # steps before are warm-up
    steps = max(at.values()) + 1
    demo.make_files(folder, steps * demo.PROMPTS)
    words = demo.arguments(folder, steps)
    schedule: dict[int, Any] = {}
    for name, step in at.items():
        schedule |= {step: TARGETS[name].plan, step + 1: START}
    del schedule[steps]  # nothing comes after
    saving = ["--ckpt.save_steps", "2", "--ckpt.max_num", str(steps)]
    nereus = ["--nereus.enable", "--nereus.run_dir", str(folder / "nereus")]
    nereus += ["--nereus.schedule", json.dumps(schedule)]
    say(f"a job of {steps} steps, {len(schedule)} transitions; log: {folder / 'log.txt'}")
    status = demo.run(folder, [*words, *saving, *nereus], folder / "log.txt", JOB_TIMEOUT_S)
    if status:
        raise RuntimeError(f"the job ended with {status}:\n{tail(folder / 'log.txt')}")
    records = list(read_records(folder / "nereus"))
    found: dict[str, dict[str, Any]] = {}
    for name, step in at.items():
        found[name] = transition(records, step)
        say(f"{name}: the transition took {found[name]['transition_s']:.2f} s; relaunching ...")
        found[name] |= relaunch(TARGETS[name], words, folder, step, folder / f"again-{name}")
        one = found[name]
        if "why_not" in one:
            say(f"{name}: OpenRLHF does not load it: {one['why_not']}")
            continue
        one["relaunch_s"] += one["save_s"]
        one["ratio"] = one["transition_s"] / one["relaunch_s"]
        say(f"{name}: {one['relaunch_s']:.1f} s by OpenRLHF's own way, ratio {one['ratio']:.3f}")
    ratios = [one["ratio"] for one in found.values() if "ratio" in one]
    return {
        "ratio": max(ratios, default=None),
        "targets": found,
        "does_not_load": {name: one["why_not"] for name, one in found.items() if "why_not" in one},
        "checkpoint_bytes": checkpoint_bytes(folder / "checkpoints", min(at.values())),
        "load_average": os.getloadavg()[0],
        "measured_on": f"CPU/gloo, {os.cpu_count()} cores, "
        f"{platform.processor() or platform.machine()}",
        "versions": installed.versions(PACKAGES),
    }


def transition(records: Sequence[Record], step: int) -> dict[str, Any]:
    """What the job's records say of the transition after a step, and of saving before it.

    Raises: RuntimeError if it was not committed.
    """
    steps = {r.step: r for r in records if isinstance(r, StepRecord)}
    done = next(r for r in records if isinstance(r, TransitionRecord) and r.step == step)
    if done.outcome != "committed" or done.rollout.get("fell_back"):
        raise RuntimeError(f"after step {step}: {done.outcome}, {done.reason}")
    waited_s = steps[step].stages_s[TRANSITION_TIMER]
    # A step's record has its time from before OpenRLHF logs and saves, a transition's from its end.
    saved_s = done.time_unix_s - waited_s - steps[step].time_unix_s
    return {
        "transition_s": waited_s,
        "transition_parts_s": {k: s for k, s in done.seconds.items() if "." not in k},
        "bytes_between_ranks": sum(unit.get("bytes_wire", 0) for unit in done.units.values()),
        "save_s": max(saved_s, 0.0),
        "step_s": steps[step].alone_s,
        "next_step_s": steps[step + 1].alone_s,
    }


def relaunch(
    target: Target, words: Sequence[str], job: Path, step: int, folder: Path
) -> dict[str, Any]:
    """Start OpenRLHF from the checkpoint of `step` in the target, and end it after one step.

    Returns: seconds by part and their sum, `relaunch_s`, without saving; or {"why_not"}.
    """
    parts = {}
    for model in ("_actor", "_critic"):
        saved = Path("checkpoints", model)
        tag = f"global_step{step}"
        shutil.copytree(job / saved / tag, folder / saved / tag)
        (folder / saved / "latest").write_text(tag)
    if target.universal:
        begin_s = time.monotonic()
        why_not = convert([folder / "checkpoints" / m / tag for m in ("_actor", "_critic")])
        if why_not:
            return {"why_not": why_not}
        parts["convert_s"] = time.monotonic() - begin_s
    given = [*words, *target.flags.split(), "--ckpt.load_enable"]
    for option, name in (("ckpt.path", "checkpoints"), ("logger.tensorboard_dir", "tensorboard"),
                         ("ckpt.output_dir", "final")):  # fmt: skip
        given += [f"--{option}", str(folder / name)]
    log = folder / "log.txt"
    begin_s = time.monotonic()
    with demo.started(folder, given, log) as process:
        line, at_s = first_step(process, log)
        if not line:
            return {"why_not": reason(log)}
        number, seconds = read_step(line)
        if number != step + 1:
            return {"why_not": f"it began at step {number} instead of {step + 1}"}
        parts["launch_and_load_s"] = at_s - begin_s - seconds
        begin_s = time.monotonic()
    parts["end_s"] = time.monotonic() - begin_s
    return {"relaunch_s": sum(parts.values()), "relaunch_parts_s": parts,
            "next_step_s_relaunched": seconds}  # fmt: skip


def convert(checkpoints: Sequence[Path]) -> str:
    """DeepSpeed's converter on each, side by side; why it failed, or ""."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--inject_missing_state"]
    started = [
        subprocess.Popen(
            [*command, "--input_folder", str(one), "--output_folder", f"{one}_universal"],
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for one in checkpoints
    ]
    said = [process.communicate()[0] for process in started]
    return next((last_error(t) for p, t in zip(started, said, strict=True) if p.returncode), "")


STEP = re.compile(r"Global step (\d+): .*'timing/step_total': ([\d.]+)")


def first_step(process: subprocess.Popen[bytes], log: Path) -> tuple[str, float]:
    """(the line about the first finished step, when it was there; "" where the job ended before).

    Raises: RuntimeError after JOB_TIMEOUT_S.
    """
    deadline = time.monotonic() + JOB_TIMEOUT_S
    with log.open(errors="replace") as file:
        rest = ""
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            *lines, rest = (rest + file.read()).split("\n")
            now_s = time.monotonic()
            found = next((line for line in lines if STEP.search(line)), "")
            if found or ended:
                return found, now_s
            time.sleep(POLL_S)
    raise RuntimeError(f"no step within {JOB_TIMEOUT_S:g} s:\n{tail(log)}")


def read_step(line: str) -> tuple[int, float]:
    """(number, seconds) of a step that OpenRLHF logged."""
    match = STEP.search(line)
    assert match is not None
    return int(match[1]), float(match[2])


def reason(log: Path) -> str:
    return last_error(log.read_text(errors="replace"))


def last_error(text: str) -> str:
    """The last line that names an exception, without what Ray puts before it."""
    found = re.findall(r"((?:\w+\.)*\w*(?:Error|Exception)\b.*)", text)
    return found[-1][:400] if found else "it ended; the log has no exception"


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def checkpoint_bytes(folder: Path, step: int) -> int:
    """Of actor and critic."""
    saved = [one for one in folder.rglob("*") if f"global_step{step}" in one.parts]
    return sum(one.stat().st_size for one in saved if one.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument(
        "--targets", default=DEFAULT, help=f"of {', '.join(TARGETS)}, or all (default {DEFAULT})"
    )
    args = parser.parse_args()
    names = list(TARGETS) if args.targets == "all" else args.targets.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}: choose from {', '.join(TARGETS)}")
    with tempfile.TemporaryDirectory(prefix="nereus-openrlhf-") as folder:
        figures = measure(names, Path(folder))
    for name, one in figures["targets"].items():
        then = f"does not load: {one['why_not']}" if "why_not" in one else (
            f"{one['relaunch_s']:.1f} s by saving and relaunching, ratio {one['ratio']:.3f}"
        )  # fmt: skip
        print(f"{name}: {one['transition_s']:.2f} s by a transition; {then}")
    print(f"measured on {figures['measured_on']}, load {figures['load_average']:.1f}")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
