"""Models from Hugging Face configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.spec import ModelSpec, MoESpec, SpecError

# Sizes as published in the models' config.json on the Hugging Face hub; the counts are those the
# model cards state (Llama 3 8B: 8.03 B, Qwen2.5 0.5B: 494 M, Qwen3 8B: 8.19 B, Mixtral 8x7B:
# 46.7 B, Qwen3 30B-A3B: 30.5 B, Qwen1.5-MoE A2.7B: 14.3 B, DeepSeek-MoE 16B: 16.4 B).
LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
}
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151936,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
DEEPSEEK_16B = {
    "model_type": "deepseek",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA3_8B, 8.03),
        (QWEN25_05B, 0.494),
        (QWEN3_8B, 8.19),
        (MIXTRAL, 46.7),
        (QWEN3_30B, 30.5),
        (QWEN15_MOE, 14.3),
        (DEEPSEEK_16B, 16.4),
    ],
)
def test_counts_are_the_published_ones(config: dict[str, Any], billions: float) -> None:
    count = ModelSpec.from_hf_config(config).num_parameters() / 1e9
    assert count == pytest.approx(billions, rel=2e-3)


def test_what_is_read() -> None:
    spec = ModelSpec.from_hf_config(QWEN25_05B)
    assert (spec.head_dim, spec.query_size, spec.kv_size) == (64, 896, 128)
    assert spec.tied_embeddings
    assert spec.qkv_bias
    assert not spec.linear_bias
    assert ModelSpec.from_hf_config(QWEN3_8B).qk_norm
    moe = ModelSpec.from_hf_config(DEEPSEEK_16B).moe
    assert moe == MoESpec(
        num_experts=64,
        experts_per_token=6,
        expert_ffn_hidden_size=1408,
        shared_ffn_hidden_size=2816,
        num_dense_layers=1,
    )


def test_value_head_unties_the_embeddings() -> None:
    actor = ModelSpec.from_hf_config(QWEN25_05B)
    critic = ModelSpec.from_hf_config(QWEN25_05B, value_head=True)
    assert critic.value_head
    assert not critic.tied_embeddings
    assert critic.num_parameters() - actor.num_parameters() == actor.hidden_size


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return LLAMA3_8B

    spec = ModelSpec.from_hf_config(tmp_path)
    assert spec == ModelSpec.from_hf_config(str(tmp_path / "config.json"))
    assert spec.name == tmp_path.name
    assert ModelSpec.from_hf_config(Config()).num_layers == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known; known are llama"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "multi-latent attention"),
        ({"hidden_size": None}, "entry 'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias=True with mlp_bias=False"),
        ({"num_key_value_heads": 5}, "must be a multiple of num_kv_heads=5"),
    ],
)
def test_what_cannot_be_represented_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_hf_config({**LLAMA3_8B, **change})


def test_scattered_dense_layers_are_refused() -> None:
    leading = ModelSpec.from_hf_config({**QWEN3_30B, "mlp_only_layers": [0, 1]}).moe
    assert leading is not None
    assert leading.num_dense_layers == 2
    with pytest.raises(SpecError, match="dense layers between expert layers"):
        ModelSpec.from_hf_config({**QWEN3_30B, "mlp_only_layers": [3]})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config\.json cannot be read"):
        ModelSpec.from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="not valid JSON"):
        ModelSpec.from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecError, match=r"config\.json: a mapping with model_type is expected"):
        ModelSpec.from_hf_config(tmp_path)
