"""Recompute and offload are switched in a running verl job: no number changes, and they happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.trace.record import TransitionRecord, read_records
from tests.e2e import knob_probe, observe
from tests.e2e.jobs import TIMEOUT_S, differences, small_job

STEPS = 6
ON = {"recompute": "full", "offload_params": True, "offload_optimizer": True}
OFF = {"recompute": "none", "offload_params": False, "offload_optimizer": False}
OTHER = {"fsdp2": {"ulysses": 2}, "megatron": {"tp": 2}}
UNITS = ("actor", "critic")


def _schedule(engine: str) -> dict[int, Any]:
    """After step 1 all on, after 2 all off, after 3 on together with another layout."""
    last: dict[str, Any] = {"offload_params": True, "offload_optimizer": True}
    if engine == "megatron":
        last["recompute"] = "selective"
    together = {**OTHER[engine], "recompute": "full", "offload_optimizer": True}
    return {
        1: dict.fromkeys(UNITS, ON),
        2: dict.fromkeys(UNITS, OFF),
        3: {**dict.fromkeys(UNITS, together), "ref": OTHER[engine]},
        4: dict.fromkeys(UNITS, last),
    }


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_recompute_and_offload_are_switched_and_no_number_changes(
    tmp_path: Path, engine: str
) -> None:
    schedule = _schedule(engine)
    plain = {3: OTHER[engine]}
    runs, probes, seen = {}, {}, {}
    for name, plans in (("switched", schedule), ("plain", plain)):
        job = small_job(
            tmp_path / "task", engine, 2, steps=STEPS, reference=True, nereus={"schedule": plans}
        )
        env = knob_probe.environment(tmp_path / f"{name}.probe")
        both = f"{env['VERL_USE_EXTERNAL_MODULES']},tests.e2e.observe"
        env |= observe.environment(tmp_path / f"{name}.observed")
        env["VERL_USE_EXTERNAL_MODULES"] = both
        runs[name] = launch.run(job, tmp_path / name, timeout_s=TIMEOUT_S, env=env)
        runs[name].require_success()
        probes[name] = knob_probe.read(tmp_path / f"{name}.probe")
        seen[name] = observe.read(tmp_path / f"{name}.observed")
    assert differences(runs["switched"].metrics, runs["plain"].metrics) == []
    for before, after in zip(seen["switched"][::2], seen["switched"][1::2], strict=True):
        assert before["units"] == after["units"]
    # The last state of both, before the last transition of each that is at the same step.
    run_dir = tmp_path / "switched" / "checkpoints" / "nereus"
    records = [r for r in read_records(run_dir) if isinstance(r, TransitionRecord)]
    assert [r.outcome for r in records] == ["committed"] * 4
    assert [sorted(r.units) for r in records] == [[], [], ["actor", "critic", "ref"], []]
    for metrics, recompute, offload in zip(
        runs["switched"].metrics,
        [0, 2, 0, 2, *([1, 1] if engine == "megatron" else [2, 2])],
        [0, 1, 0, 1, 1, 1],
        strict=True,
    ):
        for stage in ("actor-train", "critic-train"):
            assert metrics[f"nereus/{stage}/recompute"] == recompute
            assert metrics[f"nereus/{stage}/offload_optimizer"] == offload

    a_step = len(probes["plain"]) // STEPS
    assert len(probes["switched"]) == len(probes["plain"]) == a_step * STEPS
    for i, line in enumerate(probes["switched"]):
        step = i // a_step + 1
        if line["unit"] == "ref":
            assert (line["moved"], line["parked"]) == ([], False)
            continue
        n, training = line["micro_batches"], line["training"]
        full = training and (step in (2, 4) or (engine == "fsdp2" and step > 4))
        assert line["forwards"] == n * (2 if full else 1), (step, line)
        if engine == "megatron":
            selective = training and step > 4
            assert line["attention"] == n * (2 if full or selective else 1), (step, line)
    print(json_lines(probes["switched"]))


def json_lines(lines: list[dict[str, Any]]) -> str:
    return "\n".join(map(str, lines))
