"""Runs of an earlier version resume: folders that lmmods 0.1.0 left when it was interrupted between two steps.

`tests/golden/old_runs.tar.gz` contains a tiny model, its rows, a run of each engine, and the metrics.csv of the same
run finished by that version. The runs have no dropout, because its masks were sampled differently.
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
def test_a_run_of_an_earlier_version_resumes_with_the_same_numbers(engine, tmp_path, monkeypatch):
    """It starts inside a gradient accumulation window and reaches the old version's numbers."""
    shutil.unpack_archive(OLD, tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    run = RunFolder(Path("old_runs") / engine)
    assert run.find("last").name == "step=3+2"
    assert main(["fit", "--config", str(run.root / "config.yaml"), "--ckpt_path", "last"]) == 0
    resumed = rows(run)
    shutil.copy(run.root.parent / f"{engine}_metrics.csv", run.metrics_csv)
    expected = rows(run)
    assert len(resumed) == len(expected) and resumed[-1]["step"] == 6
    for row, expected_row in zip(resumed, expected, strict=True):
        del row["train/epoch"], expected_row["train/epoch"]  # the old version counted micro-batches
        assert row == pytest.approx(expected_row, rel=1e-4)  # machines and library versions round differently
