"""What built models report about their own state. Needs torch; the rest of `emu` does not."""

from nereus_plugins.emu.described.base import DescribedUnit, LocalShard, UnsupportedState

__all__ = ["DescribedUnit", "LocalShard", "UnsupportedState"]
