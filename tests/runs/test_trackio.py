"""Trackio's store has the numbers of metrics.csv, as one run across a resume."""

import csv
import json
import math
import subprocess
import sys

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.runs.trackio import TrackioLogger

TRACKIO = [{"class_path": "TrackioLogger", "init_args": {"project": "tests"}}]


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A function that reads a project with Trackio in a separate process."""
    pytest.importorskip("trackio")
    import trackio  # noqa: F401 - the loop below patches its modules

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    for name, module in list(sys.modules.items()):  # several of its modules have the folder as a constant
        if name.split(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "store")

    def read(script: str) -> object:
        code = f"import json; from trackio.sqlite_storage import SQLiteStorage as S; print(json.dumps({script}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return read


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_resumed_run_is_one_trackio_run_with_the_numbers_of_metrics_csv(engine, recipe, tmp_path, store, capsys):
    options = [*recipe(trainer__logger=TRACKIO, model__init_args__quantize=None), "--engine", engine]
    if engine == "torch":
        assert main(["fit", *options, "--stop_at", "2"]) == 0
    assert main(["fit", *options, "--ckpt_path", "auto"]) == 0
    assert "trackio show --project tests" in capsys.readouterr().out
    assert store("S.get_runs('tests')") == ["run"]
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = {int(row.pop("step")): {name: float(value) for name, value in row.items() if value}
                for row in csv.DictReader(file)}
    logged: dict[int, dict[str, float]] = {}
    for entry in store("S.get_logs('tests', 'run')"):
        step = entry.pop("step")
        logged.setdefault(step, {}).update({name: value for name, value in entry.items() if name != "timestamp"})
    assert logged == rows and len(rows) >= 4
    assert store("S.get_run_config('tests', 'run')")["recipe"]["trainer"]["logger"][0]["class_path"].endswith(
        "TrackioLogger")


def test_nan_and_infinity_are_logged(store):
    logger = TrackioLogger("odd", "run")
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": 0.1}, step=3)
    logger.finalize("success")
    entry, = store("S.get_logs('odd', 'run')")
    assert math.isnan(entry["a"]) and math.isinf(entry["b"]) and entry["c"] == 0.1


def test_a_project_name_that_trackio_rejects_is_an_error(store):
    with pytest.raises(UserError, match="trackio cannot start a run"):
        TrackioLogger("registry-a", "run").log_metrics({"a": 1.0}, step=1)


def test_without_trackio_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"needs trackio .*\[trackio\]"):
        TrackioLogger().log_metrics({"a": 1.0}, step=1)
