"""Entry point `verl.plugins`: runs in every process that imports verl.

It imports nothing heavy and changes nothing: it waits for verl's trainer to be imported, which only
the process that drives a job does, and brings in `nereus_verl.trainer` then; in the process that
starts a job, it has a job that asks for Nereus checked before Ray starts; in a worker process of
such a job, it waits for verl's Megatron engine. verl swallows what a
plugin raises, so a failure is printed, and makes a job that asks for Nereus fail; a job that does
not ask for it is left alone.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import

TRAINERS = "verl.trainer.ppo.v1"
MEGATRON_ENGINE = "verl.workers.engine.megatron.transformer_impl"


class NereusLoadError(RuntimeError):
    """A job asks for Nereus (`+nereus=on`), and Nereus could not be loaded."""


def register_resolver(omegaconf: ModuleType) -> None:
    """`${nereus_plugin_is_loaded:x}` -> x; in conf/nereus/on.yaml, to fail where this never ran."""
    omegaconf.OmegaConf.register_new_resolver(
        "nereus_plugin_is_loaded", lambda value: value, replace=True
    )


def load_trainer(trainers: ModuleType) -> None:
    """Called with `verl.trainer.ppo.v1` once verl has imported it."""
    try:
        import nereus_verl.trainer  # noqa: F401
    except Exception as error:
        print("nereus: could not be loaded into verl's trainer:", file=sys.stderr)
        traceback.print_exc()
        _fail_jobs_that_ask(trainers, error)


def _fail_jobs_that_ask(trainers: ModuleType, cause: Exception) -> None:
    from verl.trainer.ppo.v1 import trainer_base

    def failing(base: type) -> type:
        class FailingTrainer(base):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                config = kwargs.get("config", args[0] if args else None) or {}
                if (config.get("nereus") or {}).get("enable"):
                    raise NereusLoadError(
                        f"nereus.enable is true, but Nereus did not load: {cause!r}; repair the "
                        "installation (pip install 'nereus-plugins[verl]'), or set "
                        "nereus.enable=false to train with a fixed layout"
                    ) from cause
                super().__init__(*args, **kwargs)

        return FailingTrainer

    for mode, trainer in list(trainer_base.TRAINER_REGISTRY.items()):
        trainer_base.TRAINER_REGISTRY[mode] = failing(trainer)


def check_ahead(utils: Any) -> None:
    """Called with `verl.utils.config`, whose `validate_config` is the first thing that verl calls
    with a job's configuration, in the process that goes on to start Ray.

    A job that Nereus refuses ends there with one plain message, instead of a minute later in the
    middle of Ray's output.
    """
    validate = utils.validate_config

    def validate_config(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None) or {}
        if (config.get("nereus") or {}).get("enable"):
            _end_if_refused(config)
        return validate(*args, **kwargs)

    utils.validate_config = validate_config


def _end_if_refused(config: Any) -> None:
    """Raises: SystemExit with the reason; no traceback, which Hydra would add to an exception."""
    from omegaconf import OmegaConf

    try:
        from nereus_verl import preflight
    except Exception:
        return  # `load_trainer` says so, in the process that trains
    try:
        preflight.check_ahead(OmegaConf.to_container(config, resolve=True))
    except preflight.REFUSALS as error:
        sys.stdout.flush()  # the reason is to be the last that is read
        raise SystemExit(f"nereus: this job was not started: {error}") from None


def refuse_legacy(main_ppo_v0: Any) -> None:
    """Called with verl's legacy entry, which trains without any of the hooks used here."""
    validate = main_ppo_v0.validate_config

    def validate_config(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None) or {}
        if (config.get("nereus") or {}).get("enable"):
            raise NereusLoadError(
                "nereus.enable is true, but this is verl's legacy trainer, which Nereus cannot "
                "hook; set trainer.use_v1=True, or nereus.enable=false"
            )
        return validate(*args, **kwargs)

    main_ppo_v0.validate_config = validate_config


def refuse_sft(device: Any) -> None:
    """Called with `verl.utils.device`, whose `auto_set_device` is the first thing that verl's SFT
    trainers call with a job's configuration. They train without any of the hooks used here."""
    set_device = device.auto_set_device

    def auto_set_device(config: Any) -> None:
        is_sft = "actor_rollout_ref" not in config and "engine" in config
        if is_sft and (config.get("nereus") or {}).get("enable"):
            raise SystemExit(
                "nereus: this job was not started: nereus.enable is true, but this is verl's SFT "
                "trainer, which Nereus does not hook; leave +nereus=on out (or set "
                "nereus.enable=false) to train with a fixed layout"
            )
        set_device(config)

    device.auto_set_device = auto_set_device


def into_worlds(engine: ModuleType) -> None:
    """Called with verl's Megatron engine in a worker process of a job with Nereus on."""
    from nereus_verl import engine_worlds

    engine_worlds.install(engine)


def start_alone(engine: ModuleType) -> None:
    """Called with verl's Megatron engine in a process that will join a job."""
    from nereus_verl import verl_private

    verl_private.megatron_in_a_world_of_one(engine)


after_import("omegaconf", register_resolver)
after_import(TRAINERS, load_trainer)
after_import("verl.trainer.main_ppo_v0", refuse_legacy)
after_import("verl.utils.config", check_ahead)
after_import("verl.utils.device", refuse_sft)
if os.environ.get("NEREUS_WORKER"):
    after_import(MEGATRON_ENGINE, into_worlds)
if os.environ.get("NEREUS_JOINS"):
    after_import(MEGATRON_ENGINE, start_alone)
