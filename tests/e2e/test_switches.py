"""Recompute and offload are switched in a running verl job: no number changes, and they happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.spec.plan import RECOMPUTE
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
    run_dir = tmp_path / "switched" / "checkpoints" / "nereus"
    records = [r for r in read_records(run_dir) if isinstance(r, TransitionRecord)]
    assert [r.outcome for r in records] == ["committed"] * 4
    assert [sorted(r.units) for r in records] == [[], [], ["actor", "critic", "ref"], []]
    last = "full" if engine == "fsdp2" else "selective"
    recompute = ["none", "full", "none", "full", last, last]
    weights = [False, True, False, False, True, True]
    optimizer = [False, True, False, True, True, True]
    for i, metrics in enumerate(runs["switched"].metrics):
        for stage in ("actor-train", "critic-train"):
            assert metrics[f"nereus/{stage}/recompute"] == RECOMPUTE.index(recompute[i])
            assert metrics[f"nereus/{stage}/offload_params"] == weights[i]
            assert metrics[f"nereus/{stage}/offload_optimizer"] == optimizer[i]

    a_step = len(probes["plain"]) // STEPS
    assert len(probes["switched"]) == len(probes["plain"]) == a_step * STEPS
    for step in range(STEPS):
        lines = probes["switched"][a_step * step : a_step * (step + 1)]
        for line in lines:
            full = line["training"] and recompute[step] == "full"
            assert line["forwards"] == line["micro_batches"] * (2 if full else 1), (step, line)
            if engine == "megatron":
                again = line["training"] and recompute[step] != "none"
                assert line["attention"] == line["micro_batches"] * (2 if again else 1)
        # What verl's stages load and offload; a step's first forward pass is not looked at, since
        # it comes after the transition's own loading.
        for unit in UNITS:
            trained = [line["moved"] for line in lines if line["unit"] == unit and line["training"]]
            wanted = {"model": weights[step], "optimizer": optimizer[step]}
            moved = {part for parts in trained for part in parts}
            assert moved == {part for part, is_moved in wanted.items() if is_moved}, (step, unit)
        assert all(line["moved"] == [] for line in lines if line["unit"] == "ref")
