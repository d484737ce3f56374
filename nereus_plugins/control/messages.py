"""What goes over the socket, and the file by which a job is found.

One connection carries one request and one reply, each a JSON object on one line. A request has
`protocol`, `token` and `command`; commands that change something also the `epoch` they were made
for. A reply has `protocol`, `state` and `reason`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_plugins.spec.layout import MOST_RANKS

PROTOCOL = 1
ENDPOINT_FILE = "control.json"
MOST_BYTES = 1 << 18  # of one request or reply
MOST_DEPTH = 8
MOST_TEXT = 200
MOST_NUMBERS, MOST_NUMBER = 32, 1e18
MOST_INTEGER = 10**15

# States of a submitted plan, in the order it can have them; the last four are final.
ACCEPTED, EXECUTING = "accepted", "executing"
COMMITTED, ABORTED, REFUSED, FAILED = "committed", "aborted", "refused", "failed"
FINAL = (COMMITTED, ABORTED, REFUSED, FAILED)
# Of other replies.
OK, BUSY = "ok", "busy"

_SIZES = ("tp", "pp", "dp", "cp", "ulysses")


class MessageError(ValueError):
    """Not a message of this protocol; the text says what is wrong with it."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Raises: MessageError where it cannot be written, or is larger than MOST_BYTES."""
    try:
        line = json.dumps({"protocol": PROTOCOL, **message}, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"cannot be sent as JSON: {error}") from None
    if len(line) > MOST_BYTES:
        raise MessageError(f"{len(line)} bytes; a message may have {MOST_BYTES}")
    return line


def decode(line: bytes) -> dict[str, Any]:
    """Raises: MessageError."""
    if len(line) > MOST_BYTES:
        raise MessageError(f"larger than {MOST_BYTES} bytes")
    try:
        message = json.loads(line.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise MessageError("not a JSON object")
    if message.get("protocol") != PROTOCOL:
        raise MessageError(
            f"protocol {message.get('protocol')!r:.40} is not known to this version of Nereus (it "
            f"speaks {PROTOCOL}); use the version that the job runs"
        )
    return message


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def integer(message: Mapping[str, Any], name: str) -> int:
    """Raises: MessageError unless field `name` is a whole number from 0, and no absurd one."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_INTEGER:
        raise MessageError(f"{name} must be a whole number from 0 to {MOST_INTEGER}")
    return value


def check_numbers(numbers: Any, name: str) -> dict[str, float]:
    """Raises: MessageError unless field `name` maps a few names to numbers."""
    if not isinstance(numbers, dict) or len(numbers) > MOST_NUMBERS:
        raise MessageError(f"{name} must map at most {MOST_NUMBERS} names to numbers")
    for key, value in numbers.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if len(key) > MOST_TEXT or not number or abs(value) > MOST_NUMBER:
            raise MessageError(f"{name}.{key:.40}: {value!r:.40} is no number up to {MOST_NUMBER}")
    return numbers


def check_plan(plan: Any) -> dict[str, Any]:
    """A plan's outer shape and sizes, before the adapter reads it: no plan may cost the driver
    time or memory just by being checked.

    Raises: MessageError.
    """
    if not isinstance(plan, dict) or not plan:
        raise MessageError(
            "a plan is a mapping: what nereus.schedule has for a step, like {tp: 2} or "
            "{actor: {tp: 2}}, or a global plan with `assignments`"
        )
    _check_sizes(plan, "plan", 1)
    return plan


def _check_sizes(value: Any, where: str, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise MessageError(f"{where}: nested more than {MOST_DEPTH} deep")
    if isinstance(value, dict):
        factors = [value.get(name) for name in _SIZES]
        ranks = math.prod(abs(n) for n in factors if isinstance(n, int) and n != 0)
        if ranks > MOST_RANKS:
            raise MessageError(f"{where}: a layout of more than {MOST_RANKS} ranks")
        for key, child in value.items():
            _check_sizes(key, where, depth)
            _check_sizes(child, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for child in value:
            _check_sizes(child, where, depth + 1)
    elif isinstance(value, str):
        if len(value) > MOST_TEXT:
            raise MessageError(f"{where}: a text of {len(value)} characters; {MOST_TEXT} is most")
        # "0-9999999999" is a list of devices.
        if any(len(n) > 9 or int(n) > MOST_RANKS for n in re.findall(r"[0-9]+", value)):
            raise MessageError(f"{where}: a number above {MOST_RANKS}")
    elif isinstance(value, (int, float)) and abs(value) > MOST_RANKS * 1024:
        raise MessageError(f"{where}: {value!r:.40} is too large")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where a job listens: the content of `<run-dir>/control.json`, its owner's only.

    host: name of the node of the job's driver, on whose loopback interface it listens. pid: of the
    driver. run_id: of the job's RunRecord. epoch: the plan in force; commands are made for it.
    """

    host: str
    port: int
    token: str
    pid: int
    run_id: str
    epoch: int
    protocol: int = PROTOCOL

    def write(self, run_dir: Path) -> None:
        """Replace the file in one step. Raises: OSError."""
        descriptor, scratch = tempfile.mkstemp(dir=run_dir, prefix=ENDPOINT_FILE)  # mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(self), file)
            os.replace(scratch, run_dir / ENDPOINT_FILE)
        except BaseException:
            os.unlink(scratch)
            raise

    @classmethod
    def read(cls, run_dir: Path) -> Endpoint:
        """Raises: OSError; MessageError if it is not such a file."""
        path = run_dir / ENDPOINT_FILE
        try:
            fields = decode(path.read_bytes())
            endpoint = cls(**fields)
        except (TypeError, MessageError) as error:
            raise MessageError(f"{path}: {error}") from None
        for field in dataclasses.fields(cls):
            value = getattr(endpoint, field.name)
            if type(value).__name__ != str(field.type):
                raise MessageError(f"{path}: {field.name} must be {field.type}, got {value!r:.40}")
        if not 0 < endpoint.port < 1 << 16:
            raise MessageError(f"{path}: port {endpoint.port}")
        return endpoint
