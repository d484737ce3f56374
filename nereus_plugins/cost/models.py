"""Shapes of common models by name, since nothing is downloaded.

Every line is the model's config.json on the Hugging Face hub (repository named in the comment),
but MPT, from mosaicml/llm-foundry's training configurations.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re

from nereus_plugins.spec import ModelSpec, MoESpec, SpecError

from .shape import MLA, Shape


def _dense(
    name: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int,
    head_dim: int | None = None, tied: bool = False, qkv_bias: bool = False, qk_norm: bool = False,
    length: int = 32768, **more: object,
) -> Shape:  # fmt: skip
    return Shape(
        ModelSpec(
            name=name, num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn,
            num_attention_heads=heads, num_kv_heads=kv, vocab_size=vocab, head_dim=head_dim,
            tied_embeddings=tied, qkv_bias=qkv_bias, qk_norm=qk_norm,
            max_position_embeddings=length, **more,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def _qwen25(size: str, layers: int, h: int, ffn: int, heads: int, kv: int, **more: object) -> Shape:
    vocab = 152064 if h >= 3584 else 151936
    name = f"qwen2.5-{size}"
    return _dense(
        name, layers, h, ffn, heads, kv, vocab, tied=h <= 2048, qkv_bias=True, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _qwen3(size: str, layers: int, h: int, ffn: int, heads: int, kv: int, tied: bool) -> Shape:
    return _dense(
        f"qwen3-{size}", layers, h, ffn, heads, kv, 151936, head_dim=128, tied=tied, qk_norm=True,
        length=40960,
    )  # fmt: skip


def _qwen3_moe(size: str, layers: int, h: int, expert: int, heads: int, kv: int) -> Shape:
    return _dense(
        f"qwen3-{size}", layers, h, expert, heads, kv, 151936, head_dim=128, qk_norm=True,
        length=40960, moe=MoESpec(128, 8, expert),
    )  # fmt: skip


_MPT = {"125m": (768, 12), "350m": (1024, 24), "760m": (1536, 24), "1b": (2048, 24),
        "3b": (2560, 32), "7b": (4096, 32), "13b": (5120, 40), "30b": (7168, 48),
        "70b": (8192, 80)}  # fmt: skip


def mpt(size: str, seq: int) -> Shape:
    """MPT as llm-foundry trains it: plain multi-head attention, 4h GELU MLP, learned positions."""
    hidden, layers = _MPT[size]
    heads = {"3b": 20}.get(size, hidden // 128 if hidden >= 1536 else hidden // 64)
    model = ModelSpec(
        name=f"mpt-{size}", num_layers=layers, hidden_size=hidden, ffn_hidden_size=4 * hidden,
        num_attention_heads=heads, num_kv_heads=heads, vocab_size=50368, tied_embeddings=True,
        gated_mlp=False, norm="layernorm", qkv_bias=True, linear_bias=True,
        max_position_embeddings=seq,
    )  # fmt: skip
    return Shape(model, learned_positions=seq)


_SHAPES = (
    # Qwen/Qwen2.5-*, Qwen/Qwen2-7B (same sizes)
    _qwen25("0.5b", 24, 896, 4864, 14, 2),
    _qwen25("1.5b", 28, 1536, 8960, 12, 2),
    _qwen25("3b", 36, 2048, 11008, 16, 2),
    _qwen25("7b", 28, 3584, 18944, 28, 4),
    _qwen25("14b", 48, 5120, 13824, 40, 8),
    _qwen25("32b", 64, 5120, 27648, 40, 8),
    _qwen25("72b", 80, 8192, 29568, 64, 8),
    # Qwen/Qwen3-*
    _qwen3("0.6b", 28, 1024, 3072, 16, 8, True),
    _qwen3("1.7b", 28, 2048, 6144, 16, 8, True),
    _qwen3("4b", 36, 2560, 9728, 32, 8, True),
    _qwen3("8b", 36, 4096, 12288, 32, 8, False),
    _qwen3("14b", 40, 5120, 17408, 40, 8, False),
    _qwen3("32b", 64, 5120, 25600, 64, 8, False),
    _qwen3_moe("30b-a3b", 48, 2048, 768, 32, 4),
    _qwen3_moe("235b-a22b", 94, 4096, 1536, 64, 4),
    # meta-llama/*
    _dense("llama2-7b", 32, 4096, 11008, 32, 32, 32000, length=4096),
    _dense("llama2-13b", 40, 5120, 13824, 40, 40, 32000, length=4096),
    _dense("llama2-70b", 80, 8192, 28672, 64, 8, 32000, length=4096),
    _dense("llama3-8b", 32, 4096, 14336, 32, 8, 128256, length=8192),
    _dense("llama3-70b", 80, 8192, 28672, 64, 8, 128256, length=8192),
    _dense("llama3.1-405b", 126, 16384, 53248, 128, 8, 128256, length=131072),
    _dense("llama3.2-1b", 16, 2048, 8192, 32, 8, 128256, tied=True, length=131072),
    _dense("llama3.2-3b", 28, 3072, 8192, 24, 8, 128256, tied=True, length=131072),
    # mistralai/*
    _dense("mistral-7b", 32, 4096, 14336, 32, 8, 32768),
    _dense("mixtral-8x7b", 32, 4096, 14336, 32, 8, 32000, moe=MoESpec(8, 2, 14336)),
    _dense("mixtral-8x22b", 56, 6144, 16384, 48, 8, 32768, moe=MoESpec(8, 2, 16384)),
    # google/gemma-2-*, gemma-3-27b (text part); their soft caps and window are not modelled
    _dense("gemma2-9b", 42, 3584, 14336, 16, 8, 256000, head_dim=256, tied=True, length=8192),
    _dense("gemma2-27b", 46, 4608, 36864, 32, 16, 256000, head_dim=128, tied=True, length=8192),
    # openai/gpt-oss-120b, -20b (sliding window in every other layer is not modelled)
    _dense("gpt-oss-120b", 36, 2880, 2880, 64, 8, 201088, head_dim=64, qkv_bias=True,
           length=131072, moe=MoESpec(128, 4, 2880)),
    _dense("gpt-oss-20b", 24, 2880, 2880, 64, 8, 201088, head_dim=64, qkv_bias=True,
           length=131072, moe=MoESpec(32, 4, 2880)),
    # deepseek-ai/DeepSeek-V2, V2-Lite, V3 (and R1)
    Shape(
        ModelSpec("deepseek-v3", 61, 7168, 18432, 128, 129280, 128, head_dim=128,
                  max_position_embeddings=163840, moe=MoESpec(256, 8, 2048, 2048, False, 3)),
        mla=MLA(1536, 512, 128, 64, 128), mtp_layers=1, expert_groups_per_token=4,
    ),
    Shape(
        ModelSpec("deepseek-v2", 60, 5120, 12288, 128, 102400, 128, head_dim=128,
                  max_position_embeddings=163840, moe=MoESpec(160, 6, 1536, 3072, False, 1)),
        mla=MLA(1536, 512, 128, 64, 128),
    ),
    Shape(
        ModelSpec("deepseek-v2-lite", 27, 2048, 10944, 16, 102400, 16, head_dim=128,
                  max_position_embeddings=163840, moe=MoESpec(64, 6, 1408, 2816, False, 1)),
        mla=MLA(0, 512, 128, 64, 128),
    ),
)  # fmt: skip
MODELS: dict[str, Shape] = {shape.model.name: shape for shape in _SHAPES}

# Spellings of the same model, after `_plain`.
_ALIASES = {
    "llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3.3-70b": "llama3-70b",
    "qwen2-7b": "qwen2.5-7b", "qwen2-72b": "qwen2.5-72b", "qwen2.5-math-7b": "qwen2.5-7b",
    "qwen2-0.5b": "qwen2.5-0.5b", "qwen2-1.5b": "qwen2.5-1.5b", "qwen3-30b3a": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "qwen3-30b": "qwen3-30b-a3b", "deepseek-r1": "deepseek-v3", "deepseekv3": "deepseek-v3",
    "deepseekv2": "deepseek-v2", "deepseek-671b": "deepseek-v3", "deepseek-236b": "deepseek-v2",
    "mixtral-8x7b-v0.1": "mixtral-8x7b", "mistral-7b-v0.3": "mistral-7b",
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def as_shape(model: ModelSpec) -> Shape:
    """The sizes of a model of a job: with multi-latent attention where it is a model that ships so.

    Jobs name models by `ModelSpec`, which has no such attention; a spec that says the sizes of a
    shipped model, by its name, is that model. Jobs train no multi-token prediction.
    """
    known = MODELS.get(model.name)
    if known is None or known.mla is None:
        return Shape(model)
    same = dataclasses.replace(
        known.model, value_head=model.value_head, tied_embeddings=model.tied_embeddings
    )
    return dataclasses.replace(known, model=model, mtp_layers=0) if same == model else Shape(model)


def _plain(name: str) -> str:
    text = name.strip().lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    text = re.sub(r"\(.*\)", "", text).strip("-")
    text = re.sub(r"-(instruct|base|chat|hf|it)(-\d{4})?$", "", text)
    text = re.sub(r"-(instruct|base|chat|hf|it|\d{4})$", "", text)
    text = text.replace("meta-llama-", "llama").replace("llama-", "llama")
    text = re.sub(r"^gemma-", "gemma", text)
    return re.sub(r"^(qwen\d?(?:\.\d)?)(\d+(?:\.\d)?b)", r"\1-\2", text)


def find_model(name: str) -> Shape:
    """The model called `name` (hub names and common spellings); `SpecError` names the nearest."""
    key = _plain(name)
    key = _ALIASES.get(key, key)
    if key in MODELS:
        return MODELS[key]
    near = difflib.get_close_matches(key, list(MODELS), n=3, cutoff=0.4)
    raise SpecError(
        f"model {name!r} is not among the shapes that ship"
        + (f"; nearest: {', '.join(near)}" if near else "")
        + "; give the path of its config.json instead"
    )
