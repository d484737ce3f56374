"""Shapes: parameter counts against published ones, names, tensor-parallel parts."""

import csv
from pathlib import Path

import pytest

from nereus_plugins.cost.models import MODELS, find_model, mpt
from nereus_plugins.spec import SpecError

PERF = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "perf"

# Billions, as the models' cards state them.
CARDS = {
    "qwen2.5-7b": 7.62, "qwen2.5-32b": 32.8, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1,
    "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3.1-405b": 405.9, "mixtral-8x7b": 46.7,
    "mistral-7b": 7.25, "gemma2-9b": 9.24, "gpt-oss-120b": 116.8, "deepseek-v2": 235.7,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), CARDS.items())
def test_parameters_match_the_model_cards(name: str, billions: float) -> None:
    assert find_model(name).num_parameters() / 1e9 == pytest.approx(billions, rel=3e-3)


@pytest.mark.parametrize("name", [n for n, s in MODELS.items() if s.mla is None])
def test_the_two_counts_agree(name: str) -> None:
    shape = MODELS[name]
    assert shape.num_parameters() == shape.model.num_parameters()


def test_mpt_matches_the_published_table_exactly() -> None:
    with (PERF / "llm_foundry_mpt_training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100
    for row in rows:
        shape = mpt(row["Model"], int(row["SeqLen (T)"]))
        assert shape.num_parameters() == int(row["NumParams"])


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("Llama3.1-70B", "llama3-70b"),
        ("LLAMA3.1_405B", "llama3.1-405b"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("Qwen3-30B3A", "qwen3-30b-a3b"),
        ("DeepSeekV3 (dropless)", "deepseek-v3"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert find_model(spelling).model.name == name


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"nearest: .*qwen3-8b"):
        find_model("qwen3-9b")


def test_fewer_kv_heads_than_ranks_are_replicated() -> None:
    shape = find_model("qwen2.5-1.5b")  # 2 key-value heads
    (whole, _), _ = shape.attention_gemms(1)
    (part, _), _ = shape.attention_gemms(4)
    query, head = shape.model.query_size, shape.head_dim
    assert whole == query + 4 * head
    assert part == query // 4 + 2 * head  # one head a rank, not half of one
