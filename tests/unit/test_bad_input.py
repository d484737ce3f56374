"""What a user can get wrong yields one clear error that names it, exit status 2, and nothing done.

Every command that reads a file meets every damage that a file can have; a file that is right but
for one field is refused by the field's name and what it may be; and so is every flag.
"""

import copy
import json
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from nereus_verl import stamp

from nereus_plugins.cli import main
from nereus_plugins.control.driver import JOURNAL_FILE, check_run_dir
from nereus_plugins.controller.journal import line_of
from nereus_plugins.spec import SpecError
from nereus_plugins.trace.record import StepRecord

WRONG_USAGE = 2
# A file's content, by what is wrong with it. None: there is no file; a folder is made for "folder".
DAMAGES: dict[str, bytes | None] = {
    "absent": None,
    "folder": None,
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "latin1": "response_länge: 3\n".encode("latin-1"),
    "list": b"[1, 2, 3]\n",
    "number": b"7\n",
    "null": b"null\n",
    "text": b"no such thing\n",
    "unknown field": b'{"surprise": 1}\n',
    "cut": b'{"schema": "nereus.step/1", "st',
    "deep": b"[" * 5_000,
    "not a number": b'{"tp": NaN, "pp": Infinity}\n',
    "alias bomb": b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in b"bcdefghi"),
    "python tag": b"!!python/object/apply:os.system ['false']\n",
    "duplicate key": b"tp: 1\ntp: 2\n",
    "other version": b'{"schema": "nereus.step/99"}\n',
}
# Commands with FILE where the damaged one goes, OUT where something would be written.
READERS: dict[str, list[str]] = {
    "plan --job": ["plan", "--job", "FILE", "--gpu", "h100", "--gpus", "8"],
    "plan --cluster": ["plan", "--model", "qwen2.5-7b", "--cluster", "FILE"],
    "plan --workload": [
        "plan", "--model", "qwen2.5-7b", "--gpu", "h100", "--gpus", "8", "--workload", "FILE",
    ],
    "plan --calibration": [
        "plan", "--model", "qwen2.5-7b", "--gpu", "h100", "--gpus", "8", "--calibration", "FILE",
    ],
    "plan --model": ["plan", "--model", "FILE", "--gpu", "h100", "--gpus", "8"],
    "estimate --plan": [
        "estimate", "--model", "qwen2.5-7b", "--gpu", "h100", "--gpus", "8", "--plan", "FILE",
    ],
    "check --script": ["check", "--gpu", "h100", "--script", "FILE"],
    "calibrate": [
        "calibrate", "--model", "qwen2.5-7b", "--gpu", "h100", "--gpus", "8", "--out", "OUT",
        "FILE",
    ],
    "records": ["records", "FILE"],
    "trace show": ["trace", "show", "FILE"],
    "trace import verl": ["trace", "import", "verl", "FILE", "--gpus", "8", "-o", "OUT"],
    "trace import openrlhf": ["trace", "import", "openrlhf", "FILE", "--gpus", "8", "-o", "OUT"],
    "trace import wandb": ["trace", "import", "wandb", "FILE", "--gpus", "8", "-o", "OUT"],
    "trace import tensorboard": [
        "trace", "import", "tensorboard", "FILE", "--gpus", "8", "-o", "OUT",
    ],
    "trace build --records": ["trace", "build", "--records", "FILE", "-o", "OUT"],
    "trace build --lengths": [
        "trace", "build", "--lengths", "FILE", "--gpus-max", "8", "--steps", "3", "-o", "OUT",
    ],
    "trace build --availability": [
        "trace", "build", "--lengths", "LENGTHS", "--availability", "FILE", "-o", "OUT",
    ],
    "trace build --tail": [
        "trace", "build", "--lengths", "LENGTHS", "--gpus-max", "8", "--tail", "FILE", "-o", "OUT",
    ],
    "sim": ["sim", "FILE", "--policies", "static"],
    "sim --truth": ["sim", "stationary", "--policies", "static", "--truth", "FILE"],
    "sim --constants": ["sim", "stationary", "--policies", "static", "--constants", "FILE"],
    "ab --trace": ["ab", "--trace", "FILE", "--policies", "static", "-o", "OUT"],
    "ab runs": ["ab", "--runs", "a=FILE", "--runs", "b=FILE", "-o", "OUT"],
    "report": ["report", "FILE", "-o", "OUT"],
    "decisions": ["decisions", "FILE"],
    "transition job": ["transition", "FILE", "FILE"],
    "status": ["status", "FILE"],
}  # fmt: skip
# What a job that has just begun, or died as it wrote its first line, leaves: no error.
JUST_BEGUN = {("records", "empty"), ("records", "cut"), ("records", "deep")}


def run(words: list[str]) -> int:
    """Exit status of a command, run in this process: a traceback is an exception here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return main(words)
        except SystemExit as exited:  # argparse
            return int(exited.code or 0)


def damaged(path: Path, damage: str) -> Path:
    content = DAMAGES[damage]
    if damage == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_one_clear_error(
    reader: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = damaged(tmp_path / "input.yaml", damage), tmp_path / "out"
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("step,mean_response_tokens\n1,500\n2,600\n")
    words = [
        word.replace("FILE", str(file)).replace("OUT", str(out)).replace("LENGTHS", str(lengths))
        for word in READERS[reader]
    ]
    status = run(words)
    said = capsys.readouterr()
    assert said.out == ""
    assert status == (0 if (reader, damage) in JUST_BEGUN else WRONG_USAGE), said.err
    error = said.err.strip().splitlines()[-1]
    assert str(file) in error
    assert len(error) < 1000
    assert not out.exists()


JOB = ["--model", "qwen2.5-7b", "--gpu", "h100"]
VERL = [
    "python", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=True",
]  # fmt: skip
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
OPENRLHF = [
    "openrlhf.cli.train_ppo_ray", "--actor.model_name_or_path", "Qwen/Qwen2.5-7B",
    "--vllm.num_engines", "2",
]  # fmt: skip
BUILD = ["trace", "build", "--lengths", "LENGTHS", "--gpus-max", "8", "-o", "OUT"]
# Command, and what its error has to name.
WRONG_VALUES: list[tuple[list[str], str]] = [
    (["plan", *JOB], "--gpus"),
    (["plan", "--gpu", "h100", "--gpus", "8"], "--model"),
    (["plan", "--model", "qwen2.5-7b", "--gpus", "8"], "--gpu"),
    (["plan", "--model", "no-such-model", "--gpu", "h100", "--gpus", "8"], "no-such-model"),
    (["plan", "--model", "qwen2.5-7b", "--gpu", "abacus", "--gpus", "8"], "abacus"),
    (["plan", *JOB, "--gpus", "0"], "gpus"),
    (["plan", *JOB, "--gpus", "-8"], "gpus"),
    (["plan", *JOB, "--gpus", "8.5"], "--gpus"),
    (["plan", *JOB, "--gpus", "8", "--gpus-per-node", "0"], "gpus_per_node"),
    (["plan", *JOB, "--gpus", "9"], "gpus"),
    (["plan", *JOB, "--gpus", "8", "--prompts", "0"], "prompts"),
    (["plan", *JOB, "--gpus", "8", "--samples", "-1"], "samples"),
    (["plan", *JOB, "--gpus", "8", "--mini-batch", "0"], "mini"),
    (["plan", *JOB, "--gpus", "8", "--response-tokens", "0"], "tokens"),
    (["plan", *JOB, "--gpus", "8", "--response-sigma", "nan"], "sigma"),
    (["plan", *JOB, "--gpus", "8", "--response-sigma", "-1"], "sigma"),
    (["plan", *JOB, "--gpus", "8", "--median-response", "0"], "median"),
    (["plan", *JOB, "--gpus", "8", "--also", "h100"], "--also"),
    (["plan", *JOB, "--gpus", "8", "--algorithm", "magic"], "--algorithm"),
    (["estimate", *JOB, "--gpus", "8", "--tp", "3"], "tp"),
    (["estimate", *JOB, "--gpus", "8", "--tp", "0"], "tp"),
    (["estimate", *JOB, "--gpus", "8", "--tp", "16"], "tp"),
    (["estimate", *JOB, "--gpus", "8", "--pp", "5"], "pp"),
    (["estimate", *JOB, "--gpus", "8", "--vpp", "3", "--pp", "2"], "vpp"),
    (["estimate", *JOB, "--gpus", "8", "--ep", "2"], "ep"),
    (["estimate", *JOB, "--gpus", "8", "--sharding", "zero9"], "zero9"),
    (["estimate", *JOB, "--gpus", "8", "--micro-batch", "0"], "micro_batch"),
    (["estimate", *JOB, "--gpus", "8", "--token-budget", "-5"], "token_budget"),
    (["estimate", *JOB, "--gpus", "8", "--rollout-memory-fraction", "1.5"], "memory_fraction"),
    (["estimate", *JOB, "--gpus", "8", "--rollout-tp", "3"], "tp"),
    (["check", "--gpu", "h100"], "--script"),
    (["check", "--gpu", "h100", "--", "python", "train.py"], "verl"),
    (["check", "--gpu", "h100", "--", "python", "-m", "verl.trainer.main_ppo"], "model"),
    (["check", "--gpu", "h100", "--", *VERL, "trainer.n_gpus_per_node=0"], "n_gpus_per_node"),
    (["check", "--gpu", "h100", "--", *VERL, "trainer.nnodes=-1"], "nnodes"),
    (["check", "--gpu", "h100", "--", *VERL, "data.train_batch_size=x"], "train_batch_size"),
    (["check", "--gpu", "h100", "--", *VERL, f"{TP}=0"], "tensor_model_parallel_size"),
    (["check", "--gpu", "h100", "--", *VERL, "model_engine=abacus"], "model_engine"),
    (["check", "--gpu", "h100", "--", *OPENRLHF, "--vllm.num_engines", "x"], "num_engines"),
    (["check", "--gpu", "h100", "--", *OPENRLHF, "--ds.zero_stage", "9"], "zero_stage"),
    (["check", "--gpu", "h100", "--", *OPENRLHF, "--actor.num_gpus_per_node", "0"], "num_gpus"),
    (["sim", "no-such-trace"], "no-such-trace"),
    (["sim", "stationary", "--policies", "wishful"], "wishful"),
    (["sim", "stationary", "--policies", ""], "--policies"),
    (["sim", "stationary", "--seed", "x"], "--seed"),
    (["ab"], "--trace"),
    (["ab", "--trace", "stationary", "--policies", "static", "--seeds", "0"], "--seeds"),
    (["ab", "--trace", "stationary", "--policies", "static", "--steps", "0"], "--steps"),
    (["ab", "--trace", "stationary", "--policies", "static", "--jobs", "0"], "--jobs"),
    (["ab", "--trace", "stationary", "--policies", "static", "--vary", "moods"], "moods"),
    (["ab", "--trace", "stationary", "--policies", "static", "--baseline", "x"], "baseline"),
    (["trace", "build", "--lengths", "LENGTHS", "-o", "OUT"], "--gpus-max"),
    (["trace", "build", "--lengths", "LENGTHS", "--gpus-max", "0", "-o", "OUT"], "gpus"),
    ([*BUILD, "--steps", "0"], "steps"),
    ([*BUILD, "--shape", "odd"], "--shape"),
    ([*BUILD, "--run", "other"], "other"),
    (["gpus", "RUN", "-1"], "gpus"),
    (["gpus", "RUN", "some"], "gpus"),
    (["gpus", "RUN", "4", "--notice", "-1"], "--notice"),
    (["gpus", "RUN", "4", "--notice", "nan"], "--notice"),
    (["status", "RUN", "--steps", "0"], "--steps"),
    (["status", "RUN", "--every", "0"], "--every"),
    (["approve", "RUN", "first"], "number"),
    (["decisions", "RUN", "--step", "x"], "--step"),
    (["plan", *JOB, "--gpus", "8" + "0" * 30], "gpus must be an integer of at most 131072"),
    (["plan", *JOB, "--gpus", "8", "--also", "a100:8000000000"], "gpus must be an integer"),
    (["plan", *JOB, "--gpus", "8", "--prompts", "9" * 9], "262144 is most"),
    (["plan", *JOB, "--gpus", "8", "--response-sigma", "1e9"], "sigma must be a number"),
    (["ab", "--trace", "stationary", "--policies", "static", "--seeds", "9" * 12], "--seeds"),
    (["ab", "--trace", "stationary", "--policies", "static", "--jobs", "9" * 12], "--jobs"),
    (["ab", "--runs", "none"], "NAME=DIR"),
    (["gpus", "RUN", "9" * 30], "gpus must be 1 to 131072"),
    (["gpus", "RUN", "4", "--notice", "9" * 30], "--notice must be 0 to"),
    (["drain", "--on-signal", "LOUD"], "--on-signal LOUD: no such signal"),
    (["drain", "--on-signal", "KILL"], "--on-signal KILL"),
    (["drain", "--notice", "-1"], "--notice must be a number of seconds from 0"),
    (["drain", "--notice", "nan"], "--notice must be a number of seconds from 0"),
    (["drain", "--notice", "soon"], "--notice"),
    (["transition", "RUN", "PLAN", "--epoch", "-1"], "--epoch must be at least 0"),
    (["transition", "NOWHERE", "LENGTHS"], "NOWHERE is no directory"),
    (["status", "NOWHERE"], "NOWHERE is no directory"),
    (["records", "NOWHERE"], "NOWHERE"),
    (["decisions", "NOWHERE"], "NOWHERE"),
    (["report", "NOWHERE", "-o", "OUT"], "NOWHERE"),
    (["selftest", "--transitions", "-1"], "--transitions must be 0 to 1000000, got -1"),
    (["selftest", "--ranks", "many"], "--ranks"),
    (["selftest", "--ranks", "1"], "--ranks must be 2 to 64, got 1"),
    (["selftest", "--ranks", "1000000"], "--ranks must be 2 to 64"),
    (["selftest", "--backend", "abacus"], "--backend"),
    (["teleport"], "invalid choice"),
    ([], "COMMAND"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "named"),
    WRONG_VALUES,
    ids=lambda one: " ".join(one) if isinstance(one, list) else one,
)
def test_a_wrong_value_is_named_before_any_work(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out, lengths = tmp_path / "run", tmp_path / "out", tmp_path / "lengths.csv"
    run_dir.mkdir()
    lengths.write_text("step,mean_response_tokens\n1,500\n2,600\n")
    plan = tmp_path / "plan.yaml"
    plan.write_text("tp: 2\n")
    places = {"RUN": run_dir, "OUT": out, "LENGTHS": lengths, "PLAN": plan}
    status = run([str(places.get(word, word)) for word in words])
    said = capsys.readouterr()
    assert (status, said.out) == (WRONG_USAGE, ""), said.err
    assert named in said.err.strip().splitlines()[-1]
    assert not out.exists()


# One field of a file that is right otherwise: the file, the field's place and what it says instead
# (Ellipsis: it is left out), and what the message has to say.
LENGTHS = {"kind": "fixed", "tokens": 64}
MODEL = {
    "name": "m", "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128,
    "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 264,
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "cluster": {
        "nodes": 1, "gpus_per_node": 4, "intra_node": {"bandwidth_bytes_per_s": 4e11},
        "inter_node": {"bandwidth_bytes_per_s": 5e10},
        "gpu": {
            "name": "g", "memory_bytes": "80GiB", "peak_flops": 1e15,
            "memory_bandwidth_bytes_per_s": 3e12,
        },
    },
    "workload": {
        "prompts_per_step": 8, "prompt_tokens": LENGTHS, "response_tokens": LENGTHS,
        "mini_batch_prompts": 4,
    },
    "job": {"actor": MODEL, "backend": "fsdp"},
    "plan": {
        "assignments": {
            "actor-train": {
                "layout": {"dp": 4, "sharding": "fsdp"}, "knobs": {"micro_batch": 1},
                "devices": "0-3",
            },
            "ref-logprob": {"layout": {"dp": 4, "sharding": "fsdp"}, "knobs": {"micro_batch": 1}},
            "actor-generate": {"dp": 4},
        }
    },
    "calibration": {"schema": 1, "seconds": [], "memory": [], "settling": 0},
}  # fmt: skip
TRAIN = ("plan", "assignments", "actor-train")
FIELDS: list[tuple[tuple[str, ...], Any, str]] = [
    (("cluster", "nodes"), 0, "ClusterSpec.nodes must be an integer of at least 1, got 0"),
    (("cluster", "nodes"), ..., "required key 'nodes' is missing"),
    (("cluster", "nodes"), 10**6, "nodes * gpus_per_node = 4000000 GPUs; 131072 is most"),
    (("cluster", "gpu", "memory_bytes"), "80GX", "memory_bytes: expected a number or a size such"),
    (("cluster", "gpu", "memory_bytes"), 10**400, "memory_bytes must be an integer of at most"),
    (("cluster", "gpu", "peak_flops"), float("nan"), "GPUSpec.peak_flops must be a number above 0"),
    (("cluster", "gpu", "name"), 3, "ClusterSpec.gpu.name must be a text, got 3"),
    (("cluster", "gpus"), 4, "unknown key 'gpus'; did you mean 'gpu'?"),
    (("cluster", "intra_node"), 4e11, "intra_node: expected a mapping of settings, got 4"),
    (("workload", "mini_batch_prompts"), 3, "mini_batch_prompts=3 must divide prompts_per_step=8"),
    (("workload", "samples_per_prompt"), 10**6, "8000000 sequences; 262144 is most"),
    (("workload", "prompt_tokens", "kind"), "bell", "kind must be one of fixed, lognormal, quant"),
    (("workload", "prompt_tokens"), {"kind": "quantiles", "quantiles": [[0, 1], [1, "x"]]},
     "quantiles[1][1] must be a number, got 'x'"),
    (("workload", "prompt_tokens"), {"kind": "lognormal", "median_tokens": 5, "sigma": 400},
     "sigma must be a number above 0 and at most 10.0, got 400"),
    (("job", "backend"), "abacus", "JobSpec.backend must be one of"),
    (("job", "actor", "num_layers"), "many", "ModelSpec.num_layers must be an integer"),
    (("job", "actor", "num_layers"), True, "ModelSpec.num_layers must be an integer"),
    (("job", "critic"), MODEL, "has no critic: set critic to null"),
    (("plan", "assignments"), {}, "must map at least one model-stage"),
    (("plan", "assignments"), {"actor-trane": {"dp": 4}}, "did you mean 'actor-train'?"),
    ((*TRAIN, "layout", "dp"), -4, "Layout.dp must be an integer of at least 1, got -4"),
    ((*TRAIN, "layout", "sharding"), "zero9", "Layout.sharding must be one of none, zero1"),
    ((*TRAIN, "knobs", "recompute"), "some", "Knobs.recompute must be one of none, selective"),
    ((*TRAIN, "knobs", "micro_batch"), 10**400, "a number of 1329 bits"),
    ((*TRAIN, "devices"), "0-", "devices must be a list or a text like '0-3,8'"),
    ((*TRAIN, "devices"), [0, 0, 1, 2], "name one device twice"),
    (("calibration", "schema"), 9, "schema 9 is not 1"),
    (("calibration", "settling"), "x", "calibration.settling must be an integer"),
    (("calibration", "seconds"), 3, "calibration.seconds must be a list, got 3"),
    (("calibration", "seconds"), [{"stage": "actor-train"}],
     "calibration.seconds[0]: required key 'layout' is missing"),
    (("calibration", "memory"),
     [{"stage": "actor-train", "layout": {"dp": 4}, "cov": [1, 1, 1], "noise": -1}],
     "calibration.memory[0].noise must be a number at least 0"),
]  # fmt: skip
ESTIMATE = ["estimate", *(word for name in FILES for word in (f"--{name}", name))]


def estimated(folder: Path, files: Mapping[str, Any]) -> int:
    """`nereus estimate` with these files."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return run([str(folder / f"{word}.json") if word in FILES else word for word in ESTIMATE])


def test_the_files_are_right_but_for_that_field(tmp_path: Path) -> None:
    assert estimated(tmp_path, FILES) == 0


@pytest.mark.parametrize(
    ("place", "value", "named"), FIELDS, ids=[f"{'.'.join(p)}={v!r:.40}" for p, v, _ in FIELDS]
)
def test_a_wrong_field_is_named_with_what_it_may_be(
    place: tuple[str, ...],
    value: Any,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = copy.deepcopy(FILES)
    at: dict[str, Any] = files
    for key in place[:-1]:
        at = at[key]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    assert estimated(tmp_path, files) == WRONG_USAGE
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert str(tmp_path / f"{place[0]}.json") in error
    assert named in error
    assert len(error) < 1000


# What a live job wrote, and something changed afterwards: file of the run directory, its content,
# command, exit status, and what it says.
COMMIT = {
    "kind": "commit", "epoch": 1, "plan": {}, "digest": "d", "step": 1, "who": "w", "when": "t",
    "schema_version": 1,
}  # fmt: skip
STEP = StepRecord(1, 0, 1.0, 2.0, {}, {}, 4, {}, {}, {}).to_dict()
DECISION = {"schema": 1, "kind": "decision", "decision": {"kind": "stay", "reason": "r"}}
OF_A_RUN: list[tuple[str, bytes, list[str], int, str]] = [
    ("records.jsonl", b"{}\n", ["records"], 2, "records.jsonl:1: not a nereus record: no 'schema'"),
    ("records.jsonl", b"[" * 99999 + b"\n", ["records"], 2, "records.jsonl:1: not JSON"),
    ("records.jsonl", b"9" * 5000 + b"\n", ["records"], 2, "records.jsonl:1: not JSON"),
    ("records.jsonl", b"\xff\xfe\n", ["status"], 2, "records.jsonl:1: not JSON"),
    ("records.jsonl", json.dumps(STEP | {"step": "x"}).encode() + b"\n", ["records"], 2,
     "records.jsonl:1: step record: field 'step' must be int, got str"),
    ("records.jsonl", json.dumps(STEP | {"stap": 1}).encode() + b"\n", ["status"], 2,
     "records.jsonl:1: step record: unknown field 'stap'"),
    ("records.jsonl", json.dumps(STEP | {"schema": "nereus.step/9"}).encode() + b"\n", ["status"],
     2, "schema 'nereus.step/9' is not known to this version"),
    ("decisions.jsonl", b"", ["decisions"], 2, "no controller has written decisions here"),
    ("decisions.jsonl", b"x\ny\n", ["decisions"], 2, "decisions.jsonl:1: damaged line before"),
    ("decisions.jsonl", line_of(DECISION), ["decisions"], 2, "required key 'step' is missing"),
    ("decisions.jsonl", line_of(DECISION | {"schema": 9}), ["decisions"], 2, "schema 9, this"),
    ("decisions.jsonl", line_of(DECISION | {"kind": "guess"}), ["decisions"], 2,
     "decisions.jsonl:1: kind must be one of start, observation"),
    ("decisions.jsonl", line_of({"schema": 1, "kind": "proof", "proof": {"epoch": 0}}),
     ["decisions"], 2, "proof.plan: required key 'assignments' is missing"),
    ("control.json", b"{", ["pause"], 4, "control.json cannot be read"),
    ("control.json", b'{"protocol": 9}', ["resume"], 4, "protocol 9 is not known to this version"),
    ("control.json", b'{"protocol": 1}', ["gpus", "4"], 4, "missing 6 required positional"),
    ("proposal.json", b"{", ["approve"], 4, "no live job"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "content", "words", "status", "named"),
    OF_A_RUN,
    ids=[f"{f}-{c!r:.30}-{w[0]}" for f, c, w, _, _ in OF_A_RUN],
)
def test_what_a_job_wrote_and_was_damaged(
    file: str,
    content: bytes,
    words: list[str],
    status: int,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / file).write_bytes(content)
    assert run([words[0], str(tmp_path), *words[1:]]) == status
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert named in error
    assert str(tmp_path) in error
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_bytes() == content


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"{", ":1: damaged line"),
        (b"[" * 99999, ":1: damaged line"),
        (json.dumps(COMMIT | {"schema_version": 9}).encode(), ":1: schema version 9"),
        (json.dumps(COMMIT | {"epoch": "x"}).encode(), ":1: epoch cannot be 'x'"),
        (json.dumps(COMMIT | {"kind": "promise"}).encode(), ":1: unknown kind 'promise'"),
    ],
    ids=["cut", "deep", "other version", "epoch", "kind"],
)
def test_a_job_does_not_begin_on_a_damaged_journal(line: bytes, named: str, tmp_path: Path) -> None:
    """verl's and OpenRLHF's job alike: before Ray, and so before any GPU is taken."""
    (tmp_path / JOURNAL_FILE).write_bytes(line + b"\n")
    with pytest.raises(SpecError, match="the journal of an earlier run is") as error:
        check_run_dir(tmp_path)
    assert named in str(error.value)
    assert "move that file away, or set nereus.run_dir" in str(error.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected an object, got []"),
        (b"\xff", "not text"),
        (b'{"schema_version": 9}', "schema version 9 is not known"),
        (b'{"schema_version": 1}', "world_size must be an integer"),
        (b'{"schema_version": 1, "world_size": 4}', "layouts must map units to layouts"),
        (b'{"schema_version": 1, "world_size": 4, "layouts": {"actor": {"tp": "x"}}}',
         "layouts.actor: Layout.tp must be an integer"),
    ],
)  # fmt: skip
def test_a_checkpoint_whose_stamp_is_damaged(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / stamp.FILE).write_bytes(content)
    with pytest.raises(stamp.LayoutMismatch) as error:
        stamp.check(tmp_path, {}, {})
    assert str(tmp_path / stamp.FILE) in str(error.value)
    assert named in str(error.value)
    assert "trainer.resume_from_path" in str(error.value)


@pytest.mark.parametrize(("command", "package"), [("selftest", "torch"), ("demo", "verl")])
def test_what_is_not_installed_is_said(
    command: str, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    assert run([command]) == WRONG_USAGE
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert f"{package} is not installed; pip install" in error
