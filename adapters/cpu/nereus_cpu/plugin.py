"""Entry point `verl.plugins`, run where verl is imported; inert without VERL_PLATFORM=cpu."""

from __future__ import annotations

import os
import sys
import traceback


def _load() -> None:
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    try:
        from nereus_cpu.install import install_for_verl

        install_for_verl()
    except Exception:
        # verl logs a plugin's failure at debug level only; without the platform it then fails with
        # an unrelated message, so the cause is said here.
        print("nereus_cpu: the CPU platform for verl did not load:", file=sys.stderr)
        traceback.print_exc()
        raise


_load()
