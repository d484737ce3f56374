"""The core's tests run everywhere; those of what needs a framework, in its environment."""

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

# What each needs beyond the core, as far as it can be missing.
NEEDS = {
    "test_checksum.py": "torch",
    "test_cpu_generate.py": "torch",
    "test_cpu_memory.py": "torch",
    "test_cpu_platform.py": "torch",
    "test_cpu_vllm.py": "torch",
    "test_demo.py": "verl",
    "test_described.py": "torch",
    "test_described_deepspeed.py": "deepspeed",
    "test_device_wait.py": "torch",
    "test_gtg_execute.py": "torch",
    "test_nereus_cpu_megatron.py": "torch",
    "test_openrlhf_job.py": "deepspeed",
    "test_openrlhf_recipes.py": "deepspeed",
    "test_planner_verl.py": "verl",
    "test_snapshot_files.py": "torch",
    "test_transport_backend.py": "torch",
    "test_verl_background.py": "torch",
    "test_verl_controller.py": "verl",
    "test_verl_job.py": "verl",
    "test_verl_memory.py": "verl",
    "test_verl_plugin.py": "verl",
    "test_verl_preflight.py": "verl",
    "test_verl_profiler.py": "verl",
    "test_verl_recipes.py": "verl",
    "test_verl_rollout.py": "verl",
    "test_verl_snapshots.py": "verl",
    "test_verl_worker.py": "verl",
}
# Some of whose tests do.
PARTLY = ("test_control_cli.py", "test_control_driver.py", "test_docs.py", "test_verl_knobs.py")
MISSING = {file: package for file, package in NEEDS.items() if find_spec(package) is None}
collect_ignore = list(MISSING)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--beyond-core",
        action="store_true",
        help="of tests/unit only what the core's environment lacks something for",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    core = name.startswith("test_") and name not in (*NEEDS, *PARTLY)
    return True if core and config.getoption("--beyond-core") else None


def pytest_configure() -> None:
    # A shell's background job ignores Ctrl-C, and so would the processes that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for file, package in MISSING.items():
        terminalreporter.write_line(f"not run here: {file} (needs {package})")
