"""The journal survives what a crash leaves behind and refuses what is stale."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from nereus_plugins.gtg.journal import EpochError, Journal, JournalError

PLAN = {"actor": {"tp": 2}}


def test_commit_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    assert journal.current() is None
    journal.commit(epoch=1, plan=PLAN, digest="d1", step=10)
    journal.commit(epoch=3, plan={"actor": {"tp": 1}}, digest="d3", step=20)
    current = Journal(path).current()
    assert current is not None
    assert (current.epoch, current.digest, current.step) == (3, "d3", 20)
    assert "@" in current.who
    assert current.when.endswith("+00:00")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_abort_takes_the_last_commit_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.commit(epoch=1, plan=PLAN, digest="d1", step=1)
    journal.commit(epoch=2, plan=PLAN, digest="d2", step=2)
    with pytest.raises(EpochError, match="not the current"):
        journal.abort(epoch=1, reason="no")
    journal.abort(epoch=2, reason="rank 3 is gone")
    current = journal.current()
    assert current is not None
    assert current.epoch == 1
    assert journal.read()[-1].reason == "rank 3 is gone"
    with pytest.raises(EpochError, match="stale"):  # an epoch number is never used twice
        journal.commit(epoch=2, plan=PLAN, digest="d2", step=2)


@pytest.mark.parametrize("epoch", [1, 0])
def test_a_stale_epoch_is_refused(tmp_path: Path, epoch: int) -> None:
    journal = Journal(tmp_path / "j")
    journal.commit(epoch=1, plan=PLAN, digest="d", step=1)
    with pytest.raises(EpochError, match=f"epoch {epoch} is stale"):
        journal.commit(epoch=epoch, plan=PLAN, digest="d", step=1)


def test_a_torn_last_line_is_left_out_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.commit(epoch=1, plan=PLAN, digest="d1", step=1)
    whole = path.read_bytes()
    journal.commit(epoch=2, plan=PLAN, digest="d2", step=2)
    second = path.read_bytes()[len(whole) :]
    for cut in range(len(second)):
        path.write_bytes(whole + second[:cut])
        assert [r.epoch for r in journal.read()] == [1]
    path.write_bytes(whole + second[:40])
    journal.commit(epoch=2, plan=PLAN, digest="d2", step=2)
    assert [r.epoch for r in journal.read()] == [1, 2]


def test_a_line_without_what_has_a_default_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path).commit(epoch=1, plan=PLAN, digest="d1", step=1)
    line = json.loads(path.read_text())
    del line["ranks"], line["reason"]
    path.write_text(json.dumps(line) + "\n")
    (record,) = Journal(path).read()
    assert (record.epoch, list(record.ranks), record.reason) == (1, [], "")
    path.write_text(json.dumps({**line, "ranks": 3}) + "\n")
    with pytest.raises(JournalError, match="ranks cannot be 3"):
        Journal(path).read()


def test_other_damage_and_a_newer_schema_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.commit(epoch=1, plan=PLAN, digest="d1", step=1)
    line = path.read_text()
    path.write_text("{broken\n" + line)
    with pytest.raises(JournalError, match=r":1: damaged"):
        journal.read()
    newer = json.loads(line)
    newer["schema_version"] = 2
    path.write_text(json.dumps(newer) + "\n")
    with pytest.raises(JournalError, match="schema version 2"):
        journal.read()


@pytest.mark.parametrize("good", [0, 1])
def test_a_record_that_is_not_durable_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """The file's own fsync fails, or that of its directory after it."""
    journal = Journal(tmp_path / "j")
    journal.commit(epoch=1, plan=PLAN, digest="d1", step=1)
    before = journal.path.read_bytes()
    calls = []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > good:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output error"):
            journal.commit(epoch=2, plan=PLAN, digest="d2", step=2)
    assert journal.path.read_bytes() == before
    journal.commit(epoch=2, plan=PLAN, digest="d2", step=2)
    assert [record.epoch for record in journal.read()] == [1, 2]
