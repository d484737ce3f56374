"""`nereus-openrlhf`: OpenRLHF's PPO launcher, with Nereus attached.

    nereus-openrlhf [--nereus.* ...] <the usual arguments of openrlhf.cli.train_ppo_ray>

Without --nereus.enable this is `python -m openrlhf.cli.train_ppo_ray` and nothing else. On a
machine without GPUs, DS_ACCELERATOR=cpu runs either on CPU (`nereus_cpu.openrlhf`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from nereus_openrlhf import openrlhf_private
from nereus_openrlhf.config import CONTROLLER, PREFIX, NereusConfig, split
from nereus_plugins.spec import SpecError


def main(words: Sequence[str] | None = None) -> None:
    """The console script. Raises: SystemExit."""
    words = sys.argv[1:] if words is None else list(words)
    if "-h" in words or "--help" in words:
        print(_help(), flush=True)
        if _cpu():
            from nereus_cpu import openrlhf

            openrlhf.prepare()
        openrlhf_private.run_plain(["--help"])
        return
    try:
        nereus, rest = split(words)
    except SpecError as error:
        raise SystemExit(f"nereus: this job was not started: {error}") from None
    if _cpu():
        from nereus_cpu import openrlhf

        openrlhf.prepare()
    if not nereus.enable:
        with _ray():
            openrlhf_private.run_plain(rest)
        return
    from nereus_openrlhf import preflight

    try:
        openrlhf_private.check_version()
        args, train = openrlhf_private.read_launcher(rest)
        checked = preflight.run(nereus, args)
    except preflight.REFUSALS as error:
        raise SystemExit(f"nereus: this job was not started: {error}") from None
    from nereus_openrlhf.group import ElasticGroup
    from nereus_openrlhf.trainer import launched

    # What a controller has leave can be asked for by others: Ray gets every GPU back.
    single = nereus.controller is not None and not args.train.colocate_all
    openrlhf_private.use_group(partial(ElasticGroup, single_seats=single))
    engine_groups = openrlhf_private.use_single_seats() if single else []
    openrlhf_private.use_trainer(launched(checked, engine_groups))
    with _ray():
        train(args)


def _cpu() -> bool:
    return os.environ.get("DS_ACCELERATOR", "").strip().lower() == "cpu"


def _ray() -> AbstractContextManager[None]:
    """Ray on this machine's CPU where that was asked for; else OpenRLHF starts or finds its own."""
    if not _cpu():
        return nullcontext()
    from nereus_cpu import openrlhf

    return openrlhf.ray_on_cpu()


def _help() -> str:
    lines = ["usage: nereus-openrlhf [--nereus.* ...] [the options of OpenRLHF, below]", ""]
    text = NereusConfig.__doc__ or ""
    for field in dataclasses.fields(NereusConfig):
        begin = text.index(f"        {field.name}: ") + len(f"        {field.name}: ")
        said: list[str] = []
        for line in text[begin:].splitlines():
            if said and not line.startswith("            "):
                break
            said.append(line.strip())
        default = "" if field.default is dataclasses.MISSING else f" (default: {field.default})"
        name = f"{CONTROLLER}.*" if field.name == CONTROLLER else f"{field.name}{default}"
        lines += [f"  {PREFIX}{name}", f"        {' '.join(said)}"]
    return "\n".join([*lines, "", "Of OpenRLHF:"])


if __name__ == "__main__":
    main()
