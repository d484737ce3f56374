"""Transitions prepared while other stages run: exact, never committed stale, without parking."""

from __future__ import annotations

import dataclasses
import time

import pytest

from nereus_plugins.gtg.execute import TransitionAborted

from .spawn import run_ranks
from .test_transaction import WORLD, X, Y, Z, predict, set_up, tight_budget

SHARE = 0.25
LIMIT_S = 2.0  # of a vote


def _versions(rank: int, world: int) -> None:
    units, transition = set_up(rank, world)
    transition.options = dataclasses.replace(transition.options, background_share=SHARE)
    actor, critic = units["actor"], units["critic"]
    for unit in units.values():
        unit.train()
    transition.prepare(Y, 1)
    for unit in units.values():  # whole, and in use: generation reads the weights
        unit.check(1)
        assert unit.layout() == X[unit.name]
    assert transition.stale() == ()
    transition.commit()
    transition.release()

    transition.prepare(Z, 2)
    actor.train()
    assert transition.stale() == ("actor",)
    with pytest.raises(TransitionAborted, match="StaleState: actor was trained"):
        transition.commit()
    for unit in units.values():
        assert unit.layout() == Y[unit.name]
    actor.check(2)
    critic.check(1)
    transition.prepare(Z, 3)
    transition.commit()
    transition.release()
    assert actor.layout() == Z["actor"]
    actor.check(2)
    critic.check(1)

    # One rank is enough, and a driver that sees it may give up before the commit.
    transition.prepare(X, 4)
    critic.trained += rank == 1
    assert transition.stale() == (("critic",) if rank == 1 else ())
    with pytest.raises(TransitionAborted, match="critic was trained") as caught:
        transition.commit()
    assert (caught.value.rank, caught.value.phase) == (1, "commit")
    transition.prepare(X, 5)
    transition.abort()
    actor.check(2)
    assert actor.layout() == Z["actor"]


def test_what_was_trained_since_is_prepared_again() -> None:
    run_ranks(_versions, WORLD, timeout_s=60)


def _tight(rank: int, world: int, budget: int) -> None:
    units, transition = set_up(rank, world, budget=budget)
    unhidden = transition.options
    for unit in units.values():
        unit.train()
    before = {name: unit.fingerprint() for name, unit in units.items()}
    predicted = {name: predict(layout) for name, layout in Y.items()}
    transition.options = dataclasses.replace(unhidden, background_share=SHARE)
    with pytest.raises(TransitionAborted, match="do not fit the device memory together, and units"):
        transition.prepare(Y, 1, predicted)
    assert before == {name: unit.fingerprint() for name, unit in units.items()}
    assert all(unit.alive == 1 for unit in units.values())
    transition.options = unhidden
    assert transition.prepare(Y, 2, predicted).mode == "staged"
    transition.commit()
    transition.release()
    for unit in units.values():
        unit.check(1)


def test_nothing_is_parked_while_other_stages_run() -> None:
    run_ranks(_tight, WORLD, tight_budget(X, Y), timeout_s=60)


def _paced(rank: int, world: int) -> list[float]:
    """Seconds of moving and verifying: as fast as it goes, with a share, hurried."""
    _, transition = set_up(rank, world)
    plain, seconds = transition.options, []
    for epoch, (share, hurried) in enumerate([(None, False), (0.1, False), (0.1, True)], 1):
        transition.options = dataclasses.replace(
            plain, background_share=share, hurry=lambda hurried=hurried: hurried
        )
        begin = time.perf_counter()
        report = transition.prepare(Y, epoch)
        assert time.perf_counter() - begin >= report.seconds["move"]
        seconds.append(report.seconds["move"] + report.seconds["verify"])
        transition.abort()
    return seconds


def test_a_share_slows_until_it_is_hurried() -> None:
    for fast, slow, hurried in run_ranks(_paced, WORLD, timeout_s=60):
        assert slow > 2 * max(fast, hurried), (fast, slow, hurried)


def _waits(rank: int, world: int) -> None:
    """Rank 1 comes to the vote on its moves later than votes wait."""
    units, transition = set_up(rank, world, timeout_s=LIMIT_S)

    def pause(done_bytes: int, total_bytes: int) -> None:
        if rank == 1 and done_bytes == total_bytes:
            time.sleep(1.5 * LIMIT_S)

    plain = transition.options
    slowed = dataclasses.replace(plain, background_share=SHARE, progress=pause)
    transition.options = slowed
    transition.prepare({"actor": Y["actor"]}, 1)
    transition.commit()
    transition.release()
    # Without a share nothing is to pause.
    transition.options = dataclasses.replace(slowed, background_share=None)
    with pytest.raises(TransitionAborted, match="no vote from rank") as caught:
        transition.prepare({"actor": X["actor"]}, 2)
    assert (caught.value.phase, caught.value.lost_ranks) == ("move", (1,))
    units["actor"].check(0)


@pytest.mark.full
def test_a_peer_that_pauses_is_waited_for() -> None:
    run_ranks(_waits, WORLD, timeout_s=60)
