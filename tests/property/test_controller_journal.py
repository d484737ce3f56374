"""The controller's journal survives a crash at any byte, and says where it was damaged."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_plugins.controller.journal import (
    DecisionJournal,
    DecisionJournalError,
    line_of,
    parse,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ENTRIES = st.lists(
    st.builds(
        lambda kind, value: {"schema": 1, "kind": kind, "value": value},
        st.sampled_from(("observation", "decision", "state")),
        VALUES,
    ),
    min_size=1,
    max_size=6,
)


def content(entries: list[dict[str, object]]) -> bytes:
    return b"".join(line_of(one) for one in entries)


@given(ENTRIES, st.data())
def test_cut_anywhere_it_is_what_was_whole(
    entries: list[dict[str, object]], data: st.DataObject
) -> None:
    whole = content(entries)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    read, good = parse(cut, "journal")
    assert read == entries[: cut.count(b"\n")]
    assert whole[:good] == content(read)


@given(ENTRIES, st.data())
def test_one_byte_wrong_is_found(entries: list[dict[str, object]], data: st.DataObject) -> None:
    damaged = bytearray(content(entries))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    line = content(entries)[:at].count(b"\n")
    try:
        read, _ = parse(bytes(damaged), "journal")
    except DecisionJournalError as error:
        found = str(error)
    else:
        # Nothing that was read is other than what was written.
        assert read == entries[: len(read)]
        assert line - 1 <= len(read) < len(entries)
        return
    # The damage made one line, or cut it in two; it is named.
    assert f"journal:{line + 1}:" in found or f"journal:{line + 2}:" in found


@settings(max_examples=20)
@given(ENTRIES, st.binary(max_size=40), st.data())
def test_what_is_appended_after_a_crash_is_read(
    entries: list[dict[str, object]], garbage: bytes, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        whole = content(entries)
        # A crash leaves part of the last line, or blocks that were never written.
        start = len(content(entries[:-1]))
        torn = whole[: data.draw(st.integers(start, len(whole)))] + garbage.replace(b"\n", b"\0")
        path.write_bytes(torn)
        journal = DecisionJournal(path)
        before = journal.read()
        journal.append("decision", {"value": "after"})
        journal.close()
        after = DecisionJournal(path).read()
        assert after[:-1] == before
        assert after[-1]["value"] == "after"
        assert json.loads(json.dumps(after)) == after
