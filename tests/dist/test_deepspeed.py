"""DeepSpeed on 4 gloo ranks: the proofs of `nereus selftest`, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nereus_plugins.selftest import run, run_killed
from nereus_plugins.selftest.cases import Case, cases
from nereus_plugins.selftest.proofs import pairs_bit_exact
from nereus_plugins.selftest.ranks import Bench
from nereus_plugins.spec import Layout

from . import selftest_checks

pytest.importorskip("deepspeed", reason="needs DeepSpeed: the openrlhf environment has it")


def test_moves_round_trips_and_checkpoints_are_bit_exact() -> None:
    checks = run("bit_exact", "deepspeed", 4, False, device="cpu")
    selftest_checks.all_passed(checks)
    pairs = cases("deepspeed", 4)
    assert len(pairs) >= 8
    assert selftest_checks.count(checks, "moved bit-exact") == len(pairs)
    assert selftest_checks.count(checks, "there and back") == len(pairs)
    # DeepSpeed's universal checkpoint changes the number of ranks, not the stage.
    assert selftest_checks.count(checks, "equal to a checkpoint") == 2


def test_a_failure_in_any_phase_leaves_the_old_layout_training() -> None:
    selftest_checks.all_passed(run("failures", "deepspeed", 2, device="cpu"))


@pytest.mark.parametrize("phase", ["move", "commit"])
def test_a_killed_rank_is_named_and_nobody_hangs(phase: str) -> None:
    checks = run_killed("deepspeed", phase, device="cpu")
    selftest_checks.all_passed(checks)
    assert checks[0].seconds < 60
    assert "rank(s) 1" in checks[0].detail


@pytest.mark.full
def test_with_deepspeeds_own_adam() -> None:
    """It counts steps as whole numbers; ZeRO-0 flattens its masters. Compiled at first use."""
    checks = run("fused", "deepspeed", 2, device="cpu", module=__name__)
    selftest_checks.all_passed(checks)
    assert selftest_checks.count(checks, "moved bit-exact") == 2


def fused(bench: Bench, backend: str) -> list[dict[str, Any]]:
    model = {"bf16": True, "fused": True}
    zero2, zero3 = Layout(dp=2, sharding="zero2"), Layout(dp=2, sharding="zero3")
    pairs = [
        Case(backend, model, zero3, Layout(), checkpoint=False),
        Case(backend, model, Layout(dp=2), zero2, checkpoint=False),
    ]
    return pairs_bit_exact(bench, pairs)


def test_counters_and_settings() -> None:
    """On one rank: what a target counts on with, what a fresh engine has, and what is refused."""
    checks = run("one_rank", "deepspeed", 1, device="cpu", module=__name__)
    selftest_checks.all_passed(checks)
    assert len(checks) == 12


def one_rank(bench: Bench, backend: str) -> list[dict[str, Any]]:
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.utils import safe_get_full_optimizer_state

    from nereus_plugins.emu.described import UnsupportedState
    from nereus_plugins.emu.described.deepspeed import describe_deepspeed, load_scalars
    from nereus_plugins.emu.described.deepspeed_private import UntestedVersion
    from nereus_plugins.selftest.deepspeed_job import SAMPLES, DeepSpeedJob, DeepSpeedModel

    out: list[dict[str, Any]] = []

    def note(subject: str, found: str) -> None:
        out.append(
            {"proof": "as it should be", "subject": subject, "passed": not found}
            | {"seconds": 0.0, "detail": found}
        )

    def expect(what: str, error: type[Exception], said: str) -> None:
        try:
            describe_deepspeed(engine)
            found = "it was not refused"
        except error as raised:
            found = "" if said in str(raised) else f"says {raised}"
        note(what, found)

    layout = Layout(sharding="zero2")
    job = DeepSpeedJob("model", DeepSpeedModel(bf16=True), layout, seed=1, device=bench.device)
    engine: Any = job.current.engine
    job.train_step(0)
    moments = [
        safe_get_full_optimizer_state(p, "exp_avg").abs().sum().item()
        for p in engine.module.parameters()
    ]
    note("moments of all groups are found by DeepSpeed", "" if all(moments) else f"{moments}")

    scalars = describe_deepspeed(engine).scalars
    note("accumulations", "" if scalars["engine"]["accumulations"] == 1 else f"{scalars['engine']}")
    engine._config.gradient_accumulation_steps = 3
    load_scalars(scalars, engine)
    note("micro-steps of the new accumulation", "" if engine.micro_steps == 3 else "not rescaled")
    engine.micro_steps = 4
    expect("inside an accumulation", UnsupportedState, "between optimizer steps")
    engine._config.gradient_accumulation_steps = SAMPLES
    load_scalars(scalars, engine)
    engine.set_gradient_accumulation_boundary(True)
    engine.micro_steps = 4
    kept = describe_deepspeed(engine).scalars
    engine.set_gradient_accumulation_boundary(False)
    engine.micro_steps = 0
    load_scalars(kept, engine)
    again = describe_deepspeed(engine).scalars
    note("a caller that counts itself", "" if again == kept and engine.micro_steps == 4 else "lost")

    # fp16 does not run on every CPU; the scaler that it uses is the same object.
    engine.fp16_enabled = lambda: True
    scaler = DynamicLossScaler(2.0**16, 100, 1.0, 2, False)
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 2.0**11, 9, 7
    scaler.cur_hysteresis = 1
    engine.optimizer.loss_scaler = scaler
    kept = describe_deepspeed(engine).scalars
    engine.optimizer.loss_scaler = DynamicLossScaler(2.0**16, 100, 1.0, 2, False)
    load_scalars(kept, engine)
    again = describe_deepspeed(engine).scalars
    note("loss scale", "" if again == kept and again["grad_scaler"]["cur_iter"] == 9 else "lost")
    del engine.fp16_enabled

    engine.optimizer.offloaded_states.add("optim_states")
    expect("offloaded", UnsupportedState, "reload_states")
    engine.optimizer.offloaded_states.clear()
    engine.has_moe_layers = True
    expect("experts", UnsupportedState, "use a dense model")
    engine.has_moe_layers = False
    inner = engine.optimizer.optimizer
    engine.optimizer.optimizer = torch_sgd(inner)
    expect("another optimizer", UnsupportedState, "set the optimizer to AdamW")
    engine.optimizer.optimizer = inner
    version, deepspeed.__version__ = deepspeed.__version__, "0.99"
    expect("another version", UntestedVersion, "deepspeed==0.19.6")
    deepspeed.__version__ = version
    job.close()
    for stage in (0, 3):
        note(f"a model that is not trained, ZeRO-{stage}", not_trained(stage))
    return out


def not_trained(stage: int) -> str:
    """What is wrong with the unit of an evaluation engine; nothing if all is right."""
    import deepspeed

    from nereus_plugins.emu.described.deepspeed import describe_deepspeed, free_gradients, release

    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
    with torch.no_grad():
        before = engine(torch.ones(1, 3, dtype=torch.bfloat16))
        unit = describe_deepspeed(engine)
        free_gradients(engine)
        for shard in unit.shards:
            shard.view.mul_(2)
        after = engine(torch.ones(1, 3, dtype=torch.bfloat16))
    names = sorted(s.name for s in unit.shards)
    release(engine)
    if names != ["weight/0.bias", "weight/0.weight", "weight/1.bias", "weight/1.weight"]:
        return f"tensors {names}"
    if "groups" in unit.scalars or torch.equal(before, after):
        return "its weights are not those described"
    return ""


def torch_sgd(of: Any) -> Any:
    return torch.optim.SGD(of.param_groups, lr=0.1)
