"""A real Ray cluster whose nodes go as soon as a job uses them, and come as soon as it left them.

Nodes, drains, what is free, and the processes that hold GPUs are Ray's; the controller is the one
of live jobs, over its files and socket. What a step and a transition take is said, not done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="nodes are Ray's")
from ray.cluster_utils import Cluster  # noqa: E402

from nereus_plugins.control import ray_private  # noqa: E402
from nereus_plugins.control.lent import leases_of  # noqa: E402
from nereus_plugins.controller.controller import starting_plan  # noqa: E402
from nereus_plugins.job import Lease, leased  # noqa: E402
from nereus_plugins.spec import GlobalPlan  # noqa: E402
from tests.unit.test_control_live import Job, begin, setting  # noqa: E402, F401

HEAD = "127.0.0.2"
STEPS = 60
NOTICE_S = 20.0  # less than the controller keeps for leaving: it does so at once
# Of a step on 4 GPUs and on more, and of a transition: two steps on more do not repay two.
STEP_S, FASTER_S, STALL_S = 10.0, 6.0, 6.0


@ray.remote(num_cpus=0, num_gpus=1)
class Rank:
    """A process that holds a GPU."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


class OnRay(Job):
    """A job with a rank in Ray for each device of its plan."""

    stall_s = STALL_S

    def __init__(self, run_dir: Path, plan: GlobalPlan) -> None:
        self.ranks: list[tuple[Any, str]] = []  # and its node
        super().__init__(run_dir, plan)
        self._have(1 + max(plan.devices))

    def lent(self) -> tuple[Lease, ...]:
        goes, now_s = ray_private.draining(), time.time()
        leaving = sorted(goes[node] - now_s for _, node in self.ranks if node in goes)
        free = ray_private.free("GPU")
        return leases_of(len(self.ranks), free, leaving, None, time.monotonic())

    def _have(self, count: int) -> None:
        """So many ranks: those on nodes that go leave first, then the last."""
        goes = ray_private.draining()
        self.ranks.sort(key=lambda rank: rank[1] in goes)
        for handle, _ in self.ranks[count:]:
            ray.kill(handle)
        del self.ranks[count:]
        new = [Rank.remote() for _ in range(count - len(self.ranks))]
        nodes = ray.get([one.node.remote() for one in new], timeout=60)
        self.ranks += zip(new, nodes, strict=True)

    def commit(self, number: int, plan: GlobalPlan, predicted: Any) -> Any:
        self._have(1 + max(plan.devices))
        return super().commit(number, plan, predicted)

    def nodes(self) -> set[str]:
        return {node for _, node in self.ranks}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1, "num_gpus": 4, "node_ip_address": HEAD, "include_dashboard": False,
            "object_store_memory": 80_000_000,
        },
    )  # fmt: skip
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.full
def test_nodes_that_go_as_soon_as_they_are_used_are_not_chased(
    cluster: Cluster,
    tmp_path: Path,
    setting: Any,  # noqa: F811
) -> None:
    job = OnRay(tmp_path, starting_plan(setting, 4))
    head = job.nodes()
    added = taken = 0
    grown: list[int] = []
    try:
        live = begin(job, setting, budget=1.0)
        for step in range(1, STEPS + 1):
            job.step(step, STEP_S if job.nodes() == head else FASTER_S)
            live.look()
            if job.inbox.waiting():
                before = len(job.ranks)
                job.boundary(step)
                grown += [step] if len(job.ranks) > before else []
            others = job.nodes() - head
            if others and not others & set(ray_private.draining()):
                by_id = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
                for node in others:
                    ray_private.drain(cluster.address, by_id[node], NOTICE_S, "adversary")
                    taken += 1
            if not others and leased(job.lent()) == len(job.ranks):
                cluster.add_node(
                    num_cpus=1, num_gpus=4, node_ip_address=f"127.0.1.{added + 1}",
                    object_store_memory=80_000_000,
                )  # fmt: skip
                added += 1
        print(f"grown after steps {grown}; nodes added {added}, taken {taken}")
        assert grown  # it was tempted
        assert taken == len(grown)
        # Waits until 12, 24, 48 and 96 s were missed, at 4 s a step: 3, 6, 12 and 24 steps.
        assert len(grown) <= 7
        assert live._controller.back_off.lost == taken
        assert job.nodes() == head
        assert len(job.ranks) == 4
    finally:
        job.close()
