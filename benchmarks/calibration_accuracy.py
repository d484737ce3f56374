"""One step ahead: the calibrated model against 'same as last step' and 'last seconds per token'.

    python benchmarks/calibration_accuracy.py [--data FILE] [--json]

For each stage of each run, every step is predicted before it is observed. Two questions:

- stage: the tokens of the step are known (training stages start when generation has ended; for
  generation itself this is an oracle of the lengths, and the same for all three predictors);
- step: nothing of the step is known. Both naive predictors are the same then; the calibrated one
  (`NextStep`) guesses tokens from their level and trend, and weighs itself against the last step.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from nereus_plugins.cost.calibration import Filter, NextStep

SHIPPED = Path(__file__).resolve().parent / "data" / "rl_steps" / "verl_gpg_qwen2-7b_per_step.csv"
STAGES = {
    "gen": "timing_s/gen",
    "old_log_prob": "timing_s/old_log_prob",
    "update_actor": "timing_s/update_actor",
    "step": "timing_s/step",
}
TOKENS = "perf/total_num_tokens"
WARM_UP = 5
# Steps of the FSDP run in which the length jumps from about 200 to over 600 tokens.
JUMP = (156, 180)


def errors(rows: list[dict[str, str]], column: str, *, known: bool) -> list[dict[str, float]]:
    """Absolute relative errors of each predictor, step by step after the warm-up."""
    learned, blind = Filter(), NextStep()
    out: list[dict[str, float]] = []
    before: tuple[float, float] | None = None
    for row in rows:
        seconds, tokens = float(row[column]), float(row[TOKENS])
        if before is not None:
            last_s, last_tokens = before
            predictions = {
                "calibrated": learned.predict(tokens)[0] if known else blind.predict(),
                "same_as_last": last_s,
                "last_per_token": last_s / last_tokens * (tokens if known else last_tokens),
            }
            one = {k: abs(v / seconds - 1.0) for k, v in predictions.items()}
            out.append({"step": float(row["step"]), **one})
        learned.observe(tokens, seconds)
        before = seconds, tokens
        blind.observe(tokens, seconds)
    return out[WARM_UP:]


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    out: dict[str, Any] = {"n": len(rows)}
    for name in ("calibrated", "same_as_last", "last_per_token"):
        values = sorted(row[name] for row in rows)
        out[name] = {
            "median": round(statistics.median(values), 5),
            "mean": round(statistics.mean(values), 5),
            "p90": round(values[int(0.9 * (len(values) - 1))], 5),
        }
    return out


def run(path: Path) -> dict[str, Any]:
    """Results by run, question and stage; the jump in length apart."""
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs[row["run"]].append(row)
    out: dict[str, Any] = {}
    for name, rows in runs.items():
        out[name] = {}
        for question in ("stage", "step"):
            out[name][question] = {}
            for stage, column in STAGES.items():
                made = errors(rows, column, known=question == "stage")
                entry: dict[str, Any] = {"all": summary(made)}
                if name.endswith("fsdp"):
                    part = [row for row in made if JUMP[0] <= row["step"] <= JUMP[1]]
                    entry["length_jump"] = summary(part)
                out[name][question][stage] = entry
    return out


def table(result: dict[str, Any]) -> str:
    lines = [
        "| run | known | stage | part | n | calibrated median, mean | same as last | per token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, questions in result.items():
        for question, stages in questions.items():
            for stage, parts in stages.items():
                for part, values in parts.items():
                    cells = [
                        f"{100 * values[k]['median']:.2f} %, {100 * values[k]['mean']:.2f} %"
                        for k in ("calibrated", "same_as_last", "last_per_token")
                    ]
                    lines.append(
                        f"| {name} | {question} | {stage} | {part} | {values['n']} | "
                        + " | ".join(cells)
                        + " |"
                    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=SHIPPED)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    result = run(args.data)
    print(json.dumps(result) if args.json else table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
