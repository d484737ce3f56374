"""A model's sizes as the cost model counts them: `ModelSpec`, and what estimates need beyond it.

`ModelSpec` describes models whose state can be moved. Estimates are asked for a few more kinds
(multi-latent attention, learned positions, multi-token prediction), so they work on `Shape`.
"""

from __future__ import annotations

import dataclasses

from nereus_plugins.spec import ModelSpec, MoESpec


@dataclasses.dataclass(frozen=True)
class MLA:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434); widths per token or per head."""

    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer.

    Attributes:
        model: the spec (its `vocab_size` as built, padding included).
        mla: widths of multi-latent attention in place of query, key and value projections.
        learned_positions: rows of a learned position table; 0 for rotary positions.
        mtp_layers: multi-token-prediction layers, each a transformer layer and a 2h x h projection.
        expert_groups_per_token: groups of experts (laid on nodes) that the router limits a token
            to (DeepSeek-V3's topk_group); 0 for no limit.
    """

    model: ModelSpec
    mla: MLA | None = None
    learned_positions: int = 0
    mtp_layers: int = 0
    expert_groups_per_token: int = 0

    @property
    def moe(self) -> MoESpec | None:
        return self.model.moe

    @property
    def head_dim(self) -> int:
        return self.model.head_dim or 0

    @property
    def num_dense_layers(self) -> int:
        return self.model.num_layers if self.moe is None else self.moe.num_dense_layers

    @property
    def num_moe_layers(self) -> int:
        return self.model.num_layers - self.num_dense_layers

    @property
    def norm_params(self) -> int:
        return self.model.hidden_size * (2 if self.model.norm == "layernorm" else 1)

    @property
    def qk_head(self) -> int:
        """Width of a query head."""
        return self.mla.qk_nope + self.mla.qk_rope if self.mla else self.head_dim

    @property
    def v_head(self) -> int:
        return self.mla.v_head if self.mla else self.head_dim

    def attention_gemms(self, tp: int = 1) -> list[tuple[int, int]]:
        """(n, k) of each attention weight on one of `tp` ranks: output and input width.

        Fewer key-value heads than tp ranks are held in copies: one head a rank at least.
        """
        m = self.model
        h, heads = m.hidden_size, m.num_attention_heads
        if self.mla is None:
            kv = max(m.num_kv_heads // tp, 1) * self.head_dim
            return [(m.query_size // tp + 2 * kv, h), (h, m.query_size // tp)]
        a = self.mla
        down = ([(a.q_lora, h)] if a.q_lora else []) + [(a.kv_lora + a.qk_rope, h)]
        up = [(heads * self.qk_head // tp, a.q_lora or h)]
        up.append((heads * (a.qk_nope + a.v_head) // tp, a.kv_lora))
        return [*down, *up, (h, heads * a.v_head // tp)]

    def mlp_gemms(self, width: int, tp: int = 1) -> list[tuple[int, int]]:
        """(n, k) of the up and down projections of an MLP of this width, on one of `tp` ranks."""
        up = 2 if self.model.gated_mlp else 1
        return [(up * width // tp, self.model.hidden_size), (self.model.hidden_size, width // tp)]

    def _biases(self, gemms: list[tuple[int, int]]) -> int:
        return sum(n for n, _ in gemms) if self.model.linear_bias else 0

    def attention_params(self, tp: int = 1) -> int:
        """Parameters of one layer's attention and both norms, on one of `tp` ranks."""
        gemms = self.attention_gemms(tp)
        params = sum(n * k for n, k in gemms) + 2 * self.norm_params
        if self.model.linear_bias:
            params += self._biases(gemms)
        elif self.model.qkv_bias:
            params += gemms[0][0]
        if self.model.qk_norm:
            params += 2 * self.head_dim
        if self.mla is not None:
            params += self.mla.q_lora + self.mla.kv_lora
        return params

    def mlp_params(self, width: int, tp: int = 1) -> int:
        gemms = self.mlp_gemms(width, tp)
        return sum(n * k for n, k in gemms) + self._biases(gemms)

    def dense_layer_params(self, tp: int = 1) -> int:
        return self.attention_params(tp) + self.mlp_params(self.model.ffn_hidden_size, tp)

    def moe_shared_params(self, tp: int = 1) -> int:
        """Parameters of a mixture-of-experts layer that are not routed experts."""
        moe = self.moe
        assert moe is not None
        params = self.attention_params(tp) + moe.num_experts * self.model.hidden_size
        if moe.shared_ffn_hidden_size:
            params += self.mlp_params(moe.shared_ffn_hidden_size, tp)
            params += self.model.hidden_size * moe.shared_gate
        return params

    def expert_params(self, etp: int = 1) -> int:
        """Parameters of one routed expert."""
        assert self.moe is not None
        return self.mlp_params(self.moe.expert_ffn_hidden_size, etp)

    def embedding_params(self, tp: int = 1) -> int:
        return self.model.vocab_size * self.model.hidden_size // tp + (
            self.learned_positions * self.model.hidden_size
        )

    def head_params(self, tp: int = 1) -> int:
        """Output layer and final norm; a tied output layer has no weight of its own."""
        m = self.model
        if m.value_head:
            return m.hidden_size + self.norm_params
        own = 0 if m.tied_embeddings else m.vocab_size * m.hidden_size // tp
        return own + self.norm_params

    def num_parameters(self) -> int:
        layers = self.num_dense_layers * self.dense_layer_params()
        if self.moe is not None:
            one = self.moe_shared_params() + self.moe.num_experts * self.expert_params()
            layers += self.num_moe_layers * one
            layers += self.mtp_layers * (one + 2 * self.model.hidden_size**2)
        elif self.mtp_layers:
            layers += self.mtp_layers * (self.dense_layer_params() + 2 * self.model.hidden_size**2)
        return layers + self.embedding_params() + self.head_params()

    def with_layers(self, layers: int) -> Shape:
        """The same model cut to `layers` layers."""
        model = self.model
        moe = model.moe
        if moe is not None and moe.num_dense_layers >= layers:
            moe = dataclasses.replace(moe, num_dense_layers=max(0, layers - 1))
        return dataclasses.replace(
            self, model=dataclasses.replace(model, num_layers=layers, moe=moe)
        )
