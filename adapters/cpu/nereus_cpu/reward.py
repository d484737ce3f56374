"""The task's reward, loaded by verl (reward.custom_reward_function.path) and by OpenRLHF
(--reward.remote_url).

The prompt asks for 16 characters, all "letters" or all "symbols" (digits and punctuation).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ANSWER_CHARACTERS = 16
SPECIAL = re.compile(r"<pad>|<\|[\w-]+\|>")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """verl's: share of the answer's characters that are of the asked kind; missing ones count as
    wrong."""
    visible = [c for c in solution_str if "!" <= c <= "~"]
    letters = sum(c.isalpha() for c in visible)
    wanted = letters if ground_truth == "letters" else len(visible) - letters
    return wanted / max(ANSWER_CHARACTERS, len(solution_str))


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]
) -> dict[str, Any]:
    """OpenRLHF's: the same of each answer, which stands after its prompt; special tokens, which
    verl leaves out, are in a query."""
    import torch

    scores = torch.tensor(
        [
            compute_score("", SPECIAL.sub("", query[len(prompt) :]), label)
            for query, prompt, label in zip(queries, prompts, labels, strict=True)
        ]
    )
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
