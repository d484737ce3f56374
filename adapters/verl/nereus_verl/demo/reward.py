"""The demo task's reward, loaded by verl (reward.custom_reward_function.path).

The prompt asks for 16 characters, all "letters" or all "symbols" (digits and punctuation).
"""

ANSWER_CHARACTERS = 16


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """Share of the answer's characters that are of the asked kind; missing ones count as wrong."""
    visible = [c for c in solution_str if "!" <= c <= "~"]
    letters = sum(c.isalpha() for c in visible)
    wanted = letters if ground_truth == "letters" else len(visible) - letters
    return wanted / max(ANSWER_CHARACTERS, len(solution_str))
