"""The prediction against what built models report: the same boxes, in the same storages.

So the bytes between every pair of ranks, and the memory on each, are predicted exactly for these
layouts. A real job may differ (another bucket size, TransformerEngine's order of parameters).
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nereus_plugins.emu.described.fsdp2 import describe_fsdp2
from nereus_plugins.emu.predict_fsdp2 import hf_parameters
from nereus_plugins.emu.predicted import predict_unit
from nereus_plugins.emu.table import ShardTable, concat
from nereus_plugins.spec import Layout, ModelSpec, OptimizerSpec

from .spawn import run_ranks

CPU = torch.device("cpu")


def described_megatron(
    rank: int, world: int, variants: list[dict[str, bool]], layouts: list[Layout]
) -> list[bytes]:
    """The rank's table of each variant in each layout, from a built Megatron-core model."""
    import nereus_cpu.megatron

    nereus_cpu.megatron.install()
    from nereus_plugins.selftest.megatron_job import MegatronJob, MegatronModel

    tables = []
    for settings, layout in product(variants, layouts):
        job = MegatronJob("actor", MegatronModel(**settings), layout, seed=1, device=CPU)
        tables.append(job.described().table(rank).to_bytes())
        job.close()
    return tables


def described_fsdp2(
    rank: int, world: int, configs: list[dict[str, Any]], layouts: list[Layout]
) -> list[bytes]:
    """The rank's table of each model in each layout, of a Hugging Face model under FSDP2."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tables = []
    for config, layout in product(configs, layouts):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        shard = layout.shard_size or layout.shard_mesh_size
        if layout.sharding == "hsdp":
            mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("ddp", "fsdp"))
        else:
            mesh = init_device_mesh("cpu", (shard,), mesh_dim_names=("fsdp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        unit = describe_fsdp2(model, optimizer)
        # Buffers (rotary frequencies) are the module's own and not part of a prediction.
        unit.shards = [s for s in unit.shards if not s.name.startswith("buffer/")]
        tables.append(unit.table(rank).to_bytes())
    return tables


def joined(per_rank: list[list[bytes]], index: int) -> ShardTable:
    return concat([ShardTable.from_bytes(tables[index]) for tables in per_rank])


def boxes(table: ShardTable) -> Counter[tuple[Any, ...]]:
    """Every shard as (rank, tensor, dtype, offset, shape)."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in range(len(table)):
        info, box = table.tensors[table.tensor[row]], table.box(row)
        if box.numel:
            key = (int(table.rank[row]), info.name, info.dtype, info.shape, box.offset, box.shape)
            found[key] += 1
    return found


def storage_bytes(table: ShardTable) -> dict[int, int]:
    ranks = table.storages.rank
    return {r: int(table.storages.nbytes[ranks == r].sum()) for r in np.unique(ranks).tolist()}


def assert_alike(described: ShardTable, predicted: ShardTable, what: str) -> None:
    missing, extra = boxes(described) - boxes(predicted), boxes(predicted) - boxes(described)
    assert not missing, f"{what}: {len(missing)} not predicted, {next(iter(missing))}"
    assert not extra, f"{what}: {len(extra)} not there, {next(iter(extra))}"
    assert storage_bytes(described) == storage_bytes(predicted), what


MEGATRON_LAYOUTS = [
    Layout(tp=2, pp=2, dp=1, sharding="zero1"),
    Layout(tp=1, pp=2, dp=2, sharding="zero1"),
    Layout(tp=2, pp=1, dp=2, sharding="zero1"),
    Layout(tp=1, pp=1, dp=4, sharding="zero1"),
    Layout(tp=1, pp=4, dp=1),
    Layout(tp=1, pp=2, dp=2),
]


def test_megatron() -> None:
    variants = [{"bf16": b, "tied": t} for b in (True, False) for t in (True, False)]
    results = run_ranks(described_megatron, 4, variants, MEGATRON_LAYOUTS, timeout_s=300)
    for i, (variant, layout) in enumerate(product(variants, MEGATRON_LAYOUTS)):
        model = ModelSpec(
            name="job",
            num_layers=4,
            hidden_size=32,
            ffn_hidden_size=56,
            num_attention_heads=8,
            num_kv_heads=4,
            vocab_size=96,
            tied_embeddings=variant["tied"],
        )
        dtype = "bfloat16" if variant["bf16"] else "float32"
        predicted = predict_unit(
            model, layout, backend="megatron", optimizer=OptimizerSpec(), param_dtype=dtype
        )
        assert_alike(joined(results, i), predicted, f"{variant} {layout}")


FSDP_LAYOUTS = [
    Layout(dp=4, sharding="fsdp"),
    Layout(dp=2, ulysses=2, sharding="fsdp"),
    Layout(dp=4, sharding="hsdp", shard_size=2),
]
HF_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 30,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 5,
    "vocab_size": 101,
}


def test_fsdp2() -> None:
    configs = [{**HF_QWEN3, "tie_word_embeddings": tied} for tied in (True, False)]
    results = run_ranks(described_fsdp2, 4, configs, FSDP_LAYOUTS)
    for i, (config, layout) in enumerate(product(configs, FSDP_LAYOUTS)):
        model = ModelSpec.from_hf_config(config)
        predicted = predict_unit(
            model, layout, backend="fsdp2", optimizer=OptimizerSpec(), param_dtype="float32"
        )
        assert_alike(joined(results, i), predicted, f"{config} {layout}")


DEEPSPEED_LAYOUTS = [
    Layout(dp=4),
    Layout(dp=4, sharding="zero1"),
    Layout(dp=4, sharding="zero2"),
    Layout(dp=4, sharding="zero3"),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=2, sharding="zero2"),
    Layout(tp=2, dp=2, sharding="zero3"),
]


def described_deepspeed(
    rank: int, world: int, variants: list[dict[str, Any]], layouts: list[Layout]
) -> list[bytes]:
    """The rank's table of each variant in each layout, from a DeepSpeed engine."""
    import nereus_cpu.deepspeed

    nereus_cpu.deepspeed.install()
    from nereus_plugins.selftest.deepspeed_job import DeepSpeedJob, DeepSpeedModel

    tables = []
    for settings, layout in product(variants, layouts):
        job = DeepSpeedJob("actor", DeepSpeedModel(**settings), layout, seed=1, device=CPU)
        tables.append(job.described().table(rank).to_bytes())
        job.close()
    return tables


def test_deepspeed() -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: the openrlhf environment has it")
    variants = [
        {"bf16": True, "vocab": 52},
        {"bf16": True, "vocab": 52, "tied": True},
        {"bf16": False, "vocab": 52},
    ]
    results = run_ranks(described_deepspeed, 4, variants, DEEPSPEED_LAYOUTS, timeout_s=300)
    for i, (variant, layout) in enumerate(product(variants, DEEPSPEED_LAYOUTS)):
        model = ModelSpec(
            name="job",
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=44,
            num_attention_heads=4,
            num_kv_heads=2,
            vocab_size=52,
            qkv_bias=True,
            tied_embeddings=variant.get("tied", False),
        )
        dtype = "bfloat16" if variant["bf16"] else "float32"
        predicted = predict_unit(
            model, layout, backend="deepspeed", optimizer=OptimizerSpec(), param_dtype=dtype
        )
        assert_alike(joined(results, i), predicted, f"{variant} {layout}")


MOE = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "tie_word_embeddings": True},
        {"model_type": "mixtral", "num_local_experts": 4},
        {"model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 20, **MOE},
        {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0], **MOE},
    ],
    ids=lambda change: change["model_type"],
)
def test_hugging_face_parameters(change: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    settings = {**HF_QWEN3, **change}
    config = AutoConfig.for_model(settings.pop("model_type"), num_labels=1, **settings)
    kinds = {False: AutoModelForCausalLM, True: AutoModelForTokenClassification}
    for value_head, kind in kinds.items():
        with torch.device("meta"):
            model = kind.from_config(config)
        real = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert dict(hf_parameters(ModelSpec.from_hf_config(config, value_head=value_head))) == real
