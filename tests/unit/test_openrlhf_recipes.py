"""The GPU recipes, as far as a machine without GPUs can tell: OpenRLHF's own parser and checks take
every option, and Nereus accepts the job and its schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the OpenRLHF environment: ./dev env openrlhf")

from nereus_cpu import openrlhf as on_cpu
from nereus_openrlhf import openrlhf_private, preflight
from nereus_openrlhf.config import split

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "openrlhf_gpu"
LLAMA3_8B = {
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
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.sh")))
def test_openrlhf_and_nereus_take_the_recipe(recipe: str, nodes: int, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA3_8B))
    says = tmp_path / "python"
    says.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[3:]))\n")
    says.chmod(0o755)
    command = ["bash", str(RECIPES / recipe)]
    command += [str(tmp_path / name) for name in ("model", "prompts", "reward.py", "run")]
    environment = {**os.environ, "PYTHON": str(says), "NODES": str(nodes)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    on_cpu.prepare()
    nereus, rest = split(json.loads(done.stdout))
    args, _ = openrlhf_private.read_launcher(rest)
    checked = preflight.run(nereus, args)
    assert nereus.enable
    assert checked.models["actor"].num_layers == 32
    assert list(checked.targets) == sorted(nereus.schedule)
    assert all(checked.targets.values())
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    if not args.train.colocate_all:
        gpus += args.vllm.num_engines * args.vllm.tensor_parallel_size
    assert gpus == 8 * nodes
