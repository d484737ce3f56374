"""verl's own configuration takes what `nereus plan` prints, and `nereus check` reads it back."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module

from nereus_plugins.cli import main


@pytest.mark.parametrize(
    ("model", "algorithm", "backend", "gpus"),
    [
        ("llama3.1-8b", "ppo", "megatron", 64),
        ("qwen2.5-7b", "grpo", "fsdp", 8),
        ("qwen3-30b-a3b", "grpo", "megatron", 16),
    ],
)
def test_overrides_of_a_plan(
    model: str, algorithm: str, backend: str, gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", model, "--algorithm", algorithm, "--gpu", "h100", "--gpus", str(gpus)]
    assert main(["plan", *asked, "--backend", backend, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    overrides = [*found["launch_flags"], f"trainer.nnodes={gpus // 8}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    assert config.actor_rollout_ref.actor.strategy == backend
    train = found["plan"]["assignments"]["actor-train"]["layout"]
    engine = config.actor_rollout_ref.actor.get("megatron")
    if engine is not None:
        assert engine.tensor_model_parallel_size == train.get("tp", 1)
        assert engine.pipeline_model_parallel_size == train.get("pp", 1)

    command = ["python", "-m", "verl.trainer.main_ppo", *overrides]
    command += [f"algorithm.adv_estimator={'gae' if algorithm == 'ppo' else 'grpo'}"]
    command += [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.actor.use_kl_loss=True"]
    main(["check", "--gpu", "h100", "--model", model, "--json", "--", *command])
    read = json.loads(capsys.readouterr().out)["plan"]["assignments"]["actor-train"]["layout"]
    assert [read.get(key, 1) for key in ("tp", "pp")] == [train.get(key, 1) for key in ("tp", "pp")]
