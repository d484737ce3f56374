"""Transitions of small units, on 4 gloo ranks: exact when they succeed, without trace when not."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import gc
import hashlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nereus_plugins.emu.boxes import Box, flat_range_to_boxes
from nereus_plugins.emu.described.base import DescribedUnit, LocalShard
from nereus_plugins.emu.table import ShardTable, concat
from nereus_plugins.gtg.execute import (
    RankTransition,
    ReleaseFailed,
    TransitionAborted,
    TransitionOptions,
    TransitionUnrecoverable,
)
from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.gtg.journal import EpochError
from nereus_plugins.gtg.report import merge_unit_reports
from nereus_plugins.gtg.scalars import coordinate, derived_seed
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control

from .spawn import run_ranks, run_ranks_outcomes

WORLD = 4
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "weight/embedding": ((50, 24), torch.bfloat16),
    "weight/norm": ((24,), torch.float32),
    "weight/mlp": ((37, 24), torch.bfloat16),
    "exp_avg/embedding": ((50, 24), torch.float32),
    "exp_avg/norm": ((24,), torch.float32),
    "exp_avg/mlp": ((37, 24), torch.float32),
}
STAGING_BYTES = 1024


def global_tensor(unit: str, name: str, step: int) -> torch.Tensor:
    """What the whole tensor holds after `step` steps of "training"."""
    shape, dtype = TENSORS[name]
    seed = int.from_bytes(hashlib.sha256(f"{unit}/{name}".encode()).digest()[:4], "little")
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for _ in range(step):
        value = value * 0.5 + 1
    return value


class ToyBuilt:
    """Tensors cut by tp along their first dim, spread over pp, copied over dp; with ZeRO-1 the
    moments are flat ranges cut over dp. One storage a kind, as frameworks keep flat buffers."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.step = -1
        self.lr = float("nan")
        self.generator = torch.Generator()
        self.seed = 7
        self.group: dist.ProcessGroup | None = None
        self.shards: list[LocalShard] = []
        self.gradients: torch.Tensor | None = None
        if rank < layout.world_size:
            for kind in ("weight", "exp_avg"):
                self._allocate(kind)

    def _allocate(self, kind: str) -> None:
        place = self.layout.coord(self.rank)
        pieces: dict[torch.dtype, list[tuple[str, Box]]] = {}
        for index, (name, (shape, dtype)) in enumerate(TENSORS.items()):
            if not name.startswith(kind + "/") or index % self.layout.pp != place.pp:
                continue
            low = shape[0] * place.tp // self.layout.tp
            high = shape[0] * (place.tp + 1) // self.layout.tp
            boxes = [Box((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:]))]
            if kind == "exp_avg" and self.layout.sharding == "zero1":
                row = torch.Size(shape[1:]).numel()
                start, size = low * row, (high - low) * row
                dp, part = self.layout.dp, place.dp
                flat = (start + size * part // dp, start + size * (part + 1) // dp)
                boxes = [piece.box for piece in flat_range_to_boxes(shape, *flat)]
            pieces.setdefault(dtype, []).extend((name, box) for box in boxes)
        for dtype, named in pieces.items():
            buffer = torch.full((sum(box.numel for _, box in named),), float("nan"), dtype=dtype)
            at = 0
            for name, box in named:
                view = buffer[at : at + box.numel].view(box.shape)
                self.shards.append(LocalShard(name, box, TENSORS[name][0], view))
                at += box.numel

    def described(self) -> DescribedUnit:
        if not self.shards:
            return DescribedUnit()
        state = base64.b64encode(self.generator.get_state().numpy().tobytes()).decode()
        names = sorted({shard.name for shard in self.shards})
        scalars: dict[str, Any] = {
            "groups": {"0": {"lr": self.lr, "betas": [0.9, 0.95]}},
            "steps": {name: self.step for name in names},
            "rng": {coordinate(self.layout, self.rank): state},
        }
        return DescribedUnit(list(self.shards), scalars)

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.lr = scalars["groups"]["0"]["lr"]
        self.step = scalars["steps"][self.shards[0].name]
        mine = coordinate(self.layout, self.rank)
        if mine in scalars["rng"]:
            state = bytearray(base64.b64decode(scalars["rng"][mine]))
            self.generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        else:
            self.generator.manual_seed(derived_seed(self.seed, self.step, mine))


class ToyUnit:
    """An ElasticUnit whose training halves every element and adds one."""

    def __init__(self, name: str, layout: Layout, rank: int, group_s: float) -> None:
        self.name = name
        self.rank = rank
        self.group_s = group_s
        self.alive = 0
        self.trained = 0
        self.calls: list[str] = []
        self.current = self.build(layout)
        for shard in self.current.shards:
            whole = global_tensor(name, shard.name, 0)
            shard.view.copy_(whole[shard.box.slices_in(Box.whole(whole.shape))])
        self.current.step, self.current.lr = 0, 0.25
        self.current.generator.manual_seed(rank)

    def layout(self) -> Layout:
        return self.current.layout

    def described(self) -> DescribedUnit:
        return self.current.described()

    def version(self) -> int:
        return self.trained

    def free_gradients(self) -> None:
        self.current.gradients = None

    def build(self, layout: Layout) -> ToyBuilt:
        built = ToyBuilt(layout, self.rank)
        limit = datetime.timedelta(seconds=self.group_s)
        built.group = dist.new_group(list(range(dist.get_world_size())), timeout=limit)
        self.alive += 1
        return built

    def switch(self, built: ToyBuilt) -> ToyBuilt:
        old, self.current = self.current, built
        return old

    def release(self, built: ToyBuilt) -> None:
        dist.destroy_process_group(built.group)
        built.group = None
        built.shards.clear()
        self.alive -= 1
        self.calls.append("release")

    def settle(self) -> None:
        # Whatever was parked is back, on whatever path a transition ended.
        held = [shard.view.untyped_storage().nbytes() for shard in self.current.shards]
        assert all(held), held
        self.calls.append("settle")

    def train(self) -> None:
        self.trained += 1
        for shard in self.current.shards:
            shard.view.mul_(0.5).add_(1)
        if self.current.shards:
            self.current.step += 1
            torch.rand(3, generator=self.current.generator)
        self.current.gradients = torch.ones(8)

    def check(self, step: int) -> None:
        """Every element is what `step` steps from the beginning give; so are the scalars."""
        for shard in self.current.shards:
            whole = global_tensor(self.name, shard.name, step)
            want = whole[shard.box.slices_in(Box.whole(whole.shape))]
            assert torch.equal(shard.view, want), (self.name, shard.name, shard.box)
        if self.current.shards:
            assert (self.current.step, self.current.lr) == (step, 0.25)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(str((self.current.layout, self.current.step)).encode())
        for shard in self.current.shards:
            # A copy: a storage that NumPy has looked at cannot be parked any more.
            data = shard.view.clone().view(-1).view(torch.uint8)
            digest.update(data.numpy().tobytes())
        digest.update(self.current.generator.get_state().numpy().tobytes())
        return digest.hexdigest()


X = {"actor": Layout(tp=2, dp=2, sharding="zero1"), "critic": Layout(pp=2, dp=2)}
Y = {"actor": Layout(tp=1, pp=2, dp=2, sharding="zero1"), "critic": Layout(tp=2)}  # 2 of 4 ranks
Z = {"actor": Layout(tp=3), "critic": Layout(dp=4, sharding="zero1")}


def predict(layout: Layout) -> ShardTable:
    return concat([ToyBuilt(layout, rank).described().table(rank) for rank in range(WORLD)])


def storage_bytes(table: ShardTable, rank: int) -> int:
    return int(table.storages.nbytes[table.storages.rank == rank].sum())


def tight_budget(source: Mapping[str, Layout], target: Mapping[str, Layout]) -> int:
    """Just enough for the larger of both, not for both."""
    olds, news = [predict(x) for x in source.values()], [predict(x) for x in target.values()]
    old = max(sum(storage_bytes(t, r) for t in olds) for r in range(WORLD))
    new = max(sum(storage_bytes(t, r) for t in news) for r in range(WORLD))
    return max(old, new + 7 * STAGING_BYTES)


def set_up(
    rank: int,
    world: int,
    *,
    budget: int | None = None,
    timeout_s: float = 20.0,
    group_s: float = 20.0,
) -> tuple[dict[str, ToyUnit], RankTransition]:
    """timeout_s: of votes. group_s: of groups, in forming and in use."""
    units = {name: ToyUnit(name, layout, rank, group_s) for name, layout in X.items()}
    options = TransitionOptions(
        staging_bytes=STAGING_BYTES, timeout_s=group_s, memory_budget_bytes=budget
    )
    control = Control(rank, world, timeout_s=timeout_s)
    transition = RankTransition(units, rank=rank, world=world, control=control, options=options)
    return units, transition


def go(
    transition: RankTransition, target: Mapping[str, Layout], epoch: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    predicted = {name: predict(layout) for name, layout in target.items()}
    prepared = transition.prepare(target, epoch, predicted)
    transition.commit()
    return prepared.to_dict(), transition.release().to_dict()


# ---------------------------------------------------------------- success


def _succeed(rank: int, world: int, budget: int | None) -> list[dict[str, Any]]:
    units, transition = set_up(rank, world, budget=budget)
    reports = []
    for epoch, target in enumerate([Y, Z, X, Y, X], start=1):  # one step of training an epoch
        for unit in units.values():
            unit.train()
        before = {name: unit.current.generator.get_state() for name, unit in units.items()}
        here = {name: unit.layout() for name, unit in units.items()}
        prepared, _ = go(transition, target, epoch)
        reports.append(prepared)
        for name, unit in units.items():
            assert unit.layout() == target[name]
            assert unit.alive == 1
            assert unit.calls == ["release", "settle"] * epoch
            unit.check(epoch)
            stays = rank < min(here[name].world_size, target[name].world_size) and here[name].coord(
                rank
            ) == target[name].coord(rank)
            if stays:
                assert torch.equal(unit.current.generator.get_state(), before[name])
    assert transition.epoch == 5
    assert transition.prepare(X, 6).mode == "unchanged"
    transition.commit()
    transition.release()
    with pytest.raises(EpochError, match="stale"):
        transition.prepare(Y, 6)
    with pytest.raises(ValueError, match="no unit 'reward'"):
        transition.prepare({"reward": Layout()}, 7)
    with pytest.raises(ValueError, match="takes 8 ranks"):
        transition.prepare({"actor": Layout(tp=8)}, 7)
    return reports


def test_transitions_are_exact() -> None:
    by_rank = run_ranks(_succeed, WORLD, None, timeout_s=120)
    for epoch in range(5):
        reports = [reports[epoch] for reports in by_rank]
        assert {r["mode"] for r in reports} == {"intact"}
        assert len({r["digest"] for r in reports}) == 1
        for name in X:
            unit = merge_unit_reports([r["units"][name] for r in reports])
            assert unit["bytes_wire"] == unit["bytes_sent"]
            assert unit["verified"]["bytes"] == unit["bytes_wire"] + unit["bytes_local"]
            assert unit["verified"]["scalars"] > 0
            assert unit["prediction"] == []
            assert {"build", "move", "plan", "verify"} <= set(unit["seconds"])


def test_staged_transitions_are_exact() -> None:
    budget = max(tight_budget(X, Y), tight_budget(Y, Z), tight_budget(Z, X))
    by_rank = run_ranks(_succeed, WORLD, budget, timeout_s=120)
    modes = {reports[epoch]["mode"] for reports in by_rank for epoch in range(5)}
    assert "staged" in modes
    assert sum(u["bytes_parked"] for r in by_rank for e in r for u in e["units"].values()) > 0


# ---------------------------------------------------------------- failures, all ranks alive


def _fail_and_go_on(
    rank: int, world: int, faults: list[tuple[str, int, str]], budget: int | None
) -> list[tuple[str, int, str, float]]:
    units, transition = set_up(rank, world, budget=budget, group_s=5.0)
    for unit in units.values():
        unit.train()
    seen = []
    descriptors = []
    for epoch, (step, bad_rank, kind) in enumerate(faults, start=1):
        os.environ[ENVIRONMENT_VARIABLE] = f"step={step},rank={bad_rank},kind={kind},epoch={epoch}"
        before = {name: unit.fingerprint() for name, unit in units.items()}
        begin = time.monotonic()
        with pytest.raises(TransitionAborted) as caught:
            go(transition, Y, epoch)
        error = caught.value
        seen.append((error.phase, error.rank, error.reason, time.monotonic() - begin))
        for name, unit in units.items():
            assert unit.fingerprint() == before[name], (step, bad_rank)
            assert unit.layout() == X[name]
            assert unit.alive == 1, (step, bad_rank)
            assert unit.calls[-1] == "settle", (step, bad_rank)
            assert unit.calls.count("settle") == epoch, (step, bad_rank)
        del error, caught  # the traceback holds the transition's group
        gc.collect()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert max(descriptors[3:]) <= descriptors[2] + 4, f"descriptors leak: {descriptors}"
    del os.environ[ENVIRONMENT_VARIABLE]
    go(transition, Y, len(faults) + 1)
    for unit in units.values():
        unit.train()
        unit.check(2)
    return seen


def check_failures(faults: list[tuple[str, int, str]], budget: int | None) -> None:
    by_rank = run_ranks(_fail_and_go_on, WORLD, faults, budget, timeout_s=240)
    for index, (step, bad_rank, kind) in enumerate(faults):
        outcomes = {seen[index][:3] for seen in by_rank}
        assert len(outcomes) == 1, f"ranks report different failures: {outcomes}"
        phase, rank, reason = outcomes.pop()
        assert (phase, rank) == (step, bad_rank)
        assert ("ChecksumError" if kind == "corrupt" else "InjectedFault") in reason
        # Peers fail with it. They wait at most for a group that they form, not for votes.
        assert max(seen[index][3] for seen in by_rank) < 15, (step, bad_rank)


PREPARE_STEPS = ("free_gradients", "form_groups", "describe", "plan", "agree", "build", "move")
PREPARE_STEPS += ("verify", "commit")


def test_a_failure_anywhere_leaves_no_trace() -> None:
    faults = [(step, rank, "raise") for step in PREPARE_STEPS for rank in (0, 3)]
    check_failures([*faults, ("move", 1, "raise"), ("verify", 1, "corrupt")], None)


def test_a_failure_after_parking_brings_the_old_state_back() -> None:
    faults = [(step, 2, "raise") for step in ("park", "build", "plan", "move", "verify", "commit")]
    check_failures([*faults, ("verify", 0, "corrupt")], tight_budget(X, Y))


def _fail_to_park(rank: int, world: int, budget: int) -> str:
    units, transition = set_up(rank, world, budget=budget)
    held = [
        shard.view.numpy()
        for shard in units["critic"].current.shards
        if rank == 1 and shard.view.dtype == torch.float32
    ]
    before = {name: unit.fingerprint() for name, unit in units.items()}
    with pytest.raises(TransitionAborted) as caught:
        go(transition, Y, 1)
    assert {name: unit.fingerprint() for name, unit in units.items()} == before
    del held
    return caught.value.reason


def test_a_storage_that_cannot_be_parked_is_named_and_nothing_is_lost() -> None:
    reasons = set(run_ranks(_fail_to_park, WORLD, tight_budget(X, Y), timeout_s=120))
    assert len(reasons) == 1
    assert "memory_budget_bytes" in reasons.pop()


def _no_room_to_park(rank: int, world: int, budget: int) -> tuple[str, str]:
    """Rank 2's node has no host memory left; then it has."""
    units, transition = set_up(rank, world, budget=budget)
    before = {name: unit.fingerprint() for name, unit in units.items()}
    options = dataclasses.replace(transition.options, node_of=(0, 0, 1, 1))
    free = 100 if rank == 2 else 1 << 30
    transition.options = dataclasses.replace(options, host_free_bytes=lambda: free)
    with pytest.raises(TransitionAborted) as caught:
        go(transition, Y, 1)
    assert {name: unit.fingerprint() for name, unit in units.items()} == before
    assert caught.value.rank == 2
    transition.options = dataclasses.replace(options, host_free_bytes=lambda: 1 << 30)
    prepared, _ = go(transition, Y, 2)
    return caught.value.reason, prepared["mode"]


def test_state_is_not_parked_where_the_host_has_no_room() -> None:
    results = set(run_ranks(_no_room_to_park, WORLD, tight_budget(X, Y), timeout_s=120))
    assert len(results) == 1
    reason, mode = results.pop()
    assert "of this node's host memory" in reason
    assert mode == "staged"


def _does_not_fit(rank: int, world: int, budget: int, build_bytes: dict[int, int]) -> str:
    units, transition = set_up(rank, world, budget=budget)
    before = {name: unit.fingerprint() for name, unit in units.items()}
    predicted = {name: predict(layout) for name, layout in Y.items()}
    with pytest.raises(TransitionAborted) as caught:
        transition.prepare(Y, 1, predicted, {"actor": build_bytes})
    assert {name: unit.fingerprint() for name, unit in units.items()} == before
    assert caught.value.phase == "plan"
    return caught.value.reason


@pytest.mark.parametrize(
    ("budget", "build_bytes"),
    [(5000, {}), (tight_budget(X, Y), {1: tight_budget(X, Y)})],  # the state; gradients besides
)
def test_a_target_that_does_not_fit_is_refused(budget: int, build_bytes: dict[int, int]) -> None:
    reasons = set(run_ranks(_does_not_fit, WORLD, budget, build_bytes, timeout_s=120))
    assert len(reasons) == 1
    assert "InfeasibleTransition" in reasons.pop()


def _fail_to_release(rank: int, world: int) -> tuple[int, str]:
    units, transition = set_up(rank, world)
    os.environ[ENVIRONMENT_VARIABLE] = "step=release,rank=2,kind=raise,epoch=1"
    with pytest.raises(ReleaseFailed) as caught:
        go(transition, Y, 1)
    for name, unit in units.items():
        assert unit.layout() == Y[name]
        assert unit.alive == 1
        unit.check(0)
    go(transition, X, 2)
    return caught.value.rank, caught.value.reason


def test_a_failed_release_is_said_and_the_new_layout_is_current() -> None:
    outcomes = set(run_ranks(_fail_to_release, WORLD, timeout_s=120))
    assert len(outcomes) == 1
    rank, reason = outcomes.pop()
    assert rank == 2
    assert "InjectedFault" in reason


def _fail_to_fetch(rank: int, world: int, budget: int) -> str:
    _, transition = set_up(rank, world, budget=budget)
    faults = ("step=move,rank=1,kind=raise", "step=fetch,rank=2,kind=raise")
    os.environ[ENVIRONMENT_VARIABLE] = ";".join(faults)
    with pytest.raises(TransitionUnrecoverable) as caught:
        go(transition, Y, 1)
    return str(caught.value)


def test_a_state_that_cannot_be_brought_back_ends_the_job() -> None:
    messages = set(run_ranks(_fail_to_fetch, WORLD, tight_budget(X, Y), timeout_s=120))
    assert len(messages) == 1
    assert "failed in move and the old layout could not be brought back on rank 2" in messages.pop()


def _fail_to_give_back(rank: int, world: int, bad: int) -> tuple[str, str]:
    """A unit goes from ranks 0 and 1 to all; the move fails, then `bad` to give back its target."""
    unit = ToyUnit("actor", Layout(tp=2), rank, 20.0)
    control = Control(rank, world, timeout_s=20.0)
    transition = RankTransition(
        {"actor": unit}, rank=rank, world=world, control=control, options=TransitionOptions()
    )
    release = unit.release

    def release_and_fail(built: ToyBuilt) -> None:
        release(built)
        raise MemoryError("none left to give any back")

    if rank == bad:
        unit.release = release_and_fail  # type: ignore[method-assign]
    os.environ[ENVIRONMENT_VARIABLE] = "step=move,rank=0,kind=raise"
    with pytest.raises((TransitionAborted, TransitionUnrecoverable)) as caught:
        transition.prepare({"actor": Layout(tp=2, dp=2)}, 1)
    assert unit.layout() == Layout(tp=2)
    unit.check(0)
    return type(caught.value).__name__, str(caught.value)


def test_a_rank_that_held_nothing_may_fail_to_give_back() -> None:
    """As one that was to join. A rank of the old layout may not."""
    for bad, ends in ((3, "TransitionAborted"), (1, "TransitionUnrecoverable")):
        outcomes = set(run_ranks(_fail_to_give_back, WORLD, bad, timeout_s=120))
        assert len(outcomes) == 1
        name, message = outcomes.pop()
        assert name == ends
        assert ("MemoryError" in message) == (bad == 1)


def _wrong_prediction(rank: int, world: int) -> list[dict[str, Any]]:
    units, transition = set_up(rank, world)
    seen: list[tuple[int, int]] = []
    if rank == 0:  # ranks need not be alike in this
        transition.options = dataclasses.replace(
            transition.options, progress=lambda done, total: seen.append((done, total))
        )
    right = predict(Y["actor"])
    renamed = tuple(dataclasses.replace(t, name=f"{t.name}_") for t in right.tensors)
    predicted = {
        "actor": dataclasses.replace(right, tensors=renamed),
        "critic": predict(Layout(pp=2)),
    }
    report = transition.prepare(Y, 1, predicted)
    transition.commit()
    transition.release()
    for unit in units.values():
        unit.check(0)
    if rank == 0:
        ends = [total for done, total in seen if done == total]
        assert sorted(ends) == sorted(
            r.bytes_sent + r.bytes_received + r.bytes_local for r in report.units.values()
        )
    return [report.units[name].to_dict() for name in X]


def test_a_wrong_prediction_is_reported_and_aborts_nothing() -> None:
    by_rank = run_ranks(_wrong_prediction, WORLD, timeout_s=120)
    actor, critic = (merge_unit_reports([units[i] for units in by_rank]) for i in range(2))
    assert actor["prediction"] is None
    assert "embedding_" in actor["prediction_error"]
    assert critic["prediction_error"] == ""
    assert len(critic["prediction"]) > 0


# ---------------------------------------------------------------- a rank dies or hangs


def _lose_a_rank(rank: int, world: int, fault: str) -> tuple[str, tuple[int, ...], float]:
    units, transition = set_up(rank, world, timeout_s=4.0, group_s=4.0)
    before = {name: unit.fingerprint() for name, unit in units.items()}
    os.environ[ENVIRONMENT_VARIABLE] = fault
    begin = time.monotonic()
    try:
        go(transition, Y, 1)
    except TransitionAborted as error:
        for name, unit in units.items():
            assert unit.fingerprint() == before[name]
        return error.phase, error.lost_ranks, time.monotonic() - begin
    raise AssertionError("a transition succeeded without one of its ranks")


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ("describe", "kill"),
        ("build", "kill"),
        ("move", "kill"),
        ("commit", "kill"),
        ("move", "hang"),
    ],
)
def test_a_lost_rank_is_named_in_time(step: str, kind: str) -> None:
    fault = f"step={step},rank=2,kind={kind},seconds=12"
    outcomes = run_ranks_outcomes(_lose_a_rank, WORLD, fault, timeout_s=90, grace_s=40)
    for outcome in outcomes:
        if outcome.rank == 2 and kind == "kill":
            assert not outcome.ok
            continue
        assert outcome.ok, outcome.error
        phase, lost, seconds = outcome.value
        assert (phase, lost) == (step, (2,))
        assert seconds < 30


def _lose_a_rank_of_the_prepared(rank: int, world: int) -> tuple[int, ...]:
    units, transition = set_up(rank, world, timeout_s=4.0, group_s=4.0)
    before = {name: unit.fingerprint() for name, unit in units.items()}
    transition.prepare(Y, 1, {name: predict(layout) for name, layout in Y.items()})
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = transition.abort()
    for name, unit in units.items():
        assert unit.fingerprint() == before[name]
        assert unit.alive == 1
        assert unit.calls[-1] == "settle"
    return lost


def test_what_was_prepared_is_given_up_without_a_lost_rank() -> None:
    """Whether the old layout needs that rank, the caller knows."""
    outcomes = run_ranks_outcomes(_lose_a_rank_of_the_prepared, WORLD, timeout_s=90, grace_s=40)
    assert [outcome.ok for outcome in outcomes] == [True, True, False, True]
    assert {outcome.value for outcome in outcomes if outcome.ok} == {(2,)}
