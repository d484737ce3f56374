"""What verl, OpenRLHF and the engines under them need on CPU and gloo. Never active with CUDA."""

from nereus_cpu.checks import CpuPlatformError

__all__ = ["CpuPlatformError", "install_for_verl"]


def install_for_verl() -> None:
    """See `nereus_cpu.install.install_for_verl`."""
    from nereus_cpu.install import install_for_verl as install

    install()
