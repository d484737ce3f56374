"""Token budgets and micro-batches change in a running verl job: nothing moves, and training is the
same up to the order of sums."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from nereus_verl.demo import launch
from nereus_verl.stamp import FILE

from nereus_plugins.gtg.journal import Journal
from nereus_plugins.trace.record import TransitionRecord, read_records
from tests.e2e import micro_batches
from tests.e2e.jobs import TIMEOUT_S, comparable, differences, small_job

# fp32 weights and sums; compute is bf16 (verl's default), in which another packing of sequences
# rounds otherwise.
ROUNDED = ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy")
BF16 = 2e-3  # measured: 1.5e-4 at most
LONGEST = 80
SCHEDULE = {
    1: {
        "actor": {"micro_batch": 2},
        "critic": {"token_budget_tokens": LONGEST},
        "ref": {"token_budget_tokens": LONGEST},
    },
    # With a layout, in one transaction: 2 ranks hold the budget of a micro-batch together.
    2: {"actor": {"ulysses": 2, "token_budget_tokens": LONGEST}},
}


@pytest.mark.full
def test_micro_batches_change_and_training_does_not(tmp_path: Path) -> None:
    counts, plain = tmp_path / "counts", tmp_path / "plain-counts"
    job = small_job(
        tmp_path / "task",
        "fsdp2",
        2,
        steps=3,
        reference=True,
        nereus={"schedule": SCHEDULE},
        extra=["trainer.save_freq=3"],
    )
    changed = launch.run(
        job, tmp_path / "changed", timeout_s=TIMEOUT_S, env=micro_batches.environment(counts)
    ).require_success()
    job = small_job(tmp_path / "task", "fsdp2", 2, steps=2, reference=True, nereus={})
    same = launch.run(
        job, tmp_path / "plain", timeout_s=TIMEOUT_S, env=micro_batches.environment(plain)
    ).require_success()

    # 8 prompts of 4 samples a step, mini-batches of 16: 8 samples each on 2 data-parallel ranks.
    was, now = micro_batches.read(plain), micro_batches.read(counts)
    a_step = len(was) // 2
    assert was[:a_step] == was[a_step:] == now[:a_step]
    assert {(unit, use, rows, n) for unit, use, rows, n in was} == {
        ("actor", "infer", 16, 2),
        ("ref", "infer", 16, 2),
        ("critic", "infer", 16, 1),
        ("critic", "train", 8, 1),
        ("actor", "train", 8, 1),
    }
    second, third = now[a_step : 2 * a_step], now[2 * a_step :]
    # As many optimizer steps, of the same samples, in more micro-batches.
    assert [batch[:3] for batch in second] == [batch[:3] for batch in was[:a_step]]
    for unit, use, rows, n in second:
        assert n == rows // 2 if unit == "actor" else n > 2, (unit, use)
    assert {rows for unit, use, rows, _ in third if (unit, use) == ("actor", "train")} == {16}
    assert all(1 < n < rows // 2 for unit, _, rows, n in third if unit == "actor")

    assert differences(changed.metrics[:1], same.metrics[:1]) == []
    a, b = comparable(changed.metrics)[1], comparable(same.metrics)[1]
    for name in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert a[name] == b[name], name
    for name in ROUNDED:
        assert math.isclose(a[name], b[name], rel_tol=BF16), f"{name}: {a[name]} and {b[name]}"
    assert [m["nereus/epoch"] for m in changed.metrics] == [0, 1, 2]
    assert [m.get("nereus/actor-train/micro_batch") for m in changed.metrics] == [8, 2, None]
    budgets = [m.get("nereus/actor-train/token_budget_tokens") for m in changed.metrics]
    assert budgets == [None, None, LONGEST]

    checkpoints = tmp_path / "changed" / "checkpoints"
    run_dir = checkpoints / "nereus"
    records = [r for r in read_records(run_dir) if isinstance(r, TransitionRecord)]
    assert [r.outcome for r in records] == ["committed", "committed"]
    assert set(records[0].seconds) == {"journal", "commit"}
    assert records[0].units == {}
    assert set(records[0].knobs) == {"actor", "critic", "ref"}
    assert set(records[1].units) == set(records[1].knobs) == {"actor"}
    commits = Journal(run_dir / "journal.jsonl").read()
    assert [c.plan["knobs"]["actor"]["by_tokens"] for c in commits] == [False, True]
    stamp = json.loads((checkpoints / "global_step_3" / FILE).read_text())["settings"]
    assert stamp["actor_rollout_ref.actor.use_dynamic_bsz"] is True
    assert stamp["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == LONGEST
    assert stamp["critic.ppo_infer_max_token_len_per_gpu"] == LONGEST


@pytest.mark.full
def test_micro_batches_of_megatron_change(tmp_path: Path) -> None:
    """By tokens instead of sequences, through two pipeline stages."""
    schedule = {1: {"actor": {"token_budget_tokens": 2 * LONGEST}}}
    counts = tmp_path / "counts"
    runs = []
    for name, nereus in (("changed", {"schedule": schedule}), ("plain", {})):
        job = small_job(
            tmp_path / "task", "megatron", 2, layout={"pp": 2}, critic=False, nereus=nereus
        )
        env = micro_batches.environment(counts if name == "changed" else tmp_path / "plain-counts")
        runs.append(
            launch.run(job, tmp_path / name, timeout_s=TIMEOUT_S, env=env).require_success()
        )
    counted = micro_batches.read(counts)
    first, second = counted[: len(counted) // 2], counted[len(counted) // 2 :]
    assert [batch[:3] for batch in first] == [batch[:3] for batch in second]
    # 16 samples of about 50 tokens in an optimizer step.
    assert [n for _, use, _, n in first if use == "train"] == [2, 2]
    assert all(2 < n < rows for _, use, rows, n in second if use == "train")
    a, b = (comparable(run.metrics)[1] for run in runs)
    assert a["critic/score/mean"] == b["critic/score/mean"]
    for name in ("actor/grad_norm", "actor/entropy"):
        assert math.isclose(a[name], b[name], rel_tol=BF16), f"{name}: {a[name]} and {b[name]}"
