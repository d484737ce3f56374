"""Snapshots of a verl job without workers: settings, what a job goes on from, state as JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nereus_verl import json_state, last_words, resume, rng, stamp
from nereus_verl.config import NereusConfig, SnapshotConfig
from nereus_verl.snapshots import JobSnapshots

from nereus_plugins.control.attempt import TransitionFailed
from nereus_plugins.control.workers import WorkersFailed
from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.snapshot.index import INDEX_NAME, Index, UnitRecord
from nereus_plugins.spec import Layout, SpecError

from .test_verl_config import job, put

UNITS = ("actor", "critic", "ref")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folder": "s", "evry": 2}, r"nereus\.snapshot: unknown key 'evry'; did you mean 'every'"),
        ({"folder": ""}, r"nereus\.snapshot\.folder must be a directory or null"),
        ({"folder": "s", "every": 0}, r"nereus\.snapshot\.every must be a number of steps"),
        ({"folder": "s", "every": True}, r"nereus\.snapshot\.every must be a number of steps"),
        ({"folder": "s", "every": "often"}, r"nereus\.snapshot\.every .*or auto; got 'often'"),
        ({"folder": "s", "every": "auto"}, r"nereus\.snapshot\.between_failures_s goes with"),
        ({"folder": "s", "between_failures_s": 9}, r"between_failures_s goes with .*every=auto"),
        ({"folder": "s", "keep": 0}, r"nereus\.snapshot\.keep must be an integer of at least 1"),
        ("s", r"nereus\.snapshot must be a mapping of settings"),
    ],
)
def test_a_wrong_setting_is_named(settings: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        NereusConfig.from_dict({"snapshot": settings})


def test_settings() -> None:
    assert NereusConfig.from_dict({"snapshot": {"folder": None, "every": 5}}).snapshot is None
    fixed = NereusConfig.from_dict({"snapshot": {"folder": "s", "every": 5}}).snapshot
    assert fixed == SnapshotConfig("s", 5)
    assert fixed.interval() == {"every_steps": 5}
    auto = {"folder": "s", "every": "auto", "between_failures_s": 3600}
    found = NereusConfig.from_dict({"snapshot": auto}).snapshot
    assert found is not None
    assert found.interval() == {"between_failures_s": 3600.0}


# -- what a job goes on from --------------------------------------------------------------------


def _take(root: Path, number: int, step: int, units: tuple[str, ...] = UNITS[:2]) -> Path:
    """A snapshot whose units have no tensors."""
    layout = Layout(dp=2, sharding="fsdp")
    records = {name: UnitRecord(layout, (), {}) for name in units}
    records["trainer"] = UnitRecord(Layout(dp=2), (), {"data": {"step": step}})
    index = Index(number, step, 0, {}, 2, "now", records, ())
    return folder.complete(folder.begin(root, number, step), index)


def _config(root: Path, mode: str = "auto", checkpoint: int | None = None) -> dict[str, Any]:
    config = put(job(), "trainer.resume_mode", mode)
    put(config, "trainer.default_local_dir", str(root / "checkpoints"))
    if checkpoint is not None:
        (root / "checkpoints" / f"global_step_{checkpoint}").mkdir(parents=True)
        newest = root / "checkpoints" / "latest_checkpointed_iteration.txt"
        newest.write_text(str(checkpoint))
    return config


def _newest(root: Path, checkpoint: int | None = None, mode: str = "auto") -> Any:
    settings = SnapshotConfig(str(root / "snapshots"))
    return resume.newest(settings, _config(root, mode), UNITS, checkpoint)


def test_the_newer_of_snapshot_and_checkpoint_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "snapshots"
    assert _newest(tmp_path) is None
    _take(root, 1, 40)
    _take(root, 2, 20)  # a job that went back to an earlier step
    found = _newest(tmp_path)
    assert (found.step, found.data, found.passed_over) == (20, {"step": 20}, ())
    assert _newest(tmp_path, checkpoint=20).step == 20  # can be restored into any layout
    assert _newest(tmp_path, checkpoint=21) is None
    assert _newest(tmp_path, mode="disable") is None
    assert _newest(tmp_path, mode="resume_path") is None


def test_what_is_torn_is_passed_over_and_said(tmp_path: Path) -> None:
    root = tmp_path / "snapshots"
    _take(root, 1, 10)
    damaged = _take(root, 2, 20) / INDEX_NAME
    damaged.write_text(damaged.read_text().replace('"step": 20', '"step": 21'))
    folder.begin(root, 3, 30)
    found = _newest(tmp_path)
    assert found.step == 10
    index, unfinished = found.passed_over
    assert "its digest is not that of its content" in index
    assert "was not finished" in unfinished
    lines = resume.words(found, tmp_path, {})
    assert lines[:2] == [f"passed over {index}", f"passed over {unfinished}"]


def test_a_job_does_not_begin_anew_where_all_snapshots_are_damaged(tmp_path: Path) -> None:
    (_take(tmp_path / "snapshots", 1, 10) / INDEX_NAME).write_text("{}")
    with pytest.raises(SnapshotError, match=r"no snapshot in .*snapshots is whole \(.*set nereus"):
        _newest(tmp_path)
    assert _newest(tmp_path, checkpoint=5) is None  # verl's checkpoint is used


def test_a_snapshot_of_another_job_is_refused(tmp_path: Path) -> None:
    path = _take(tmp_path / "snapshots", 1, 10, ("actor",))
    with pytest.raises(SnapshotError, match=r"is of another job: it holds actor, trainer, this"):
        _newest(tmp_path)
    assert path.exists()


def test_what_was_lost_and_how_it_was_laid_out_is_said(tmp_path: Path) -> None:
    from nereus_verl import jobconfig

    from nereus_plugins.trace.record import RecordWriter, StepRecord

    _take(tmp_path / "snapshots", 1, 10)
    units = jobconfig.units(job())
    found = _newest(tmp_path)
    assert "work lost" not in resume.words(found, tmp_path, units)[0]
    writer = RecordWriter(tmp_path)
    for step in (10, 11, 12):
        writer.write(StepRecord(step, 0, 0.0, 1.0, {}, {}, 0, {}, {}, {}))
    writer.close()
    first, second = resume.words(found, tmp_path, units)
    assert first.endswith("; the job had done step 12: 2 steps of work lost")
    assert "it was taken on 2 ranks in actor" in second
    assert "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1" in second


def test_last_words_name_what_is_newer(tmp_path: Path) -> None:
    settings = SnapshotConfig(str(tmp_path / "snapshots"))
    assert resume.newest_words(settings, _config(tmp_path)) == ""
    _take(tmp_path / "snapshots", 1, 10)
    assert "after step 10" in resume.newest_words(settings, _config(tmp_path, checkpoint=10))
    assert resume.newest_words(settings, _config(tmp_path, checkpoint=11)) == ""
    assert resume.newest_words(None, _config(tmp_path)) == ""
    assert stamp.latest_checkpoint(_config(tmp_path)) is not None


def test_last_words_do_not_hide_the_error(tmp_path: Path) -> None:
    settings = SnapshotConfig(str(tmp_path / "snapshots"))
    _take(tmp_path / "snapshots", 1, 10)
    config = _config(tmp_path, checkpoint=9)
    newest = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    newest.write_text("?")
    assert resume.newest_words(settings, config) == ""
    put(config, "nereus", {"snapshot": {"folder": settings.folder}})
    with (
        pytest.raises(TransitionFailed, match=r"rank 1 died.*cannot be read: invalid literal"),
        last_words.if_lost("it could not begin", 3, config),
    ):
        raise WorkersFailed("rank 1 died")
    newest.write_text("9")
    assert "after step 10" in resume.newest_words(settings, config)
    too_long = SnapshotConfig(str(tmp_path / ("s" * 300)))  # not to be looked into: OSError
    assert resume.newest_words(too_long, config) == ""


# -- what the driver makes of the ranks' answers -------------------------------------------------

WHOLE = {"step": 2, "error": "", "nbytes": 8, "blocked_s": 0.0, "background_s": 0.0, "path": "p"}


class Answering:
    """Two ranks. Args: answers: to a function of `snapshot_worker`, or what it fails with."""

    current = ()

    def __init__(self, **answers: Any) -> None:
        said = {"last": WHOLE, "lost": False}
        self.answers = {
            "named": [3, 4],
            "begin": [None] * 2,
            "take": [{"not_begun": ""} | said] * 2,
            "ended": [{"ended": True} | said] * 2,
            "end": [said] * 2,
        } | answers
        self.asked: list[Any] = []

    def call(self, ranks: Any, phase: str, function: Any, *args: Any) -> Any:
        name = function.__name__
        self.asked.append((name, *args) if name in ("end", "ended") else name)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def since(self, before: int) -> list[Any]:
        return self.asked[before:]


def _snapshots(ranks: Any, **settings: Any) -> JobSnapshots:
    snapshot = SnapshotConfig("s", **({"every": 2} | settings))
    nereus = NereusConfig(snapshot=snapshot, timeout_s=50.0)
    return JobSnapshots(SimpleNamespace(nereus=nereus, config={}), ranks, ranks)  # type: ignore[arg-type]


def test_ranks_give_back_what_they_hold_where_a_job_takes_no_more_snapshots() -> None:
    ranks = Answering()
    them = _snapshots(ranks)
    them.after_step(2, 0, {}, object)  # which is not JSON
    assert (them.on, them.begun, them.missed()) == (False, False, 1)
    assert ranks.asked == ["named", "begin", ("end", 5.0)]
    them.after_step(4, 0, {}, dict)
    assert len(ranks.asked) == 3


def test_where_none_is_due_nothing_is_collected() -> None:
    ranks = Answering()
    them, collected = _snapshots(ranks, every="auto", between_failures_s=1e9), []

    def data() -> dict[str, int]:
        collected.append(1)
        return {}

    for step in range(1, 50):
        them.after_step(step, 0, {}, data)
    # After the first step of which the time is known; then as long as it is being written.
    assert ranks.asked == ["named", "begin", "take", ("ended", 0.0)]
    assert len(collected) == 1
    assert them.missed() == 0


def test_a_hung_disk_holds_the_job_for_a_stated_time(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Answering()
    them = _snapshots(ranks, every=1)
    them.after_step(1, 0, {}, dict)
    ranks.answers["ended"] = [
        {"ended": True, "last": WHOLE, "lost": False},
        {"ended": False, "last": None, "lost": False},
    ]
    before, waited = len(ranks.asked), []
    for step in range(2, 18):
        them.after_step(step, 0, {}, dict)
        if ranks.asked[-1] == ("ended", 5.0):
            waited.append(step)
    assert waited == [2, 3, 5, 9, 17]  # less and less often
    assert set(ranks.since(before)) == {("ended", 5.0), ("ended", 0.0)}
    assert (them.missed(), them.missed()) == (5, 0)
    said = capsys.readouterr().out
    assert "after step 2 no snapshot could be taken; it is tried again from step 3 on" in said
    assert "the one after step 1 is not written yet, which was waited 5 s for" in said
    # The disk is there again, but the others had not waited for so long.
    late = {"last": WHOLE | {"error": "on disk: a rank is gone"}, "lost": True}
    ranks.answers["ended"] = [{"ended": True} | late] * 2
    ranks.answers["end"] = [late] * 2
    before = len(ranks.asked)
    them.after_step(33, 0, {}, dict)
    assert ranks.since(before) == [("ended", 5.0), ("end", 5.0), "named", "begin", "take"]
    assert "the snapshot after step 2 failed, the job trains on: on disk" in capsys.readouterr().out


def test_ranks_that_lost_each_other_begin_anew(capsys: pytest.CaptureFixture[str]) -> None:
    well = {"not_begun": "", "last": WHOLE, "lost": False}
    late = {"not_begun": "", "last": WHOLE | {"error": "on disk: a rank is gone"}, "lost": True}
    ranks = Answering(take=[well, late])
    them = _snapshots(ranks)
    them.after_step(2, 0, {}, dict)
    assert "after step 2 no snapshot could be taken" in capsys.readouterr().out
    assert ranks.asked == ["named", "begin", "take", ("end", 5.0)]
    ranks.answers["take"] = [well] * 2
    for step in (3, 4, 6):
        them.after_step(step, 0, {}, dict)
    assert ranks.since(4) == ["named", "begin", "take", ("ended", 5.0), "take"]
    assert them.on


def test_ranks_that_cannot_begin_try_less_and_less_often() -> None:
    ranks = Answering(begin=WorkersFailed("rank 1: peers did not come"))
    them = _snapshots(ranks, every=1)
    tried = []
    for step in range(1, 17):
        before = len(ranks.asked)
        them.after_step(step, 0, {}, dict)
        if len(ranks.asked) > before:
            tried.append(step)
            assert ranks.since(before) == ["named", "begin", ("end", 5.0)]
    assert tried == [1, 2, 4, 8, 16]
    ranks.answers["begin"] = [None] * 2
    ranks.answers["take"] = [{"not_begun": "rank 1: no memory", "last": None, "lost": False}] * 2
    before = len(ranks.asked)
    for step in (32, 33):
        them.after_step(step, 0, {}, dict)
    assert ranks.since(before) == ["named", "begin", "take"]
    assert them.begun


def test_ranks_part_though_the_last_snapshot_fails(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Answering(end=WorkersFailed("rank(s) 1 did not answer in 'snapshot' within 200 s"))
    them = _snapshots(ranks)
    them.end()
    assert not ranks.asked
    them.after_step(2, 0, {}, dict)
    them.end()
    assert ranks.asked[-1] == ("end", 5.0)
    assert "the last snapshot may not be whole: WorkersFailed: rank(s) 1" in capsys.readouterr().out
    them.after_step(4, 0, {}, dict)
    them.finish()
    assert ranks.asked[-1] == ("end", None)


# -- state as JSON ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_goes_on_from_its_state_as_json(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    def loader() -> Any:
        data = list(range(24))
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
        return StatefulDataLoader(data, batch_size=4, num_workers=workers, sampler=sampler)

    one = loader()
    batches = iter(one)
    for _ in range(2):
        next(batches)
    text = json.dumps(json_state.to_json(one.state_dict()))
    other = loader()
    other.load_state_dict(json_state.from_json(json.loads(text)))
    assert [b.tolist() for b in other] == [b.tolist() for b in batches]


def test_values_come_back_as_they_were() -> None:
    value = {
        "a": [1, 2.5, None, True, "x"],
        "b": (1, (2,)),
        3: b"\x00\xff",
        "$tuple": {"$bytes": 1},
        "t": torch.arange(6, dtype=torch.int64).view(2, 3),
        "n": np.arange(3, dtype=np.float32),
        "s": np.float64(0.1),
    }
    back = json_state.from_json(json.loads(json.dumps(json_state.to_json(value))))
    assert {k: v for k, v in back.items() if k not in ("t", "n")} == {
        k: v for k, v in value.items() if k not in ("t", "n")
    }
    assert isinstance(back["b"], tuple)
    assert back["t"].equal(value["t"])
    assert (back["n"] == value["n"]).all()
    assert back["n"].dtype == np.float32


@pytest.mark.parametrize("value", [{"a": [object()]}, {"a": [{1, 2}]}, {"a": [np.array([None])]}])
def test_what_json_cannot_hold_is_named(value: Any) -> None:
    with pytest.raises(json_state.NotJson, match=r"^state\.a\[0\] is a"):
        json_state.to_json(value, "state")


@pytest.mark.parametrize(
    "said",
    [
        {"$tensor": {"dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$tensor": {"dtype": "<f4", "shape": [3], "data": "AAAA"}},
        {"$tensor": 3},
        {"$array": {"dtype": "x", "shape": [], "data": ""}},
        {"$bytes": "?"},
        {"$dict": [1]},
        {"$tuple": 1},
    ],
)
def test_text_that_is_no_state_is_refused(said: Any) -> None:
    with pytest.raises(json_state.NotJson):
        json_state.from_json(said)


def test_generators_go_on_from_their_states_as_json() -> None:
    def draw() -> tuple[float, ...]:
        normal = np.random.normal()
        return random.gauss(0, 1), random.random(), normal, float(torch.randn(()))

    with rng.preserved():
        rng.seed(5)
        draw()  # leaves a cached normal number in two of them
        text = json.dumps(rng.states())
        wanted = draw()
        rng.seed(6)
        rng.load(json.loads(text))
        assert draw() == wanted
