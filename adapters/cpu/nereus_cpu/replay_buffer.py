"""verl's replay buffer, giving a step's samples in the dataset's order and polling more often.

verl takes samples in the order of their arrival, which differs from run to run and with it the
rounding of every sum over the batch; and it polls every 2 s, most of a step on a small model.

    trainer.v1.sampler.custom_sampler.path=pkg://nereus_cpu.replay_buffer
    trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_S = 0.1


class OrderedReplayBuffer(ReplayBuffer):
    """For the synchronous trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": POLL_S})

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> Any:
        # The trainer registers a step's prompts in dataset order; verl's stable sort keeps it.
        order = {uid: i for i, uid in enumerate(self.prompt_global_steps[partition_id])}
        uids, snapshot, steps = super()._select_prompt_uids(
            partition_id,
            sorted(sampleable_keys, key=order.__getitem__),
            batch_size,
        )

        def position(key: str) -> tuple[int, ...]:
            uid, *numbers = key.split("_")  # "<uid>_<sample>_<output>"
            return (order.get(uid, len(order)), *map(int, numbers))

        return uids, {key: snapshot[key] for key in sorted(snapshot, key=position)}, steps
