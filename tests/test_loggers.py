"""metrics.csv, W&B and TensorBoard: same numbers, one run across a resume, no secret anywhere."""

import csv

import pytest
import yaml

from lmmods.cli import main
from lmmods.loggers import MetricsCSV
from lmmods.run import RunFolder

WANDB = [{"class_path": "WandbLogger", "init_args": {"project": "test"}}]


def read(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_one_step_are_one_row_and_columns_grow(tmp_path):
    logger = MetricsCSV(tmp_path / "metrics.csv")
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"a": 2.0}, step=2)
    logger.log_metrics({"b": 0.1}, step=2)
    logger.log_metrics({"a": 3.0}, step=3)
    assert read(logger.path) == [{"step": "1", "a": "1.0", "b": ""}, {"step": "2", "a": "2.0", "b": "0.1"},
                                 {"step": "3", "a": "3.0", "b": ""}]


def test_rewind_drops_what_will_come_again(tmp_path):
    first = MetricsCSV(tmp_path / "metrics.csv")
    for step in range(1, 6):
        first.log_metrics({"a": step / 3}, step=step)
    second = MetricsCSV(tmp_path / "metrics.csv")
    second.rewind(3)
    second.log_metrics({"a": 4 / 3}, step=4)
    rows = read(second.path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [float(row["a"]) for row in rows] == [step / 3 for step in range(1, 5)]


@pytest.fixture
def clean_wandb(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    import wandb

    wandb.finish()


def test_wandb_stays_offline_without_a_key_and_keeps_its_run(recipe, tmp_path, capsys, clean_wandb, monkeypatch):
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    folder = RunFolder(tmp_path / "run")
    changes = {"trainer__logger": WANDB, "model__init_args__optimizer": {"lr": 0.01}, "trainer__limit_val_batches": 0}
    assert main(["fit", *recipe(**changes, trainer__max_steps=2)]) == 0
    assert "wandb sync" in capsys.readouterr().out
    wandb.finish()
    first = yaml.safe_load(folder.config.read_text())["trainer"]["logger"][0]["init_args"]["id"]
    assert main(["fit", *recipe(**changes, trainer__max_steps=4), "--ckpt_path", "last"]) == 0
    wandb.finish()
    assert yaml.safe_load(folder.config.read_text())["trainer"]["logger"][0]["init_args"]["id"] == first
    runs = list((folder.root / "wandb").glob("offline-run-*"))
    assert runs and all(run.name.endswith(first) for run in runs)
    assert len(read(folder.metrics_csv)) == 4


def test_no_secret_reaches_the_run_folder(recipe, tmp_path, clean_wandb, monkeypatch):
    secrets = {"WANDB_API_KEY": "wandbsecret" + "0" * 30, "HF_TOKEN": "hf_plantedsecrettoken"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(["fit", *recipe(trainer__logger=WANDB, trainer__max_steps=1)]) == 0
    import wandb

    wandb.finish()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        content = path.read_bytes()
        assert not any(value.encode() in content for value in secrets.values()), path


def test_tensorboard_by_one_line(recipe, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(tmp_path / "run"), "name": "",
                                                               "version": "tensorboard"}}
    assert main(["fit", *recipe(trainer__logger=logger)]) == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = read(tmp_path / "run" / "metrics.csv")
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    assert logged == {int(row["step"]): pytest.approx(float(row["train/loss"]), rel=1e-6) for row in rows}
