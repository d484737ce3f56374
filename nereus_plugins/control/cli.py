"""`nereus transition`, `status`, `pause`, `resume`, `gpus`, `approve`: command a live job by its
run directory, or by its name in Ray.

Exit status of all of them:

    0  done: committed (with --no-wait: accepted), paused, resumed, status shown
    1  the transition was aborted (the old layout trains on) or failed (the job ends)
    2  wrong usage: no such directory, no plan in the file, records that cannot be read
    3  refused by the job, which says why; nothing was done
    4  no live job can be reached by this run directory or name
    130  interrupted while waiting: the plan stays pending
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nereus_plugins.control import by_ray
from nereus_plugins.control.client import Client, NoLiveJob
from nereus_plugins.control.messages import (
    ACCEPTED,
    COMMITTED,
    EXECUTING,
    FINAL,
    REFUSED,
    MessageError,
)
from nereus_plugins.control.offered import Offered
from nereus_plugins.control.view import View, lines
from nereus_plugins.spec import SpecError
from nereus_plugins.spec.layout import MOST_RANKS
from nereus_plugins.spec.record import load_yaml, read_text, shown
from nereus_plugins.trace.record import RecordError

DONE, NOT_COMMITTED, USAGE, NOT_TAKEN, NO_JOB = range(5)
WAIT_S = 20  # of one request; then it is asked again
MOST_STEPS = 1000  # that are shown
MOST_EVERY_S = 86400
MOST_NOTICE_S = 10**9

_EXIT = __doc__[__doc__.index("Exit status") :].replace(" of all of them", "")
_JOB = (
    "the job's run directory (nereus.run_dir; by default `nereus` in its checkpoint folder); or "
    "ray:NAME, on a node of its Ray cluster (RAY_ADDRESS, or the one that runs here): NAME is its "
    "Ray namespace, trainer.experiment_name, or the beginning of its run id; `ray:` the only job"
)


def transition(argv: Sequence[str]) -> int:
    parser = _parser(
        "transition",
        "Submit a plan to a live job. The job checks it at once and executes it at its next "
        "iteration boundary, as a transaction.",
    )
    parser.add_argument(
        "plan",
        type=Path,
        help="YAML or JSON: what nereus.schedule has for one step, like {tp: 2}, "
        "{actor: {ulysses: 2}}, {ranks: 8}; or a global plan",
    )
    _may_wait(parser)
    parser.add_argument(
        "--epoch",
        type=int,
        help="the epoch that the plan was made for; refused if the job is in another one. Without: "
        "the one that it is in now",
    )
    return _guarded(parser, argv, _transition)


def _may_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show progress until it is committed, refused or aborted (Ctrl-C leaves it pending)",
    )


def _transition(args: argparse.Namespace) -> int:
    try:
        plan = load_yaml(read_text(args.plan), str(args.plan))
    except (OSError, SpecError) as error:
        raise _Usage(str(error)) from None
    if not isinstance(plan, dict) or not plan:
        raise _Usage(f"{args.plan}: no plan, which is a mapping like {{tp: 2}}; got {shown(plan)}")
    if args.epoch is not None and args.epoch < 0:
        raise _Usage(f"--epoch must be at least 0, got {args.epoch}")
    client = Client(args.run_dir)
    epoch = client.endpoint.epoch if args.epoch is None else args.epoch
    return _submitted(client, {"epoch": epoch, "plan": plan}, args.wait)


def _submitted(client: Client, fields: dict[str, Any], wait: bool) -> int:
    """Submit a plan, and show what becomes of it."""
    reply = client.call("submit", **fields)
    if reply["state"] == REFUSED:
        return _refused(reply)
    try:
        _say(reply)
        if not wait:
            return DONE
        while reply["state"] not in FINAL:
            seen = {"seen": reply["state"], "phase": reply["phase"]}
            answer = client.call(
                "wait", wait_s=WAIT_S, number=reply["number"], timeout_s=WAIT_S, **seen
            )
            reply = {**reply, **answer}
            if {"seen": reply["state"], "phase": reply["phase"]} != seen:
                _say(reply)
    except KeyboardInterrupt:
        print(f"plan {reply['number']} is still {reply['state']}; see `nereus status`")
        return 130
    except NoLiveJob as error:
        raise NoLiveJob(f"plan {reply['number']} was not answered: {error}") from None
    if reply["state"] == REFUSED:
        return NOT_TAKEN
    return DONE if reply["state"] == COMMITTED else NOT_COMMITTED


def _say(reply: dict[str, Any]) -> None:
    """One line on a submitted plan's state."""
    number, state = reply.get("number"), reply["state"]
    text = f"plan {number}: {state}"
    if state == ACCEPTED:
        text += f" for epoch {reply['epoch']}, at the next iteration boundary: {reply['what']}"
    elif state == EXECUTING:
        text += f" after step {reply['step']}: {reply['phase'] or 'begun'} ..."
    if reply["reason"]:
        text += f": {reply['reason']}"
    print(text, flush=True)


def status(argv: Sequence[str]) -> int:
    parser = _parser(
        "status",
        "Show a job: plan and epoch, times of the last steps by stage, memory, transitions, what "
        "is pending, whether it is paused. Of a job that has ended: what its records say.",
    )
    parser.add_argument("--watch", action="store_true", help="refresh until the job ends")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="how many steps to show (default 5)"
    )
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="with --watch (default 2)"
    )
    return _guarded(parser, argv, _status)


def _status(args: argparse.Namespace) -> int:
    if not 1 <= args.steps <= MOST_STEPS:
        raise _Usage(f"--steps must be 1 to {MOST_STEPS}, got {args.steps}")
    if not 0 < args.every <= MOST_EVERY_S:
        raise _Usage(f"--every must be above 0 and at most {MOST_EVERY_S} seconds")
    job = View(args.run_dir, args.steps)
    clear = "\033[H\033[2J" if sys.stdout.isatty() else ""
    try:
        while True:
            seen = job.look()
            text = json.dumps(seen) if args.json else "\n".join(lines(seen))
            print((clear if args.watch else "") + text, flush=True)
            if not args.watch or not seen["live"]:
                return DONE
            time.sleep(args.every)
    except (OSError, RecordError) as error:
        raise _Usage(str(error)) from None
    except KeyboardInterrupt:
        return DONE


def pause(argv: Sequence[str]) -> int:
    parser = _parser(
        "pause",
        "Pause changes of a live job's layout. Training goes on. While paused, the job executes no "
        "transition: one that is scheduled for a step reached meanwhile is skipped for good and "
        "recorded so, submitted plans are refused, a pending one is refused now. One that is being "
        "executed ends first. It lasts until `nereus resume`, or the job's end: a job that is "
        "started again is not paused.",
    )
    return _guarded(parser, argv, lambda args: _switch(args, "pause"))


def resume(argv: Sequence[str]) -> int:
    parser = _parser(
        "resume",
        "End `nereus pause`: the job executes transitions again. What was skipped meanwhile is not "
        "made up for; submit it with `nereus transition`.",
    )
    return _guarded(parser, argv, lambda args: _switch(args, "resume"))


def _switch(args: argparse.Namespace, command: str) -> int:
    client = Client(args.run_dir)
    reply = client.call(command, epoch=client.endpoint.epoch)
    if reply["state"] == REFUSED:
        return _refused(reply)
    pending = reply["pending"]
    print("paused" if reply["paused"] else "not paused")
    if pending is not None:
        print(f"plan {pending['number']} is {pending['state']}")
    return DONE


def gpus(argv: Sequence[str]) -> int:
    parser = _parser(
        "gpus",
        "Say how many GPUs a live job with a controller may use from now on: more than it has "
        "ranks, and its controller may have it grow as far as Ray has them free; fewer, and it "
        "leaves the others within the notice.",
    )
    parser.add_argument("gpus", type=int, help="how many")
    parser.add_argument(
        "--notice",
        type=int,
        default=0,
        metavar="SECONDS",
        help="after which those beyond must have been left (default 0: at the next boundary)",
    )
    parser.add_argument(
        "--for",
        type=int,
        dest="lent",
        metavar="SECONDS",
        help="those beyond the ones that it has now, not lent, have to be left again after so long",
    )
    parser.add_argument(
        "--spot",
        type=int,
        metavar="SECONDS",
        help="these may be taken back before, with so much notice",
    )
    return _guarded(parser, argv, _gpus)


def _gpus(args: argparse.Namespace) -> int:
    if not 1 <= args.gpus <= MOST_RANKS:
        raise _Usage(f"gpus must be 1 to {MOST_RANKS}, got {args.gpus}")
    for option, seconds in (("notice", args.notice), ("for", args.lent), ("spot", args.spot)):
        if seconds is not None and not 0 <= seconds <= MOST_NOTICE_S:
            raise _Usage(f"--{option} must be 0 to {MOST_NOTICE_S} seconds, got {seconds}")
    client = Client(args.run_dir)
    reply = client.call(
        "gpus", epoch=client.endpoint.epoch, gpus=args.gpus, notice_s=args.notice,
        lent_s=args.lent, spot_s=args.spot,
    )  # fmt: skip
    if reply["state"] == REFUSED:
        return _refused(reply)
    print(f"the job may use {args.gpus} GPUs; it uses {reply['job'].get('gpus')}")
    return DONE


def approve(argv: Sequence[str]) -> int:
    parser = _parser(
        "approve",
        "Have a live job execute what its controller proposed (nereus.controller.mode=advise), at "
        "its next iteration boundary.",
    )
    parser.add_argument(
        "number", type=int, nargs="?", help="of the proposal (default: the last one, whichever)"
    )
    _may_wait(parser)
    return _guarded(parser, argv, _approve)


def _approve(args: argparse.Namespace) -> int:
    client = Client(args.run_dir)
    try:
        offered = Offered.read(args.run_dir)
    except FileNotFoundError:
        raise _Usage(f"the controller of {args.run_dir} has proposed nothing yet") from None
    except (OSError, SpecError) as error:
        raise _Usage(str(error)) from None
    if args.number is not None and args.number != offered.number:
        raise _Usage(
            f"proposal {args.number} is not the last one, which is {offered.number}: "
            f"{offered.reason}"
        )
    print(f"proposal {offered.number}: {offered.reason}")
    return _submitted(client, offered.fields(), args.wait)


def _refused(reply: dict[str, Any]) -> int:
    print(f"refused: {reply['reason']}", file=sys.stderr)
    return NOT_TAKEN


class _Usage(Exception):
    """What was asked cannot be tried; the text says why."""


def _parser(command: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"nereus {command}",
        description=text,
        epilog=_EXIT,
        formatter_class=_Help,
    )
    parser.add_argument("job", help=_JOB)
    return parser


class _Help(argparse.HelpFormatter):
    """Fills the description, leaves the epilog as it is written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text.rstrip() if "\n" in text else super()._fill_text(text, width, indent)


def _guarded(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    run: Callable[[argparse.Namespace], int],
) -> int:
    args = parser.parse_args(argv)
    try:
        if args.job.startswith(by_ray.PREFIX):
            args.run_dir = by_ray.find(args.job.removeprefix(by_ray.PREFIX))
        else:
            args.run_dir = Path(args.job)
        if not args.run_dir.is_dir():
            raise _Usage(f"{args.run_dir} is no directory")
        return run(args)
    except (_Usage, MessageError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return USAGE
    except NoLiveJob as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return NO_JOB
