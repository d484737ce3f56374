"""verl's single-turn agent loop, with a seed in every request, so that a run can be repeated.

actor_rollout_ref.rollout.agent.agent_loop_config_path=<AGENT_LOOP_CONFIG>
actor_rollout_ref.rollout.agent.default_agent_loop=seeded_single_turn
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

AGENT_LOOP_CONFIG = Path(__file__).with_name("agent_loop.yaml")


class SeededAgentLoop(SingleTurnAgentLoop):
    """The seed follows from rollout.seed, step, prompt, and the sample's number in the prompt.

    A row of the dataset may limit its own responses (`extra_info: {"max_tokens": 64}`), below
    data.max_response_length.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        identity = (
            self.rollout_config.seed,
            kwargs.get("global_steps"),
            kwargs.get("index"),
            kwargs.get("session_id"),
            list(kwargs["raw_prompt"]),
        )
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        own = {"seed": seed}
        limit = (kwargs.get("extra_info") or {}).get("max_tokens")
        if limit is not None:
            own["max_tokens"] = int(limit)
        return await super().run({**sampling_params, **own}, **kwargs)
