"""Kernel tables: they reproduce what was measured, and behave outside it."""

import dataclasses

import pytest

from nereus_plugins.cost.hardware import GPUS, find_gpu
from nereus_plugins.cost.kernels import attention_s, decode_attention_s, gemm_s, nccl_s


def test_grid_points_give_back_the_measurement() -> None:
    # aiconfigurator, h100_sxm, gemm m=4096 n=4096 k=4096 and nccl all_gather, 8 ranks, 512 MiB.
    h100 = find_gpu("h100")
    assert gemm_s(h100, 4096, 4096, 4096) == pytest.approx(156.1e-6, rel=0.01)
    assert nccl_s(find_gpu("a100"), "all_gather", 8, 2.0**29) == pytest.approx(2288e-6, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_no_gemm_beats_the_peak(name: str) -> None:
    gpu = GPUS[name]
    for m, n, k in ((1, 4096, 4096), (777, 5000, 3000), (8192, 8192, 8192), (100000, 30000, 9000)):
        assert 2 * m * n * k / gemm_s(gpu, m, n, k) <= gpu.bf16_flops


def test_more_work_takes_longer() -> None:
    gpu = find_gpu("h100")
    sizes = [gemm_s(gpu, m, 4096, 4096) for m in (256, 1024, 4096, 16384, 65536)]
    assert sizes == sorted(sizes)
    gathers = [nccl_s(gpu, "all_gather", 8, float(2**p)) for p in range(8, 36, 3)]
    assert gathers == sorted(gathers)


def test_attention_kernels_rank_as_published() -> None:
    gpu = find_gpu("h100")

    def seconds(kernel: str, backward: bool = False) -> float:
        return attention_s(
            gpu, batch=1, seq=8192, heads=32, head_dim=128, kernel=kernel, backward=backward
        )

    assert seconds("fa3") < seconds("fa2") < seconds("fa1")
    assert seconds("fa3", backward=True) > 2.5 * seconds("fa3")


def test_slower_links_slow_only_what_the_wire_carries() -> None:
    h100 = find_gpu("h100")
    slow = dataclasses.replace(h100, nvlink_bytes_s=h100.nvlink_bytes_s / 2)
    small, large = 2.0**12, 2.0**30
    assert nccl_s(slow, "all_reduce", 8, small) < 1.2 * nccl_s(h100, "all_reduce", 8, small)
    assert nccl_s(slow, "all_reduce", 8, large) > 1.8 * nccl_s(h100, "all_reduce", 8, large)


def test_decode_attention_is_bound_by_the_cache() -> None:
    gpu = find_gpu("h100")
    traffic = 256 * 8192 * 8 * 128 * 4
    seconds = decode_attention_s(gpu, batch=256, context=8192, kv_heads=8, head_dim=128)
    assert 0.4 < traffic / seconds / gpu.hbm_bytes_s <= 1.0


def test_an_unknown_gpu_names_those_known() -> None:
    with pytest.raises(KeyError, match="h100_80gb"):
        find_gpu("h101")
