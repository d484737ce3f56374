"""Commands to a live job: the inbox, and the server on real sockets, whatever is sent to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereus_plugins.control import messages, server
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.inbox import Inbox, Refused
from nereus_plugins.control.messages import ENDPOINT_FILE, MOST_BYTES, Endpoint, MessageError
from nereus_plugins.control.server import Server

PLAN = {"tp": 2}


def check(plan: Mapping[str, Any]) -> str:
    """What an adapter does with a plan: this one knows tp only."""
    if set(plan) != {"tp"}:
        raise ValueError(f"plan: unknown field {sorted(set(plan) - {'tp'})}, did you mean tp?")
    if plan["tp"] == "bug":
        raise KeyError("an error of the adapter's own")
    return f"actor TP1 -> TP{plan['tp']}"


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(check)


@pytest.fixture
def running(inbox: Inbox, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, inbox, "run", 0)
    yield made
    made.close()


def raw(port: int, data: bytes, *, end: bool = True) -> bytes:
    """What the server answers to `data`; b"" if it only closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        try:
            connection.sendall(data)
            if end:
                connection.shutdown(socket.SHUT_WR)
            reply = b""
            while part := connection.recv(1 << 16):
                reply += part
            return reply
        except OSError:  # reset: an answer, too
            return b""


# -- the inbox ----------------------------------------------------------------------------------


def test_a_plan_is_accepted_pulled_and_answered(inbox: Inbox) -> None:
    assert not inbox.waiting()
    assert inbox.pull(1) is None
    accepted = inbox.submit(0, PLAN)
    assert (accepted["state"], accepted["what"]) == ("accepted", "actor TP1 -> TP2")
    assert inbox.waiting()
    pulled = inbox.pull(7)
    assert pulled is not None
    assert pulled.plan == PLAN
    assert inbox.wait(1, "accepted", 0)["state"] == "executing"
    inbox.inform(epoch=1)
    inbox.answer("committed")
    assert not inbox.waiting()
    ended = inbox.wait(1, "executing", 60)
    assert (ended["state"], ended["step"]) == ("committed", 7)


def test_a_status_never_has_a_plan_older_than_its_epoch() -> None:
    """The driver may commit while the status is put together."""
    plans = ["old", "new"]

    def more() -> dict[str, Any]:
        said = plans[0]
        del plans[:-1]
        one.inform(epoch=1)
        return {"global_plan": said}

    one = Inbox(check, more=more)
    found = [one.status() for _ in range(2)]
    assert [(each["job"]["epoch"], each["global_plan"]) for each in found] == [
        (0, "old"),
        (1, "new"),
    ]


def test_only_one_plan_is_pending(inbox: Inbox) -> None:
    inbox.submit(0, PLAN)
    with pytest.raises(Refused, match=r"another plan is pending \(number 1, accepted: actor TP1"):
        inbox.submit(0, PLAN)
    inbox.pull(1)
    with pytest.raises(Refused, match="number 1, executing"):
        inbox.submit(0, PLAN)
    inbox.answer("aborted", "rank 1 in build")
    assert inbox.submit(0, PLAN)["number"] == 2
    assert inbox.wait(1, "", 0)["reason"] == "rank 1 in build"


def test_a_stale_epoch_is_refused_and_so_is_what_has_become_stale(inbox: Inbox) -> None:
    inbox.inform(epoch=3)
    for command in (lambda: inbox.submit(2, PLAN), lambda: inbox.pause(4), lambda: inbox.resume(2)):
        with pytest.raises(Refused, match=r"stale: made for epoch \d, the job is in epoch 3"):
            command()
    inbox.submit(3, PLAN)
    inbox.inform(epoch=3)
    assert inbox.waiting()
    inbox.inform(epoch=4)  # something scheduled was committed first
    assert not inbox.waiting()
    ended = inbox.wait(1, "accepted", 0)
    assert (ended["state"], "in epoch 4" in ended["reason"]) == ("refused", True)


def test_a_plan_that_cannot_be_run_is_refused_by_the_setting(inbox: Inbox) -> None:
    with pytest.raises(Refused, match=r"unknown field \['tq'\]"):
        inbox.submit(0, {"tq": 2})
    assert not inbox.waiting()


def test_paused_nothing_is_taken_and_what_was_pending_is_refused(inbox: Inbox) -> None:
    inbox.submit(0, PLAN)
    assert inbox.pause(0)["paused"]
    assert inbox.paused
    assert inbox.pull(1) is None
    assert "paused" in inbox.wait(1, "accepted", 0)["reason"]
    with pytest.raises(Refused, match="`nereus resume` first"):
        inbox.submit(0, PLAN)
    assert not inbox.resume(0)["paused"]
    inbox.submit(0, PLAN)
    inbox.pull(2)
    assert inbox.pause(0)["pending"]["state"] == "executing", "it ends first"


@pytest.mark.parametrize(("pulled", "state"), [(False, "refused"), (True, "failed")])
def test_the_jobs_end_answers_who_waits(inbox: Inbox, pulled: bool, state: str) -> None:
    inbox.submit(0, PLAN)
    if pulled:
        inbox.pull(1)
    seen: list[dict[str, Any]] = []
    before = "executing" if pulled else "accepted"
    waiter = threading.Thread(target=lambda: seen.append(inbox.wait(1, before, 60)))
    waiter.start()
    inbox.close()
    waiter.join(10)
    assert [one["state"] for one in seen] == [state]
    with pytest.raises(Refused, match="ending"):
        inbox.submit(0, PLAN)


def test_old_answers_are_forgotten(inbox: Inbox) -> None:
    for _ in range(20):
        inbox.submit(0, PLAN)
        inbox.pull(1)
        inbox.answer("aborted")
    assert inbox.wait(20, "", 0)["state"] == "aborted"
    with pytest.raises(Refused, match="no plan number 1"):
        inbox.wait(1, "", 0)


# -- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (None, "a plan is a mapping"),
        ({}, "a plan is a mapping"),
        ([PLAN], "a plan is a mapping"),
        ({"shard_size": 10**30}, "too large"),
        ({"actor": {"tp": 2**10, "dp": 2**10}}, r"plan\.actor: a layout of more than 131072 ranks"),
        ({"assignments": {"actor-train": {"devices": "0-99999999"}}}, "devices: a number above"),
        ({"name": "x" * 201}, "a text of 201 characters"),
        ({"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {}}}}}}}}}, "nested more than 8"),
    ],
)
def test_a_plan_that_would_cost_the_driver_is_refused_unread(plan: Any, wrong: str) -> None:
    with pytest.raises(MessageError, match=wrong):
        messages.check_plan(plan)


def test_plans_of_any_real_size_pass() -> None:
    layout = {"tp": 8, "pp": 16, "dp": 512, "sharding": "zero1", "sequence_parallel": True}
    plan = {"assignments": {"actor-train": {"layout": layout, "devices": "0-65535"}}, "name": "big"}
    assert messages.check_plan(plan) == plan
    assert messages.check_plan({"ranks": 8, "leave": [0, 3], "actor": {"ulysses": 2}})


# -- the endpoint file --------------------------------------------------------------------------


def test_the_endpoint_is_its_owners_only_and_removed_at_the_end(
    inbox: Inbox, tmp_path: Path
) -> None:
    made = Server(tmp_path, inbox, "run", 5)
    path = tmp_path / ENDPOINT_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = Endpoint.read(tmp_path)
    assert found == made.endpoint
    assert (found.pid, found.epoch, found.run_id) == (os.getpid(), 5, "run")
    assert len(found.token) == 64
    made.moved_to(6)
    assert Endpoint.read(tmp_path).epoch == 6
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.close()
    made.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", found.port), timeout=5)


def test_it_listens_on_the_loopback_interface_only(running: Server) -> None:
    assert running._tcp.server_address[0] == "127.0.0.1"


def test_anothers_endpoint_is_left_alone(inbox: Inbox, tmp_path: Path) -> None:
    first = Server(tmp_path, inbox, "first", 0)
    second = Server(tmp_path, Inbox(check), "second", 0)
    first.close()
    assert Client(tmp_path).call("status")["state"] == "ok"
    second.close()


def test_a_job_that_cannot_write_its_endpoint_does_not_listen(inbox: Inbox, tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="No such file"):
        Server(tmp_path / "gone", inbox, "run", 0)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"protocol": 1}', '{"protocol": 2}', "\0" * 100]
    + [
        json.dumps({"protocol": 1, "host": "h", "token": "t", "run_id": "r", "epoch": 0} | fields)
        for fields in ({"port": 0, "pid": 1}, {"port": "22", "pid": 1}, {"port": 99999, "pid": 1})
    ],
)
def test_a_damaged_endpoint_is_said_to_be_so(tmp_path: Path, content: str) -> None:
    (tmp_path / ENDPOINT_FILE).write_text(content)
    with pytest.raises(NoLiveJob, match=f"{ENDPOINT_FILE} cannot be read"):
        Client(tmp_path)


def test_no_endpoint_another_host_another_job(running: Server, tmp_path: Path) -> None:
    with pytest.raises(NoLiveJob, match="it has ended, does not train yet, or"):
        Client(tmp_path / "elsewhere")
    replace(running.endpoint, host="node-17").write(tmp_path)
    with pytest.raises(NoLiveJob, match="runs on host node-17"):
        Client(tmp_path).call("status")
    replace(running.endpoint, token="0" * 64).write(tmp_path)
    assert Client(tmp_path).call("status") == {
        "protocol": 1,
        "state": "refused",
        "reason": "not this job's token",
    }


JOB = """
import sys, time
from pathlib import Path
from nereus_plugins.control.inbox import Inbox
from nereus_plugins.control.server import Server
server = Server(Path(sys.argv[1]), Inbox(str), "run", 0)
print("ready", flush=True)
if sys.argv[2] == "stay":
    time.sleep(60)
"""


def test_a_dead_jobs_endpoint_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", JOB, str(tmp_path), "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        assert Client(tmp_path).call("status")["state"] == "ok"
        job.send_signal(signal.SIGKILL)
        job.wait()
        with pytest.raises(NoLiveJob, match=rf"is dead: its process {job.pid} is gone.*remove"):
            Client(tmp_path).call("status")
    # Its number may be another process's by now.
    replace(Endpoint.read(tmp_path), pid=os.getpid()).write(tmp_path)
    with pytest.raises(NoLiveJob, match="does not take commands"):
        Client(tmp_path).call("status")


def test_a_job_that_ends_without_closing_leaves_no_endpoint(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", JOB, str(tmp_path), "end"], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


# -- the server ---------------------------------------------------------------------------------


def request(running: Server, **fields: Any) -> bytes:
    return json.dumps({"protocol": 1, "token": running.endpoint.token, **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    "token", ["", "0" * 64, None, 5, ["x"], "\ud800", "é" * 64, "x" * 100_000], ids=repr
)
def test_without_the_token_nothing_is_done(running: Server, inbox: Inbox, token: Any) -> None:
    line = json.dumps({"protocol": 1, "token": token, "command": "pause", "epoch": 0}).encode()
    reply = json.loads(raw(running.endpoint.port, line + b"\n"))
    assert (reply["state"], reply["reason"]) == ("refused", "not this job's token")
    assert not inbox.paused


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"command": "stop"}, "'stop' is not known"),
        ({}, "None is not known"),
        ({"command": "pause"}, "epoch must be a whole number"),
        ({"command": "pause", "epoch": True}, "epoch must be a whole number"),
        ({"command": "pause", "epoch": -1}, "epoch must be a whole number"),
        ({"command": "submit", "epoch": 0}, "a plan is a mapping"),
        ({"command": "submit", "epoch": 0, "plan": {"tq": 2}}, "did you mean tp"),
        ({"command": "submit", "epoch": 0, "plan": {"tp": "bug"}}, "an error of Nereus itself"),
        ({"command": "submit", "epoch": 9, "plan": PLAN}, "stale: made for epoch 9"),
        ({"command": "wait", "number": 1, "timeout_s": 1}, "no plan number 1"),
        ({"command": "status", "protocol": 2}, "protocol 2 is not known"),
    ],
)
def test_what_is_wrong_is_named(running: Server, fields: dict[str, Any], wrong: str) -> None:
    reply = json.loads(raw(running.endpoint.port, request(running, **fields)))
    assert reply["state"] == "refused"
    assert wrong in reply["reason"]


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "not JSON"),
        (b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b'{"protocol": 1, "epoch": ' + b"9" * 10_000 + b"}\n", "not JSON"),
        (b'{"protocol": NaN}\n', "NaN is not JSON"),
        (b"null\n", "not a JSON object"),
        (b"\xff\xfe\n", "not JSON"),
    ],
    ids=["empty", "http", "deep", "digits", "nan", "null", "bytes"],
)
def test_garbage_is_answered(running: Server, data: bytes, wrong: str) -> None:
    reply = json.loads(raw(running.endpoint.port, data))
    assert reply["state"] == "refused"
    assert wrong in reply["reason"]
    assert Client(running._run_dir).call("status")["state"] == "ok"


def test_what_is_too_large_is_not_read(running: Server) -> None:
    reply = raw(running.endpoint.port, b"x" * (8 * MOST_BYTES))
    # Closing with data unread resets the connection, which can take the answer with it.
    assert reply == b"" or b"larger than" in reply
    client = Client(running._run_dir)
    with pytest.raises(MessageError, match="a message may have"):
        client.call("submit", epoch=0, plan={"name": "x" * MOST_BYTES})
    assert client.call("status")["state"] == "ok"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries(
    {"command": st.sampled_from(["submit", "wait", "status", "pause", "resume"]) | JSON},
    optional={
        "epoch": st.just(0) | JSON,
        "plan": st.dictionaries(st.sampled_from(["tp", "actor", "ranks"]), JSON) | JSON,
        "number": st.integers(0, 3) | JSON,
        "seen": JSON,
        "timeout_s": st.just(0),
    },
)
MANY = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@MANY
@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(running: Server, inbox: Inbox, data: bytes) -> None:
    reply = messages.decode(raw(running.endpoint.port, data))
    assert reply["state"] == "refused"
    assert not inbox.waiting()


@MANY
@given(fields=FIELDS)
def test_any_json_is_answered(running: Server, inbox: Inbox, fields: dict[str, Any]) -> None:
    """Also with the right token: a reply that says how it went, and no thread ends in an error."""
    reply = messages.decode(raw(running.endpoint.port, request(running, **fields)))
    assert reply["state"] in {"ok", "accepted", "executing", "refused"}
    if inbox.waiting():
        inbox.pull(0)
        inbox.answer("aborted")


def test_two_plans_at_once_one_is_taken(running: Server) -> None:
    """Concurrent clients; the check takes long enough for all of them to be in it together."""
    together = threading.Barrier(4)

    def slow(plan: Mapping[str, Any]) -> str:
        together.wait(10)
        return "x"

    running._inbox._check = slow
    replies: list[dict[str, Any]] = []

    def submit() -> None:
        replies.append(Client(running._run_dir).call("submit", epoch=0, plan=PLAN))

    clients = [threading.Thread(target=submit) for _ in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(30)
    assert sorted(reply["state"] for reply in replies) == ["accepted", *["refused"] * 3]
    assert sum("another plan is pending" in reply["reason"] for reply in replies) == 3


def test_silent_clients_do_not_keep_others_out_for_ever(
    running: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_WITHIN_S", 2.0)
    address = ("127.0.0.1", running.endpoint.port)
    silent = [socket.create_connection(address) for _ in range(server.MOST_CONNECTIONS)]
    for connection in silent:
        connection.sendall(b"{")
    reply = b""
    while not reply:  # a reset can take the answer with it
        reply = raw(running.endpoint.port, b"", end=False)
    assert json.loads(reply)["state"] == "busy"
    assert Client(running._run_dir).call("status")["state"] == "ok", "it asks again"
    for connection in silent:
        connection.close()


def test_who_waits_is_told_and_the_driver_is_not_held_up(running: Server, inbox: Inbox) -> None:
    client = Client(running._run_dir)
    number = client.call("submit", epoch=0, plan=PLAN)["number"]
    replies: list[dict[str, Any]] = []

    def wait() -> None:
        replies.append(client.call("wait", number=number, seen="accepted", timeout_s=20))

    waiter = threading.Thread(target=wait)
    waiter.start()
    inbox.inform(epoch=0, step=3)
    assert inbox.pull(3) is not None
    waiter.join(10)
    assert [reply["state"] for reply in replies] == ["executing"]
    # The job's end is an answer too.
    last = threading.Thread(
        target=lambda: replies.append(
            client.call("wait", number=number, seen="executing", timeout_s=20)
        )
    )
    last.start()
    time.sleep(0.2)
    running.close()
    last.join(10)
    assert replies[-1]["state"] == "failed"
    assert "the job ended" in replies[-1]["reason"]


# -- GPUs, and plans of a controller -------------------------------------------------------------


def test_gpus_are_granted_by_command_where_there_is_a_controller(tmp_path: Path) -> None:
    inbox = Inbox(str, takes_gpus="", fewest_gpus=3)
    server = Server(tmp_path, inbox, "run", 3)
    try:
        inbox.inform(epoch=3)
        client = Client(tmp_path)
        assert inbox.granted() is None
        before = time.monotonic()
        assert client.call("gpus", epoch=3, gpus=4, notice_s=30)["state"] == "ok"
        granted = inbox.granted()
        assert granted is not None
        assert granted.gpus == 4
        assert before + 29 < granted.deadline < time.monotonic() + 31
        stale = client.call("gpus", epoch=2, gpus=4, notice_s=0)
        assert stale["state"] == "refused"
        assert "stale" in stale["reason"]
        assert "fewer than 3" in client.call("gpus", epoch=3, gpus=2, notice_s=0)["reason"]
    finally:
        server.close()


def test_gpus_are_refused_without_a_controller(running: Server, tmp_path: Path) -> None:
    reply = Client(tmp_path).call("gpus", epoch=running.endpoint.epoch, gpus=4, notice_s=0)
    assert reply["state"] == "refused"
    assert reply["reason"] == "this job has no controller"


def test_a_controllers_plan_is_adapted_and_its_numbers_are_kept(tmp_path: Path) -> None:
    inbox = Inbox(str, adapt=lambda plan: {**plan, "pp": 2}, more=lambda: {"gpus": 8})
    server = Server(tmp_path, inbox, "run", 0)
    try:
        client = Client(tmp_path)
        assert client.call("status")["gpus"] == 8
        reply = client.call("submit", epoch=0, plan={"tp": 2}, predicted={"saving_s": 1.5})
        assert reply["state"] == "accepted"
        pulled = inbox.pull(1)
        assert pulled is not None
        assert pulled.plan == {"tp": 2, "pp": 2}
        assert pulled.predicted == {"saving_s": 1.5}
        inbox.answer("refused", "not today", by_plan=True)
        (answered,) = client.call("status")["answered"]
        assert answered["by_plan"]
        assert client.call("submit", epoch=0, plan={"tp": 4})["state"] == "accepted"
        persons = inbox.pull(2)
        assert persons is not None
        assert persons.plan == {"tp": 4}  # as it was written
    finally:
        server.close()


@pytest.mark.parametrize("predicted", [[1], {"a": "1"}, {"a": True}, {"a": 1e300}, {"a": None}])
def test_numbers_that_are_none_are_refused(
    running: Server, tmp_path: Path, predicted: object
) -> None:
    fields = {"epoch": running.endpoint.epoch, "plan": {"tp": 2}, "predicted": predicted}
    reply = Client(tmp_path).call("submit", **fields)
    assert reply["state"] == "refused"
    assert "predicted" in reply["reason"]
