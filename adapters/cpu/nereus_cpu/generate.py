"""Seeded sampling with Hugging Face generate, whose result does not depend on how requests batch.

Every call has the same shape (a fixed number of rows, prompts padded to a fixed length), so that
the arithmetic of one row does not change with the rows beside it, and every request draws from its
own random numbers. Equal requests to equal weights give equal bits, whatever else is being served,
on one thread: several may each have a part of the rows, and round them differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from nereus_cpu.checks import CpuPlatformError


@dataclass(frozen=True)
class Request:
    """One prompt. `temperature` 0 decodes greedily."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """`log_probs[i]` is the log-probability of `token_ids[i]` at the request's temperature."""

    token_ids: list[int]
    log_probs: list[float]


class _GumbelNoise(LogitsProcessor):
    """argmax(logits / T + Gumbel noise) is a draw from softmax(logits / T), the Gumbel trick."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._temperature = [r.temperature for r in requests]
        self._random = [np.random.Generator(np.random.Philox(key=r.seed)) for r in requests]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.to(torch.float32, copy=True)  # output_logits keeps the caller's
        for row, (t, random) in enumerate(zip(self._temperature, self._random, strict=True)):
            if t > 0:
                noise = torch.from_numpy(random.gumbel(size=scores.shape[1])).float()
                scores[row] = scores[row] / t + noise
        return scores


@torch.no_grad()
def generate(
    model: Any, requests: Sequence[Request], *, rows: int, prompt_tokens: int
) -> list[Completion]:
    """Completes up to `rows` requests with prompts of up to `prompt_tokens` tokens.

    Raises: CpuPlatformError on a prompt longer than that.
    """
    longest = max(len(r.prompt_ids) for r in requests)
    if longest > prompt_tokens:
        raise CpuPlatformError(
            f"a prompt has {longest} tokens: raise data.max_prompt_length (now {prompt_tokens})"
        )
    eos, pad = model.config.eos_token_id, model.config.pad_token_id or 0
    ids = torch.full((rows, prompt_tokens), pad)
    mask = torch.zeros_like(ids)
    mask[:, -1] = 1  # a row without a request attends to one padding token: no row is all masked
    for row, r in enumerate(requests):
        ids[row, prompt_tokens - len(r.prompt_ids) :] = torch.tensor(list(r.prompt_ids))
        mask[row, prompt_tokens - len(r.prompt_ids) :] = 1
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max(r.max_new_tokens for r in requests),
        eos_token_id=eos,
        pad_token_id=pad,
        logits_processor=LogitsProcessorList([_GumbelNoise(requests)]),
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = out.sequences[:, prompt_tokens:]
    completions = []
    for row, r in enumerate(requests):
        tokens = new[row, : r.max_new_tokens]
        ended = (tokens == eos).nonzero()
        tokens = tokens[: int(ended[0]) + 1] if len(ended) else tokens
        logits = torch.stack([out.logits[i][row].float() for i in range(len(tokens))])
        log_probs = (logits / (r.temperature or 1.0)).log_softmax(-1)
        completions.append(
            Completion(tokens.tolist(), log_probs.gather(-1, tokens[:, None])[:, 0].tolist())
        )
    return completions
