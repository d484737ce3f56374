"""OpenRLHF's own train_ppo_ray on CPU (DeepSpeed on gloo, vLLM's CPU build), with Nereus."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs the OpenRLHF environment: ./dev env openrlhf")

import torch
from nereus_openrlhf import demo
from safetensors.torch import load_file

from nereus_plugins.cli import main
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.messages import ENDPOINT_FILE
from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records

pytestmark = pytest.mark.full
STEPS = 3
LOSSES = ("policy_loss", "critic_loss", "actor_grad_norm", "critic_grad_norm", "return", "reward")


def run(
    folder: Path, *words: str, steps: int = STEPS, reward_model: bool = False
) -> list[dict[str, Any]]:
    """Run a job; what OpenRLHF's own log says of each step.

    reward_model: whether a model scores, instead of a function."""
    demo.make_files(folder, steps * demo.PROMPTS)
    # Runs repeat: OpenRLHF shuffles prompts, and takes samples in the order in which they are done,
    # so all are the same one; and sampling is greedy.
    prompts = folder / "prompts.jsonl"
    line, *others = prompts.read_text().splitlines(keepends=True)
    prompts.write_text(line * (1 + len(others)))
    given = [*demo.arguments(folder, steps), "--rollout.top_p", "1e-6", *words]
    if reward_model:
        at = given.index("--reward.remote_url")
        given[at : at + 2] = ["--reward.model_name_or_path", str(folder / "model")]
    log = folder / "log.txt"
    assert demo.run(folder, given, log) == 0, "\n".join(log.read_text().splitlines()[-60:])
    return logged(folder)


def logged(folder: Path) -> list[dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: dict[int, dict[str, Any]] = {}
    for events in sorted((folder / "tensorboard").rglob("events.out*")):
        found = EventAccumulator(str(events.parent))
        found.Reload()
        for tag in found.Tags()["scalars"]:
            for event in found.Scalars(tag):
                steps.setdefault(event.step, {})[tag.removeprefix("train/")] = event.value
    return [steps[step] for step in sorted(steps)]


def transitions(folder: Path) -> list[TransitionRecord]:
    records = read_records(folder / "nereus")
    return [record for record in records if isinstance(record, TransitionRecord)]


def nereus(folder: Path, schedule: dict[int, Any]) -> Sequence[str]:
    return (
        "--nereus.enable",
        "--nereus.run_dir",
        str(folder / "nereus"),
        "--nereus.schedule",
        json.dumps(schedule),
    )


def test_losses_are_openrlhfs_own_until_the_layout_changes(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    assert len(plain) == STEPS
    assert not any(name.startswith("nereus/") for step in plain for name in step)
    enabled = run(tmp_path / "enabled", *nereus(tmp_path / "enabled", {}))
    for ours, theirs in zip(enabled, plain, strict=True):
        assert {name: ours[name] for name in LOSSES} == {name: theirs[name] for name in LOSSES}
    assert transitions(tmp_path / "enabled") == []
    steps = [r for r in read_records(tmp_path / "enabled" / "nereus") if isinstance(r, StepRecord)]
    assert [record.step for record in steps] == [1, 2, 3]


def test_layouts_change_while_it_trains(tmp_path: Path) -> None:
    schedule = {
        1: {"dp": 1, "sharding": "zero3"},
        2: {"actor": {"dp": 2, "sharding": "zero1"}},
        3: {"tp": 2, "dp": 1, "sharding": "zero2"},
    }
    logs = run(tmp_path, *nereus(tmp_path, schedule), steps=4)
    done = transitions(tmp_path)
    assert [(t.step, t.outcome) for t in done] == [(step, "committed") for step in schedule]
    assert all(set(t.units) == {"actor", "critic"} for t in (done[0], done[2]))
    assert [step["nereus/actor/dp"] for step in logs] == [2, 1, 2, 1]
    assert (tmp_path / "final" / "config.json").exists()  # the launcher saved the moved actor


def test_openrlhf_goes_on_from_a_checkpoint_saved_after_a_transition(tmp_path: Path) -> None:
    """OpenRLHF without Nereus, started in the layout that was in force, loads what was saved there
    and trains as the job does that saved it."""
    saving, steps = ("--ckpt.save_steps", "3"), 5
    schedule = {2: {"dp": 1, "sharding": "zero3"}}
    whole = run(tmp_path / "job", *saving, *nereus(tmp_path / "job", schedule), steps=steps)
    (done,) = transitions(tmp_path / "job")
    assert (done.outcome, set(done.units)) == ("committed", {"actor", "critic"})
    parts = {"build", "move", "verify", "release"}
    assert all(parts <= set(unit["seconds"]) for unit in done.units.values())
    words = "--ds.zero_stage 3 --actor.num_gpus_per_node 1 --critic.num_gpus_per_node 1"
    words += f" --ckpt.load_enable --ckpt.path {tmp_path / 'job' / 'checkpoints'}"
    resumed = run(tmp_path / "again", *words.split(), steps=steps)
    assert len(resumed) == steps - 3
    # What the critic logs as its gradient's norm is a mean over micro-batches, of which all but the
    # last still see the norm of the step before: a new engine, none.
    del resumed[0]["critic_grad_norm"]
    names = (*LOSSES, "actor_lr", "critic_lr")
    for again, before in zip(resumed, whole[3:], strict=True):
        known = [name for name in names if name in again]
        assert {name: again[name] for name in known} == {name: before[name] for name in known}


def test_models_that_share_gpus_and_sleep(tmp_path: Path) -> None:
    """OpenRLHF's hybrid engine, without a critic, with a reference model."""
    words = "--train.colocate_all --ds.enable_sleep --vllm.num_engines 2 --ref.num_gpus_per_node 2"
    words += " --algo.kl.init_coef 0.01 --algo.advantage.estimator reinforce_baseline"
    words += " --rollout.n_samples_per_prompt 2"
    schedule = {1: {"actor": {"sharding": "zero3"}, "ref": {"sharding": "zero3"}}}
    moved = run(tmp_path / "on", *words.split(), *nereus(tmp_path / "on", schedule), steps=2)
    (done,) = transitions(tmp_path / "on")
    assert done.outcome == "committed"
    assert set(done.units) == {"actor", "ref"}
    assert len(moved) == 2
    plain = run(tmp_path / "off", *words.split(), steps=2)
    names = [name for name in LOSSES if name in plain[0]]
    assert "policy_loss" in names
    assert {name: moved[0][name] for name in names} == {name: plain[0][name] for name in names}


def test_all_four_models_and_a_moving_average_change(tmp_path: Path) -> None:
    """PPO with critic, reference and reward model, and OpenRLHF's moving average of the actor."""
    words = "--critic.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --reward.num_gpus_per_node 1"
    words += " --algo.kl.init_coef 0.01 --train.enable_ema --train.ema_beta 0.5"
    words += " --ckpt.save_steps 1 --ckpt.save_hf"
    # After step 2: OpenRLHF's first has a learning rate of 0.
    schedule = {
        2: {
            "actor": {"dp": 1, "sharding": "zero1"},
            "critic": {"sharding": "zero3"},
            "ref": {"sharding": "zero3"},
            "reward": {"dp": 2, "sharding": "zero3"},
        },
    }
    given = (*words.split(), *nereus(tmp_path, schedule))
    logs = run(tmp_path, *given, reward_model=True)
    (done,) = transitions(tmp_path)
    assert (done.outcome, set(done.units)) == ("committed", {"actor", "critic", "ref", "reward"})
    assert [step["nereus/reward/dp"] for step in logs] == [1, 1, 2]
    assert all(math.isfinite(step["reward"]) and step["reward"] for step in logs)
    # What OpenRLHF saved after each step is half of the average before, half of the actor then.
    folder = tmp_path / "checkpoints"
    before = load_file(tmp_path / "model" / "model.safetensors")
    for step in range(1, STEPS + 1):
        average = load_file(folder / f"global_step{step}_hf" / "model.safetensors")
        state = folder / "_actor" / f"global_step{step}" / "mp_rank_00_model_states.pt"
        actor = torch.load(state, weights_only=True)["module"]
        for name, tensor in average.items():
            assert torch.equal(tensor, 0.5 * actor[name] + 0.5 * before[name]), (step, name)
        if step > 1:
            assert any(not torch.equal(tensor, actor[name]) for name, tensor in average.items())
            assert any(not torch.equal(tensor, before[name]) for name, tensor in average.items())
        before = average
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in final.items())


def test_a_live_job_takes_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir, plan = tmp_path / "nereus", tmp_path / "plan.yaml"
    logs: list[list[dict[str, Any]]] = []
    schedule = {1: {"sharding": "zero3"}}

    def job() -> None:
        logs.append(run(tmp_path, *nereus(tmp_path, schedule), steps=4))

    thread = threading.Thread(target=job)
    thread.start()
    try:
        while thread.is_alive() and not _answers(run_dir):
            time.sleep(0.2)
        assert main(["pause", str(run_dir)]) == 0
        plan.write_text("{sharding: zero1}")
        assert main(["transition", str(run_dir), str(plan)]) == 3
        assert "the job is paused" in capfd.readouterr().err
        while thread.is_alive() and Client(run_dir).call("status")["job"]["step"] < 1:
            time.sleep(0.2)
        assert main(["resume", str(run_dir)]) == 0
        plan.write_text("{actor: {dp: 3}}")
        assert main(["transition", str(run_dir), str(plan)]) == 3
        assert "--rollout.micro_batch_size" in capfd.readouterr().err
        plan.write_text("{critic: {sharding: zero1, dp: 1}}")
        assert main(["transition", str(run_dir), str(plan)]) == 0
        assert "plan 1: committed" in capfd.readouterr().out
        assert main(["status", str(run_dir)]) == 0
        assert "live, pid" in capfd.readouterr().out
    finally:
        thread.join()
    (log,) = logs
    skipped, moved = transitions(tmp_path)
    assert (skipped.step, skipped.outcome) == (1, "skipped")
    assert (moved.outcome, set(moved.units)) == ("committed", {"critic"})
    assert [step["nereus/critic/dp"] for step in log][-1] == 1
    assert not (run_dir / ENDPOINT_FILE).exists()


def _answers(run_dir: Path) -> bool:
    try:
        Client(run_dir).call("status")
    except NoLiveJob:
        return False
    return True


def test_engines_of_vllm_follow(tmp_path: Path) -> None:
    run(tmp_path, *nereus(tmp_path, {1: {"rollout": {"replicas": 2}}}), steps=2)
    (done,) = transitions(tmp_path)
    assert done.outcome == "committed"
    assert done.rollout["fell_back"] == ""


@pytest.mark.parametrize("phase", ["build", "move", "commit"])
def test_a_failure_leaves_the_job_training(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEREUS_FAULT", f"step={phase},rank=1,kind=raise")
    logs = run(tmp_path, *nereus(tmp_path, {1: {"actor": {"dp": 4}}}), steps=2)
    (done,) = transitions(tmp_path)
    assert done.outcome == "aborted"
    assert f"injected at {phase}" in done.reason
    assert [step["nereus/actor/dp"] for step in logs] == [2, 2]
