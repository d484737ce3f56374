"""OpenRLHF's model actors in plain processes, for tests of what a transition does in them.

A process holds an object of OpenRLHF's own actor class, as a Ray actor does, and runs functions on
it one at a time. `Model` is what the trainer's process does with them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nereus_openrlhf import openrlhf_private, worker
from nereus_openrlhf.config import STAGES

from nereus_plugins.spec import Layout

ANSWER_WITHIN_S = 240.0
VOCABULARY, SEQUENCE, BATCH = 96, 12, 12  # a batch of samples, which 1, 2, 3, 4 and 6 ranks share
TIMEOUT_S = 60.0


def make_model(folder: Path, *, value_head: bool = False) -> Path:
    """A small random Llama and a tokenizer, as files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2}
    inner = Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="w1", bos_token="w2"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def arguments(
    model: Path, *, dtype: str = "bf16", sleep: bool = False, average: bool = False
) -> SimpleNamespace:
    """OpenRLHF's, as its own parser leaves them. sleep: of DeepSpeed's engines. average: a moving
    one of the actor."""
    words = f"""--actor.model_name_or_path {model} --critic.model_name_or_path {model}
        --reward.remote_url f.py --data.prompt_dataset none --vllm.num_engines 1
        --train.batch_size {BATCH} --train.micro_batch_size 1 --rollout.batch_size {BATCH}
        --rollout.micro_batch_size 1 --actor.num_gpus_per_node 1 --critic.num_gpus_per_node 1
        --ds.attn_implementation eager --ds.param_dtype {dtype} --vllm.sync_backend gloo
        --actor.adam.lr 1e-2 --critic.adam.lr 1e-2 --actor.adam.weight_decay 0.01
        --ckpt.path {model.parent / "ckpt"} {"--ds.enable_sleep" * sleep}
        --ckpt.output_dir {model.parent / "saved"}
        {"--train.enable_ema --train.ema_beta 0.5" * average}"""
    args, _ = openrlhf_private.read_launcher(words.split())
    args.reward.model_name_or_path = str(model)
    return args  # type: ignore[no-any-return]


class Process:
    """A process with an empty model actor in it."""

    def __init__(self, unit: str) -> None:
        # Forked from the test's own process, which has imported all of it: that takes half a
        # minute, and starts no thread.
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, unit), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_WITHIN_S):
            raise TimeoutError("no answer")
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, unit: str) -> None:
    os.setpgrp()  # as an actor of its own
    from openrlhf.trainer.ray.launcher import ReferenceModelActor, RewardModelActor
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.trainer.ray.ppo_critic import CriticModelActor

    torch.set_num_threads(1)
    remote = {
        "actor": PolicyModelActor,
        "critic": CriticModelActor,
        "ref": ReferenceModelActor,
        "reward": RewardModelActor,
    }[unit]
    held = remote.__ray_metadata__.modified_class(1, 0, "127.0.0.1", 1)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(held, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def all_of(processes: list[Process], function: Callable[..., Any], each: list[Any]) -> list[Any]:
    """Run a function in all; answers in order."""
    for process, args in zip(processes, each, strict=True):
        process.begin(function, *args)
    return [process.answer() for process in processes]


class Model:
    """One model's ranks, and transitions of it, as `nereus_openrlhf.job` runs them."""

    def __init__(self, unit: str, args: SimpleNamespace, layout: Layout) -> None:
        self.unit, self.args, self.layout, self.epoch = unit, args, layout, 0
        self.ranks = [Process(unit) for _ in range(layout.world_size)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = [
            (self.args, unit, STAGES[layout.sharding], layout.tp, rank, layout.world_size, port)
            for rank in range(layout.world_size)
        ]
        all_of(self.ranks, build, given)
        told = [(unit, True, None, TIMEOUT_S, 0)] * layout.world_size
        found = all_of(self.ranks, worker.setup, told)
        assert [Layout.from_dict(one["layout"]) for one in found] == [layout] * layout.world_size
        self.backend = found[0]["backend"]

    def move(self, layout: Layout, *, fault: str = "") -> str:
        """One transition. Args: fault: as NEREUS_FAULT. Returns: why it was aborted, or ""."""
        self.epoch += 1
        old, stay = list(self.ranks), min(len(self.ranks), layout.world_size)
        joined = [Process(self.unit) for _ in range(layout.world_size - stay)]
        if joined:
            states = all_of(old[:1], worker.briefing, [()])[0]
            told = (self.unit, True, None, TIMEOUT_S, self.epoch - 1)
            entering = (*told, self.backend, self.layout.to_dict(), states)
            all_of(joined, worker.enter, [entering] * len(joined))
        union = [*old, *joined]
        order = (*range(stay), *range(len(old), len(union)))
        ((address, port),) = all_of(union[:1], worker.host_store, [()])
        size = len(union)
        answers = all_of(
            union, worker.join, [(rank, size, order, address, port) for rank in range(size)]
        )
        if any(answers):
            all_of(old, worker.withdraw, [()] * len(old))
            for process in joined:
                process.end()
            return "; ".join(filter(None, answers))
        all_of(union, set_fault, [(fault,)] * size)
        given = (layout.to_dict(), self.epoch, (0,) * size, self.args, 100)
        answers = all_of(union, worker.prepare, [given] * size)
        if not any("aborted" in answer for answer in answers):
            self.reports = [answer["report"] for answer in answers]
            answers = all_of(union, worker.commit, [()] * size)
        gave_up = [answer["aborted"] for answer in answers if "aborted" in answer]
        if gave_up:
            assert len(gave_up) == size
            all_of(old, worker.withdraw, [()] * len(old))
            for process in joined:
                process.end()
            return str(gave_up[0]["reason"])
        released = all_of(union, worker.release, [()] * size)
        after = [union[place] for place in order]
        all_of(after, worker.settle, [()] * len(after))
        for process in old[stay:]:
            process.end()
        self.ranks, self.layout = after, layout
        return str(released[0]["failed"])

    def train(self, steps: int, first: int) -> list[float]:
        """Losses of some optimizer steps, on batches numbered from `first`."""
        given = [(self.unit, steps, first)] * len(self.ranks)
        losses: list[list[float]] = all_of(self.ranks, train, given)
        assert all(one == losses[0] for one in losses)
        return losses[0]

    def state(self) -> dict[str, Any]:
        """The whole state: every tensor put together from the ranks' boxes, and scalars."""
        whole: dict[str, torch.Tensor] = {}
        scalars: list[str] = []
        for shards, said in all_of(self.ranks, state, [(self.unit,)] * len(self.ranks)):
            scalars.append(said)
            for name, shape, offset, data in shards:
                tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=data.dtype))
                box = tuple(
                    slice(low, low + size) for low, size in zip(offset, data.shape, strict=True)
                )
                known = tensor[box]
                fresh = known.isnan()
                assert torch.equal(known[~fresh], data[~fresh]), f"ranks differ in {name}"
                tensor[box] = data
        assert not any(bool(t.isnan().any()) for t in whole.values()), "a part is on no rank"
        return {"tensors": whole, "scalars": json.loads(scalars[0])}

    def change_weights(self) -> None:
        """Have other weights than are in the files. In a layout that does not cut them."""
        all_of(self.ranks, change_weights, [(self.unit,)] * len(self.ranks))

    def answers(self) -> torch.Tensor:
        """What a model that only reads says of one batch: OpenRLHF's `forward` on rank 0."""
        return all_of(self.ranks, answers, [(self.unit,)] * len(self.ranks))[0]  # type: ignore[no-any-return]

    def average(self) -> dict[str, torch.Tensor]:
        """The actor's moving average as rank 0 has it, whole."""
        return all_of(self.ranks, average, [()] * len(self.ranks))[0]  # type: ignore[no-any-return]

    def save(self) -> None:
        """As OpenRLHF does it at the end of a run."""
        all_of(self.ranks, save, [()] * len(self.ranks))

    def asleep(self) -> list[list[str]]:
        """What is in host memory, by rank."""
        return all_of(self.ranks, asleep, [(self.unit,)] * len(self.ranks))

    def groups(self) -> list[int]:
        """Process groups alive, by rank."""
        found = all_of(self.ranks, worker.memory, [()] * len(self.ranks))
        return [one["process_groups"] for one in found]

    def close(self) -> None:
        for process in self.ranks:
            process.end()


# -- in the processes --------------------------------------------------------------------------


def build(
    held: Any, args: Any, unit: str, stage: int, tp: int, rank: int, world: int, port: int
) -> None:
    """As OpenRLHF starts a rank."""
    held._rank, held._world_size = rank, world
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    openrlhf_private.build_model(held, args, unit, stage, tp, world, 100)
    if openrlhf_private.sleeps(held):
        held.offload_states()


def without_room(held: Any, unit: str) -> None:
    """Have the next transition find no room on the device for what sleeps."""
    engine = openrlhf_private.engine_of(held, unit)

    def reload_states(*_: Any, **__: Any) -> None:
        del engine.reload_states
        raise MemoryError("no room to wake")

    engine.reload_states = reload_states


def set_fault(held: Any, fault: str) -> None:
    os.environ["NEREUS_FAULT"] = fault


def train(held: Any, unit: str, steps: int, first: int) -> list[float]:
    import torch.distributed as dist

    if openrlhf_private.sleeps(held):  # as OpenRLHF's trainer has it
        held.reload_states()
    strategy, model = held.strategy, getattr(held, unit)
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY - 2, (BATCH, SEQUENCE), generator=generator)
        tp = strategy.ds_tensor_parallel_size  # ranks that have the same samples
        mine = tokens.chunk(dist.get_world_size() // tp)[dist.get_rank() // tp]
        total = 0.0
        for one in mine.split(1):
            mask = torch.ones_like(one)
            if unit == "actor":
                logits = model(one, attention_mask=mask, return_output=True)["logits"]
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1).float(), one[:, 1:].flatten()
                )
            else:
                values = model(one, action_mask=mask[:, 1:], attention_mask=mask)
                loss = ((values.float() - one[:, 1:] / VOCABULARY) ** 2).mean()
            strategy.backward(loss, model, None)
            strategy.optimizer_step(None, model, None)
            if getattr(held, "ema_model", None):
                strategy.moving_average(model, held.ema_model, strategy.args.train.ema_beta, "cuda")
            total += float(loss.detach()) / len(mine)
        losses.append(float(strategy.all_reduce(total)))
    if openrlhf_private.sleeps(held):
        held.offload_states()
    return losses


def asleep(held: Any, unit: str) -> list[str]:
    """What of a model is in host memory, by DeepSpeed's own account."""
    engine = openrlhf_private.engine_of(held, unit)
    return sorted(kind.value for kind in engine.optimizer.offloaded_states)


def state(held: Any, unit: str) -> tuple[list[Any], str]:
    from nereus_plugins.emu.described.deepspeed import describe_deepspeed

    if openrlhf_private.sleeps(held):
        held.reload_states()
    described = describe_deepspeed(openrlhf_private.engine_of(held, unit))
    named = [(s.name, s) for s in described.shards]
    scalars = dict(described.scalars)
    if (model := openrlhf_private.average_of(held)) is not None:
        named += [(f"averaged {s.name}", s) for s in describe_deepspeed(model).shards]
        strategy = held.strategy
        scalars["averaged"] = strategy.time_steps["ema"] / strategy.accumulated_gradient
    shards = [(name, s.global_shape, s.box.offset, s.view.detach().clone()) for name, s in named]
    if openrlhf_private.sleeps(held):
        held.offload_states()
    return shards, json.dumps(scalars)


def change_weights(held: Any, unit: str) -> None:
    with torch.no_grad():
        for param in openrlhf_private.engine_of(held, unit).module.parameters():
            param.mul_(-0.75)


def answers(held: Any, unit: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY - 2, (2, SEQUENCE), generator=generator)
    mask = torch.ones_like(tokens)
    if unit == "reward":
        return held.forward(tokens, mask)  # type: ignore[no-any-return]
    return held.forward(tokens, mask[:, 1:], mask)  # type: ignore[no-any-return]


def average(held: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    module = held.ema_model.model.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def save(held: Any) -> None:
    held.save_model()


def described_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raises: AssertionError where two states that `Model.state` gave differ in any bit, but for
    masters: layouts without a master of their own have none."""
    for name in a["tensors"].keys() | b["tensors"].keys():
        assert name in a["tensors"], name
        assert name in b["tensors"], name
        assert torch.equal(a["tensors"][name], b["tensors"][name]), name
    assert a["scalars"] == b["scalars"]
