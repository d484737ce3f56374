"""Pages and traces from records: what is drawn, that nothing from a file becomes markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_plugins.cli import main
from nereus_plugins.controller.journal import DecisionJournal
from nereus_plugins.report.colours import LayoutColours
from nereus_plugins.report.figures import figures
from nereus_plugins.report.journal import Journal, read_journal, with_records
from nereus_plugins.report.series import AGAIN, TRANSITIONS, binned, series_of
from nereus_plugins.report.svg import number, ticks
from nereus_plugins.report.timeline import JOB, Bar, bars
from nereus_plugins.spec import SpecError
from nereus_plugins.trace.record import Record

from .test_ab import live, run_record, step_record, transition_record, write

EVIL = "<img src=x onerror=alert(1)>\"'</script><script>alert(2)</script>"


class Tags(HTMLParser):
    """Every element's name and attributes; the text inside of the element with id `data`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data += data


def evil_records() -> list[Record]:
    unit = {"from": EVIL, "to": EVIL, "bytes_wire": 5, "seconds": {"move": 1.0}}
    return [
        run_record(run_id=EVIL, config={"note": EVIL, EVIL: EVIL}, plan={EVIL: {"dp": 4}}),
        step_record(1, 110.0, 10.0, plan={EVIL: {EVIL: EVIL}}, stages_s={"gen": 4.0, EVIL: 1.0}),
        transition_record(
            1, 113.0, {"move": 3.0, EVIL: 1.0}, units={EVIL: unit}, reason=EVIL,
            knobs={EVIL: {"from": {}, "to": {}}}, background={"exposed": EVIL},
        ),
        step_record(2, 124.0, 10.0, plan={EVIL: {"dp": 2}}),
    ]  # fmt: skip


def page_of(tmp_path: Path, *more: str) -> str:
    out = tmp_path / "page.html"
    assert main(["report", *more, "-o", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_nothing_from_a_file_becomes_markup(tmp_path: Path) -> None:
    write(tmp_path / "a", evil_records())
    write(tmp_path / "b", live())
    named = [f"--runs={EVIL.replace('=', '')}={tmp_path / 'a'}", f"--runs=plain={tmp_path / 'b'}"]
    for page in (page_of(tmp_path, *named), page_of(tmp_path, str(tmp_path / "a"))):
        tags = Tags(page)
        assert not [tag for tag, _ in tags.seen if tag == "img"]
        assert len([tag for tag, _ in tags.seen if tag == "script"]) == 2
        assert not [name for _, given in tags.seen for name in given if name.startswith("on")]
        assert json.loads(tags.data)["charts"]["step_s"]["lines"]
        assert "&lt;img src=x onerror=alert(1)&gt;" in page  # it is shown, as text


def test_a_page_fetches_nothing(tmp_path: Path) -> None:
    write(tmp_path / "run", live())
    page = page_of(tmp_path, str(tmp_path / "run"))
    for tag, given in Tags(page).seen:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in given
        assert (given.get("href") or "#").startswith("#")
    assert "@import" not in page
    assert all(found.startswith("#") for found in re.findall(r"url\(['\"]?([^'\")]*)", page))


def test_what_a_page_of_one_run_shows(tmp_path: Path) -> None:
    write(tmp_path / "run", live())
    page = page_of(tmp_path, str(tmp_path / "run"))
    assert "<b>MEASURED</b>" in page
    assert "SIMULATED" not in page
    for title in ("Step time", "Conditions", "Plans", "Memory", "Where the time went",
                  "Transitions", "Reward"):  # fmt: skip
        assert f"<h2>{title}</h2>" in page, title
    assert "<h2>Figures</h2>" not in page  # there is nothing to compare with
    assert "after step 2: 3 s" in page
    assert 'data-tip="actor\nTP1 PP1 DP4\nsteps 1 to 4"' in page


def test_a_comparison_has_its_figures_and_says_what_kind_it_is(tmp_path: Path) -> None:
    off, act = write(tmp_path / "off", live()), write(tmp_path / "act", live(0.5))
    assert main(["ab", str(off), str(act), "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<b>MEASURED</b>" in page
    assert "Against off" in page
    assert "\N{MINUS SIGN}50.0%" in page
    assert "<h2>Figures</h2>" in page
    again = write(tmp_path / "sim", [run_record(source="simulator"), *live()[1:]])
    page = page_of(tmp_path, str(again))
    assert "<b>SIMULATED</b>" in page
    assert "MEASURED" not in page


def test_measured_and_simulated_runs_are_not_on_one_page(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "a", live())
    write(tmp_path / "b", [run_record(source="simulator"), *live()[1:]])
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(out)]) == 2
    assert "never put side by side" in capsys.readouterr().err
    assert not out.exists()


def test_many_steps_are_drawn_as_few(tmp_path: Path) -> None:
    records: list[Record] = [run_record()]
    records += [
        step_record(i, 100.0 + 10 * i, 10.0 + (i == 5000), stages_s={}) for i in range(1, 9001)
    ]
    page = page_of(tmp_path, str(write(tmp_path / "run", records)))
    data = json.loads(Tags(page).data)
    for chart in data["charts"].values():
        assert all(len(line["x"]) <= 480 for line in chart["lines"])
    line = data["charts"]["step_s"]["lines"][0]
    assert max(line["h"]) == 11.0  # the one step that stands out is still there
    assert len(page) < 300_000


def test_bins_are_those_computed_by_hand() -> None:
    step = np.array([1, 2, 3, 4, 5])
    values = np.array([1.0, 3.0, np.nan, 5.0, 9.0])
    found = binned(step, values, 2)
    assert found.step.tolist() == [1.5, 4.5]
    assert found.mean.tolist() == [2.0, 7.0]
    assert found.low.tolist() == [1.0, 5.0]
    assert found.high.tolist() == [3.0, 9.0]
    assert len(binned(step, np.full(5, np.nan), 2).step) == 0
    assert binned(step, np.array([1.0, np.inf, 2.0, np.nan, 3.0]), 5).mean.tolist() == [1, 2, 3]


def test_a_series_keeps_the_last_run_of_a_step_and_all_of_the_time() -> None:
    records = live()
    records.insert(3, step_record(1, 130.0, 10.0))  # gone back to a checkpoint, and run again
    found = series_of("job", records)
    assert found.step.tolist() == [1, 2, 3, 4]
    assert found.columns["step_s"].tolist() == [10.0] * 4
    assert found.columns["gpus_used"].tolist() == [4.0, 4.0, 8.0, 8.0]
    assert found.stages_s[AGAIN] == 10.0
    assert found.stages_s[TRANSITIONS] == 3.0
    assert sum(found.stages_s.values()) == pytest.approx(figures(live())["run_s"] + 10.0)


def test_headroom_is_what_is_left_of_a_device() -> None:
    found = series_of("job", live(), capacity_bytes=3.0 * 2**30)
    assert found.columns["headroom_bytes"].tolist() == [2.0 * 2**30] * 4
    records = [run_record(config={"device_memory_bytes": 5 * 2**30}), *live()[1:]]
    found = series_of("job", records, capacity_bytes=3.0 * 2**30)  # the run's own word counts
    assert found.columns["headroom_bytes"].tolist() == [4.0 * 2**30] * 4
    assert np.isnan(series_of("job", live()).columns["headroom_bytes"]).all()


def test_what_was_hidden_lies_before_the_wait() -> None:
    record = transition_record(
        1, 0.0, {"prepare": 1.0, "prepare.build": 2.0, "commit": 0.5},
        units={"actor": {"seconds": {"build": 2.0}}},
        background={"prepare_s": 4.0, "hidden_s": 3.0},
    )  # fmt: skip
    assert bars(record) == [
        Bar(JOB, "prepare", -3.0, 1.0, 0),
        Bar(JOB, "build", -3.0, -1.0, 1),
        Bar(JOB, "commit", 1.0, 1.5, 0),
        Bar("actor", "build", -3.0, -1.0, 0),
    ]


def test_a_transitions_bars_follow_its_phases() -> None:
    units = {
        "actor": {"seconds": {"build": 1.0, "move": 0.5}},
        "critic": {"seconds": {"build": 1.0, "move": 5.0}},
    }
    record = transition_record(
        1, 0.0, {"prepare": 4.0, "prepare.move": 2.0, "prepare.build": 2.0, "commit": 1.0},
        units=units,
    )  # fmt: skip
    found = bars(record)
    assert found[:4] == [
        Bar(JOB, "prepare", 0.0, 4.0, 0),
        Bar(JOB, "build", 0.0, 2.0, 1),  # parts in the order in which a graph runs them
        Bar(JOB, "move", 2.0, 4.0, 1),
        Bar(JOB, "commit", 4.0, 5.0, 0),
    ]
    # Units that fit into a phase take turns in it; others are drawn side by side, within it.
    assert Bar("actor", "build", 0.0, 1.0, 0) in found
    assert Bar("critic", "build", 1.0, 2.0, 0) in found
    assert Bar("actor", "move", 2.0, 2.5, 0) in found
    assert Bar("critic", "move", 2.0, 4.0, 0) in found


def test_predictions_are_the_controllers_proofs(tmp_path: Path) -> None:
    assert read_journal(tmp_path) == Journal()
    journal = DecisionJournal(tmp_path)
    proof = {"step": 7, "forced": False, "predicted_s": 2.0, "predicted_of_s": 10.0,
             "predicted_stall_s": 3.0, "stall_s": 4.0, "savings": [0.1, 0.2]}  # fmt: skip
    journal.append("proof", {"proof": proof})
    journal.append("proof", {"proof": proof | {"forced": True, "savings": []}})
    journal.close()
    first, second = read_journal(tmp_path).predictions
    assert first == (7, False, 3.0, 4.0, 0.2, pytest.approx(0.15))
    assert (second.forced, second.measured_saving) == (True, None)
    page = page_of(tmp_path, str(write(tmp_path, live())))
    assert "<h2>Predicted and measured</h2>" in page
    assert "predicted +20.0%, was +15.0%" in page
    told = transition_record(9, 0.0, {"prepare": 3.0}, predicted={"transition_s": 2.5})
    known = transition_record(7, 0.0, {"prepare": 3.0}, predicted={"transition_s": 2.5})
    assert with_records([first], [told, known]) == [first, (9, False, 2.5, 3.0, None, None)]
    (tmp_path / "decisions.jsonl").write_text("nothing\nof the kind\n")
    with pytest.raises(SpecError, match=r"decisions.jsonl"):
        read_journal(tmp_path)


def test_a_layouts_colour_is_its_own_and_darker_with_dp() -> None:
    few, many, other = {"tp": 2, "dp": 2}, {"tp": 2, "dp": 8}, {"tp": 4, "dp": 2}
    colours = LayoutColours([few, many, other])
    assert list(colours.names) == ["TP2 PP1", "TP4 PP1"]
    assert len({colours.fill(one) for one in (few, many, other)}) == 3
    lightness = [int(colours.fill(one).split()[-1][:-2]) for one in (few, many)]
    assert lightness[0] > lightness[1]


def test_ticks_and_numbers() -> None:
    assert ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ticks(-0.11, 0.02, 4) == pytest.approx([-0.1, -0.05, 0.0])
    assert ticks(3.0, 3.0, 4) == [3.0]
    assert [number(v) for v in (1234.5, 12.34, 0.1234, 0.01234, 3.0)] == [
        "1,234", "12.3", "0.12", "0.012", "3",
    ]  # fmt: skip


def test_a_chrome_trace_is_valid_and_holds_what_happened(tmp_path: Path) -> None:
    records = live()
    units = {"actor": {"from": "DP4", "to": "DP8", "seconds": {"build": 1.5}}}
    records[3] = transition_record(
        2, 123.0, {"prepare": 3.0, "prepare.build": 2.0}, units=units
    )  # fmt: skip
    run = write(tmp_path / "run", records)
    out = tmp_path / "trace.json"
    assert main(["report", str(run), "--perfetto", str(out)]) == 0
    trace = json.loads(out.read_text())
    assert trace["otherData"]["kind"] == "measured"
    events = trace["traceEvents"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    spans = [e for e in events if e["ph"] == "X"]
    for span in spans:
        assert span["ts"] >= 0
        assert span["dur"] >= 0
        assert (span["pid"], span["tid"]) in names
    steps = [e for e in spans if names[e["pid"], e["tid"]] == "steps"]
    assert [round(e["dur"]) for e in steps] == [10_000_000, 10_000_000, 13_000_000, 10_000_000]
    assert steps[1]["ts"] == pytest.approx(steps[0]["ts"] + steps[0]["dur"])
    built = [e for e in spans if names[e["pid"], e["tid"]] == "transitions: actor"]
    assert [(e["name"], e["dur"]) for e in built] == [("build", 1_500_000)]
    # It lies where the transition was: the first 3 s of the third step.
    assert built[0]["ts"] == pytest.approx(steps[2]["ts"])
    assert {e["name"] for e in events if e["ph"] == "C"} == {"peak memory, bytes"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["RUN"], "say where it goes"),
        (["-o", "OUT"], "give a run directory"),
        (["GONE", "-o", "OUT"], "no records of a run"),
        (["RUN", "-o", "RUN/none/page.html"], "no directory"),
        (["RUN", "--perfetto", "RUN"], "no plain file"),
    ],
)
def test_wrong_use(given: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    run = write(tmp_path / "run", live())
    places = {"RUN": run, "GONE": tmp_path / "gone", "OUT": tmp_path / "page.html"}
    for name, place in places.items():
        given = [text.replace(name, str(place)) for text in given]
    assert main(["report", *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
