"""Sampling on CPU: the same request gives the same bits whatever is served with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from nereus_cpu.checks import CpuPlatformError
from nereus_cpu.generate import Request, generate

ROWS, PROMPT_TOKENS = 8, 12


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the server."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> object:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen2ForCausalLM(config).eval()


def _request(number: int, temperature: float = 1.0) -> Request:
    return Request([3 + number, 5, 7][: 1 + number % 3], 6, temperature, seed=number)


def _generate(model: object, *numbers: int) -> dict[int, object]:
    done = generate(model, [_request(n) for n in numbers], rows=ROWS, prompt_tokens=PROMPT_TOKENS)
    return dict(zip(numbers, done, strict=True))


def test_does_not_depend_on_the_batch(model: object) -> None:
    together = _generate(model, *range(8))
    for numbers in ([3], [7, 3, 1], [6, 5, 4, 3, 2, 1]):
        for number, completion in _generate(model, *numbers).items():
            assert completion == together[number]


def test_samples_the_softmax(model: object) -> None:
    draws = Counter[int]()
    for start in range(0, 2000, ROWS):
        requests = [Request([4, 5], 1, 1.0, seed=start + i) for i in range(ROWS)]
        for c in generate(model, requests, rows=ROWS, prompt_tokens=PROMPT_TOKENS):
            draws[c.token_ids[0]] += 1
    logits = model(input_ids=torch.tensor([[4, 5]])).logits[0, -1]  # type: ignore[operator]
    expected = logits.softmax(-1).detach() * 2000
    got = torch.tensor([draws[i] for i in range(len(expected))])
    # Pearson's statistic with 47 degrees of freedom exceeds 85 once in 2,000 right samplers.
    assert float(((got - expected) ** 2 / expected).sum()) < 85


def test_log_probs_are_the_models(model: object) -> None:
    request = Request([4, 5], 5, 0.7, seed=1)
    (c,) = generate(model, [request], rows=ROWS, prompt_tokens=PROMPT_TOKENS)
    ids = torch.tensor([[4, 5, *c.token_ids]])
    logits = model(input_ids=ids).logits[0, 1:-1]  # type: ignore[operator]
    want = (logits / 0.7).log_softmax(-1).gather(-1, ids[0, 2:, None])[:, 0]
    assert torch.allclose(want, torch.tensor(c.log_probs), atol=1e-5)


def test_greedy_takes_the_most_likely(model: object) -> None:
    request = Request([4, 5], 1, 0.0, seed=1)
    (c,) = generate(model, [request], rows=ROWS, prompt_tokens=PROMPT_TOKENS)
    logits = model(input_ids=torch.tensor([[4, 5]])).logits[0, -1]  # type: ignore[operator]
    assert c.token_ids == [int(logits.argmax())]


def test_long_prompt_names_the_setting(model: object) -> None:
    request = Request([4] * (PROMPT_TOKENS + 1), 1, 1.0, seed=1)
    with pytest.raises(CpuPlatformError, match=r"data\.max_prompt_length"):
        generate(model, [request], rows=ROWS, prompt_tokens=PROMPT_TOKENS)
