"""The CPU platform's parts that need no process group."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from nereus_cpu.mbridge import fused_name
from nereus_cpu.post_import import after_import

torch = pytest.importorskip("torch")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("local", "fused"),
    [
        (
            "decoder.layers.3.input_layernorm.weight",
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.0.pre_mlp_layernorm.weight",
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        ),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.weight"),
    ],
)
def test_fused_name(local: str, fused: str) -> None:
    assert fused_name(local) == fused


def test_packed_attention_keeps_sequences_apart() -> None:
    pytest.importorskip("verl")
    from nereus_cpu.attention import packed_attention

    torch.manual_seed(0)
    lengths = [3, 1, 6]
    q = torch.randn(1, 4, sum(lengths), 8)
    k, v = torch.randn(2, 1, 2, sum(lengths), 8)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, position_ids=positions)
    assert out.shape == (1, sum(lengths), 4, 8)
    begin = 0
    for n in lengths:
        part = slice(begin, begin + n)
        alone = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, part],
            k[:, :, part].repeat_interleave(2, 1),
            v[:, :, part].repeat_interleave(2, 1),
            is_causal=True,
        )
        torch.testing.assert_close(out[:, part], alone.transpose(1, 2))
        begin += n


def test_after_import_waits_and_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    finders = len(sys.meta_path)
    after_import("late_module", lambda module: seen.append(module.value))
    after_import("late_module", lambda module: seen.append(module.value + 1))
    assert seen == []
    import late_module  # type: ignore[import-not-found]

    assert sorted(seen) == [1, 2]
    assert len(sys.meta_path) == finders
    after_import("late_module", lambda module: seen.append(module.value + 2))
    assert seen[-1] == 3
    monkeypatch.delitem(sys.modules, "late_module")
    assert late_module.value == 1


def test_inert_until_asked_and_loud_when_it_fails() -> None:
    pytest.importorskip("verl")
    done = _python(
        """
        import os, torch
        before = torch.distributed.init_process_group, torch.Tensor.cuda
        import verl
        from verl.plugin.platform import PlatformRegistry
        from verl.workers.rollout import base
        assert (torch.distributed.init_process_group, torch.Tensor.cuda) == before
        assert "cpu" not in PlatformRegistry.registered_names()

        import nereus_cpu.plugin
        os.environ["VERL_PLATFORM"] = "cpu"
        def fails(text):
            try:
                nereus_cpu.plugin._load()
            except nereus_cpu.CpuPlatformError as error:
                assert text in str(error), error
            else:
                raise AssertionError(text)
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        fails("unset VERL_PLATFORM")
        assert (torch.distributed.init_process_group, torch.Tensor.cuda) == before
        torch.cuda.is_available = available
        registry = base._ROLLOUT_REGISTRY
        del base._ROLLOUT_REGISTRY
        fails("_ROLLOUT_REGISTRY is gone")
        base._ROLLOUT_REGISTRY = registry
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the CPU platform for verl did not load") == 2
