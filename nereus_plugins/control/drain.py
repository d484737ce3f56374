"""`nereus drain`: tell Ray, and with it the jobs on it, that this node is going to go.

A job with a controller leaves the node within the notice (docs/verl-controller.md). Run it on the
node itself: where a scheduler says beforehand that it takes the node back, by a signal (Slurm's
--signal), by a file, or by calling something (Kubernetes' preStop, a spot notice).

Exit status:

    0  Ray drains the node
    1  Ray does not, and says why
    2  wrong usage
    4  no Ray cluster can be reached, or there is no such node in it
    130  interrupted while waiting; nothing was told
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nereus_plugins.control import by_ray, ray_private

DONE, NOT_DRAINED, USAGE, NO_CLUSTER = 0, 1, 2, 4
POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    try:
        number = None if args.on_signal is None else signal_number(args.on_signal)
        if not 0 <= args.notice < float("inf"):
            raise ValueError("--notice must be a number of seconds from 0")
        address = _address(args.address)
        ray_private.check_version()
        from ray.util import get_node_ip_address
    except ValueError as error:
        return _fail(USAGE, str(error))
    except ImportError:
        return _fail(NO_CLUSTER, "this takes Ray in this environment")
    except OSError as error:
        return _fail(NO_CLUSTER, f"no Ray cluster can be reached (--address): {error}")
    except ray_private.UnsupportedRay as error:
        return _fail(NOT_DRAINED, str(error))
    try:
        notice_s, why = _wait(number, args.on_file, args.notice)
        node_ip = args.node_ip or get_node_ip_address()
        node = ray_private.drain(address, node_ip, notice_s, why)
    except KeyboardInterrupt:
        return 130
    except ray_private.DrainRefused as error:
        return _fail(NOT_DRAINED, str(error))
    except (OSError, RuntimeError) as error:
        return _fail(NO_CLUSTER, f"no Ray cluster can be reached at {address}: {error}")
    print(f"Ray drains {node_ip} ({node[:8]}), which goes in {notice_s:g} s: {why}")
    return DONE


def signal_number(name: str) -> int:
    """ "USR1", "SIGUSR1" or "10". Raises: ValueError."""
    text = name.upper().removeprefix("SIG")
    if text in ("KILL", "STOP", "9", "19"):
        raise ValueError(f"--on-signal {name}: no process is told of that signal")
    try:
        return int(signal.Signals(int(text)) if text.isdecimal() else signal.Signals[f"SIG{text}"])
    except (KeyError, ValueError):
        raise ValueError(f"--on-signal {name}: no such signal") from None


def _wait(number: int | None, file: Path | None, notice_s: float) -> tuple[float, str]:
    """Until the signal or the file is there; at once where neither is asked for.

    Returns: seconds of notice, and what it came by.
    """
    if number is None and file is None:
        return notice_s, "nereus drain"
    awaited = [] if number is None else [f"signal {signal.Signals(number).name}"]
    awaited += [] if file is None else [f"file {file}"]
    with _told_of(number) as told:
        print(f"waiting for {' or '.join(awaited)}", flush=True)
        while not told:
            if file is not None and file.exists():
                return _seconds_in(file, notice_s), f"notice file {file}"
            time.sleep(POLL_S)
    return notice_s, f"signal {signal.Signals(told[0]).name}"


@contextlib.contextmanager
def _told_of(number: int | None) -> Iterator[list[int]]:
    """A list that gets the signal when it comes."""
    told: list[int] = []
    if number is None:
        yield told
        return
    before = signal.signal(number, lambda found, frame: told.append(found))
    try:
        yield told
    finally:
        signal.signal(number, before)


def _seconds_in(file: Path, otherwise_s: float) -> float:
    """The number in a notice file; a file that holds none gives the notice of the command line."""
    try:
        seconds = float(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return otherwise_s
    return seconds if 0 <= seconds < float("inf") else otherwise_s


def _address(given: str | None) -> str:
    """Of the cluster. Raises: ValueError; OSError where nothing answers there."""
    address = given or os.environ.get("RAY_ADDRESS") or ""
    try:
        if not by_ray.reach(address):
            raise ValueError("--address HOST:PORT (or RAY_ADDRESS) of the Ray cluster is required")
    except OverflowError:
        raise ValueError(f"--address {address}: no such port") from None
    return address


def _fail(status: int, text: str) -> int:
    print(f"nereus drain: {text}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="nereus drain",
        description=first.partition(": ")[2],
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="of the cluster (RAY_ADDRESS)")
    parser.add_argument("--node-ip", help="of the node, as it was started; default: this host's")
    parser.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="after which the node is gone (default 0)",
    )
    parser.add_argument(
        "--on-signal", metavar="NAME", help="wait for this signal (USR1, ...) before telling Ray"
    )
    parser.add_argument(
        "--on-file",
        type=Path,
        metavar="FILE",
        help="wait until this file is there; a number in it is the notice in seconds",
    )
    return parser
