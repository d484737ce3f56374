"""Imported once by the server that CPU ranks are forked from: what every rank would import."""

import contextlib
import importlib

from nereus_plugins.selftest.ranks import prepare_process

prepare_process("cpu")
importlib.import_module("nereus_plugins.selftest.fsdp2_job")
for other in ("megatron_job", "deepspeed_job"):  # FSDP2 alone needs neither framework
    with contextlib.suppress(ImportError):
        importlib.import_module(f"nereus_plugins.selftest.{other}")
