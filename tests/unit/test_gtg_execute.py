"""What the rank side refuses before it moves anything."""

import pytest

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.table import ShardTable, StorageInfo, TensorInfo

execute = pytest.importorskip("nereus_plugins.gtg.execute", reason="needs torch (verl environment)")


def _table(*names: str) -> ShardTable:
    box = Box((0,), (2,))
    shards = [(TensorInfo(name, (2,), "float32"), box, 0) for name in names]
    return ShardTable.from_shards(0, shards, [StorageInfo(0, 0, 64, "cpu")])


def test_a_target_that_lacks_a_tensor_is_refused() -> None:
    execute._check_nothing_dropped("actor", _table("weight/a"), _table("weight/a", "weight/b"))
    with pytest.raises(ValueError, match=r"actor lacks 1 tensor.*'exp_avg/a'"):
        execute._check_nothing_dropped("actor", _table("weight/a", "exp_avg/a"), _table("weight/a"))
