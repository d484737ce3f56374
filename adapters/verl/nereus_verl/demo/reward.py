"""The demo task's reward, loaded by verl (reward.custom_reward_function.path)."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """Share of the answer's characters that are of the asked kind ("digits" or "letters"), 0 to 1."""
    asked = str.isdigit if ground_truth == "digits" else str.isalpha
    wanted = sum(1 for c in solution_str if c.isascii() and asked(c))
    return wanted / max(1, len(solution_str))
