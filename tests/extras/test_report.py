"""The report page: its content, robustness against text from runs, and its look in a browser.

The last test needs chromium or chrome and is skipped where there is none.
"""

import fnmatch
import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import lmmods.extras.report.command as page_module
from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.data.label_metrics import class_report
from lmmods.extras.report.charts import MAX_POINTS, build_charts, interpolate_tokens, linear_ticks, log_ticks, thin
from lmmods.extras.report.command import COLOURS, SHAPES, render
from lmmods.extras.report.numbers import format_tick, format_value
from lmmods.extras.report.reading import Run, make_labels, read_curves, read_runs, read_samples
from lmmods.extras.report.tables import (
    MAX_CLASS_ROWS,
    build_class_tables,
    build_metrics_table,
    build_mmlu_bars,
    build_settings_tables,
    flatten,
    group_samples,
    ranking_sign,
    select_outcomes,
)

PACKAGE = Path(page_module.__file__).parent
VOID = {"meta", "input", "br", "wbr", "link", "img", "hr"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page(HTMLParser):
    """Elements and visible text of a page; fails on tags that are not nested properly."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def write_run(folder: Path, csv: str | None = "step,train/loss\n1,2.0\n2,1.5\n", final: dict | None = None,
              samples: list[dict] = (), data: dict | None = None, completed: bool = True, **recipe) -> Path:
    folder.mkdir(parents=True)
    content = {"engine": "torch", "trainer": {"max_steps": 10}, "model": {
        "class_path": "SFT", "init_args": {"pretrained": "demo/llama"}}, **recipe}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    if csv is not None:
        (folder / "metrics.csv").write_text(csv)
    if final is not None:
        (folder / "metrics.json").write_text(json.dumps(final))
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    if data:
        (folder / "data_report.json").write_text(json.dumps(data))
    if completed:
        (folder / "completed").touch()
    return folder


def render_page(*folders: Path) -> str:
    return render(read_runs([str(folder) for folder in folders]), datetime(2026, 1, 2).astimezone())


def make_run(**curves) -> Run:
    """Return a run with curves only; `__` in a name stands for `/`."""
    points = {name.replace("__", "/"): value for name, value in curves.items()}
    return Run("run", {}, points, {}, {}, [], 0, True, datetime(2026, 1, 2))


# A run of each engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_report_of_a_run_shows_its_metrics_settings_and_charts(engine, recipe, tmp_path, capsys):
    assert main(["fit", *recipe(model__init_args__quantize=None, engine=engine, trainer__max_steps=2,
                                trainer__val_check_interval=2)]) == 0
    out = tmp_path / "pages" / "report.html"
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == 0
    assert f"Wrote {out}" in capsys.readouterr().out
    page = Page(out.read_text())
    text = "".join(page.text)
    final = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for expected in ("completed", engine, "SFT", "val/loss", format_value(final["val/loss"]), "train · rows",
                     "model.init_args.optimizer.lr", "optimiser step", "tokens trained on"):
        assert expected in text, expected
    plots = [attributes["aria-label"] for attributes in page.all("svg") if "data-chart" in attributes]
    assert {"Loss over optimiser step", "Loss over tokens trained on", "Learning rate over optimiser step",
            "Perplexity over optimiser step", "Throughput over optimiser step"} <= set(plots)


def test_class_tables_and_confusion_matrix_equal_classes_json(tmp_path):
    """Names are escaped."""
    names = ["O", "B-<b>", "B-LOC"]
    report = class_report(np.array([0, 0, 1, 2, 1, 1, 0]), np.array([0, 1, 1, 2, 2, 1, 0]), names)
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    (run / "classes.json").write_text(json.dumps({**report, "entities": {"LOC": report["classes"]["B-LOC"]}}))
    (class_tables,) = build_class_tables(read_runs([str(other), str(run)]))
    assert class_tables.run == 1 and [kind for kind, *_ in class_tables.tables] == ["class", "entity"]
    assert class_tables.tables[0][2][1] == ("B-<b>", ["0.6667", "0.6667", "0.6667", "3"])
    assert class_tables.tables[1][2] == [("LOC", ["1", "0.5000", "0.6667", "2"])]
    assert [[count for count, _ in row] for _, row in class_tables.confusion] == [[2, 0, 0], [1, 2, 0], [0, 1, 1]]
    assert class_tables.confusion[1][1][0][1] == pytest.approx(1 / 3)
    page = Page(render_page(other, run))
    assert "B-<b>" in "".join(page.text)
    assert {"--share: 33%", "--share: 67%"} <= {cell.get("style") for cell in page.all("td")}
    assert "Classes" not in "".join(Page(render_page(other)).text)


@pytest.mark.parametrize("content", [
    {"classes": [1]}, {"classes": {"a": 3}}, {"classes": {"a": {"support": "x"}}, "names": "ab", "confusion": {}},
    {"classes": {"a": {"f1": None}}, "names": ["a", "b"], "confusion": [[1, 2], [3]]},
    {"classes": {"a": {}}, "names": [["a"], None], "confusion": [[-1, "x"], [None, math.nan]]}, {"names": ["a"]}])
def test_malformed_class_scores_do_not_break_the_page(content, tmp_path):
    run = write_run(tmp_path / "run")
    (run / "classes.json").write_text(json.dumps(content))
    Page(render_page(run))


def test_only_the_largest_classes_are_shown(tmp_path):
    """They are those with the largest support, without a confusion matrix."""
    label_ids = np.concatenate([np.arange(300), [250] * 3])
    run = write_run(tmp_path / "run")
    names = [f"class {index}" for index in range(300)]
    (run / "classes.json").write_text(json.dumps(class_report(label_ids, label_ids, names)))
    (class_tables,) = build_class_tables(read_runs([str(run)]))
    ((_, total, rows),) = class_tables.tables
    assert total == 300 and len(rows) == MAX_CLASS_ROWS and rows[0][0] == "class 250" and class_tables.confusion == []
    assert "of 300" in "".join(Page(render_page(run)).text)


def test_report_imports_no_heavy_library(tmp_path):
    run = write_run(tmp_path / "run")
    code = ("import sys; from lmmods.cli import main; status = main(sys.argv[1:]); "
            "heavy = {'torch', 'lightning', 'transformers', 'datasets', 'jax'} & set(sys.modules); "
            "assert not heavy, heavy; sys.exit(status)")
    result = subprocess.run([sys.executable, "-c", code, "report", run, "--out", tmp_path / "report.html"], timeout=60)
    assert result.returncode == 0 and (tmp_path / "report.html").is_file()


def test_help_lists_report_and_its_options(capsys):
    assert main(["report", "--help"]) == 0
    assert "--overwrite" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "report" in capsys.readouterr().out


# The file ------------------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_escapes_text_from_runs(tmp_path):
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    run = write_run(
        tmp_path / "<b onclick=alert(3)>", f'step,train/loss,"{evil.replace(chr(34), chr(34) * 2)}"\n1,2.0,1.0\n',
        final={evil: 3.0, "val/note": evil, "mmlu/val/" + "<script>": 0.5}, notes=evil, **{evil: "key"},
        samples=[{"step": 1, "prompt": evil, "base": evil, "output": evil}],
        data={"sources": {evil: {"format": evil, "rows_read": 1, "notes": [evil],
                                 "dropped": {evil: {"rows": 1, "first": [evil]}}}},
              "splits": {evil: {"rows": 1, evil: evil}}})
    text = render_page(run)
    page = Page(text)
    assert [set(script) for script in page.all("script")] == [{"type", "id"}, set()]
    assert not page.all("img") and not page.all("link")
    assert not any(name.startswith("on") or name in ("src", "action") for _, attrs in page.elements for name in attrs)
    assert all(attrs["href"].startswith("#m") for _, attrs in page.elements if "href" in attrs)
    assert "://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S).replace("http://www.w3.org", "")
    assert html.escape(evil, quote=False) in text.replace("&#34;", '"').replace("&#39;", "'")
    policy = next(attrs["content"] for attrs in page.all("meta") if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    json.loads(text.split('id="points">')[1].split("</script>")[0])


def test_only_a_report_is_overwritten_without_overwrite(tmp_path, capsys):
    run, out = str(write_run(tmp_path / "run")), tmp_path / "report.html"
    assert main(["report", run, "--out", str(out)]) == 0
    assert main(["report", run, "--out", str(out)]) == 0
    out.write_text("my notes")
    assert main(["report", run, "--out", str(out)]) == 2
    assert "is not a report" in capsys.readouterr().err and out.read_text() == "my notes"
    assert main(["report", run, "--out", str(out), "--overwrite", "true"]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert main(["report", run, "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_the_page_templates_are_packaged():
    pattern = re.search(r'"lmmods.extras.report": \["(.*?)"\]', (PACKAGE.parents[2] / "setup.py").read_text())[1]
    parts = [path.name for path in PACKAGE.iterdir() if path.is_file() and path.suffix != ".py"]
    assert len(parts) == 3 and all(fnmatch.fnmatch(part, pattern) for part in parts)


# Mistakes ------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path, capsys):
    run = str(write_run(tmp_path / "run"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    out = ["--out", str(tmp_path / "report.html")]
    for folders, message in (([str(tmp_path / "nowhere")], "does not exist"),
                             ([str(tmp_path / "empty")], "is not a run folder"),
                             ([str(tmp_path / "file")], "is a file"), ([run, run + "/"], "the same folder"),
                             ([], "runs")):
        assert main(["report", *folders, *out]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("name", "content", "message"), [
    ("metrics.csv", "step,train/loss\n1,2.0\n2,x\n3,1.0\n", "metrics.csv, line 3: could not convert"),
    ("metrics.csv", "step,train/loss\n1,2.0,5\n", "metrics.csv, line 2: more values"),
    ("metrics.csv", "epoch,train/loss\n1,2.0\n", "no column step"),
    ("metrics.csv", "step,train/loss\n1,\0\n", "metrics.csv, line"),
    ("metrics.csv", b"step\xff\n", "cannot be read"),
    ("metrics.json", "{", "metrics.json cannot be read"),
    ("metrics.json", "[1]", "should contain keys"),
    ("config.yaml", "a: [", "config.yaml cannot be read"),
    ("classes.json", "[1]", "should contain keys"),
    ("data_report.json", "no", "data_report.json cannot be read"),
    ("samples.jsonl", '{"step": 1}\n', "samples.jsonl, line 1"),
    ("rollouts/step=1.jsonl", '{"prompt": 1, "asked": "a"}\n', "step=1.jsonl, line 1: not an object with"),
    ("rollouts/step=1.jsonl", '[1]\n', "step=1.jsonl, line 1: not an object"),
    ("rollouts/step=1.jsonl", '{"prompt": 1\n', "step=1.jsonl, line 1"),
    ("samples.jsonl", 'half\n{"step": 1, "prompt": "a"}\n', "samples.jsonl, line 1"),
])
def test_a_broken_file_is_named(name, content, message, tmp_path):
    run = write_run(tmp_path / "run")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=re.escape(message)):
        read_runs([str(run)])


def test_a_run_in_progress_is_shown(tmp_path):
    """There is no metrics.json yet, and the last lines are incomplete."""
    run = write_run(tmp_path / "run", "step,train/loss,train/tokens\n1,2.5,10\n2,1.75,20\n3,1.2", completed=False)
    (run / "samples.jsonl").write_text('{"step": 1, "prompt": "a\u2028b", "output": "c"}\n{"step": 2, "pro')
    (read_run,) = read_runs([str(run)])
    assert read_run.curves["train/loss"] == [(1, 2.5), (2, 1.75)] and read_run.final["train/loss"] == 1.75
    assert read_run.state == "step 2 of 10" and [row["step"] for row in read_run.samples] == [1]
    assert "1.750" in render_page(run)


def test_a_run_without_logged_steps_is_shown(tmp_path):
    page = "".join(Page(render_page(write_run(tmp_path / "run", csv=None, completed=False))).text)
    assert "No step has been logged yet" in page and "step 0 of 10" in page
    (tmp_path / "bare" / "checkpoints" / "step=7").mkdir(parents=True)
    assert "step 7" in render_page(tmp_path / "bare")


def test_an_empty_metrics_file_has_no_curves(tmp_path):
    for name, text in (("a", ""), ("b", "step"), ("c", "step,train/loss\n")):
        (tmp_path / name).write_text(text)
        assert read_curves(tmp_path / name) == {}
    assert read_samples(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("paths", "expected"), [
    (["/r/a", "/r/b"], ["a", "b"]),
    (["/one/sft/7b", "/two/sft/7b", "/two/sft/8b"], ["one/sft/7b", "two/sft/7b", "8b"]),
    (["/a", "/x/a"], ["//a", "x/a"]),
])
def test_labels_distinguish_runs(paths, expected):
    assert make_labels([Path(path) for path in paths]) == expected


# Curves --------------------------------------------------------------------------------------------------------------

VALUES = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(VALUES, min_size=1, max_size=400), st.integers(20, 60))
@settings(max_examples=200, deadline=None)
def test_thinning_keeps_spikes_and_gaps(values, limit):
    points = [(float(step), value) for step, value in enumerate(values)]
    thinned = thin(points, limit)
    assert len(thinned) <= limit and thinned[0][0] == 0 and thinned[-1][0] == len(points) - 1
    assert thinned == sorted(thinned, key=lambda point: point[0]) and {x for x, _ in thinned} <= {x for x, _ in points}
    finite = [y for y in values if math.isfinite(y)]
    thinned_values = [y for _, y in thinned if math.isfinite(y)]
    assert not finite or (min(thinned_values), max(thinned_values)) == (min(finite), max(finite))
    assert len(finite) == len(values) or len(thinned_values) < len(thinned)


def test_thinning_keeps_one_spike_and_one_gap_of_50000_points():
    spike = [(float(step), 100.0 if step == 12_345 else math.sin(step)) for step in range(50_000)]
    assert len(thin(spike)) <= MAX_POINTS and (12_345.0, 100.0) in thin(spike)
    broken = [(x, math.nan if x == 20_000 else y) for x, y in spike]
    assert len(thin(broken)) <= MAX_POINTS and sum(math.isnan(y) for _, y in thin(broken)) == 1
    assert thin(spike[:1000]) == spike[:1000]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
@settings(max_examples=200, deadline=None)
def test_linear_ticks_are_in_range(low, span):
    assume(span > 1e-9 * abs(low))
    ticks = linear_ticks(low, low + span)
    assert 1 <= len(ticks) <= 7 and ticks == sorted(set(ticks))
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)


@given(st.floats(1e-9, 1e9), st.floats(31, 1e12))
@settings(max_examples=200, deadline=None)
def test_log_ticks_are_in_range(low, ratio):
    ticks = log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 7 and all(low <= tick <= low * ratio for tick in ticks) and ticks == sorted(set(ticks))


def test_ticks_by_hand():
    assert linear_ticks(0, 10) == [0, 2, 4, 6, 8, 10] and linear_ticks(0.13, 0.71) == [0.2, 0.4, 0.6]
    assert log_ticks(0.9, 120) == [1, 10, 100] and log_ticks(3, 100) == [5, 10, 20, 50, 100]
    assert [format_tick(v) for v in (0, 0.002, 5e-5, 1.5e-4, 2000, 12_500, 3e6, -4e3)] == [
        "0", "0.002", "5e-5", "1.5e-4", "2k", "12.5k", "3M", "-4k"]


def test_a_line_breaks_where_a_value_is_not_finite():
    run = make_run(train__loss=[(0, 1.0), (1, 2.0), (2, math.nan), (3, 3.0), (4, math.inf), (5, 2.0), (6, 1.0)])
    ((chart,),), other = build_charts([run])
    segments = [segment.split("L") for segment in chart.lines[0].path.split("M")[1:]]
    assert [len(segment) for segment in segments] == [2, 2, 2] and segments[1][0] == segments[1][1] and not other
    assert chart.has_gaps and run.not_finite == {"train/loss": [2, 4]} and "nan" not in chart.lines[0].path
    assert build_charts([make_run(train__loss=[(1, math.nan)])]) == ([], [])


def test_chart_positions_are_proportional_to_values():
    run = make_run(train__loss=[(0, 4.0), (50, 1.0), (100, 2.0)], val__loss=[(100, 3.0)])
    ((chart,),), _ = build_charts([run])
    train, val = chart.lines
    (x0, y0), (x1, y1), (x2, y2) = train.marks
    assert x0 == 44 and x2 == 350 and x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert (y1 - y2) / (y1 - y0) == pytest.approx(1 / 3, abs=2e-3) and y0 < y2 < y1
    assert val.is_dashed and not train.is_dashed and y0 < val.marks[0][1] < y2


def test_only_logged_metrics_have_charts():
    run = make_run(train__lr=[(1, 1e-3)], train__mfu=[(1, 0.4)], train__tokens=[(1, 10.0)], train__epoch=[(1, 0.1)],
                   **{"mmlu/five-shot/accuracy": [(1, 0.5)], "mmlu/five-shot/anatomy": [(1, 0.5)]})
    main_, other = build_charts([run, make_run(train__lr=[(1, 2e-3), (2, 1e-3)])])
    assert [by_axis[0].title for by_axis in main_] == ["Learning rate", "MMLU five-shot"]
    assert [by_axis[0].title for by_axis in other] == ["train/mfu"]
    steps, tokens = main_[0]
    assert {line.run for line in steps.lines} == {0, 1} and [line.run for line in tokens.lines] == [0]


def test_tokens_are_interpolated_between_logged_steps():
    run = make_run(train__tokens=[(10, 1000.0), (20, 3000.0)])
    assert interpolate_tokens(run, [5, 10, 15, 20, 30]) == [500, 1000, 2000, 3000, 4500]


def test_a_wide_range_of_values_gets_a_log_scale():
    wide = build_charts([make_run(train__grad_norm=[(1, 0.5), (2, 400.0)])])[0][0][0]
    narrow = build_charts([make_run(train__grad_norm=[(1, 0.5), (2, 4.0)])])[0][0][0]
    zero = build_charts([make_run(train__grad_norm=[(1, 0.0), (2, 400.0)])])[0][0][0]
    assert [chart.y.log for chart in (wide, narrow, zero)] == [True, False, False] and "log scale" in wide.unit


def test_constant_values_are_plotted():
    for value in (0.0, 5.0, -3.0, 1e-12):
        ((chart,),), _ = build_charts([make_run(val__loss=[(0, value)])])
        assert chart.y.low < value < chart.y.high and chart.y.ticks()


# Tables --------------------------------------------------------------------------------------------------------------


def test_the_best_value_of_a_metric_is_marked(tmp_path):
    finals = ({"val/loss": 2.0, "val/accuracy": 0.5, "train/lr": 1.0, "val/f1": math.nan, "only": 1},
              {"val/loss": 1.0, "val/accuracy": 0.7, "train/lr": 2.0, "val/f1": 10.0},
              {"val/loss": 1.5, "val/accuracy": 0.7, "train/lr": 3.0, "val/f1": 20.0})
    folders = [write_run(tmp_path / str(k), final=final) for k, final in enumerate(finals)]
    rows = {row.name: row for row in build_metrics_table(read_runs([str(folder) for folder in folders]))}
    best = {name: [cell.is_best for cell in row.cells] for name, row in rows.items()}
    assert best["val/loss"] == [False, True, False] and best["val/accuracy"] == [False, True, True]
    assert best["val/f1"] == [False, False, True] and not any(best["train/lr"]) and not any(best["train/loss"])
    assert [cell.text for cell in rows["only"].cells] == ["1", "–", "–"] and rows["val/f1"].cells[0].text == "NaN"
    other = write_run(tmp_path / "qa", final={"val/loss": 0.1}, model={"class_path": "lmmods.torch_engine.tasks.qa.QA"})
    mixed = {row.name: row for row in build_metrics_table(read_runs([str(folders[0]), str(other)]))}
    assert not any(cell.is_best for cell in mixed["val/loss"].cells)


def test_not_finite_values_are_counted(tmp_path):
    run = write_run(tmp_path / "run", "step,train/loss\n1,2.0\n2,nan\n3,inf\n4,1.0\n")
    assert "NaN or inf at 2 of 4 steps, first 2" in render_page(run)


@pytest.mark.parametrize(("metric", "sign"), [
    ("val/f1_macro", 1), ("val/calibration_error", -1), ("val/mse", -1), ("val/spearman", 1), ("val/margin", 0),
    ("val/loss", -1), ("val/perplexity", -1), ("val/f1", 1), ("val/HasAns_exact_match", 1), ("train/lr", 0),
    ("mmlu/val/accuracy", 1), ("val/best_f1_threshold", 0), ("train/tokens_per_second", 1), ("train/tokens", 0),
    ("val/reward", 1), ("val/pass@8", 1), ("train/reward_std", 0), ("val/missing_rewards", 0)])
def test_ranking_sign_of_a_metric(metric, sign):
    assert ranking_sign(metric) == sign


def test_values_are_formatted_with_four_digits():
    values = (0.21119540, 7419.4, 883374, 100.0, 8.2018e-9, math.nan, -math.inf, True, None, "text")
    assert [format_value(v) for v in values] == [
        "0.2112", "7,419", "883,374", "100", "8.202e-09", "NaN", "-inf", "True", "None", "text"]


def test_settings_that_differ_are_listed(tmp_path):
    a = write_run(tmp_path / "a", data_={"source": [{"path": "x"}, {"path": "y"}], "betas": [0.9, 0.99], "none": None})
    b = write_run(tmp_path / "b", data_={"source": [{"path": "x"}], "betas": [0.9, 0.95], "none": None}, extra=True)
    differing, same = build_settings_tables(read_runs([str(a), str(b)]))
    assert {row.name: [cell.text for cell in row.cells] for row in differing} == {
        "data_.source.1.path": ["y", "–"], "data_.betas": ["[0.9, 0.99]", "[0.9, 0.95]"], "extra": ["–", "true"]}
    assert ("data_.none", "null") in {(row.name, row.cells[0].text) for row in same}
    assert flatten({"a": {}, "b": [], "c": {"d": "x"}}) == {"a": "{}", "b": "[]", "c.d": "x"}


def test_defaults_folders_and_ids_are_not_differences(tmp_path):
    """Each engine records its own defaults; folders and ids always differ."""
    loggers = [{"class_path": "WandbLogger", "init_args": {"id": name, "name": name, "project": "p"}} for name in "ab"]
    a = write_run(tmp_path / "a", trainer={"default_root_dir": "a", "logger": [loggers[0]], "max_steps": 5})
    b = write_run(tmp_path / "b", trainer={"default_root_dir": "b", "logger": [loggers[1]], "max_steps": 5,
                                           "accumulate_grad_batches": 1, "detect_anomaly": True})
    differing, same = build_settings_tables(read_runs([str(a), str(b)]))
    assert {row.name: [cell.text for cell in row.cells] for row in differing} == {
        "trainer.detect_anomaly": ["false", "true"]}
    assert {"trainer.logger.0.init_args.project", "trainer.accumulate_grad_batches"} < {row.name for row in same}


def test_samples_are_listed_newest_first(tmp_path):
    rows = [{"step": step, "prompt": prompt, "base": "?", "output": f"{prompt}{step}"}
            for step in (5, 20, 10) for prompt in ("p", "q")]
    a = write_run(tmp_path / "a", samples=rows)
    b = write_run(tmp_path / "b", samples=[{"step": 1, "prompt": "q", "base": "!", "output": "b"}])
    (p, base_p, (answer,)), (q, base_q, (first, second)) = group_samples(read_runs([str(a), str(b)]))
    assert (p, base_p, answer.output, answer.older) == ("p", "?", "p20", [(10, "p10"), (5, "p5")])
    assert (q, base_q, first.run, second.run, second.base) == ("q", None, 0, 1, "!")
    assert "p20" in render_page(a, b)


def answer_row(prompt: int, reward: float | None, **changes) -> dict:
    """Return an answer in the format of rollout files."""
    return {"prompt": prompt, "sample": 0, "asked": f"p{prompt}", "answer": f"answer of {reward}", "reward": reward,
            "rewards": {"a": reward}, "advantage": 0.5, "tokens": 3, "ended": True, **changes}


def write_rollouts(run: Path, **rollouts: list[dict]) -> None:
    (run / "rollouts").mkdir()
    for name, lines in rollouts.items():
        text = "".join(json.dumps(answer) + "\n" for answer in lines)
        (run / "rollouts" / f"step={name.removeprefix('step')}.jsonl").write_text(text)


def test_best_and_worst_answers_of_the_last_rollouts_are_shown(tmp_path):
    """They belong to the first prompts, with their rewards; HTML in them is escaped."""
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    evil = "<img src=x onerror=alert(1)>"
    write_rollouts(run, step9=[answer_row(n, reward) for n in range(9) for reward in (0.0, 2.5, -1.0, None)], step10=[
        answer_row(1, 0.5), answer_row(1, 0.5), answer_row(1, None),
        answer_row(2, None, missing={"a": "took more than 10 s"}, answer=evil), answer_row(2, None),
        answer_row(3, 1.0, asked=evil, rewards={"a": 1.0, "b": None}, ended=False), answer_row(3, -1.0)],
        step8=[answer_row(8, 1.0)])
    outcomes = select_outcomes(read_runs([str(other), str(run)]))
    assert [(outcome.run, outcome.step, outcome.prompt) for outcome in outcomes] == [
        (1, 10, "p1"), (1, 10, "p2"), (1, 10, evil), *((1, 9, f"p{n}") for n in range(4))]
    assert [outcome.answers for outcome in outcomes[:4]] == [
        [("one of 2 with this reward", "reward 0.5000; advantage 0.5000; 3 tokens", "answer of 0.5")],
        [("one of 2, without rewards", "no reward; a: took more than 10 s; advantage 0.5000; 3 tokens",
          evil)],
        [("best of 2", "reward 1; a 1, b missing; advantage 0.5000; 3 tokens; truncated", "answer of 1.0"),
         ("worst of 2", "reward -1; advantage 0.5000; 3 tokens", "answer of -1.0")],
        [("best of 3", "reward 2.500; advantage 0.5000; 3 tokens", "answer of 2.5"),
         ("worst of 3", "reward -1; advantage 0.5000; 3 tokens", "answer of -1.0")]]
    page = Page(render_page(other, run))
    assert "".join(page.text).count(evil) == 2 and not page.all("img")
    assert "Answers in training" not in "".join(Page(render_page(other)).text)


def test_rollouts_without_complete_lines_are_skipped(tmp_path):
    """An incomplete line is being written; other files do not belong to the run."""
    run = write_run(tmp_path / "run")
    write_rollouts(run, step1=[answer_row(1, 1.0)], step2=[answer_row(1, 0.0)], step3=[answer_row(1, 2.0)], step4=[])
    (run / "rollouts" / "step=5.jsonl").write_text('{"prompt": 1, "as')
    (run / "rollouts" / "step=mine.jsonl").write_text("x\n")
    assert [outcome.step for outcome in select_outcomes(read_runs([str(run)]))] == [3, 2]


@pytest.mark.parametrize("changes", [
    {"reward": "x", "rewards": 3, "missing": [1]}, {"reward": math.nan, "advantage": None, "tokens": "many"},
    {"rewards": {"a": [1], "b": {}}, "ended": None}, {"asked": None, "answer": [1, {}], "prompt": {"a": 1}}])
def test_malformed_rollouts_do_not_break_the_page(changes, tmp_path):
    run = write_run(tmp_path / "run")
    write_rollouts(run, step1=[answer_row(1, 1.0), answer_row(1, 0.0) | changes])
    Page(render_page(run))


def test_reward_metrics_are_grouped_into_charts():
    curve = [(0, 0.0), (1, 1.0)]
    names = ("train/reward", "val/reward", "val/pass@1", "val/pass@16", "val/pass@8", "train/rewards/a",
             "val/rewards/a", "val/rewards/b", "train/groups_without_spread", "train/rewards/margin")
    shown, other = ([(by_axis[0].title, [line.metric for line in by_axis[0].lines]) for by_axis in charts]
                    for charts in build_charts([make_run(**dict.fromkeys(names, curve))]))
    assert shown == [("Reward margin", ["train/rewards/margin"]), ("Reward", ["train/reward", "val/reward"]),
                     ("Prompts answered correctly", ["val/pass@1", "val/pass@8", "val/pass@16"])]
    assert other == [("rewards/a", ["train/rewards/a", "val/rewards/a"]), ("rewards/b", ["val/rewards/b"]),
                     ("train/groups_without_spread", ["train/groups_without_spread"])]


def test_mmlu_scores_are_shown_as_bars(tmp_path):
    run = write_run(tmp_path / "run", final={"mmlu/val/anatomy": 0.5, "mmlu/val/accuracy": 0.4,
                                             "mmlu/val/bad": math.nan, "mmlu/test/world_religions": 0.25})
    runs = read_runs([str(run)])
    assert [(bars.split, bars.subjects) for bars in build_mmlu_bars(runs)] == [
        ("val", [("accuracy", [(0, 0.4)]), ("anatomy", [(0, 0.5)])]), ("test", [("world religions", [(0, 0.25)])])]
    assert "mmlu/val/anatomy" not in {row.name for row in build_metrics_table(runs)}
    assert "--share: 50.0%" in render_page(run)


# Looks ---------------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2 defines it."""
    channels = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_have_enough_contrast():
    css = (PACKAGE / "page.css").read_text()
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)]
    assert len(schemes) == 2 and len([name for name in schemes[0] if re.fullmatch(r"c\d", name)]) == COLOURS
    for scheme in schemes:
        for ground in ("page", "card", "tint"):
            assert all(contrast(scheme[text], scheme[ground]) >= 4.5 for text in ("ink", "soft"))
        assert contrast(scheme["ink"], scheme["best"]) >= 4.5
        assert all(contrast(scheme[f"c{k}"], scheme["card"]) >= 3 for k in range(COLOURS))
        assert all(contrast(scheme[f"c{k}"], scheme["page"]) >= 3 for k in range(COLOURS))


def test_every_marker_shape_is_defined():
    template = (PACKAGE / "page.html.jinja").read_text()
    assert all(f'id="m{k}"' in template for k in range(SHAPES)) and math.gcd(COLOURS, SHAPES) == 1


PROBE = """
const observed = {width: innerWidth, scroll: document.documentElement.scrollWidth,
                  dark: matchMedia("(prefers-color-scheme: dark)").matches};
const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width, clientY: box.top + 20}));
observed.tip = document.querySelector(".tip").innerText;
observed.tipInside = document.querySelector(".tip").getBoundingClientRect().right <= innerWidth;
plot.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"}));
observed.before = document.querySelector(".tip").innerText;
const visible = (element) => getComputedStyle(element).display !== "none";
const line = document.querySelector("figure .run-1");
observed.lines = [visible(line)];
document.getElementById("run-1").click();
observed.lines.push(visible(line));
plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width, clientY: box.top + 20}));
observed.without = document.querySelector(".tip").innerText;
observed.axes = [".by-step", ".by-tokens"].map((name) => visible(document.querySelector(name)));
document.getElementById("x-tokens").click();
observed.axes.push(...[".by-step", ".by-tokens"].map((name) => visible(document.querySelector(name))));
parent.document.documentElement.dataset.observed = JSON.stringify(observed);
"""


@pytest.fixture(scope="module")
def busy_page(tmp_path_factory) -> str:
    """Render three runs with everything on the page, long names and long texts."""
    folder = tmp_path_factory.mktemp("runs")
    header = "step,train/loss,train/grad_norm,train/tokens,val/loss,val/perplexity,train/mfu\n"
    runs = []
    for k, name in enumerate(("short", "a-rather-long-name-of-a-run-with-rank-64-and-more", "n" * 80)):
        rows = "".join(f"{s},{3 / s + k},{s % 7 + 0.1},{s * 64},{2.5 - s / 100},{math.exp(2.5 - s / 100)},0.4\n"
                       for s in range(1, 61))
        runs.append(write_run(
            folder / name, header + rows, final={"val/loss": 1.9 + k, "val/accuracy": 0.5, "mmlu/val/anatomy": 0.3},
            samples=[{"step": 60, "prompt": "word " * 60 + "x" * 300, "base": "y" * 300, "output": "z" * 300}],
            data={"sources": {"some/very/long/path/" + "s" * 90: {"format": "alpaca", "rows_read": 3, "tokens": 9}},
                  "splits": {"train": {"rows": 3, "length": {"max": 9}, "padding_share": {"shuffled": 0.1}}}},
            setting="v" * 200, trainer={"max_steps": 10, "default_root_dir": name}))
        write_rollouts(runs[-1], step60=[answer_row(1, reward, asked="word " * 60 + "x" * 300, answer="z" * 300,
                                                    rewards={"r" * 90: reward, "other": 1.0}) for reward in (1.0, 0.0)])
    return render_page(*runs)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_the_page_works_in_a_browser(width, dark, busy_page, tmp_path):
    """Test for console errors and horizontal scrolling; test the switches and the pointer."""
    def visit(text: str) -> subprocess.CompletedProcess:
        """Load the page in a frame, because the window itself cannot be as narrow as a phone."""
        frame = f'<iframe style="width: {width}px; height: 900px" srcdoc="{html.escape(text)}"></iframe>'
        (tmp_path / "page.html").write_text(f'<!DOCTYPE html><meta charset="utf-8">{frame}')
        return subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--enable-logging=stderr", f"--blink-settings=preferredColorScheme={int(not dark)}", "--dump-dom",
             (tmp_path / "page.html").as_uri()],
            capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)})

    assert "CONSOLE" not in visit(busy_page).stderr
    probed = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", busy_page)
    result = visit(probed.replace("</body>", f"<script>{PROBE}</script></body>"))
    assert "CONSOLE" not in result.stderr
    state = json.loads(html.unescape(re.search(r'data-observed="([^"]*)"', result.stdout)[1]))
    assert state["width"] == width and state["scroll"] <= width and state["dark"] == dark
    assert state["tipInside"] and "optimiser step 60" in state["tip"] and state["tip"].count("short") == 2
    assert "1.900" in state["tip"] and "step 59" in state["before"] and "rank-64" not in state["without"]
    assert state["lines"] == [True, False] and state["axes"] == [True, False, False, True]
