"""Nothing is unpickled or evaluated that came from outside; nothing listens beyond loopback; what a
job writes is its user's alone; what CI installs is pinned."""

import ast
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nereus_plugins.control import beside, live, offered
from nereus_plugins.control.beside import Beside, Launch
from nereus_plugins.control.driver import JOURNAL_FILE, check_run_dir
from nereus_plugins.control.inbox import Inbox
from nereus_plugins.control.messages import ENDPOINT_FILE
from nereus_plugins.control.offered import Offered
from nereus_plugins.control.server import Server
from nereus_plugins.controller import journal as decisions
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.gtg.journal import Journal
from nereus_plugins.spec import Assignment, GlobalPlan, Layout, LengthDistribution, ModelStage
from nereus_plugins.spec.record import SpecError, load_yaml
from nereus_plugins.trace.record import RECORDS_FILE, RecordWriter

from .test_sim import SETTING

ROOT = Path(__file__).resolve().parents[2]
CODE = ("nereus_plugins", "adapters", "recipes", "benchmarks")
# Each of these runs what it reads, or can.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Functions by their last name: torch's object collectives pickle, and so on.
BUILTINS = {"eval", "exec"}  # a method of that name (`model.eval()`) is another thing
CALLS = BUILTINS | {
    "os.system", "os.popen", "getoutput", "getstatusoutput", "read_pickle",
    "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "jit.load", "torch.jit.load",
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
# Loaders of YAML that make any object.
LOADERS = {"UnsafeLoader", "FullLoader", "yaml.Loader", "CLoader", "CUnsafeLoader", "CFullLoader"}
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
        if isinstance(node, (ast.Attribute, ast.Name)):
            named = ast.unparse(node)
            if named in LOADERS or named.rpartition(".")[2] in LOADERS:
                yield f"{node.lineno}: {named}"
        if not isinstance(node, ast.Call):
            continue
        for one in (*node.args, *(k.value for k in node.keywords)):
            # import_module("pickle"), and the like
            if isinstance(one, ast.Constant) and one.value in UNPICKLERS:
                yield f"{node.lineno}: imports {one.value}"
        full, last = _name(node)
        if full in CALLS or last in CALLS - BUILTINS:
            yield f"{node.lineno}: {last}"
        elif full == "torch.load" and not _is(node, "weights_only", True):
            yield f"{node.lineno}: torch.load without weights_only=True"
        elif full in ("np.load", "numpy.load") and not _is(node, "allow_pickle", False):
            yield f"{node.lineno}: np.load without allow_pickle=False"
        elif full in ("yaml.load", "yaml.load_all") and not any(
            one.arg == "Loader" and "Safe" in ast.unparse(one.value) for one in node.keywords
        ):
            yield f"{node.lineno}: yaml.load with a loader that is not known to be safe"
        elif last == "recv" and not node.args and not node.keywords:
            yield f"{node.lineno}: recv() of a multiprocessing connection, which unpickles"
        elif _is(node, "trust_remote_code", True):
            yield f"{node.lineno}: code that comes with a model"
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
        "os.popen(text)",
        "importlib.import_module('pickle')",
        "class Mine(yaml.FullLoader): pass",
        "from yaml import UnsafeLoader\nload(text, UnsafeLoader)",
        "yaml.load_all(text, Loader)",
        "connection.recv()",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path, weights_only=False)",
        "joblib = __import__('joblib')",
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
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "connection.recv_bytes()",
        "sock.recv(1 << 16)",
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


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.getcwd []", "!!python/name:os.system", "!!python/tuple [1]"],
)
def test_yaml_makes_no_object(text: str) -> None:
    assert yaml.load(text, Loader=yaml.UnsafeLoader) is not None  # it is one that could be made
    with pytest.raises(SpecError, match="could not determine a constructor"):
        load_yaml(text, "file")


def test_tokens_are_compared_in_constant_time() -> None:
    """In the job's process; `close` looks at its own file, `view` at no token at all."""
    found = []
    for file in sorted((ROOT / "nereus_plugins" / "control").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare) and "token" in ast.unparse(node):
                found.append(ast.unparse(node))
    assert found == ["Endpoint.read(self._run_dir).token == self.endpoint.token"]
    assert "hmac.compare_digest(" in (ROOT / "nereus_plugins/control/server.py").read_text()


# Of torch: ranks find each other at a node's address, and only one that knows the port of a group.
STORES = {
    "adapters/verl/nereus_verl/membership.py", "adapters/openrlhf/nereus_openrlhf/worker.py",
    "adapters/cpu/nereus_cpu/gloo_group.py",
}  # fmt: skip
SERVES = re.compile(r"\b(bind|\w*TCPServer|\w*HTTPServer|create_server|start_server|Listener)$")


def test_the_control_server_cannot_listen_elsewhere_or_without_a_token(tmp_path: Path) -> None:
    """No argument of it is an address or a token: both are its own, and a new token each time."""
    parameters = set(Server.__init__.__annotations__) - {"return"}
    assert parameters == {"run_dir", "inbox", "run_id", "epoch"}
    tokens = set()
    for number in range(2):
        server = Server(tmp_path, Inbox(lambda plan: ""), f"run {number}", 0)
        assert server._tcp.server_address[0] == "127.0.0.1"
        tokens.add(server.endpoint.token)
        server.close()
    assert len(tokens) == 2
    assert {len(token) for token in tokens} == {64}


def test_all_that_listens_is_known() -> None:
    found = set()
    for file in _sources():
        name = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                called = [ast.unparse(base) for base in node.bases]
            elif isinstance(node, ast.Call):
                called = [ast.unparse(node.func)]
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if called[0].endswith("TCPStore") and keywords.get("is_master") not in (
                    None,
                    "False",
                ):
                    found.add(name)
            else:
                continue
            found |= {name for one in called if SERVES.search(one)}
    assert found == STORES | {"nereus_plugins/control/server.py"}


# -- what a job writes ----------------------------------------------------------------------------

PLAN = GlobalPlan({ModelStage.ACTOR_TRAIN: Assignment(Layout(dp=4))})
# Files of a run directory, docs/operations.md: each by what makes it.
FILES = (
    RECORDS_FILE, JOURNAL_FILE, decisions.FILE, offered.FILE, beside.FILE, beside.LOG_FILE,
    live.LOCK_FILE, ENDPOINT_FILE,
)  # fmt: skip


def _write_all(folder: Path) -> Server:
    RecordWriter(folder).close()
    Journal(folder / JOURNAL_FILE).commit(epoch=1, plan={}, digest="", step=1)
    log = decisions.DecisionJournal(folder)
    log.append("state", {})
    log.close()
    lengths = LengthDistribution.fixed(9)
    setting = JobSetting(SETTING, lengths, 99, 9, {})
    Launch(setting, ControllerConfig(), PLAN, 0).write(folder)
    Offered(1, 0, PLAN, "", "", {}).write(folder)
    with live.only_one(folder, os.getppid()) as alone:
        assert alone
    controller = Beside(folder, lambda text: None)
    controller.start()
    deadline = time.monotonic() + 20
    while not controller.running and time.monotonic() < deadline:
        time.sleep(0.01)
    controller.close()
    return Server(folder, Inbox(lambda plan: ""), "run", 0)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_of_a_run_are_their_users_alone(umask: int, tmp_path: Path) -> None:
    """Whatever the umask, and also where they were left with wider rights."""
    listed = (ROOT / "docs" / "operations.md").read_text().partition("## Files of a run")[2]
    before = os.umask(umask)
    try:
        folder = check_run_dir(tmp_path / "run")
        assert not stat.S_IMODE(folder.stat().st_mode) & 0o077
        for name in FILES if umask == 0 else ():
            (folder / name).touch()
            (folder / name).chmod(0o666)
        _write_all(folder).close()
        server = Server(folder, Inbox(lambda plan: ""), "run", 0)
        try:
            for name in FILES:
                assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name
                assert f"`{name}`" in listed
            assert {path.name for path in folder.iterdir()} == set(FILES)
        finally:
            server.close()
    finally:
        os.umask(before)


def test_a_file_whose_rights_cannot_be_changed_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another user's, or its file system keeps none."""

    def refuse(handle: int, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    _write_all(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} >= {*FILES} - {ENDPOINT_FILE}
    assert Journal(tmp_path / JOURNAL_FILE).current()


# -- what CI installs -----------------------------------------------------------------------------

REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[\w,]+\])?(==[^\s;*]+)?(\s*;.*)?")


def _requirements(file: Path) -> Iterator[tuple[str, bool]]:
    """(name, whether it is pinned), lower case with dashes."""
    for line in file.read_text().splitlines():
        line = line.partition(" #")[0].strip()
        if line and not line.startswith(("#", "-c ", "-r ")):
            match = REQUIREMENT.fullmatch(line)
            assert match, f"{file.name}: {line}"
            yield re.sub(r"[-_.]+", "-", match[1]).lower(), match[3] is not None


FOLDER = ROOT / "requirements"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.txt")), ids=lambda file: file.name)
def test_what_ci_installs_is_pinned(file: Path) -> None:
    """Each by ==, in its own file or in the constraints that it names."""
    constraints = dict(_requirements(FOLDER / "constraints.txt"))
    named = "-c constraints.txt" in file.read_text().splitlines()
    loose = [
        name
        for name, pinned in _requirements(file)
        if not pinned and not (named and constraints.get(name))
    ]
    assert not loose


@pytest.mark.parametrize("file", ["run", "full"])
def test_ci_installs_nothing_else(file: Path) -> None:
    """But by `./dev`, from those files."""
    assert "pip " not in (ROOT / ".ci" / file).read_text()
