"""The accuracy benchmark: no answer is an input, nothing is dropped, and the aims it reaches."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def accuracy() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import cost_accuracy

        yield cost_accuracy
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def result(accuracy: Any) -> dict[str, Any]:
    return accuracy.result(*accuracy.load(accuracy.SHIPPED))


ANSWERS = {
    "MFU", "HFU", "Model TFLOP", "Throughput (T/s/GPU)", "Throughput (S/s)", "Throughput (T/s)",
    "tokens_per_s_per_gpu", "peak_mem_gib", "step_time_mean", "throughput_mean", "mfu_mean",
    "measured_ms", "simumax_ms", "measured_peak_gib", "simumax_peak_gib", "Tokens / sec / GPU",
    "Model TFLOP / sec / GPU", "iter_time_s_median_2nd_half", "mem_max_alloc_bytes_peak",
    "mem_alloc_bytes_last", "iter_time_s_min", "step_time_s", "step_s",
    "sync_s_low", "peak_mem_pct", "other",
}  # fmt: skip


def test_no_answer_is_an_input(accuracy: Any) -> None:
    for table in accuracy.cost_tables.TABLES:
        assert not table.inputs & ANSWERS, table.file


def test_reading_an_undeclared_column_is_an_error(accuracy: Any) -> None:
    inputs = accuracy.Inputs({"Model": "7b", "MFU": "45"}, frozenset(["Model"]))
    assert inputs["Model"] == "7b"
    with pytest.raises(KeyError):
        inputs["MFU"]


def test_predictions_do_not_change_with_the_answers(accuracy: Any, tmp_path: Path) -> None:
    """Every answer blanked or doubled: the same predictions."""
    import csv

    name = "llm_foundry_mpt_training.csv"
    rows = accuracy.cost_tables.read(accuracy.SHIPPED / name)[:10]
    for row in rows:
        row.update({k: "1" for k in ("MFU", "HFU", "Model TFLOP")})
        row["Throughput (T/s/GPU)"] = str(2 * float(row["Throughput (T/s/GPU)"]))
    with (tmp_path / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    changed, _, _ = accuracy.load(tmp_path)
    shipped, _, _ = accuracy.load(accuracy.SHIPPED)
    before = {r.modelled: r.step_s for r in shipped if r.table == name}
    assert len(changed) == 10
    assert all(before[r.modelled] == r.step_s for r in changed)


def test_every_row_is_modelled_or_named(result: dict[str, Any]) -> None:
    modelled = sum(t["rows_modelled"] for t in result["tables"].values())
    read = sum(t["rows_read"] for t in result["tables"].values())
    assert modelled + sum(result["not_modelled"].values()) == read
    assert read > 700


def test_aims_on_groups_not_fitted(result: dict[str, Any]) -> None:
    """The aims for models of hidden size 2,048 and more."""
    large = result["overall"]["unfitted"]["hidden_ge_2048"]
    assert large["step_time"]["n"] > 100
    assert large["step_time"]["median"] <= 0.08
    assert large["step_time"]["p90"] <= 0.20
    assert large["memory"]["allocated"]["median"] <= 0.03
    assert large["memory"]["allocated"]["p90"] <= 0.08
    assert large["memory"]["reserved"]["median"] <= 0.08
    assert large["memory"]["reserved"]["p90"] <= 0.15


def test_the_model_beats_one_constant_in_every_table(result: dict[str, Any]) -> None:
    for name, table in result["tables"].items():
        if table["step_time"]["n"] > 2:
            assert table["step_time"]["median"] < table["one_constant"]["median"], name


def test_plans_are_ranked_as_measured(result: dict[str, Any]) -> None:
    assert result["ranking"]["groups"] >= 10
    assert result["ranking"]["kendall_tau_mean"] > 0.5
    assert result["ranking"]["regret_mean"] < 0.05


def test_public_runs_that_ran_are_said_to_fit(accuracy: Any) -> None:
    """llm-foundry states no memory, but its micro-batches were raised until they just fitted."""
    rows, _, _ = accuracy.load(accuracy.SHIPPED)
    used = [
        r.reserved_bytes / r.modelled.case.gpu.memory_bytes
        for r in rows
        if r.source == "llm_foundry"
    ]
    assert max(used) < 1.0
    assert sum(u > 0.8 for u in used) > 30


def test_json_is_the_last_line(
    accuracy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(accuracy.SHIPPED / "simumax_b200.csv", tmp_path)
    (tmp_path / "unheard_of.csv").write_text("a,b\n1,2\n")
    assert accuracy.main(["--data", str(tmp_path), "--json"]) == 0
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    part = out["overall"]["unfitted"]["hidden_ge_2048"]
    assert set(part["step_time"]) == {"n", "median", "p90"}
    assert set(part["memory"]) >= {"n", "median", "p90"}
    assert set(out) >= {"overall", "tables", "not_modelled"}
    assert out["not_modelled"] == {"table unheard_of.csv is not known": 1}


def test_a_missing_directory_is_named(
    accuracy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy.main(["--data", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_rows_not_seen_before_are_modelled_or_named(accuracy: Any, tmp_path: Path) -> None:
    cases = {
        "deepseekv2_l4_ep8_pp1_dp8_mbc8": True,
        "mixtral_8x7b_l8_ep8_mbc8": True,
        "qwen3_32b_l32_tp2_pp2_dp2_mbc8_cef": True,
        "unknown_l3_tp2": False,
        "deepseek_v3_l5_ep8_pp2_dp4_mbc8": False,  # ep 8 on 4 ranks
    }
    lines = ["case,measured_ms,simumax_ms,measured_peak_gib,simumax_peak_gib"]
    lines += [f"{case},1000,1000,50,50" for case in cases]
    (tmp_path / "simumax_b200.csv").write_text("\n".join(lines))
    rows, reasons, _ = accuracy.load(tmp_path)
    assert len(rows) == sum(cases.values())
    assert sum(reasons.values()) == len(cases) - len(rows)
    assert all(0.05 < row.step_s < 20 for row in rows)
