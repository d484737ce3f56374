"""Every parser of outside data on anything: it reads it, or raises its one documented error.

Three ways to be wrong: any bytes at all; a valid file cut at any byte, or with one byte changed; a
valid file with one field dropped, unknown, or of another type, size or sign. No other exception, no
long message, nothing written; what is wrong with one field is said by its name.
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nereus_openrlhf import config as openrlhf_config
from nereus_verl import config as verl_config
from nereus_verl import stamp
from nereus_verl.stamp import LayoutMismatch

from nereus_plugins.control import drain, messages, view
from nereus_plugins.control.beside import Launch
from nereus_plugins.control.inbox import Inbox, Refused
from nereus_plugins.control.messages import Endpoint, MessageError
from nereus_plugins.control.offered import Offered
from nereus_plugins.control.server import _run
from nereus_plugins.controller import cli as decisions
from nereus_plugins.controller.config import ControllerConfig
from nereus_plugins.controller.controller import Controller
from nereus_plugins.controller.journal import DecisionJournal, DecisionJournalError, line_of
from nereus_plugins.controller.setting import JobSetting
from nereus_plugins.cost.calibration import Calibration
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.gtg.journal import Journal, JournalError
from nereus_plugins.report.journal import read_journal
from nereus_plugins.sim.constants import Constants
from nereus_plugins.sim.truth import TruthSpec
from nereus_plugins.spec import (
    ClusterSpec,
    GlobalPlan,
    Layout,
    ModelSpec,
    ModelStage,
    SpecError,
    WorkloadSpec,
)
from nereus_plugins.spec.record import load_json, load_yaml
from nereus_plugins.trace import conditions, show
from nereus_plugins.trace.record import (
    RecordError,
    RunRecord,
    StepRecord,
    TransitionRecord,
    read_records,
)
from nereus_plugins.trace.steps import read_run
from tests.unit.test_verl_config import job as verl_job

VERL_SETTINGS = [field.name for field in dataclasses.fields(verl_config.NereusConfig)]

# -- valid files --------------------------------------------------------------------------------

LAYOUT = {"tp": 2, "dp": 2, "sequence_parallel": True, "sharding": "zero1"}
PLAN = {
    "name": "start",
    "assignments": {
        "actor-train": {"layout": LAYOUT, "knobs": {"micro_batch": 2}, "devices": [0, 1, 2, 3]},
        "actor-generate": {"layout": {"tp": 2, "dp": 2}, "knobs": {"rollout_memory_fraction": 0.5}},
        "critic-train": {"tp": 1, "dp": 4},
    },
}
CLUSTER = {
    "nodes": 2,
    "gpus_per_node": 8,
    "gpu": {
        "name": "g", "memory_bytes": "80GiB", "peak_flops": 1e15,
        "memory_bandwidth_bytes_per_s": 3e12,
    },
    "intra_node": {"bandwidth_bytes_per_s": 4e11, "latency_s": 1e-6},
    "inter_node": {"bandwidth_bytes_per_s": 5e10},
}  # fmt: skip
LENGTHS = {"kind": "quantiles", "quantiles": [[0.0, 5], [0.5, 50.0], [1.0, 900]], "max_tokens": 999}
WORKLOAD = {
    "prompts_per_step": 8, "prompt_tokens": {"kind": "fixed", "tokens": 64},
    "response_tokens": LENGTHS, "samples_per_prompt": 4, "mini_batch_prompts": 4, "epochs": 1,
}  # fmt: skip
DENSE = {
    "name": "m", "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128,
    "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 264,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 32}
JOB = {
    "actor": {**DENSE, "moe": EXPERTS}, "algorithm": "ppo", "critic": DENSE, "backend": "megatron",
    "attention": "fa2", "packed": True, "grad_bytes": 4,
}  # fmt: skip
CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "hidden_act": "silu",
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264, "mlp_bias": False,
    "tie_word_embeddings": True, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
QWEN = {
    **CONFIG, "model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [0], "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK = {
    **CONFIG, "model_type": "deepseek", "n_routed_experts": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1,
}  # fmt: skip
SETTING = {
    "job": {**JOB, "actor": DENSE}, "cluster": CLUSTER, "prompts_per_step": 8,
    "prompt_tokens": {"kind": "lognormal", "median_tokens": 9.0, "sigma": 0.5},
}  # fmt: skip
TRACE = {
    "schema": "nereus.trace/1", "name": "t", "note": "n", "assumptions": ["none"],
    "sources": [{"what": "gpus", "file": "f"}], "setting": SETTING, "gpus": [[0, 8], [2, 16]],
    "mean_response_tokens": [5.0, 6, 7.5], "tail": [[0.0, 0.1], [1.0, 3.0]],
    "max_response_tokens": 99, "indexed_by": "step", "seed": 1,
}  # fmt: skip
JOB_SETTING = {
    "setting": SETTING, "response_tokens": LENGTHS, "max_response_tokens": 99, "steps": 9,
    "changes": {"actor-train": {"layout_fields": ["tp"], "knob_fields": ["micro_batch"]}},
    "coupled": [["actor-train", "critic-train"]], "devices_fixed": True,
}  # fmt: skip
LAUNCH = {"setting": JOB_SETTING, "config": {"dwell_steps": 3}, "plan": PLAN, "epoch": 1}
OFFERED = {
    "number": 1, "epoch": 2, "plan": PLAN, "digest": "d", "reason": "r",
    "predicted": {"step_s": 3.0}, "forced": False,
}  # fmt: skip
ENDPOINT = dataclasses.asdict(Endpoint("host", 4711, "token", 1, "run", 3))
STAMP = {
    "schema_version": 1, "world_size": 4, "epoch": 1, "settings": {},
    "layouts": {"actor": {"dp": 4, "sharding": "fsdp"}, "critic": {"dp": 4, "sharding": "fsdp"}},
}  # fmt: skip
_TAUGHT = Calibration()
_TAUGHT.observe(
    GlobalPlan.from_dict(PLAN).assignments,
    {ModelStage.ACTOR_TRAIN: 1.0}, {ModelStage.ACTOR_TRAIN: 1.5},
    predicted_bytes={ModelStage.ACTOR_TRAIN: 1e9}, measured_bytes={ModelStage.ACTOR_TRAIN: 1e9},
)  # fmt: skip
CALIBRATION = _TAUGHT.to_dict()
TRANSITION = TransitionRecord(
    step=1, epoch=1, time_unix_s=1.0, outcome="committed", reason="",
    units={"actor": {"from": "TP1", "to": "TP2", "bytes_wire": 5}}, seconds={"prepare": 0.5},
    digest="d", ranks={"from": 4, "to": 2, "joined": [], "left": ["a", "b"], "nodes": ["n", "n"]},
    knobs={"actor": {"from": {"micro_batch": 1}, "to": {"micro_batch": 2}}},
    rollout={"from": {"tp": 1}, "to": {"tp": 2}, "kept": [0], "ended": [], "launched": [1]},
    background={"hidden_s": 1.0}, predicted={"transition_s": 1.0, "step_s": 3.0},
)  # fmt: skip
STEP = StepRecord(
    step=1, epoch=0, time_unix_s=2.0, step_s=3.0, stages_s={"gen": 1.0, "update_actor": 2.0},
    tokens={"prompt": 8, "response": 9, "total": 17}, samples=4, memory_bytes={"allocated": 5},
    metrics={"critic/score/mean": 0.5}, plan={"actor": LAYOUT},
)  # fmt: skip
RECORDS = [
    RunRecord("run", 1.0, "verl", {"verl": "0.9"}, 4, {"actor": LAYOUT}).to_dict(),
    STEP.to_dict(),
    TRANSITION.to_dict(),
]
JOURNAL = [
    {"kind": "commit", "epoch": 1, "plan": PLAN, "digest": "d", "step": 1, "who": "u@h:1",
     "when": "2026-01-01", "reason": "", "ranks": ["a"], "schema_version": 1},
    {"kind": "abort", "epoch": 1, "plan": PLAN, "digest": "d", "step": 1, "who": "u@h:1",
     "when": "2026-01-01", "reason": "r", "ranks": ["a"], "schema_version": 1},
]  # fmt: skip
NUMBERS = {
    "step_s": 3.0, "new_step_s": 2.0, "saving_s": 1.0, "saving_spread_s": 0.1, "steps": 9.0,
    "confidence": 0.9, "memory": 0.5, "transition_s": 4.0, "transition_parts_s": {"build": 1.0},
}  # fmt: skip
DECISION = {
    "kind": "propose", "reason": "faster", "step": 3, "epoch": 1, "gpus": 4,
    "mean_response_tokens": 50.0, "plan": PLAN, "digest": "d", "numbers": NUMBERS,
    "alternatives": [{"plan": PLAN, "reason": "slower", "numbers": NUMBERS}],
}  # fmt: skip
PROOF = {
    "step": 3, "epoch": 1, "plan": PLAN, "former": PLAN, "forced": False, "predicted_s": 1.0,
    "predicted_spread_s": 0.1, "predicted_of_s": 3.0, "predicted_stall_s": 4.0, "stall_s": 5.0,
    "gpus": 4, "mean_tokens": 50.0, "savings": [0.1, 0.2, 0.3], "measured": [0.2, 0.05],
}  # fmt: skip
START = {
    "setting": JOB_SETTING, "config": ControllerConfig().to_dict(), "plan": PLAN, "epoch": 1,
}  # fmt: skip
STATE = Controller(
    JobSetting.from_dict(JOB_SETTING), ControllerConfig(), GlobalPlan.from_dict(PLAN), 1
).to_dict()
DECISIONS = [
    {"schema": 1, "kind": "start", **START},
    {"schema": 1, "kind": "state", "state": STATE},
    {"schema": 1, "kind": "decision", "decision": DECISION, "time_unix_s": 1.0},
    {"schema": 1, "kind": "observation", "record": STEP.to_dict()},
    {"schema": 1, "kind": "proof", "proof": PROOF},
]

# -- their readers ------------------------------------------------------------------------------


def _lines(tree: Any) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in tree).encode()


def _checked_lines(tree: Any) -> bytes:
    """A journal whose checksums are right: what is wrong with it is its content."""
    return b"".join(line_of(one if isinstance(one, dict) else {"": one}) for one in tree)


def _plain(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _records(path: Path) -> None:
    list(show.lines(read_records(path)))
    assert show.main([str(path)]) == 0


def _journal(path: Path) -> None:
    Journal(path).read()
    Journal(path).current()


def _decisions(path: Path) -> None:
    view.last_decision(path.parent)  # says nothing of what it cannot read
    status = decisions.main([str(path), "--alternatives"])
    if status:
        raise SpecError("decisions")
    assert status == 0


def _stamp(path: Path) -> None:
    path.rename(path.with_name(stamp.FILE))
    layout = Layout(dp=4, sharding="fsdp")
    stamp.check(path.parent, {"actor": layout, "critic": layout}, verl_job())


def _resume(path: Path) -> None:
    Controller.resume(DecisionJournal(path))


def _message(path: Path) -> None:
    """What the server does with a request, but for its token and connection."""

    def check(plan: Mapping[str, Any]) -> str:
        verl_config.check_plan(plan, "plan")
        return ""

    inbox = Inbox(check, takes_gpus="")
    request = messages.decode(path.read_bytes())
    if request.get("command") == "wait":
        inbox.submit(0, {"tp": 2})
        if type(request.get("timeout_s")) is int:
            request["timeout_s"] = 0  # it is bounded, and still too long here
    messages.encode(_run(inbox, request))


@dataclasses.dataclass(frozen=True)
class Parser:
    """One kind of file.

    valid: its content. read: reads a file at a path. error: what `read` may raise. write: the
    content as a file has it. named: how deep a wrong field is to be named in the message.
    """

    name: str
    valid: Any
    read: Callable[[Path], Any]
    error: type[Exception] | tuple[type[Exception], ...] = SpecError
    write: Callable[[Any], bytes] = _plain
    named: int = 99


PARSERS = [
    Parser("cluster.yaml", CLUSTER, ClusterSpec.load),
    Parser("workload.json", WORKLOAD, WorkloadSpec.load),
    Parser("job.yaml", JOB, JobSpec.load),
    Parser("plan.json", PLAN, GlobalPlan.load),
    Parser("truth.json", dataclasses.asdict(TruthSpec()), TruthSpec.load),
    Parser("constants.yaml", dataclasses.asdict(Constants()), Constants.load),
    Parser("calibration.json", CALIBRATION, Calibration.load),
    Parser("qwen.json", QWEN, ModelSpec.from_hf_config),
    Parser("deepseek.json", DEEPSEEK, ModelSpec.from_hf_config),
    Parser("trace.json", TRACE, conditions.load),
    Parser("controller.json", LAUNCH, lambda path: Launch.read(path.parent)),
    Parser("proposal.json", OFFERED, lambda path: Offered.read(path.parent)),
    Parser("control.json", ENDPOINT, lambda path: Endpoint.read(path.parent), MessageError),
    Parser("records.jsonl", RECORDS, _records, RecordError, _lines, named=2),
    Parser("steps.jsonl", RECORDS, lambda path: list(read_run(path)), SpecError, _lines),
    Parser("journal.jsonl", JOURNAL, _journal, JournalError, _lines, named=2),
    Parser("decisions.jsonl", DECISIONS, _decisions, SpecError, _checked_lines, named=0),
    Parser(
        "decisions.jsonl", DECISIONS, lambda path: read_journal(path.parent), SpecError,
        _checked_lines, named=0,
    ),
    Parser("resumed.jsonl", DECISIONS, _resume, DecisionJournalError, _checked_lines, named=0),
    Parser("stamp.json", STAMP, _stamp, LayoutMismatch),
    Parser(
        "submit", {"protocol": 1, "command": "submit", "epoch": 0, "plan": PLAN,
                   "predicted": {"step_s": 1.0}}, _message, (MessageError, Refused),
    ),
    Parser(
        "units", {"protocol": 1, "command": "submit", "epoch": 0,
                  "plan": {"actor": {"tp": 2}, "rollout": {"replicas": 2}}},
        _message, (MessageError, Refused),
    ),
    Parser(
        "gpus", {"protocol": 1, "command": "gpus", "epoch": 0, "gpus": 2, "notice_s": 5},
        _message, (MessageError, Refused),
    ),
    Parser(
        "wait", {"protocol": 1, "command": "wait", "number": 1, "seen": "",
                 "timeout_s": 0}, _message, (MessageError, Refused), named=0,
    ),
    Parser("notice", 30, lambda path: drain._seconds_in(path, 1.0), ()),
]  # fmt: skip
PARSER = pytest.mark.parametrize("parser", PARSERS, ids=lambda p: f"{p.name}")

HOSTILE = st.sampled_from(
    [None, True, False, 0, -1, 1.5, 10**12, 10**30, 10**400, 1e300, float("nan"), float("inf"),
     "", "x", "80GiB", "1e999", "x" * 5000, "\x00", "\ud800", [], [[]], {}, {"": 1},
     [None], {"tp": "2"}, [1, "a", None]]
) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)  # fmt: skip
QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# What a message calls a field whose value is right in itself.
OTHER_WORDS = {
    "world_size": "ranks", "schema_version": "version", "num_experts": "experts",
    "num_key_value_heads": "kv_heads", "num_experts_per_tok": "experts_per_token",
    "first_k_dense_replace": "num_dense_layers",
}  # fmt: skip
LONGEST = 1500  # characters of a message, the file's path in it


def _places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for key, value in (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    ):
        yield from _places(value, (*at, key))


def _put(data: Any, place: tuple[Any, ...], value: Any, how: str) -> Any:
    data = copy.deepcopy(data)
    at = data
    for key in place[:-1]:
        at = at[key]
    if how == "drop":
        del at[place[-1]]
    elif how == "unknown" and isinstance(at, dict):
        at["surprise"] = value
    else:
        at[place[-1]] = value
    return data


def message_of(run: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...]) -> str:
    """What it says of what it was given, "" where it takes it. Any other error fails the test."""
    try:
        run()
    except error as raised:
        message = str(raised)
    else:
        return ""
    assert 0 < len(message) < LONGEST
    return message


def said(parser: Parser, folder: Path, content: bytes) -> str:
    """`message_of` a file's content, by which nothing is written."""
    path = folder / parser.name
    for left in folder.iterdir():
        left.unlink()
    path.write_bytes(content)
    message = message_of(lambda: parser.read(path), parser.error)
    assert len(list(folder.iterdir())) == 1
    return message


@PARSER
def test_the_valid_file_is_read(parser: Parser, tmp_path: Path) -> None:
    assert said(parser, tmp_path, parser.write(parser.valid)) == ""


@PARSER
@QUICK
@given(st.binary(max_size=60) | HOSTILE.map(_plain))
def test_anything(parser: Parser, tmp_path: Path, content: bytes) -> None:
    said(parser, tmp_path, content)


@PARSER
@QUICK
@given(st.data())
def test_a_valid_file_cut_or_with_a_byte_changed(
    parser: Parser, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(parser.write(parser.valid))
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] = data.draw(st.integers(0, 255))
    said(parser, tmp_path, bytes(content))


@PARSER
@QUICK
@given(st.data())
def test_a_valid_file_with_one_field_wrong(
    parser: Parser, tmp_path: Path, data: st.DataObject
) -> None:
    places = list(_places(parser.valid)) or [()]
    place = data.draw(st.sampled_from(places))
    value, how = data.draw(HOSTILE), data.draw(st.sampled_from(["set", "set", "drop", "unknown"]))
    wrong = _put(parser.valid, place, value, how) if place else value
    message = said(parser, tmp_path, parser.write(wrong))
    names = [key for key in place[: parser.named] if isinstance(key, str)][-2:]
    names += [OTHER_WORDS[name] for name in names if name in OTHER_WORDS]
    if "is not JSON" in message:  # a NaN, where none may be: it has no field yet
        names = []
    if message and how != "unknown" and parser.named and names:
        assert any(name in message for name in names), (place, message)


@QUICK
@given(st.dictionaries(st.sampled_from([*VERL_SETTINGS, "surprise"]), HOSTILE, max_size=3))
def test_verls_settings(given: dict[str, Any]) -> None:
    message = message_of(lambda: verl_config.NereusConfig.from_dict(given), SpecError)
    assert not message or any(name in message for name in given)


WORDS = st.sampled_from(
    ["--nereus.enable", "--nereus.schedule", "--nereus.timeout_s", "--nereus.staging_mib",
     "--nereus.run_dir", "--nereus.surprise", "--nereus.", "--ckpt.path", "true", "1e999", "-1",
     "{2: {dp: 1}}", "{2: {actor: {dp: 0}}}", "--nereus.schedule={x", "--nereus.timeout_s=nan",
     "{1: &a {dp: *a}}", "0x" + "f" * 5000, "--nereus.control=maybe"]
) | st.text(max_size=8)  # fmt: skip


@QUICK
@given(st.lists(WORDS, max_size=5) | HOSTILE.map(lambda v: ["--nereus.schedule", json.dumps(v)]))
def test_openrlhfs_flags(words: list[str]) -> None:
    message = message_of(lambda: openrlhf_config.split(words), SpecError)
    assert not message or "nereus" in message


YAML = st.sampled_from(
    ["a: ", "- ", "&x ", "*x", "[", "]", "{", "}", ", ", "\n", "  ", "!!set ", "!!binary ", "|",
     "!!python/name:os.system", "2020-01-01", "1:30:30", "0x" + "f" * 5000, "1e400", "? ", "<<: ",
     "'", '"', "#", "---\n", "...", "%YAML 9", "\x07", "~", ".nan", "!!int x", "!!omap", "\ud800"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(YAML, max_size=10).map("".join), st.sampled_from([load_yaml, load_json]))
def test_texts(text: str, load: Callable[[str, str], Any]) -> None:
    message = message_of(lambda: load(text, "where"), SpecError)
    assert not message or message.startswith("where: ")


def test_aliases_that_say_more_than_memory_holds() -> None:
    layers = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))
    with pytest.raises(SpecError, match="aliases"):
        Layout.from_yaml(f"a: &a [xxxxxxxxx]\n{layers}tp: *j\n")
    with pytest.raises(SpecError, match="line 1: a value that contains itself"):
        Layout.from_yaml("tp: &a [*a]\n")
    shared = yaml.safe_dump({"critic": LAYOUT}).replace("critic:", "critic: &a") + "actor: *a\n"
    assert load_yaml(shared, "")["actor"] == LAYOUT
