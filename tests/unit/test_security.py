"""Nothing is unpickled or evaluated that came from outside; nothing listens beyond loopback."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("nereus_plugins", "adapters", "recipes", "benchmarks")
# Each of these runs what it reads, or can.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Functions by their last name: torch's object collectives pickle, and so on.
BUILTINS = {"eval", "exec"}  # a method of that name (`model.eval()`) is another thing
CALLS = BUILTINS | {
    "os.system", "unsafe_load", "full_load", "read_pickle",
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
# Why a call that looks forbidden is not.
ALLOWED = {
    # What megatron-core itself gathers, confined to the ranks of one layout.
    ("nereus_plugins/emu/described/megatron_private.py", "all_gather_object"),
    # OpenRLHF's own launcher, from the installed package, of which the parser is no function.
    ("adapters/openrlhf/nereus_openrlhf/openrlhf_private.py", "exec"),
}


def _sources() -> list[Path]:
    return [file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py"))]


def _name(call: ast.Call) -> tuple[str, str]:
    """("os.system", "system") of `os.system(...)`, ("eval", "eval") of `eval(...)`."""
    whole = ast.unparse(call.func)
    return whole, whole.rpartition(".")[2]


def _is(call: ast.Call, keyword: str, value: object) -> bool:
    return any(
        one.arg == keyword and isinstance(one.value, ast.Constant) and one.value.value is value
        for one in call.keywords
    )


def unsafe(source: str) -> Iterator[str]:
    """What in a module runs, or may run, what it reads; `line: what`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                if module.split(".")[0] in UNPICKLERS:
                    yield f"{node.lineno}: imports {module}"
        if not isinstance(node, ast.Call):
            continue
        full, last = _name(node)
        if full in CALLS or last in CALLS - BUILTINS:
            yield f"{node.lineno}: {last}"
        elif full == "torch.load" and not _is(node, "weights_only", True):
            yield f"{node.lineno}: torch.load without weights_only=True"
        elif full in ("np.load", "numpy.load") and not _is(node, "allow_pickle", False):
            yield f"{node.lineno}: np.load without allow_pickle=False"
        elif full == "yaml.load" and not any(
            one.arg == "Loader" and "Strict" in ast.unparse(one.value) for one in node.keywords
        ):
            yield f"{node.lineno}: yaml.load with a loader that is not known to be safe"
        elif _is(node, "shell", True):
            yield f"{node.lineno}: a shell"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load(path)",
        "np.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "dist.all_gather_object(out, value)",
        "pd.read_pickle(path)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert list(unsafe(source))


@pytest.mark.parametrize(
    "source",
    [
        "import json",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "model.eval()",
        "ast.literal_eval(text)",
    ],
)
def test_the_check_passes_over(source: str) -> None:
    assert not list(unsafe(source))


def test_nothing_from_outside_is_unpickled_or_evaluated() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{one}"
        for file in _sources()
        for one in unsafe(file.read_text())
        if (str(file.relative_to(ROOT)), one.partition(": ")[2]) not in ALLOWED
    ]
    assert not found


def test_nothing_listens_beyond_loopback() -> None:
    """No address that means "every interface" stands in the code; what is left to chance there
    (an empty host) is looked for in calls that bind."""
    found = []
    for file in _sources():
        for node in ast.walk(ast.parse(file.read_text())):
            everywhere = isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".bind"):
                everywhere |= any(ast.unparse(one).startswith("(''") for one in node.args)
            if everywhere:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found
