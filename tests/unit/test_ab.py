"""Comparisons: figures and statistics against values by hand; what is kept; what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.cli import main
from nereus_plugins.controller.journal import DecisionJournal
from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.report import simulated
from nereus_plugins.report.cli import parser, request
from nereus_plugins.report.compare import mean_figures, oracle_shares
from nereus_plugins.report.figures import by_part, figures, read_run
from nereus_plugins.report.journal import Prediction, read_journal
from nereus_plugins.report.measured import retimed
from nereus_plugins.report.sensitivity import settings, tabulated
from nereus_plugins.report.statistics import paired, t_quantile
from nereus_plugins.report.thin import thinned
from nereus_plugins.sim import run as running
from nereus_plugins.sim.world import World
from nereus_plugins.spec import LengthDistribution, SpecError
from nereus_plugins.trace.conditions import Setting, Trace
from nereus_plugins.trace.record import (
    Record,
    RecordWriter,
    RunRecord,
    StepRecord,
    TransitionRecord,
)

from .test_trace_import import OPENRLHF, VERL

STEPS = 8
# What is promised of every policy.
PROMISED = (
    "step_s_mean", "step_s_p99", "tokens_per_s_per_gpu", "transitions", "transition_share", "oom",
    "run_s",
)  # fmt: skip


def small_trace() -> Trace:
    setting = Setting(
        JobSpec(read_model("qwen2.5-1.5b"), algorithm="grpo", backend="megatron"),
        cluster_of("a100_40gb", 8),
        LengthDistribution.fixed(256),
        prompts_per_step=32,
        samples_per_prompt=4,
    )
    return Trace(
        name="small", sources=(), assumptions=("all of it",), setting=setting,
        mean_response_tokens=tuple(400.0 + 50 * i for i in range(STEPS)),
        gpus=((0.0, 8), (3.0, 4), (6.0, 8)), tail=((0.0, 0.1), (0.9, 1.8), (1.0, 4.0)),
        max_response_tokens=2048, seed=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.json"
    small_trace().save(path)
    return path


@pytest.fixture(scope="module")
def compared(trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder of a comparison, and what it printed."""
    out = tmp_path_factory.mktemp("ab") / "out"
    assert ab(trace_file, out) == 0
    return out, json.loads((out / "ab.json").read_text())


def ab(trace_file: Path, out: Path, *more: str) -> int:
    return main(["ab", "--trace", str(trace_file), "--policies", "static,dp_scaling",
                 "--seeds", "2", "-o", str(out), "--json", *more])  # fmt: skip


def run_record(**changed: Any) -> RunRecord:
    given: dict[str, Any] = dict(
        run_id="job", time_unix_s=90.0, source="verl", versions={"verl": "0.9.1"}, world_size=4,
        plan={"actor": {"dp": 4}},
    )  # fmt: skip
    return RunRecord(**given | changed)


def step_record(step: int, end_s: float, seconds: float, **changed: Any) -> StepRecord:
    given: dict[str, Any] = dict(
        step=step, epoch=0, time_unix_s=end_s, step_s=seconds, stages_s={"step": seconds},
        tokens={"total": 1000}, samples=8, memory_bytes={"allocated": 1 << 30},
        metrics={"critic/score/mean": 0.1 * step}, plan={"actor": {"dp": 4}},
    )  # fmt: skip
    return StepRecord(**given | changed)


def transition_record(step: int, end_s: float, seconds: dict[str, float], **changed: Any) -> Any:
    given: dict[str, Any] = dict(
        step=step, epoch=1, time_unix_s=end_s, outcome="committed", reason="", units={},
        seconds=seconds, digest="",
    )  # fmt: skip
    return TransitionRecord(**given | changed)


def live(scale: float = 1.0) -> list[Record]:
    """Four steps of 10 s; between the second and third a transition of 3 s, inside the third's
    timer as verl has it, to 8 ranks."""
    ranks = {"from": 4, "to": 8, "joined": [], "left": []}
    inside = {"stages_s": {"step": 13.0 * scale, "nereus_transition": 3.0 * scale}}
    return [
        run_record(),
        step_record(1, 110.0, 10.0 * scale),
        step_record(2, 110.0 + 10 * scale, 10.0 * scale),
        transition_record(
            2, 110.0 + 13 * scale, {"prepare": 3.0 * scale, "prepare.build": 2.0 * scale},
            ranks=ranks,
        ),
        step_record(3, 110.0 + 23 * scale, 13.0 * scale, **inside),
        step_record(4, 110.0 + 33 * scale, 10.0 * scale),
    ]  # fmt: skip


def write(folder: Path, records: list[Record]) -> Path:
    writer = RecordWriter(folder)
    for record in records:
        writer.write(record)
    writer.close()
    return folder


def test_figures_of_a_run_are_those_computed_by_hand() -> None:
    found = figures(live())
    assert found["steps"] == 4
    assert found["step_s_mean"] == 10.0  # the transition is no part of its step
    assert found["run_s"] == 43.0
    assert found["run_s_per_step"] == 43.0 / 4
    assert found["transitions"] == 1
    assert found["transition_share"] == 3.0 / 43.0
    assert found["stall_parts_s"] == {"build": 2.0, "other": 1.0}
    gpu_s = 4 * 20 + 8 * 23  # the larger number while they change
    assert found["gpu_hours"] == gpu_s / 3600
    assert found["tokens_per_s_per_gpu"] == 4000 / gpu_s
    assert found["reward_last"] == pytest.approx(0.4)
    assert found["controller_s_max"] is None
    asked = [step_record(i, 10.0 * i, 10.0, metrics={"nereus/controller_ms": i}) for i in (1, 3)]
    found = figures([run_record(), *asked])
    assert (found["controller_s_mean"], found["controller_s_max"]) == (0.002, 0.003)


def test_figures_until_a_step_leave_out_what_follows() -> None:
    found = figures(live(), last_step=2)
    assert (found["steps"], found["run_s"], found["transitions"]) == (2, 20.0, 0)


def test_figures_count_failures_and_what_they_cost() -> None:
    records = live()
    lost = {"lost_step": 4.0, "relaunch": 20.0, "load": 1.0}
    records[3] = transition_record(2, 140.0, lost, outcome="failed", reason="out of memory in it")
    found = figures(records)
    assert (found["oom"], found["failures"], found["failure_s"]) == (1, 1, 25.0)
    assert (found["transitions"], found["transition_share"]) == (0, 0.0)


def test_parts_of_a_stall_add_up_to_it() -> None:
    seconds = {
        "form_groups": 1.0, "build": 2.0, "move": 3.0, "relaunch": 4.0, "save": 5.0, "new": 6.0,
        "rollout": 7.0, "rollout.launch": 4.0, "rollout.sync": 1.0,
        "prepare": 2.0, "prepare.move": 3.0, "prepare.build": 1.0,  # slowest ranks: more than whole
    }  # fmt: skip
    parts = by_part(seconds)
    assert sum(parts.values()) == pytest.approx(30.0)
    assert parts["groups"] == 1.0
    assert parts["snapshot"] == 5.0
    assert parts["relaunch"] == 4.0 + 6.0
    assert parts["move"] == pytest.approx(3.0 + 1.0 + 1.5)
    assert parts["build"] == 2.5
    assert parts["other"] == 6.0


def test_figures_of_a_simulated_run_are_the_simulators(tmp_path: Path) -> None:
    result = running.run(World(small_trace()), "dp_scaling", tmp_path).to_dict()
    found = figures(read_run(tmp_path))
    assert result["transitions"] == 1  # back up does not pay before the end
    for key in ("steps", "run_s", "step_s_mean", "step_s_p50", "step_s_p99", "transitions",
                "restarts", "transition_share", "oom", "failures"):  # fmt: skip
        assert found[key] == pytest.approx(result[key]), key
    assert found["stall_s"] == pytest.approx(result["stall_s"])
    (move,) = found["each_transition"]
    assert move["stall_s"] == pytest.approx(sum(result["stall_s"].values()))
    assert 0 < move["limit_s"] < move["stall_s"]
    assert found["stall_over_limit_max"] == pytest.approx(move["stall_s"] / move["limit_s"])
    # The simulator counts a step together with the transition before it.
    assert found["gpu_hours"] == pytest.approx(result["gpu_hours"], rel=0.15)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_t_quantiles_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=5e-4)


def test_paired_differences_are_those_computed_by_hand() -> None:
    found = paired([20.0, 5.0, 40.0], [10.0, 10.0, 10.0])
    # Logarithms to base 2: 1, -1, 2; mean 2/3, standard deviation sqrt(7/3).
    half = 4.302653 * (7 / 3) ** 0.5 / 3**0.5
    assert found["mean"] == pytest.approx(2 ** (2 / 3) - 1)
    assert found["low"] == pytest.approx(2 ** (2 / 3 - half) - 1, rel=1e-5)
    assert found["high"] == pytest.approx(2 ** (2 / 3 + half) - 1, rel=1e-5)
    assert found["pairs"] == pytest.approx([1.0, -0.5, 3.0])
    alone = paired([9.0], [10.0])
    assert (alone["mean"], alone["low"], alone["high"]) == (pytest.approx(-0.1), None, None)
    with pytest.raises(ValueError, match="no pairs"):
        paired([1.0], [1.0, 2.0])


def test_the_oracles_saving_is_shared_out() -> None:
    def of(run_s: float, stopped: str = "") -> list[dict[str, Any]]:
        return [{"run_s": run_s, "stopped": stopped}]

    runs = {"static_hindsight": of(100), "oracle": of(80), "a": of(82), "b": of(110),
            "c": of(50, "no more")}  # fmt: skip
    found = oracle_shares(runs)
    assert found is not None
    assert found["saving"] == pytest.approx(0.2)
    assert found["free_saving"] is None
    free = oracle_shares(runs | {"oracle": [of(80)[0] | {"about": {"free_s": 75.0}}]})
    assert free is not None
    assert free["free_saving"] == pytest.approx(0.25)
    assert found["shares"] == {"a": pytest.approx(0.9), "b": pytest.approx(-0.5)}
    found = oracle_shares(runs | {"oracle": of(99)})
    assert found is not None
    assert found["shares"]["a"] is None
    assert found["against_hindsight"]["a"] == pytest.approx(0.18)
    assert oracle_shares({"a": of(82), "oracle": of(80)}) is None


def test_means_over_seeds() -> None:
    found = mean_figures(
        [
            {"run_s": 1.0, "oom": 1, "stall_s": {"move": 1.0}, "stopped": "", "each": [1]},
            {"run_s": 3.0, "oom": 3, "stall_s": {"build": 1.0}, "stopped": "no plan"},
        ]
    )
    assert (found["run_s"], found["oom"]) == (2.0, 2)
    assert found["stall_s"] == {"move": 0.5, "build": 0.5}
    assert found["stopped"] == "no plan"
    assert found["step_s_mean"] is None
    assert "each" not in found


def test_a_comparison_has_what_is_promised(compared: tuple[Path, Any]) -> None:
    _, found = compared
    assert found["kind"] == "simulated"
    assert set(found["policies"]) == {"static", "dp_scaling"}
    for one in found["policies"].values():
        assert all(isinstance(one[key], (int, float)) for key in PROMISED)
    assert found["seeds"] == [5, 6]
    assert "no public data set" in found["trace"]["note"].lower()
    assert found["trace"]["assumptions"] == ["all of it"]
    assert found["constants"]["relaunch_s"]["kind"] == "assumed"
    assert found["versions"]["nereus-plugins"]
    first, second = found["runs"]["static"]
    assert first["run_s"] != second["run_s"]  # seeds are different worlds
    difference = found["differences"]["dp_scaling"]["run_s"]
    assert difference["low"] < difference["mean"] < difference["high"]
    expected = [
        ours["run_s"] / base["run_s"] - 1
        for ours, base in zip(found["runs"]["dp_scaling"], found["runs"]["static"], strict=True)
    ]
    assert difference["pairs"] == pytest.approx(expected)


def test_what_is_finished_is_not_run_again(
    compared: tuple[Path, Any], trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out, before = compared
    ran: list[tuple[str, int]] = []
    inner = running.run

    def counted(world: World, name: str, folder: Path | None = None) -> Any:
        ran.append((name, world.seed))
        return inner(world, name, folder)

    monkeypatch.setattr(running, "run", counted)
    assert ab(trace_file, out) == 0
    assert ran == []
    assert json.loads(capsys.readouterr().out)["policies"] == before["policies"]

    # One whose records are gone, and one that was interrupted, are run again; no other.
    (simulated.folder_of(out, "static", 6) / "records.jsonl").unlink()
    (simulated.folder_of(out, "dp_scaling", 5) / "result.json").unlink()
    assert ab(trace_file, out) == 0
    assert sorted(ran) == [("dp_scaling", 5), ("static", 6)]
    again = json.loads(capsys.readouterr().out)
    assert again["runs"] == before["runs"]
    assert len(read_run(simulated.folder_of(out, "dp_scaling", 5))) == len(
        read_run(simulated.folder_of(out, "dp_scaling", 6))
    )

    # What was computed from anything else is not taken.
    truth = out.parent / "truth.yaml"
    truth.write_text("noise: 0.1\n")
    ran.clear()
    assert ab(trace_file, out, "--truth", str(truth)) == 0
    assert len(ran) == 4


def test_a_fingerprint_follows_everything_that_a_result_follows_from(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(*more: str, policy: str = "static", seed: int = 5) -> str:
        given = ["--trace", str(trace_file), "--policies", "static", *more]
        return request(parser().parse_args(given)).fingerprint(policy, seed)

    constants = tmp_path / "constants.yaml"
    constants.write_text("relaunch_s: 60\n")
    truth = tmp_path / "truth.yaml"
    truth.write_text("noise: 0.1\n")
    found = {
        of(), of(policy="dp_scaling"), of(seed=6), of("--steps", "4"),
        of("--constants", str(constants)), of("--truth", str(truth)),
    }  # fmt: skip
    assert len(found) == 6
    assert of() in found
    monkeypatch.setattr(simulated, "code_sha256", lambda: "another")
    assert of() not in found


def test_a_simulated_controllers_journal_is_beside_its_records(
    trace_file: Path, tmp_path: Path
) -> None:
    def proofs() -> Sequence[Prediction]:
        assert main(["ab", "--trace", str(trace_file), "--policies", "nereus", "-o",
                     str(tmp_path)]) == 0  # fmt: skip
        folder = simulated.folder_of(tmp_path, "nereus", 5)
        assert DecisionJournal(folder).read()[0]["kind"] == "start"
        memory = small_trace().setting.cluster.gpu.memory_bytes
        assert read_journal(folder).capacity_bytes == memory
        return read_journal(folder).predictions

    first = proofs()
    (simulated.folder_of(tmp_path, "nereus", 5) / "result.json").unlink()
    entries = len(DecisionJournal(simulated.folder_of(tmp_path, "nereus", 5)).read())
    assert proofs() == first
    # The journal of the run that was taken for interrupted is not written behind.
    assert len(DecisionJournal(simulated.folder_of(tmp_path, "nereus", 5)).read()) == entries


def test_a_policy_that_cannot_begin_does_not_end_the_others(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(world: World, name: str, folder: Path | None = None) -> Any:
        if name == "static":
            raise SpecError("no plan fits")
        return inner(world, name, folder)

    inner = running.run
    monkeypatch.setattr(running, "run", refuse)
    assert main(["ab", "--trace", str(trace_file), "--policies", "static,dp_scaling",
                 "--json"]) == 1  # fmt: skip
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "no plan fits" in found["policies"]["static"]["stopped"]
    assert found["policies"]["static"]["run_s"] is None
    assert found["policies"]["dp_scaling"]["run_s"] > 0
    assert found["differences"] == {}


def test_a_policy_that_gets_nowhere_is_told_of(trace_file: Path, tmp_path: Path) -> None:
    truth = tmp_path / "truth.yaml"
    truth.write_text("memory_stage_spread: 10\n")  # nothing fits
    out = tmp_path / "out"
    assert ab(trace_file, out, "--truth", str(truth)) == 1
    found = json.loads((out / "ab.json").read_text())
    assert [one["steps"] for one in found["runs"]["static"]] == [0, 0]
    assert "out of memory" in found["policies"]["static"]["stopped"]
    assert found["differences"] == {}


@pytest.mark.full
def test_seeds_in_several_processes_say_the_same(
    compared: tuple[Path, Any], trace_file: Path, capsys: Any
) -> None:
    assert main(["ab", "--trace", str(trace_file), "--policies", "static,dp_scaling",
                 "--seeds", "2", "--jobs", "2", "--json"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == compared[1]["runs"]


def test_assumptions_vary_one_at_a_time(trace_file: Path) -> None:
    given = ["--trace", str(trace_file), "--policies", "static,dp_scaling", "--seeds", "2"]
    asked = request(parser().parse_args(given))
    found = {one.name: one.request for one in settings(asked, "all")}
    assert len(found) == 15
    # A single node cannot become fewer: there, two settings are as given.
    assert len({r.fingerprint("static", 5) for r in (asked, *found.values())}) == 14
    assert found["availability-0.5"].trace == asked.trace
    assert found["noise-0.1"].truth.noise == 0.1
    assert found["noise-0.1"].trace == asked.trace
    assert found["relaunch-600"].constants.relaunch_s == 600
    links = found["bandwidth-4"].trace.setting.cluster.inter_node
    base = asked.trace.setting.cluster.inter_node
    assert links.bandwidth_bytes_per_s == 4 * base.bandwidth_bytes_per_s
    assert [one.name for one in settings(asked, "error,noise")] == [
        "error-0.05", "error-0.1", "error-0.2", "noise-0", "noise-0.1",
    ]  # fmt: skip
    with pytest.raises(SpecError, match="--vary 'nois'"):
        settings(asked, "nois")


def test_what_holds_in_one_setting_only_is_called_so(trace_file: Path) -> None:
    def runs(*run_s: float, stopped: str = "") -> Any:
        base = [{"run_s": 100.0, "stopped": ""} for _ in run_s]
        return {"static": base, "it": [{"run_s": s, "stopped": stopped} for s in run_s]}

    given = ["--trace", str(trace_file), "--policies", "static", "--seeds", "2"]
    first, second, third = settings(request(parser().parse_args(given)), "error")
    clear, unclear, worse = runs(80, 82), runs(80, 119), runs(110, 111)
    table = tabulated(clear, [(first, unclear), (second, worse), (third, runs(90, 90))], "static")
    assert [row["differences"]["it"]["mean"] < 0 for row in table["rows"]] == [
        True, True, False, True,
    ]  # fmt: skip
    assert table["verdicts"]["it"] == (
        f"faster in 2 of 4 settings; not: {first.text}; {second.text}"
    )
    table = tabulated(clear, [(first, unclear), (second, worse)], "static")
    assert table["verdicts"]["it"] == "faster in one setting only, of 3: as given"
    table = tabulated(worse, [(first, runs(1, 1, stopped="it broke"))], "static")
    assert table["rows"][1]["differences"]["it"] is None
    assert table["verdicts"]["it"] == "faster in none of 2 settings"


def test_varied_assumptions_are_tabulated(trace_file: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main(["ab", "--trace", str(trace_file), "--policies", "static,dp_scaling", "--vary",
                 "relaunch", "-o", str(out)]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert "starting the job again 600 s" in printed
    table = json.loads((out / "ab.json").read_text())["sensitivity"]
    slow, fast = (
        next(r for r in table["rows"] if r["name"] == name)["differences"]["dp_scaling"]["mean"]
        for name in ("relaunch-600", "relaunch-60")
    )
    assert slow < fast  # the dearer a restart, the more a transition saves
    assert (out / "varied" / "relaunch-600" / "runs" / "static" / "seed-5").is_dir()
    assert "<h2>Other assumptions</h2>" in (out / "report.html").read_text(encoding="utf-8")


def test_jobs_that_have_run_side_by_side(tmp_path: Path, capsys: Any) -> None:
    off, act = write(tmp_path / "off", live()), write(tmp_path / "act", live(0.5)[:-1])
    assert main(["ab", str(off), str(act), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["kind"] == "measured"
    assert found["last_step"] == 3  # the last that both have finished
    assert found["policies"]["off"]["run_s"] == 33.0
    assert found["policies"]["act"]["run_s"] == 16.5
    difference = found["differences"]["act"]["step_s_mean"]
    assert (difference["mean"], difference["low"]) == (pytest.approx(-0.5), None)
    assert found["jobs"]["off"][0]["versions"] == {"verl": "0.9.1"}
    assert found["time_by"] == "clock"
    assert found["policies"]["act"]["ended_early"] == "its last step was 3, another run's 4"
    assert found["policies"]["off"]["ended_early"] == ""


def test_verl_and_openrlhf_side_by_side(tmp_path: Path, capsys: Any) -> None:
    """A console log of verl, one of OpenRLHF, and the records of an OpenRLHF job with Nereus."""
    for kind, line in (("verl", VERL), ("openrlhf", OPENRLHF)):
        log = tmp_path / f"{kind}.log"
        log.write_text("".join(line.format(step=step) for step in (1, 2)), encoding="utf-8")
        out = tmp_path / kind / "records.jsonl"
        out.parent.mkdir()
        asked = ["trace", "import", kind, str(log), "-o", str(out), "--gpus", "8", "--ran-here"]
        assert main(asked) == 0
    versions = {"openrlhf": "0.11.2", "deepspeed": "0.19.6", "vllm": "0.29.0"}
    run = [run_record(source="openrlhf", versions=versions), *live()[1:]]
    names = [str(tmp_path / "verl"), str(tmp_path / "openrlhf"), str(write(tmp_path / "on", run))]
    assert main(["ab", *names, "-o", str(tmp_path / "compared")]) == 0
    said = capsys.readouterr().out
    assert "openrlhf 0.11.2, deepspeed 0.19.6, vllm 0.29.0" in said
    found = json.loads((tmp_path / "compared" / "ab.json").read_text())
    assert found["time_by"].startswith("timers of steps")
    jobs = [each[0] for each in found["jobs"].values()]
    assert [job["source"] for job in jobs] == ["verl", "openrlhf", "openrlhf"]
    assert all(job["versions"] for job in jobs)
    policies = found["policies"]
    assert policies["verl"]["tokens_per_s_per_gpu"] == pytest.approx(64000 / 100 / 8)
    assert policies["openrlhf"]["tokens_per_s_per_gpu"] == pytest.approx(128 * 700 / 56 / 8)
    assert policies["openrlhf"]["step_s_mean"] == 56.0
    assert [policies[name]["reward_last"] for name in ("verl", "openrlhf")] == [0.25, 0.5]
    difference = found["differences"]["openrlhf"]["tokens_per_s_per_gpu"]
    assert difference["mean"] == pytest.approx(1600 / 640 - 1)
    assert "0.19.6" in (tmp_path / "compared" / "report.html").read_text(encoding="utf-8")


def test_what_has_no_clock_is_compared_by_the_timers_of_steps(tmp_path: Path, capsys: Any) -> None:
    """A log's import begins at 0 and knows nothing of what is between steps."""
    imported = [run_record(time_unix_s=0.0), step_record(1, 10.0, 10.0), step_record(2, 20.0, 10.0)]
    late = [run_record(), step_record(1, 110.0, 10.0), step_record(2, 150.0, 10.0)]
    a, b = write(tmp_path / "off", imported), write(tmp_path / "act", late)
    assert main(["ab", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["time_by"].startswith("timers of steps")
    assert [found["policies"][name]["run_s"] for name in ("off", "act")] == [20.0, 20.0]
    transition = [*live()[:5]]
    assert figures(retimed(transition))["run_s"] == 33.0  # verl's timer holds the transition
    assert figures(retimed(transition))["gpu_hours"] == pytest.approx((4 * 20 + 8 * 13) / 3600)


def test_several_runs_of_a_name_are_pairs(tmp_path: Path, capsys: Any) -> None:
    for i, scale in enumerate((1.0, 1.1)):
        write(tmp_path / f"off-{i}", live(scale))
        write(tmp_path / f"act-{i}", live(0.5 * scale))
    named = [f"{name}={tmp_path}/{name}-0,{tmp_path}/{name}-1" for name in ("act", "off")]
    assert main(["ab", "--runs", named[0], "--runs", named[1], "--baseline", "off", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"]["act"]["step_s_mean"]["pairs"] == pytest.approx([-0.5, -0.5])
    assert main(["ab", "--runs", named[0], "--runs", named[1]]) == 0
    assert "MEASURED" in capsys.readouterr().out


def test_measured_and_simulated_are_never_mixed(
    tmp_path: Path, trace_file: Path, capsys: Any
) -> None:
    off = write(tmp_path / "off", live())
    simulated_run = write(tmp_path / "sim", [run_record(source="simulator"), *live()[1:]])
    assert main(["ab", str(off), str(simulated_run)]) == 2
    assert "never put side by side" in capsys.readouterr().err
    assert main(["ab", str(off), "--trace", str(trace_file), "--policies", "static"]) == 2
    assert "never mixed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--trace", "TRACE", "--policies", "statik"], "no policy 'statik'"),
        (["--trace", "TRACE"], "--policies is required"),
        (["--trace", "TRACE", "--policies", "static", "--vary", "x"], "--vary 'x'"),
        (["--trace", "TRACE", "--policies", "static", "--seeds", "0"], "--seeds must be 1 to 1000"),
        (["--trace", "TRACE", "--policies", "static", "--jobs", "0"], "--jobs must be 1 to 1000"),
        (["--trace", "TRACE", "--policies", "static", "--steps", "99"], "small has 8"),
        (["--trace", "TRACE", "--policies", "static", "--baseline", "x"], "none of static"),
        (["--trace", "nowhere", "--policies", "static"], "no trace 'nowhere'"),
        (["--trace", "TRACE", "--policies", "static", "-o", "TRACE"], "no directory"),
        ([], "give --trace"),
        (["EMPTY", "GONE"], "no finished step"),
        (["GONE", "EMPTY"], "no records of a run"),
        (["LIVE"], "two names at least"),
        (["LIVE", "OTHER/run"], "two runs are called 'run'"),
        (["--runs", "a", "--runs", "b=LIVE"], "must be NAME=DIR"),
        (["LIVE", "BROKEN"], "not JSON"),
        (["LIVE", "LATER"], "no step in common"),
    ],
)
def test_wrong_use(
    given: list[str], message: str, trace_file: Path, tmp_path: Path, capsys: Any
) -> None:
    write(tmp_path / "run", live())
    write(tmp_path / "other" / "run", live())
    write(tmp_path / "empty", [run_record()])
    write(tmp_path / "later", [run_record(), step_record(9, 200.0, 10.0)])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "records.jsonl").write_text("{\n")
    places = {"TRACE": trace_file, "EMPTY": tmp_path / "empty", "GONE": tmp_path / "gone",
              "LIVE": tmp_path / "run", "OTHER": tmp_path / "other", "LATER": tmp_path / "later",
              "BROKEN": tmp_path / "broken"}  # fmt: skip
    for name, place in places.items():
        given = [text.replace(name, str(place)) for text in given]
    assert main(["ab", *given]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_thinned_trace_keeps_its_shape_and_says_so() -> None:
    short = thinned(small_trace(), 4)
    assert short.mean_response_tokens == (400.0, 500.0, 600.0, 700.0)
    assert short.gpus == ((0.0, 8), (1.0, 4), (3.0, 8))
    assert "thinned from 8 steps to 4" in short.assumptions[-1]
    assert thinned(small_trace(), STEPS) == small_trace()
