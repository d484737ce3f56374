"""The GPU recipes, as far as a machine without GPUs can tell: verl's own configuration takes every
override, Nereus accepts the job and its schedule, and the memory model says that it fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from nereus_verl import preflight
from omegaconf import OmegaConf

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "verl_gpu"
QWEN = {"vocab_size": 152064, "hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
# What each model's config.json says of its shape.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b_grpo_fsdp2.sh": QWEN
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    "qwen3-8b_grpo_megatron.sh": QWEN
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "llama3-8b_ppo_megatron.sh": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
}


def words(recipe: str, nodes: int, folder: Path) -> list[str]:
    """The command that the script runs, from its `python` on."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODELS[recipe]))
    printer = folder / "python"
    printer.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    printer.chmod(0o700)
    arguments = [str(folder / name) for name in ("model", "data", "run")]
    run = subprocess.run(
        ["bash", str(RECIPES / recipe), *arguments, "trainer.logger=[console]"],
        env={**os.environ, "NODES": str(nodes), "PYTHON": str(printer)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(run.stdout)
    return found


def test_every_recipe_is_here() -> None:
    assert sorted(MODELS) == sorted(path.name for path in RECIPES.glob("*.sh"))


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("recipe", MODELS)
def test_verl_and_nereus_take_the_recipe(recipe: str, nodes: int, tmp_path: Path) -> None:
    module, name, *overrides = words(recipe, nodes, tmp_path)
    assert (module, name) == ("-m", "verl.trainer.main_ppo")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, Mapping)
    assert plain["trainer"]["logger"] == ["console"]  # what the user adds comes last, and counts
    checked = preflight.run(plain)
    assert checked.world_size() == 8 * nodes
    assert list(checked.targets) == [50, 100]
    layouts = [
        checked.layouts["actor"],
        *(targets["actor"] for targets in checked.targets.values()),
    ]
    assert len(set(layouts)) == 3


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("recipe", MODELS)
def test_the_recipe_fits(recipe: str, nodes: int, tmp_path: Path) -> None:
    command = words(recipe, nodes, tmp_path)
    check = [sys.executable, "-m", "nereus_plugins.cli", "check", "--gpu", "h100", "--json", "--"]
    run = subprocess.run([*check, "python", *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    actor = json.loads(run.stdout)["plan"]["assignments"]["actor-train"]["layout"]
    assert actor.get("tp", 1) == (4 if "megatron" in recipe else 1)
