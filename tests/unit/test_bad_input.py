"""What a user can get wrong yields one clear error that names it, exit status 2, and nothing done.

Every command that reads a file meets every damage that a file can have, and every number it takes
values that are none.
"""

import warnings
from pathlib import Path

import pytest

from nereus_plugins.cli import main

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
    places = {"RUN": run_dir, "OUT": out, "LENGTHS": lengths}
    status = run([str(places.get(word, word)) for word in words])
    said = capsys.readouterr()
    assert (status, said.out) == (WRONG_USAGE, ""), said.err
    assert named in said.err.strip().splitlines()[-1]
    assert not out.exists()
