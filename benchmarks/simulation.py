"""How long the simulator itself takes for 1,000 steps that reach 1,024 GPUs, on one core.

    python benchmarks/simulation.py [--policy nereus] [--json]

Trace `thousand` (8B PPO, eight grants of GPUs), policy dp_scaling, so that transitions between up
to 1,024 ranks are compiled. What the policy spends (planning) is measured and left out: the limit
of 10 s is for simulating alone. With `--policy nereus` the limit is 300 s for all, the controller's
own time and the graphs that it compiles to estimate transitions included. `*_cpu_s` is processor
time, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time

from nereus_plugins.sim import run as running
from nereus_plugins.sim.job import Failure, SimulatedJob
from nereus_plugins.sim.nereus import Nereus
from nereus_plugins.sim.planning import Known
from nereus_plugins.sim.policies import Decision, DPScaling, Policy
from nereus_plugins.sim.world import World
from nereus_plugins.spec import GlobalPlan
from nereus_plugins.trace.conditions import find

# Seconds: simulating alone, and with the controller's own time.
LIMIT_S, CONTROLLER_LIMIT_S = 10.0, 300.0


class Timed:
    """A policy, and the processor time that it spends."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.name = inner.name
        self.cpu_s = self.longest_cpu_s = 0.0

    def start(self, known: Known) -> GlobalPlan:
        begin = time.process_time()
        try:
            return self.inner.start(known)
        finally:
            self.cpu_s += time.process_time() - begin

    def decide(self, job: SimulatedJob) -> Decision | None:
        begin = time.process_time()
        try:
            return self.inner.decide(job)
        finally:
            spent = time.process_time() - begin
            self.cpu_s += spent
            self.longest_cpu_s = max(self.longest_cpu_s, spent)

    def refused(self, job: SimulatedJob, decision: Decision) -> None:
        self.inner.refused(job, decision)

    def recover(self, job: SimulatedJob, failure: Failure) -> GlobalPlan:
        return self.inner.recover(job, failure)


def measure(name: str) -> dict[str, float | int | str]:
    world = World(find("thousand"))
    policy = Timed(Nereus(world) if name == "nereus" else DPScaling(world.planning()))
    wall, busy = time.perf_counter(), time.process_time()
    result = running.through(world, policy)
    busy = time.process_time() - busy
    of_limit = (busy - policy.cpu_s) / LIMIT_S
    if name == "nereus":
        of_limit = busy / CONTROLLER_LIMIT_S
    return {
        "policy": name,
        "steps": result.steps,
        "gpus": world.setting.cluster.world_size,
        "transitions": result.transitions,
        "simulation_cpu_s": round(busy - policy.cpu_s, 2),
        "policy_cpu_s": round(policy.cpu_s, 2),
        "policy_longest_cpu_s": round(policy.longest_cpu_s, 2),
        "of_limit": round(of_limit, 3),
        "wall_s": round(time.perf_counter() - wall, 2),
        "stopped": result.stopped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", choices=("dp_scaling", "nereus"), default="dp_scaling")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    found = measure(args.policy)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
