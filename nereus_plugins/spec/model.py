"""The model: sizes that decide which tensors it has; read from a Hugging Face config or a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .record import (
    Record,
    SpecError,
    load_json,
    read_text,
    require,
    require_bool,
    require_choice,
    require_int,
    shown,
)

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek")
_NO_MLA = (
    "multi-latent attention (kv_lora_rank, as in DeepSeek-V2 and V3) is not representable; use a "
    "model with grouped-query attention"
)


@dataclasses.dataclass(frozen=True)
class MoESpec(Record):
    """The experts of a mixture-of-experts model.

    Attributes:
        num_experts: routed experts of one layer.
        experts_per_token: routed experts a token goes to.
        expert_ffn_hidden_size: width of one routed expert's MLP.
        shared_ffn_hidden_size: width of all shared experts of a layer together; 0 for none.
        shared_gate: the shared experts' output is scaled by a learned gate (Qwen2-MoE).
        num_dense_layers: leading layers with an ordinary MLP of ModelSpec.ffn_hidden_size.
    """

    num_experts: int
    experts_per_token: int
    expert_ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    num_dense_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "expert_ffn_hidden_size"):
            require_int("MoESpec", name, getattr(self, name))
        for name in ("shared_ffn_hidden_size", "num_dense_layers"):
            require_int("MoESpec", name, getattr(self, name), minimum=0)
        require_bool("MoESpec", "shared_gate", self.shared_gate)
        require(
            self.experts_per_token <= self.num_experts,
            f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}",
        )
        require(
            not self.shared_gate or self.shared_ffn_hidden_size > 0,
            "shared_gate scales shared experts: set shared_ffn_hidden_size",
        )


@dataclasses.dataclass(frozen=True)
class ModelSpec(Record):
    """A decoder-only transformer with rotary positions.

    Attributes:
        name: for messages and reports.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of a dense layer's MLP.
        num_attention_heads: query heads.
        num_kv_heads: key-value heads (grouped-query attention); divides num_attention_heads.
        head_dim: width of one head; None means hidden_size / num_attention_heads.
        vocab_size: rows of the embedding as it is built (with padding, where the framework pads).
        tied_embeddings: the output layer is the embedding.
        gated_mlp: MLP with gate and up projections (SwiGLU), else one up projection.
        norm: "rmsnorm" or "layernorm" (weight and bias).
        qkv_bias: biases in the query, key and value projections.
        linear_bias: biases in every linear layer; includes qkv_bias.
        qk_norm: normalisation of queries and keys per head (Qwen3).
        value_head: a scalar head in place of the vocabulary output (critic, reward model).
        max_position_embeddings: longest sequence, tokens.
        moe: mixture of experts, or None for a dense model.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int | None = None
    tied_embeddings: bool = False
    gated_mlp: bool = True
    norm: str = "rmsnorm"
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    value_head: bool = False
    max_position_embeddings: int = 4096
    moe: MoESpec | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "vocab_size",
            "num_kv_heads",
            "max_position_embeddings",
        ):
            require_int("ModelSpec", name, getattr(self, name))
        for name in ("tied_embeddings", "gated_mlp", "qkv_bias", "linear_bias", "qk_norm"):
            require_bool("ModelSpec", name, getattr(self, name))
        require_bool("ModelSpec", "value_head", self.value_head)
        require_choice("ModelSpec", "norm", self.norm, ("rmsnorm", "layernorm"))
        require(isinstance(self.name, str) and self.name != "", "ModelSpec.name must be a text")
        require(
            self.num_attention_heads % self.num_kv_heads == 0,
            f"num_attention_heads={self.num_attention_heads} must be a multiple of "
            f"num_kv_heads={self.num_kv_heads}",
        )
        if self.head_dim is None:
            require(
                self.hidden_size % self.num_attention_heads == 0,
                f"hidden_size={self.hidden_size} is not divisible by "
                f"num_attention_heads={self.num_attention_heads}: give head_dim",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        require_int("ModelSpec", "head_dim", self.head_dim)
        require(
            self.qkv_bias or not self.linear_bias,
            "linear_bias puts biases in every linear layer: set qkv_bias as well",
        )
        require(
            not (self.value_head and self.tied_embeddings),
            "a value head replaces the vocabulary output: set tied_embeddings to false",
        )
        require(
            self.moe is None or isinstance(self.moe, MoESpec), "ModelSpec.moe must be a MoESpec"
        )
        if self.moe is not None:
            require(
                self.moe.num_dense_layers < self.num_layers,
                f"moe.num_dense_layers={self.moe.num_dense_layers} leaves none of the "
                f"{self.num_layers} layers for experts",
            )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * (self.head_dim or 0)

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * (self.head_dim or 0)

    def num_parameters(self) -> int:
        """Trained parameters; a tied output layer counts once, a value head as hidden_size."""
        h, bias = self.hidden_size, int(self.linear_bias)
        norm = h * (2 if self.norm == "layernorm" else 1)

        def mlp(width: int, biased: int) -> int:
            up = width * (2 if self.gated_mlp else 1)
            return up * h + width * h + biased * (up + h)

        qkv = self.query_size + 2 * self.kv_size
        attention = qkv * h + self.query_size * h + qkv * int(self.qkv_bias) + h * bias
        if self.qk_norm:
            attention += 2 * (self.head_dim or 0) * (2 if self.norm == "layernorm" else 1)
        dense = mlp(self.ffn_hidden_size, bias)
        if self.moe is None:
            mlps = self.num_layers * dense
        else:
            experts = self.moe.num_experts * mlp(self.moe.expert_ffn_hidden_size, bias)
            experts += self.moe.num_experts * h  # router
            if self.moe.shared_ffn_hidden_size:
                experts += mlp(self.moe.shared_ffn_hidden_size, bias) + h * self.moe.shared_gate
            sparse = self.num_layers - self.moe.num_dense_layers
            mlps = sparse * experts + self.moe.num_dense_layers * dense
        head = h if self.value_head else (0 if self.tied_embeddings else self.vocab_size * h)
        layers = self.num_layers * (attention + 2 * norm) + mlps
        return self.vocab_size * h + layers + norm + head

    @classmethod
    def from_hf_config(
        cls, config: str | Path | Mapping[str, Any] | Any, *, value_head: bool = False
    ) -> ModelSpec:
        """Read a Hugging Face model config.

        Args:
            config: a config.json, a folder that holds one, its content as a mapping, or a
                transformers config object.
            value_head: build the critic or reward variant: a scalar head, embeddings not tied.

        Raises:
            SpecError: unknown architecture, missing entry, or a feature that the spec cannot
                represent; the message names it.
        """
        try:
            return cls._of_config(_read_config(config), value_head)
        except SpecError as error:
            named = isinstance(config, (str, Path)) and str(config) not in str(error)
            raise SpecError(f"{config}: {error}") if named else error from None

    @classmethod
    def _of_config(cls, data: Mapping[str, Any], value_head: bool) -> ModelSpec:
        kind = data.get("model_type")
        if data.get("kv_lora_rank"):
            raise SpecError(f"model config {kind}: {_NO_MLA}")
        if kind not in _DENSE + _MOE:
            raise SpecError(
                f"model_type {shown(kind)} is not known; known are {', '.join(_DENSE + _MOE)}. "
                "Other models: write a ModelSpec by hand"
            )

        where = f"model config {kind}"

        def need(key: str, minimum: int = 1) -> int:
            if data.get(key) is None:
                raise SpecError(f"{where}: entry {key!r} is missing")
            require_int(where, key, data[key], minimum=minimum)
            return int(data[key])

        for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
            if data.get(key) is not None:
                require_int(where, key, data[key])

        activation = data.get("hidden_act", "silu")
        require(
            activation == "silu",
            f"model config {kind}: hidden_act {shown(activation)} is not known; silu is",
        )
        everywhere = bool(data.get("mlp_bias", False))
        attention_bias = bool(data.get("attention_bias", False))
        require(
            everywhere == attention_bias,
            f"model config {kind}: attention_bias={attention_bias} with mlp_bias={everywhere} is "
            "not representable: biases are in query, key and value projections only, or everywhere",
        )
        qkv_bias = (
            everywhere or kind == "qwen2" or (kind == "qwen2_moe" and _flag(data, "qkv_bias"))
        )
        return cls(
            name=_name(data, kind),
            num_layers=need("num_hidden_layers"),
            hidden_size=need("hidden_size"),
            ffn_hidden_size=need("intermediate_size"),
            num_attention_heads=need("num_attention_heads"),
            num_kv_heads=data.get("num_key_value_heads") or need("num_attention_heads"),
            head_dim=data.get("head_dim"),
            vocab_size=need("vocab_size"),
            tied_embeddings=bool(data.get("tie_word_embeddings", False)) and not value_head,
            qkv_bias=qkv_bias,
            linear_bias=everywhere,
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            value_head=value_head,
            max_position_embeddings=data.get("max_position_embeddings", 4096),
            moe=_read_moe(kind, data, need) if kind in _MOE else None,
        )


def _flag(data: Mapping[str, Any], key: str) -> bool:
    return bool(data.get(key, True))


def _name(data: Mapping[str, Any], kind: str) -> str:
    return str(data.get("_name_or_path") or kind)


def _read_config(config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = load_json(read_text(path), f"model config {path}")
        except OSError as error:
            raise SpecError(f"model config {path} cannot be read: {error.strerror}") from None
        if not isinstance(data, dict) or "model_type" not in data:
            raise SpecError(f"model config {path}: a mapping with model_type is expected")
        data.setdefault("_name_or_path", path.resolve().parent.name)
        return data
    data = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(data, Mapping):
        raise SpecError(f"model config: expected a mapping, got {type(data).__name__}")
    return data


def _read_moe(kind: str, data: Mapping[str, Any], need: Any) -> MoESpec:
    where = f"model config {kind}"
    if kind == "mixtral":
        return MoESpec(
            num_experts=need("num_local_experts"),
            experts_per_token=need("num_experts_per_tok"),
            expert_ffn_hidden_size=need("intermediate_size"),
        )
    if kind == "deepseek":
        require(
            data.get("moe_layer_freq", 1) == 1,
            "model config deepseek: moe_layer_freq other than 1 is not representable",
        )
        width, shared = need("moe_intermediate_size"), data.get("n_shared_experts") or 0
        leading = data.get("first_k_dense_replace") or 0
        require_int(where, "n_shared_experts", shared, minimum=0)
        require_int(where, "first_k_dense_replace", leading, minimum=0)
        return MoESpec(
            num_experts=need("n_routed_experts"),
            experts_per_token=need("num_experts_per_tok"),
            expert_ffn_hidden_size=width,
            shared_ffn_hidden_size=width * shared,
            num_dense_layers=leading,
        )
    dense = data.get("mlp_only_layers") or []
    require(
        isinstance(dense, list) and all(type(layer) is int for layer in dense),
        f"{where}: mlp_only_layers must list layers, got {shown(dense)}",
    )
    dense = sorted(dense)
    require(
        data.get("decoder_sparse_step", 1) == 1 and dense == list(range(len(dense))),
        f"model config {kind}: dense layers between expert layers (decoder_sparse_step, "
        "mlp_only_layers) are not representable; leading ones are",
    )
    shared = need("shared_expert_intermediate_size", 0) if kind == "qwen2_moe" else 0
    return MoESpec(
        num_experts=need("num_local_experts" if data.get("num_experts") is None else "num_experts"),
        experts_per_token=need("num_experts_per_tok"),
        expert_ffn_hidden_size=need("moe_intermediate_size"),
        shared_ffn_hidden_size=shared,
        shared_gate=shared > 0,
        num_dense_layers=len(dense),
    )
