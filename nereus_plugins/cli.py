"""The `nereus` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from nereus_plugins import __version__


def _selftest(arguments: Sequence[str]) -> int:
    from nereus_plugins.selftest import main

    return main(arguments)


def _demo(arguments: Sequence[str]) -> int:
    try:
        if find_spec("verl") is None:
            raise ModuleNotFoundError(name="verl")
        from nereus_verl.demo.run import main
    except ModuleNotFoundError as error:
        return _missing(error, "demo", "verl")
    return main(arguments)


def _records(arguments: Sequence[str]) -> int:
    from nereus_plugins.trace.show import main

    return main(arguments)


def _trace(arguments: Sequence[str]) -> int:
    from nereus_plugins.trace.cli import main

    return main(arguments)


def _sim(arguments: Sequence[str]) -> int:
    from nereus_plugins.sim.cli import main

    return main(arguments)


def _ab(arguments: Sequence[str]) -> int:
    from nereus_plugins.report.cli import main

    return main(arguments)


def _report(arguments: Sequence[str]) -> int:
    from nereus_plugins.report.show import main

    return main(arguments)


def _decisions(arguments: Sequence[str]) -> int:
    from nereus_plugins.controller.cli import main

    return main(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from nereus_plugins.planner.cli import main

    return main(arguments)


def _estimate(arguments: Sequence[str]) -> int:
    from nereus_plugins.cost.cli import main

    return main(arguments)


def _check(arguments: Sequence[str]) -> int:
    from nereus_plugins.planner.check import main

    return main(arguments)


def _calibrate(arguments: Sequence[str]) -> int:
    from nereus_plugins.cost.calibrate import main
    from nereus_plugins.trace.steps import read_run

    return main(arguments, read_run)


def _control(command: str) -> Callable[[Sequence[str]], int]:
    def run(arguments: Sequence[str]) -> int:
        from nereus_plugins.control import cli

        commands = (
            cli.transition, cli.status, cli.pause, cli.resume, cli.gpus, cli.approve,
        )  # fmt: skip
        return {f.__name__: f for f in commands}[command](arguments)

    return run


def _drain(arguments: Sequence[str]) -> int:
    from nereus_plugins.control.drain import main

    return main(arguments)


def _missing(error: ModuleNotFoundError, command: str, extra: str) -> int:
    print(
        f"nereus {command}: {error.name} is not installed; pip install 'nereus-plugins[{extra}]'",
        file=sys.stderr,
    )
    return 2


# Each command parses its own arguments and is imported only when called: `nereus` starts fast
# and works without torch.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "plan": ("the fastest plan that fits in memory, its alternatives, and why not others", _plan),
    "estimate": ("whether a given plan fits, and how fast it runs", _estimate),
    "check": ("whether a verl or OpenRLHF command fits, until which length, what to set", _check),
    "calibrate": ("learn from a run that has happened what estimates are off by", _calibrate),
    "selftest": ("prove on this machine: moving state is bit-exact, failures are safe", _selftest),
    "demo": ("a real verl PPO job on CPU that changes its layout while it trains", _demo),
    "records": ("show what a run's records say: steps, transitions", _records),
    "trace": ("logs as records; series and records as traces to simulate", _trace),
    "sim": ("policies on a trace, on a simulated cluster", _sim),
    "ab": ("policies or jobs side by side: figures and differences with intervals", _ab),
    "report": ("a page, or a trace for Perfetto, from the records of runs", _report),
    "decisions": ("why the controller of a run changed its plan, or did not", _decisions),
    "transition": ("submit a plan to a live job", _control("transition")),
    "status": (
        "a job's plan, last steps, memory and transitions; live or from its records",
        _control("status"),
    ),
    "pause": ("have a live job execute no transition; it trains on", _control("pause")),
    "resume": ("end `nereus pause`", _control("resume")),
    "gpus": ("say how many GPUs a live job with a controller may use", _control("gpus")),
    "approve": ("have a live job execute what its controller proposed", _control("approve")),
    "drain": ("tell Ray, and the jobs on it, that this node is going to go", _drain),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 what was asked for failed, 2 wrong usage or bad input; commands to a
    live job have more, see `nereus_plugins.control.cli`."""
    parser = argparse.ArgumentParser(
        prog="nereus",
        description="Change the parallel layout of a live RL post-training job.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:10} {text}" for name, (text, _) in COMMANDS.items())
        + "\n\n`nereus COMMAND --help` explains one.",
    )
    parser.add_argument("--version", action="version", version=f"nereus-plugins {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command][1](args.arguments)
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
