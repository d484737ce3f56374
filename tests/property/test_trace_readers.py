"""Readers of outside files on anything: they read it, or raise `SpecError`; nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereus_plugins.spec import SpecError
from nereus_plugins.trace import conditions, importing, series

ENDINGS = {
    "verl": ("log", "csv"),
    "openrlhf": ("log",),
    "wandb": ("csv", "json", "jsonl"),
    "tensorboard": ("tfevents", "csv", "json"),
}
# Pieces of real files, so that what is tried gets past the first check.
PIECES = st.sampled_from(
    [b"step:1 - ", b"timing_s/gen:", b" - ", b"Global step 2: {", b"'timing/generation': 1.0}",
     b"\n", b"1e999", b"nan", b"-1", b"9" * 400, b"np.float64(", b")", b"_step,", b"Step", b",",
     b'"', b"[", b"]", b"{", b"}", b'"_step": 1', b"\x00", b"\xff", b"run", b"a - b", b"\x0a\x05",
     b"\x08\x00\x00\x00\x00\x00\x00\x00", b"Wall time,Step,Value\n", b"response_length/mean",
     b"field,len_lo,len_hi_excl,share\n", b"output_tokens,1,2,0.5\n", b"t_s,instances\n", b"0,5\n",
     b"step,mean_response_tokens\n", b"perf/total_num_tokens:5", b"[[[[[" * 300]
)  # fmt: skip
CONTENT = st.lists(PIECES | st.binary(max_size=12), max_size=14).map(b"".join)
SLOW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def refused(run: Callable[[], Any]) -> str:
    """The message of the `SpecError`, or "" where it is read; anything else fails the test."""
    try:
        run()
    except SpecError as error:
        return str(error)
    return ""


@SLOW
@given(st.sampled_from([(k, e) for k, es in ENDINGS.items() for e in es]), CONTENT)
def test_logs(tmp_path: Path, kind: tuple[str, str], content: bytes) -> None:
    path = tmp_path / f"run-x-tag-timing_s_gen.{kind[1]}"
    path.write_bytes(content)
    message = refused(lambda: importing.records(kind[0], path, samples=4, gpus=4))
    assert message == "" or str(path) in message


@SLOW
@given(st.sampled_from(["availability", "lengths", "tail"]), CONTENT)
def test_series(tmp_path: Path, what: str, content: bytes) -> None:
    path = tmp_path / "series.csv"
    path.write_bytes(content)
    read = {
        "availability": lambda: series.read_availability(path),
        "lengths": lambda: series.read_lengths(path, None),
        "tail": lambda: series.read_tail(path),
    }
    message = refused(read[what])
    assert message == "" or str(path) in message


SHIPPED = json.loads((conditions.shipped_folder() / "churn.json").read_text())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def _places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [at] if at else []
    if isinstance(data, dict):
        for key, value in data.items():
            out += _places(value, (*at, key))
    elif isinstance(data, list) and data:
        out += _places(data[0], (*at, 0))
    return out


@SLOW
@given(st.sampled_from(_places(SHIPPED)), VALUES)
def test_a_trace_with_any_field_changed(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    data = json.loads(json.dumps(SHIPPED))
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    message = refused(lambda: conditions.load(path))
    assert message == "" or str(path) in message


@SLOW
@given(CONTENT)
def test_any_bytes_as_a_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SpecError):
        conditions.load(path)
