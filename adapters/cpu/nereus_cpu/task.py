"""A model and a task small enough for a CPU: random weights, a tokenizer of bytes, prompts. For
verl and OpenRLHF alike."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = 1024
SPECIAL_TOKENS = ("<pad>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Task:
    """Where the parts of the task lie. prompts_file: the rows of `train_file`, as OpenRLHF reads
    them (`prompt`, a chat, and `label`)."""

    model_dir: Path
    train_file: Path
    test_file: Path
    reward_file: Path
    prompts_file: Path


def make_task(
    directory: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    tied_embeddings: bool = False,
    seed: int = 0,
    response_limits: Sequence[int] = (),
) -> Task:
    """Makes model, tokenizer and prompts in `directory`; equal arguments give equal bytes.

    Args:
        response_limits: of each row, the tokens that its responses may have at most
            (`nereus_cpu.agent_loop`); rows beyond have the last one. None: the job's limit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model_dir = directory / "model"
    vocab_size = _save_tokenizer(model_dir)
    _save_model(model_dir, vocab_size, layers, hidden, tied_embeddings, seed)
    rows = [_prompt(i, random.Random(f"{seed}/{i}")) for i in range(PROMPTS)]
    for row, limit in zip(rows, _as_many(response_limits), strict=False):
        row["extra_info"]["max_tokens"] = limit
    task = Task(
        model_dir=model_dir,
        train_file=directory / "train.parquet",
        test_file=directory / "test.parquet",
        reward_file=Path(__file__).with_name("reward.py"),
        prompts_file=directory / "prompts.jsonl",
    )
    _save_rows(rows[:-16], task.train_file)
    _save_rows(rows[-16:], task.test_file)
    with task.prompts_file.open("w") as file:
        for row in rows[:-16]:
            label = row["reward_model"]["ground_truth"]
            file.write(json.dumps({"prompt": row["prompt"], "label": label}) + "\n")
    return task


def _as_many(limits: Sequence[int]) -> list[int]:
    return [limits[min(i, len(limits) - 1)] for i in range(PROMPTS)] if limits else []


def _save_tokenizer(model_dir: Path) -> int:
    """One token a byte (verl wants a newline to be one). Returns the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # Divisible by every tensor-parallel size up to 8. Each is a token: vLLM gives none to others.
    spare = [f"<|spare_{i}|>" for i in range(-len(words) % 8)]
    words += spare
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *spare],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(model_dir)
    return len(words)


def _save_model(
    model_dir: Path, vocab_size: int, layers: int, hidden: int, tied: bool, seed: int
) -> None:
    """Qwen2 (grouped-query attention, SwiGLU, RMSNorm, biases on q, k, v), fp32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # saving a small model is not worth one
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_sliding_window=False,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(model_dir)


def _prompt(index: int, rng: random.Random) -> dict[str, Any]:
    kind = "symbols" if index % 2 else "letters"
    return {
        "data_source": "nereus/demo",
        "prompt": [{"role": "user", "content": f"{rng.randrange(100):02d} {kind}"}],
        "ability": "format",
        "reward_model": {"style": "rule", "ground_truth": kind},
        "extra_info": {"index": index},
    }


def _save_rows(rows: list[dict[str, Any]], path: Path) -> None:
    import pandas as pd

    pd.DataFrame(rows).to_parquet(path)
