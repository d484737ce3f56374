"""The GPU recipes, as far as a machine without GPUs can tell: OpenRLHF's own parser and checks take
every option, and Nereus accepts the job and its schedule."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed", reason="needs the OpenRLHF environment: ./dev env openrlhf")

from nereus_cpu import openrlhf as on_cpu
from nereus_cpu.reward import compute_score, reward_func
from nereus_cpu.task import make_task
from nereus_openrlhf import openrlhf_private, preflight
from nereus_openrlhf.config import split

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "openrlhf_gpu"
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


def test_a_model_that_comes_with_its_own_code_is_read_without_running_it(tmp_path: Path) -> None:
    """No class of the library has this type."""
    code = {"AutoConfig": "configuration_deepseek.DeepseekConfig"}
    config = {**LLAMA3_8B, "model_type": "deepseek", "auto_map": code}
    config["architectures"] = ["DeepseekForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_deepseek.py").write_text("raise SystemExit('it was run')\n")
    args = SimpleNamespace(actor=SimpleNamespace(model_name_or_path=str(tmp_path)))
    assert preflight.hf_config(args, "actor")["model_type"] == "deepseek"


def test_the_side_of_a_comparison_is_a_job_that_openrlhf_takes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("ab", ROOT / "recipes" / "ab" / "openrlhf_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    on_cpu.prepare()
    schedule = json.dumps(recipe.ARMS["nereus"])
    words = [*recipe.arguments(tmp_path, tmp_path / "work", 3), "--nereus.schedule", schedule]
    nereus, rest = split([*words, "--nereus.run_dir", str(tmp_path / "run")])
    args, _ = openrlhf_private.read_launcher(rest)
    checked = preflight.run(nereus, args)
    assert set(checked.layouts) == {"actor"}
    ((step, targets),) = checked.targets.items()
    assert 0 < step < recipe.STEPS
    assert targets["actor"] != checked.layouts["actor"]
    assert targets["actor"].world_size == recipe.RANKS == args.vllm.num_engines
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    assert samples == args.train.batch_size  # one optimizer step of a rollout, as in verl's job


def test_openrlhf_reads_the_rows_that_verl_does(tmp_path: Path) -> None:
    import pandas as pd
    from openrlhf.datasets.prompts_dataset import preprocess_data
    from transformers import AutoTokenizer

    task = make_task(tmp_path, layers=1)
    template = AutoTokenizer.from_pretrained(task.model_dir).apply_chat_template
    rows = [json.loads(line) for line in task.prompts_file.read_text().splitlines()]
    of_verl = pd.read_parquet(task.train_file)
    assert len(rows) == len(of_verl)
    for row, chat, truth in zip(rows, of_verl["prompt"], of_verl["reward_model"], strict=True):
        prompt, label = preprocess_data(row, None, "prompt", "label", template)
        assert prompt == template(list(chat), tokenize=False, add_generation_prompt=True)
        assert label == truth["ground_truth"]


def test_openrlhfs_reward_is_verls() -> None:
    prompt = "<|im_start|>user\n07 letters<|im_end|>\n<|im_start|>assistant\n"
    answer = "abcdefgh01234567"
    query = f"{prompt}abcdefgh<|spare_-2|>01234567<|im_end|>"
    labels = ["letters", "symbols"]
    found = reward_func([query, query], [prompt] * 2, labels)["rewards"].tolist()
    assert found == [compute_score("", answer, label) for label in labels] == [0.5, 0.5]
