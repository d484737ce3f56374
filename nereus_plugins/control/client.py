"""The client's side: finds a job by its run directory, sends one command, reads one reply."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from nereus_plugins.control import messages
from nereus_plugins.control.messages import BUSY, ENDPOINT_FILE, Endpoint, MessageError

CONNECT_WITHIN_S = 5.0
REPLY_WITHIN_S = 15.0
BUSY_FOR_S = 15.0
ASK_AGAIN_S = 0.1


class NoLiveJob(RuntimeError):
    """No job can be reached by this run directory; the text says why, as far as can be seen."""


class Client:
    """Commands to the job of `run_dir`.

    Raises: NoLiveJob.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / ENDPOINT_FILE
        try:
            self.endpoint = Endpoint.read(run_dir)
        except FileNotFoundError:
            raise NoLiveJob(
                f"no live job in {run_dir} ({ENDPOINT_FILE} is not there): it has ended, does not "
                "train yet, or runs with nereus.control=false"
            ) from None
        except PermissionError:
            raise NoLiveJob(
                f"{self._file} belongs to another user; only the job's owner can command it"
            ) from None
        except (OSError, MessageError) as error:
            raise NoLiveJob(f"{self._file} cannot be read: {error}") from None

    def call(self, command: str, *, wait_s: float = 0.0, **fields: Any) -> dict[str, Any]:
        """Send `command`; the reply, whose `state` may be "refused".

        Args: wait_s: how much longer than usual the reply may take.

        Raises: NoLiveJob; MessageError if what is to be sent, or the reply, is no message.
        """
        endpoint = self.endpoint
        if endpoint.host != socket.gethostname():
            raise NoLiveJob(
                f"the job's driver runs on host {endpoint.host} and takes commands there only; run "
                "this command on that host"
            )
        request = messages.encode({"token": endpoint.token, "command": command, **fields})
        deadline = time.monotonic() + BUSY_FOR_S
        try:
            while True:
                reply = messages.decode(self._exchange(request, REPLY_WITHIN_S + wait_s))
                if not all(isinstance(reply.get(name), str) for name in ("state", "reason")):
                    raise MessageError(
                        f"what listens on port {endpoint.port} is not the job: its reply has no "
                        "state and reason"
                    )
                if reply.get("state") != BUSY:
                    return reply
                if time.monotonic() > deadline:
                    raise NoLiveJob("the job is busy with too many other commands")
                time.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise NoLiveJob(
                f"the job (pid {endpoint.pid}) did not answer; it may be stopped or very busy"
            ) from None
        except OSError as error:
            raise NoLiveJob(self._why(error)) from None

    def _exchange(self, request: bytes, within_s: float) -> bytes:
        address = ("127.0.0.1", self.endpoint.port)
        with socket.create_connection(address, timeout=CONNECT_WITHIN_S) as connection:
            connection.settimeout(within_s)
            connection.sendall(request)
            reply = bytearray()
            while b"\n" not in reply and len(reply) <= messages.MOST_BYTES:
                part = connection.recv(1 << 16)
                if not part:
                    if not reply:
                        raise ConnectionError("it closed the connection")
                    break
                reply += part
        return bytes(reply)

    def _why(self, error: OSError) -> str:
        pid = self.endpoint.pid
        if not _is_alive(pid):
            return (
                f"the job is dead: its process {pid} is gone, and left {self._file} behind; remove "
                "that file, or start the job again"
            )
        return (
            f"the job does not take commands ({error.strerror or error}); process {pid} is there, "
            "so it is ending, or that number is another process's now"
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
