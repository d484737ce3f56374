"""Where DeepSpeed's flat partitions and AutoTP's cuts lie in the whole tensors."""

from __future__ import annotations

from typing import Any

import nereus_cpu.deepspeed
import pytest
import torch

nereus_cpu.deepspeed.install()

from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from nereus_plugins.emu.described import UnsupportedState  # noqa: E402
from nereus_plugins.emu.described import deepspeed as described  # noqa: E402
from nereus_plugins.emu.described import deepspeed_private as private  # noqa: E402


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_a_flat_range_is_boxes_of_its_parameters(
    shapes: list[tuple[int, int]], dp: int, random: Any
) -> None:
    """ZeRO-1 and 2: parameters of any order in one padded tensor, cut for `dp` ranks."""
    numel = sum(a * b for a, b in shapes)
    part = -(-numel // (2 * dp)) * 2
    flat = torch.arange(part * dp, dtype=torch.float32)
    params: list[torch.nn.Parameter] = []
    at = 0
    order = list(range(len(shapes)))
    random.shuffle(order)  # as round_robin_gradients does
    placed: dict[int, torch.nn.Parameter] = {}
    for i in order:
        size = shapes[i][0] * shapes[i][1]
        placed[i] = torch.nn.Parameter(torch.empty(0))
        placed[i].data = flat[at : at + size].view(shapes[i])
        at += size
    params = [placed[i] for i in range(len(shapes))]
    seen = [torch.zeros(shape) for shape in shapes]
    for rank in range(dp):
        mine = flat[rank * part : (rank + 1) * part]
        main = mine.clone()  # the masters: equal to the weights, so their place shows
        partition = private._flat(0, params, flat, mine, main)
        for piece in partition.pieces:
            i = next(n for n, p in enumerate(params) if p is piece.param)
            held = main[piece.at : piece.at + piece.numel]
            for shard in described._flat_shards("master", "p", piece.param, piece.start, held):
                where = shard.box.slices_in(shard.box.whole(shapes[i]))
                assert torch.equal(params[i].detach()[where], shard.view)
                seen[i][where] += 1
    assert all(bool((count == 1).all()) for count in seen)


class Layer:
    """What AutoTP leaves at a parameter: a method of its layer."""

    def __init__(self, tp_index: int) -> None:
        self.tp_index = tp_index

    def gather(self) -> None: ...


def cut_parameter(
    whole: torch.Tensor, dim: int, widths: list[list[int]], rank: int, **meta: Any
) -> torch.nn.Parameter:
    """A parameter as AutoTP leaves it: one piece of each sub-parameter."""
    pieces = []
    for sub, sizes in zip(whole.split([sum(w) for w in widths], dim), widths, strict=True):
        pieces.append(sub.split(sizes, dim)[rank])
    param: Any = torch.nn.Parameter(torch.cat(pieces, dim).contiguous())
    param.gather_params = Layer(rank).gather
    shape = tuple(whole.shape)
    told = {
        "replicated": False,
        "partition_dim": dim,
        "original_shape": shape,
        "logical_shape": shape,
        "sub_param_shard_widths": widths if len(widths) > 1 else None,
        "partition_sizes": widths[0] if len(widths) == 1 else None,
        "conversion": {"unsupported_reason": None},
    }
    setattr(param, DS_AUTOTP_UC_META, told | meta)
    return param


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.data(),
)
def test_a_flat_range_of_a_tensor_parallel_shard(
    dim: int, subs: int, tp: int, dp: int, other: int, data: st.DataObject
) -> None:
    """Sub-parameters of uneven widths, and ZeRO cutting what AutoTP left."""
    if dim == 1:
        subs = 1
    width = st.integers(0, 3)
    widths = [data.draw(st.lists(width, min_size=tp, max_size=tp)) for _ in range(subs)]
    size = sum(map(sum, widths))
    shape = (size, other) if dim == 0 else (other, size)
    whole = torch.arange(size * other, dtype=torch.float32).view(shape)
    seen = torch.zeros(shape)
    for rank in range(tp):
        param = cut_parameter(whole, dim, widths, rank)
        flat = param.detach().reshape(-1)
        part = -(-flat.numel() // dp)
        for place in range(dp):
            held = flat[place * part : (place + 1) * part]
            for shard in described._flat_shards("weight", "p", param, place * part, held):
                where = shard.box.slices_in(shard.box.whole(shape))
                assert shard.global_shape == shape
                assert torch.equal(whole[where], shard.view)
                seen[where] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"conversion": {"unsupported_reason": "it interleaves"}}, "it interleaves"),
        ({"partition_sizes": None}, "at which widths"),
        ({"logical_shape": (2, 2, 3)}, "a tensor of shape"),
        ({"partition_sizes": [3, 1]}, "where AutoTP's cut says"),
    ],
)
def test_a_cut_that_is_no_box_is_refused(meta: dict[str, Any], said: str) -> None:
    whole = torch.zeros(4, 3)
    param = cut_parameter(whole, 0, [[2, 2]], 0, **meta)
    with pytest.raises(UnsupportedState, match=said):
        described._flat_shards("weight", "p", param, 0, param.detach().view(-1))


def test_parameters_with_other_memory_than_their_group() -> None:
    flat = torch.zeros(8)
    with pytest.raises(RuntimeError, match="data was replaced"):
        private._flat(0, [torch.nn.Parameter(torch.zeros(4))], flat, flat, flat)


def test_globals_are_exchanged_and_kept() -> None:
    from deepspeed.utils import groups

    before = private.Globals.in_force()
    groups._WORLD_GROUP = "outer"
    mine = private.Globals.fresh()
    with mine.loaded():
        assert groups._WORLD_GROUP is None
        groups._WORLD_GROUP = "inner"
        groups._EXPERT_PARALLEL_GROUP["ep_size_1"] = "inner"
    assert groups._WORLD_GROUP == "outer"
    assert groups._EXPERT_PARALLEL_GROUP == {}
    with mine.loaded():
        assert groups._WORLD_GROUP == "inner"
        assert groups._EXPERT_PARALLEL_GROUP == {"ep_size_1": "inner"}
    assert groups._WORLD_GROUP == "outer"
    assert private.Globals.fresh()._values[groups, "_EXPERT_PARALLEL_GROUP"] == {}
    before.load()
