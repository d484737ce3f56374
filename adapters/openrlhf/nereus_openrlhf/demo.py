"""A real OpenRLHF PPO job on CPU that changes its layout while it trains.

    python -m nereus_openrlhf.demo [--dir DIR] [--plain] [further arguments of nereus-openrlhf]

Makes a tiny random Llama, prompts and a reward function, then runs `nereus-openrlhf` on them:
OpenRLHF's own `train_ppo_ray`, DeepSpeed on gloo, vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nereus_plugins.spec import Layout
from nereus_plugins.trace.record import RecordError, StepRecord, TransitionRecord, read_records

STEPS, PROMPTS = 5, 8  # prompts a step
END_WITHIN_S = 60.0
SCHEDULE = "{2: {dp: 1, sharding: zero3}, 4: {actor: {dp: 2, sharding: zero1}, critic: {dp: 2}}}"
REWARD = '''"""Rewards responses by how many letters "e" they have."""
import torch


def reward_func(queries, prompts, labels):
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    scores = torch.tensor([min(1.0, text.count("e") / 4 + 0.1) for text in texts])
    return {"rewards": scores, "scores": scores, "extra_logs": {"letters": scores}}
'''


def make_files(folder: Path, prompts: int) -> None:
    """A model, prompts and a reward function in `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    special = ["<pad>", "<s>", "</s>"]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    inner = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,  # vLLM on CPU wants heads of at least 32
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    lines = [
        json.dumps({"input": f"What is {i} plus {i + 1}?", "label": str(2 * i + 1)})
        for i in range(prompts)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)


def arguments(folder: Path, steps: int = STEPS) -> list[str]:
    """OpenRLHF's, for a PPO job with a critic: two ranks each, one vLLM engine."""
    model = str(folder / "model")
    return f"""--actor.model_name_or_path {model} --critic.model_name_or_path {model}
        --reward.remote_url {folder / "reward.py"}
        --data.prompt_dataset {folder / "prompts.jsonl"} --data.input_key input
        --data.label_key label --data.max_len 64 --data.max_samples {steps * PROMPTS}
        --rollout.max_new_tokens 16 --rollout.batch_size {PROMPTS} --rollout.micro_batch_size 2
        --rollout.n_samples_per_prompt 1
        --train.batch_size {PROMPTS} --train.micro_batch_size 2 --algo.kl.init_coef 0
        --algo.advantage.estimator gae --actor.adam.lr 1e-3 --critic.adam.lr 1e-3
        --actor.num_gpus_per_node 2 --critic.num_gpus_per_node 2 --ds.zero_stage 2
        --ds.attn_implementation eager
        --vllm.num_engines 1 --vllm.sync_backend gloo --vllm.enforce_eager
        --ckpt.output_dir {folder / "final"} --ckpt.path {folder / "checkpoints"}
        --logger.tensorboard_dir {folder / "tensorboard"}""".split()


@contextmanager
def started(folder: Path, words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, `nereus-openrlhf` runs on CPU in `folder`, its output into `log`. What is left of it
    then is ended, by SIGTERM first, of which Ray cleans up after itself."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "nereus_openrlhf.cli", *words]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(folder: Path, words: Sequence[str], log: Path, timeout_s: float | None = None) -> int:
    """As `started`, to its end; the exit status. Raises: subprocess.TimeoutExpired."""
    with started(folder, words, log) as process:
        return process.wait(timeout_s)


def tell(run_dir: Path) -> int:
    """Print what the records say; how many transitions were committed."""
    committed = 0
    for record in read_records(run_dir):
        if isinstance(record, StepRecord):
            layouts = ", ".join(
                f"{name} {Layout.from_dict(fields)}" for name, fields in record.plan.items()
            )
            reward = record.metrics.get("rollout/reward_mean", float("nan"))
            loss = record.metrics.get("policy_loss", float("nan"))
            print(
                f"step {record.step}: reward {reward:.3f}, policy loss {loss:+.4f}, "
                f"{record.step_s:.1f} s; {layouts}"
            )
        elif isinstance(record, TransitionRecord):
            committed += record.outcome == "committed"
            parts = ", ".join(
                f"{phase} {spent:.1f}"
                for phase, spent in record.seconds.items()
                if "." not in phase
            )
            print(
                f"  transition {record.outcome} in {record.stall_s:.1f} s ({parts})"
                + (f": {record.reason}" if record.reason else "")
            )
    return committed


def main() -> None:
    """The command. Raises: SystemExit."""
    parser = argparse.ArgumentParser(prog="nereus_openrlhf.demo", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("openrlhf-demo"), help="where to run")
    parser.add_argument("--plain", action="store_true", help="OpenRLHF alone, without Nereus")
    args, further = parser.parse_known_args()
    folder = args.dir.absolute()
    make_files(folder, STEPS * PROMPTS)
    words = arguments(folder)
    if not args.plain:
        words += ["--nereus.enable", "--nereus.run_dir", str(folder / "nereus")]
        words += ["--nereus.schedule", SCHEDULE]
    log = folder / "log.txt"
    print(f"running OpenRLHF on CPU, a few minutes; its output: {log}", flush=True)
    begin_s = time.monotonic()
    status = run(folder, [*words, *further], log)
    if status:
        print("\n".join(log.read_text(errors="replace").splitlines()[-30:]))
        raise SystemExit(f"OpenRLHF ended with status {status}; see {log}")
    if not args.plain:
        try:
            committed = tell(folder / "nereus")
        except (RecordError, FileNotFoundError) as error:
            raise SystemExit(f"no records: {error}") from None
        if committed != 2:
            raise SystemExit(f"{committed} of 2 transitions were committed; see {log}")
    print(f"done in {time.monotonic() - begin_s:.0f} s; model in {folder / 'final'}")


if __name__ == "__main__":
    main()
