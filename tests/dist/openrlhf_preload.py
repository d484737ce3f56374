"""What processes of these tests have imported when they are forked: it takes half a minute."""

from nereus_cpu import openrlhf

openrlhf.prepare()

import openrlhf.trainer.ray.ppo_actor  # noqa: E402
import openrlhf.trainer.ray.ppo_critic  # noqa: E402
