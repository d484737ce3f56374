"""`nereus drain` on a real Ray cluster of several nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="drains are Ray's")
from ray.cluster_utils import Cluster  # noqa: E402

from nereus_plugins.control import ray_private  # noqa: E402

HEAD, SECOND, THIRD = (f"127.0.0.{n}" for n in (2, 3, 4))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    args = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80_000_000}
    made = Cluster(
        initialize_head=True,
        head_node_args={**args, "node_ip_address": HEAD, "include_dashboard": False},
    )
    for address in (SECOND, THIRD):
        made.add_node(node_ip_address=address, **args)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@ray.remote(num_gpus=1)
class Holder:
    """Something on a node: Ray ends a draining node at once where nothing runs."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def drain(cluster: Cluster, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "nereus_plugins.cli", "drain", "--address", cluster.address]
    return subprocess.Popen(
        [*command, *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


def test_a_node_that_goes_is_known_with_its_deadline(cluster: Cluster, tmp_path: Path) -> None:
    holders = [Holder.remote() for _ in range(3)]
    nodes = set(ray.get([one.node.remote() for one in holders]))
    assert len(nodes) == 3
    assert ray_private.draining() == {}

    status, said = ended(drain(cluster, "--node-ip", "127.0.0.9"))
    assert status == 1
    assert f"its nodes are at {HEAD}, {SECOND}, {THIRD}" in said

    by_ip = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    begin_s = time.time()
    waits = drain(cluster, "--node-ip", SECOND, "--notice", "500", "--on-signal", "usr1")
    file = tmp_path / "notice"
    watches = drain(cluster, "--node-ip", THIRD, "--on-file", str(file))
    for process, what in ((waits, "signal SIGUSR1"), (watches, f"file {file}")):
        assert process.stdout is not None
        assert process.stdout.readline() == f"waiting for {what}\n"
    assert ray_private.draining() == {}
    waits.send_signal(signal.SIGUSR1)
    status, said = ended(waits)
    assert (status, "signal SIGUSR1" in said) == (0, True), said
    file.write_text("700\n")
    status, said = ended(watches)
    assert (status, "goes in 700 s" in said) == (0, True), said

    found = ray_private.draining()
    assert set(found) == {by_ip[SECOND], by_ip[THIRD]}
    assert 500 <= found[by_ip[SECOND]] - begin_s <= 560
    assert 700 <= found[by_ip[THIRD]] - begin_s <= 760
    assert len(ray.get([one.node.remote() for one in holders])) == 3  # who runs there, runs on
    free = ray_private.free_by_node()
    assert all(free[node].get("GPU", 0.0) == 0.0 for node in nodes)


def test_an_address_without_a_cluster_is_named() -> None:
    command = [sys.executable, "-m", "nereus_plugins.cli", "drain", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "no Ray cluster can be reached (--address)" in done.stderr
