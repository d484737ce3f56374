"""Assertions over the checks that a selftest returns."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_plugins.selftest.proofs import Check


def all_passed(checks: Sequence[Check]) -> None:
    failed = [f"{c.proof} | {c.subject}: {c.detail}" for c in checks if not c.passed]
    assert not failed, "\n".join(failed)
    assert checks, "nothing was checked"


def count(checks: Sequence[Check], proof: str) -> int:
    return sum(c.proof.startswith(proof) for c in checks)
