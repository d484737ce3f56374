"""Imported once by the server that CPU ranks are forked from: what every rank would import."""

import contextlib
import importlib

from nereus_plugins.selftest.ranks import prepare_process

prepare_process("cpu")
importlib.import_module("nereus_plugins.selftest.fsdp2_job")
with contextlib.suppress(ImportError):  # FSDP2 alone needs no Megatron-core
    importlib.import_module("nereus_plugins.selftest.megatron_job")
