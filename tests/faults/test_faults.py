"""Jobs that a fault strikes, by seed: they go on, in the old layout or the new, bit for bit; or
from the last snapshot. Never a hang, a torn layout, or a wrong number.

`python -m tests.faults` runs more seeds, and counts what became of the jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from nereus_plugins.gtg.faults import PHASES
from tests.faults.__main__ import run
from tests.faults.scenario import MOMENTS, TRANSITIONS, scenario

# As many as the gate has time for; ./dev full runs 200.
IN_CI = 4
# No two jobs without a fault are made for one case.
KNOWN: dict[Any, Any] = {}


@pytest.mark.parametrize("seed", range(IN_CI))
def test_a_job_survives_a_fault_as_promised(seed: int) -> None:
    run(scenario(seed), KNOWN)


def test_the_seeds_reach_every_transition_fault_and_place() -> None:
    found = [scenario(seed) for seed in range(200)]
    assert {it.transition for it in found} == set(TRANSITIONS)
    assert {it.where for it in found} == {*PHASES, *MOMENTS, "journal"}
    faults: Mapping[str, set[str]] = {
        fault: {it.where for it in found if it.fault == fault}
        for fault in {it.fault for it in found}
    }
    assert set(faults) == {
        "raise", "kill", "delay", "hang", "corrupt", "stop", "pause", "full disk", "torn line",
    }  # fmt: skip
    assert {it.case.backend for it in found} == {"fsdp2", "megatron"}
    assert {scenario(seed).transition for seed in range(IN_CI)} == set(TRANSITIONS)
