"""Runs begun with an earlier version go on: folders that lmmods 0.1.0 left when it was interrupted between two steps.

`tests/golden/old_runs.tar.gz` holds a tiny model, its rows, a run of each engine, and the metrics.csv of the same run
left to its end by that version. They have no dropout, whose masks were drawn by another rule.
"""

import shutil
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.finished_runs import rows

OLD = Path(__file__).parents[1] / "golden" / "old_runs.tar.gz"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_an_old_run_goes_on(engine, tmp_path, monkeypatch):
    """From inside a gradient accumulation window, to the numbers that the old version would have reached."""
    shutil.unpack_archive(OLD, tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    run = RunFolder(Path("old_runs") / engine)
    assert run.find("last").name == "step=3+2"
    assert main(["fit", "--config", str(run.root / "config.yaml"), "--ckpt_path", "last"]) == 0
    finished = rows(run)
    shutil.copy(run.root.parent / f"{engine}_metrics.csv", run.metrics_csv)
    wanted = rows(run)
    assert len(finished) == len(wanted) and finished[-1]["step"] == 6
    for row, golden in zip(finished, wanted, strict=True):
        del row["train/epoch"], golden["train/epoch"]  # which counted micro-batches
        assert row == pytest.approx(golden, rel=1e-4)  # machines and versions of the libraries differ in rounding
