"""Measured comparisons on CPU: arms one after the other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nereus_cpu.arms import parser_for, run_arms

ARMS = ("off", "act")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_arms_run_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, seed: int) -> tuple[Path, dict[str, Any]]:
        return Path(f"{name}-{seed}"), {"steps": seed}

    parser = parser_for(None, ARMS)
    args = parser.parse_args(["there", "--seeds", "2", "--first-seed", "3"])
    run_arms(parser, args, ARMS, run)
    *lines, compare = capsys.readouterr().out.splitlines()
    told = [json.loads(line) for line in lines]
    assert [(one["arm"], one["seed"], one["steps"]) for one in told] == [
        ("off", 3, 3),
        ("act", 3, 3),
        ("off", 4, 4),
        ("act", 4, 4),
    ]
    runs = "--runs off=off-3,off-4 --runs act=act-3,act-4"
    assert compare == f"nereus ab {runs} --baseline off --json"


def test_an_unknown_arm_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_for(None, ARMS)
    with pytest.raises(SystemExit) as stopped:
        run_arms(parser, parser.parse_args(["there", "--arms", "on"]), ARMS, _never)
    assert stopped.value.code == 2
    assert "no arm 'on': choose from off, act" in capsys.readouterr().err


def _never(name: str, seed: int) -> tuple[Path, dict[str, Any]]:
    raise AssertionError


def test_sigterm_ends_what_was_started() -> None:
    ended = []

    def run(name: str, seed: int) -> tuple[Path, dict[str, Any]]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
            raise AssertionError
        finally:
            ended.append(name)

    parser = parser_for(None, ARMS)
    with pytest.raises(SystemExit) as stopped:
        run_arms(parser, parser.parse_args(["there"]), ARMS, run)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert ended == ["off"]
