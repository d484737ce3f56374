"""Imported once by the server that CPU ranks are forked from: what every rank would import."""

import contextlib

from nereus_plugins.selftest.ranks import prepare_process

prepare_process("cpu")
with contextlib.suppress(ImportError):  # FSDP2 alone needs no Megatron-core
    import nereus_plugins.selftest.megatron_job
import nereus_plugins.selftest.fsdp2_job  # noqa: F401
