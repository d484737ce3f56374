"""A small, genuine PPO job on CPU, to watch and to test with.

nereus demo            (or: python -m nereus_verl.demo)
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """See `nereus_verl.demo.run.main`; imported when called, as the launcher alone needs less."""
    from nereus_verl.demo.run import main as run

    return run(argv)
