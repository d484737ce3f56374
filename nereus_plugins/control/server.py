"""The server in a job's driver: takes commands into the inbox, on the loopback interface only.

Nothing that a client sends harms the job: sizes, times and numbers of connections are limited,
input is JSON, and what goes wrong in a thread of the server is answered to the client.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hmac
import os
import secrets
import socket
import socketserver
import threading
import time
from pathlib import Path
from typing import Any

from nereus_plugins.control import messages
from nereus_plugins.control.inbox import Inbox, Refused
from nereus_plugins.control.messages import BUSY, ENDPOINT_FILE, REFUSED, Endpoint, MessageError

MOST_CONNECTIONS = 16
REQUEST_WITHIN_S = 10.0
LONGEST_WAIT_S = 30.0
CLOSE_WITHIN_S = 2.0


class Server:
    """Listens from its making on, until `close`.

    Args:
        run_dir: where the endpoint file goes. inbox: what commands are written into.
        run_id: of the job's RunRecord. epoch: in force.

    Raises: OSError if it cannot listen or the endpoint file cannot be written.
    """

    def __init__(self, run_dir: Path, inbox: Inbox, run_id: str, epoch: int) -> None:
        self._run_dir = run_dir
        self._inbox = inbox
        self._tcp = _Tcp(inbox, secrets.token_hex(32))
        self.endpoint = Endpoint(
            host=socket.gethostname(),
            port=self._tcp.server_address[1],
            token=self._tcp.token,
            pid=os.getpid(),
            run_id=run_id,
            epoch=epoch,
        )
        try:
            self.endpoint.write(run_dir)
        except OSError:
            self._tcp.server_close()
            raise
        self._closed = False
        self._thread = threading.Thread(
            target=self._tcp.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.name = "nereus-control"
        self._thread.start()
        atexit.register(self.close)

    def moved_to(self, epoch: int) -> None:
        """The job is in another epoch. Raises: OSError if that cannot be written to the file."""
        if epoch != self.endpoint.epoch:
            self.endpoint = dataclasses.replace(self.endpoint, epoch=epoch)
            self.endpoint.write(self._run_dir)

    def close(self) -> None:
        """Answer what is pending, stop listening, remove the endpoint file."""
        if (
            self._closed or os.getpid() != self.endpoint.pid
        ):  # at the exit of a fork, not of the job
            return
        self._closed = True
        atexit.unregister(self.close)
        # Another job may have been started in this directory meanwhile: the file is then its own.
        with contextlib.suppress(OSError, MessageError):
            if Endpoint.read(self._run_dir).token == self.endpoint.token:
                (self._run_dir / ENDPOINT_FILE).unlink()
        self._inbox.close()
        self._tcp.shutdown()
        self._tcp.finish(CLOSE_WITHIN_S)
        self._tcp.server_close()
        self._thread.join(CLOSE_WITHIN_S)


class _Tcp(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, inbox: Inbox, token: str) -> None:
        self.inbox = inbox
        self.token = token
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.sendall(messages.encode({"state": BUSY, "reason": "too many commands"}))
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish(self, within_s: float) -> None:
        """Let requests in progress be answered."""
        deadline = time.monotonic() + within_s
        for _ in range(MOST_CONNECTIONS):
            self._free.acquire(timeout=max(deadline - time.monotonic(), 0.0))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or no thread: nothing that the job's log should have."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Tcp
    request: socket.socket

    def handle(self) -> None:
        deadline = time.monotonic() + REQUEST_WITHIN_S
        line = bytearray()
        while b"\n" not in line and len(line) <= messages.MOST_BYTES:
            self.request.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self.request.recv(1 << 16)
            if not part:
                break
            line += part
        reply = self._reply(bytes(line))
        self.request.settimeout(REQUEST_WITHIN_S)
        self.request.sendall(reply)

    def _reply(self, line: bytes) -> bytes:
        try:
            request = messages.decode(line)
            token = request.get("token")
            if not isinstance(token, str) or not hmac.compare_digest(
                token.encode(errors="replace"), self.server.token.encode()
            ):
                return _refusal("not this job's token")
            return messages.encode(_run(self.server.inbox, request))
        except MessageError as error:
            return _refusal(str(error))
        except Refused as error:
            return _refusal(str(error), error.by_plan)
        except Exception as error:  # ours; the client is told, the job goes on
            return _refusal(f"an error of Nereus itself: {error!r}")


def _refusal(reason: str, by_plan: bool = False) -> bytes:
    reply = {"state": REFUSED, "reason": reason[: messages.MOST_BYTES // 8]}
    return messages.encode(reply | ({"by_plan": True} if by_plan else {}))


def _run(inbox: Inbox, request: dict[str, Any]) -> dict[str, Any]:
    """Raises: MessageError, Refused."""
    command = request.get("command")
    if command == "status":
        return inbox.status()
    if command == "wait":
        timeout_s = min(messages.integer(request, "timeout_s"), LONGEST_WAIT_S)
        seen, phase = str(request.get("seen")), str(request.get("phase", ""))
        return inbox.wait(messages.integer(request, "number"), seen, timeout_s, phase)
    if command == "submit":
        plan = messages.check_plan(request.get("plan"))
        predicted = request.get("predicted")
        if predicted is not None:
            predicted = messages.check_numbers(predicted, "predicted")
        return inbox.submit(messages.integer(request, "epoch"), plan, predicted)
    if command == "gpus":
        gpus, notice_s = messages.integer(request, "gpus"), messages.integer(request, "notice_s")
        lent_s, spot_s = (
            None if request.get(name) is None else messages.integer(request, name)
            for name in ("lent_s", "spot_s")
        )
        return inbox.grant(messages.integer(request, "epoch"), gpus, notice_s, lent_s, spot_s)
    if command == "pause":
        return inbox.pause(messages.integer(request, "epoch"))
    if command == "resume":
        return inbox.resume(messages.integer(request, "epoch"))
    raise MessageError(f"command {command!r:.40} is not known")
