"""Property tests say what holds, not how fast: a busy machine is no finding."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
