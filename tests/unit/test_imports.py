"""The core works, and starts quickly, without torch; imports point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "nereus_plugins"
# A package imports only from those after it (CONTRIBUTING.md).
ORDER = [
    "cli",
    "selftest",
    "report",
    "sim",
    "control",
    "controller",
    "trace",
    "job",
    "snapshot",
    "gtg",
    "transport",
]
ORDER += ["emu", "planner", "cost", "spec"]
# What each layer may import although it stands above: none. `job` reads the record's schema.
ALLOWED_UP = {("job", "trace")}
RL_FRAMEWORKS = {"verl", "openrlhf", "nereus_verl", "nereus_openrlhf"}

BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "verl", "ray"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize(
    "module",
    [
        "nereus_plugins.spec",
        "nereus_plugins.emu.boxes",
        "nereus_plugins.emu.moves",
        "nereus_plugins.emu.predicted",
        "nereus_plugins.emu.feasibility",
        "nereus_plugins.gtg.build",
        "nereus_plugins.gtg.compile",
        "nereus_plugins.gtg.estimate",
        "nereus_plugins.gtg.journal",
        "nereus_plugins.transport.rounds",
        "nereus_plugins.job",
        "nereus_plugins.trace.record",
        "nereus_plugins.trace.cli",
        "nereus_plugins.sim.cli",
        "nereus_plugins.report.cli",
        "nereus_plugins.cli",
        "nereus_plugins.control.cli",
        "nereus_plugins.control.driver",
        "nereus_plugins.control.schedule",
        "nereus_plugins.control.server",
    ],
)
def test_imports_without_torch(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_TORCH + f"import {module}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _top_level_imports(file: Path) -> set[str]:
    """Every module named by an import statement anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_imports_point_down() -> None:
    wrong = []
    for file in CORE.rglob("*.py"):
        layer = file.relative_to(CORE).parts[0].removesuffix(".py")
        for name in _top_level_imports(file):
            parts = name.split(".")
            if parts[0] in RL_FRAMEWORKS and layer != "cli":
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
            if parts[0] != "nereus_plugins" or len(parts) < 2 or layer not in ORDER:
                continue
            other = parts[1]
            if other not in ORDER or (layer, other) in ALLOWED_UP:
                continue
            if ORDER.index(other) < ORDER.index(layer):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}, which stands above it")
    assert not wrong, "\n".join(wrong)
