"""metrics.csv, W&B and TensorBoard: the same numbers, one run across a resume, and no secrets."""

import ast
import csv
import json
import secrets
import struct
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from lmmods.cli import main
from lmmods.data.label_metrics import class_report
from lmmods.recipe.engines import LOGGERS
from lmmods.runs.csv_logger import MetricsCSV
from lmmods.runs.folder import RunFolder
from lmmods.runs.loggers import LoggerSupport, find_support
from lmmods.runs.wandb import TABLE_PROMPTS, TABLE_ROWS, RolloutTable, log_classes

ROOT = Path(__file__).parents[2]
WANDB = [{"class_path": "WandbLogger", "init_args": {"project": "test"}}]


def read_csv(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_csv_merges_rows_of_one_step_and_adds_columns(tmp_path):
    logger = MetricsCSV(tmp_path / "metrics.csv")
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_metrics({"a": 2.0}, step=2)
    logger.log_metrics({"b": 0.1}, step=2)
    logger.log_metrics({"a": 3.0}, step=3)
    assert read_csv(logger.path) == [{"step": "1", "a": "1.0", "b": ""}, {"step": "2", "a": "2.0", "b": "0.1"},
                                     {"step": "3", "a": "3.0", "b": ""}]


def test_rewind_drops_the_rows_that_will_be_logged_again(tmp_path):
    first = MetricsCSV(tmp_path / "metrics.csv")
    for step in range(1, 6):
        first.log_metrics({"a": step / 3}, step=step)
    second = MetricsCSV(tmp_path / "metrics.csv")
    second.rewind(3)
    second.log_metrics({"a": 4 / 3}, step=4)
    rows = read_csv(second.path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [float(row["a"]) for row in rows] == [step / 3 for step in range(1, 5)]


@pytest.fixture
def clean_wandb(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    import wandb

    wandb.finish()


@pytest.mark.slow
def test_wandb_without_a_key_is_offline_and_keeps_its_run_id(recipe, tmp_path, capsys, clean_wandb, monkeypatch):
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "12345e67")  # a string that looks like a number
    folder = RunFolder(tmp_path / "run")
    changes = {"trainer__logger": WANDB, "model__init_args__optimizer": {"lr": 0.01}, "trainer__limit_val_batches": 0}
    assert main(["fit", *recipe(**changes, trainer__max_steps=2)]) == 0
    assert "wandb sync" in capsys.readouterr().out
    wandb.finish()
    first = yaml.safe_load(folder.config.read_text())["trainer"]["logger"][0]["init_args"]["id"]
    assert first == "12345e67"
    assert main(["fit", *recipe(**changes, trainer__max_steps=4), "--ckpt_path", "last"]) == 0
    wandb.finish()
    assert yaml.safe_load(folder.config.read_text())["trainer"]["logger"][0]["init_args"]["id"] == first
    runs = [run.name for run in (folder.root / "wandb").glob("offline-run-*")]
    # offline-run-TIME-ID, with a suffix if both start within one second
    assert len(runs) == 2 and all(run.split("-")[3] == first for run in runs), runs
    assert len(read_csv(folder.metrics_csv)) == 4


def read_records(file) -> list:
    """Read the records of an offline run: protobuf messages in a LevelDB log with blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, part, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # too short for a header: the block ends here
            position += left
            continue
        _, length, record_kind = struct.unpack("<IHB", data[position:position + 7])
        if position + 7 + length > len(data):
            break
        part += data[position + 7:position + 7 + length]
        position += 7 + length
        if record_kind in (1, 4):  # a whole record, or its last part
            records.append(Record.FromString(part))
            part = b""
    return records


def read_all_records(file) -> list:
    """Read all records of a finished run. W&B's service still writes after `finish`, until `teardown`."""
    import wandb

    wandb.teardown()
    all_records = read_records(file)
    assert all_records[-1].WhichOneof("record_type") == "exit"
    return all_records


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_an_offline_wandb_run_has_the_numbers_of_metrics_csv(recipe, tmp_path, clean_wandb, engine):
    import wandb

    folder = RunFolder(tmp_path / "run")
    logger = [{"class_path": "WandbLogger", "init_args": {"project": "test", "log_model": "all"}}]
    arguments = recipe(engine=engine, trainer__logger=logger, trainer__max_steps=4,
                       samples={"prompts": ["Add 1 and 2."], "every_n_steps": 2, "max_new_tokens": 4})
    assert main(["fit", *arguments]) == 0
    wandb.finish()
    file, = folder.root.glob("wandb/offline-run-*/run-*.wandb")
    history, artifacts, config = {}, [], {}
    for record in read_all_records(file):
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if row:
            history.setdefault(row["trainer/global_step"], {}).update(row)
        artifacts += [record.request.log_artifact.artifact, record.artifact]
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    for row in read_csv(folder.metrics_csv):
        expected = {name: float(value) for name, value in row.items() if value and name != "step"}
        assert {name: history[int(row["step"])][name] for name in expected} == pytest.approx(expected)
    assert config["recipe"]["engine"] == engine and config["data_report"] == json.loads(folder.data_report.read_text())
    assert "samples/path" in history[2] and "samples/path" in history[4]
    aliases = {alias for artifact in artifacts if artifact.type == "model" for alias in artifact.aliases}
    assert {"step-2", "step-4"} <= aliases
    assert main(["predict", "--config", str(folder.config), "--ckpt_path", "last"]) == 0
    wandb.finish()
    tables = [path for path in folder.root.glob("wandb/offline-run-*/files/media/table/predictions*.json")]
    rows = json.loads(tables[0].read_text())
    predicted = [json.loads(line) for line in folder.predictions.read_text().splitlines()]
    assert rows["columns"] == list(predicted[0]) and len(rows["data"]) == len(predicted) > 0


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_wandb_logs_scores_by_class_as_tables(tmp_path, clean_wandb, monkeypatch, engine):
    """For each evaluation: precision, recall, F1 and support by class and by entity, and the confusion matrix."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path / "run")
    assert main(["fit", "--config", "configs/tag.yaml", "--engine", engine, "--trainer.max_steps", "2",
                 "--trainer.val_check_interval", "1", "--trainer.limit_val_batches", "1",
                 "--trainer.default_root_dir", str(folder.root)]) == 0
    wandb.finish()
    expected = json.loads(folder.classes.read_text())

    def tables(name: str) -> list[dict]:
        paths = folder.root.glob(f"wandb/offline-run-*/files/media/table/val/{name}_*.json")
        return [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: int(path.name.split("_")[1]))]

    for name in ("classes", "entities"):
        score_tables = tables(name)
        assert len(score_tables) == 2
        assert all(table["columns"] == ["name", "precision", "recall", "f1", "support"] for table in score_tables)
        assert score_tables[-1]["data"] == [[label, *row.values()] for label, row in expected[name].items()]
    table = tables("confusion")[-1]
    assert table["columns"] == ["Actual", "Predicted", "nPredictions"]
    matrix = np.zeros((len(expected["names"]),) * 2, int)
    for actual, predicted, count in table["data"]:
        matrix[expected["names"].index(actual), expected["names"].index(predicted)] = count
    assert matrix.tolist() == expected["confusion"] and matrix.sum() > 0
    counts = [row[2] for row in table["data"]]
    assert 0 not in counts and counts == sorted(counts, reverse=True)


def test_a_confusion_table_of_many_classes_has_only_the_largest_counts():
    """The confusion table has the largest counts; without classes, as in other tasks, nothing is logged."""
    logged, size = {}, 40
    logger = SimpleNamespace(log_table=lambda name, **table: logged.update({name: table}))
    names = [f"class {index}" for index in range(size)]
    report = class_report(np.arange(size**2) // size, np.arange(size**2) % size, names)
    report["confusion"][3][5] = 9
    log_classes([object(), logger], {"classes.json": report}, "test", 7)
    assert set(logged) == {"test/classes", "test/confusion"} and logged["test/confusion"]["step"] == 7
    rows = logged["test/confusion"]["data"]
    assert len(rows) == TABLE_ROWS and rows[0] == ["class 3", "class 5", 9]
    logged.clear()
    log_classes([logger], {}, "val", 1)
    assert not logged


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_wandb_logs_the_answers_of_rollouts_as_a_table(recipe, tmp_path, clean_wandb, monkeypatch, engine):
    """The first rows of the rollout file, for the first rollout and then every `log_every_n_steps`."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path / "run")
    rewards = [{"name": "regex", "pattern": "[a-m]", "label": "letters"}, {"name": "length", "max_tokens": 3}]
    assert main(["fit", *recipe(
        engine=engine, trainer__logger=WANDB, trainer__max_steps=4, trainer__log_every_n_steps=2,
        trainer__limit_val_batches=0, data__class_path="PromptData", data__init_args__batch_size=12,
        model__class_path="GRPO", model__init_args__num_generations=2, model__init_args__max_new_tokens=4,
        model__init_args__rewards=rewards)]) == 0
    wandb.finish()
    files = folder.root.glob("wandb/offline-run-*/files/media/table/rollouts_*.json")
    tables = [json.loads(path.read_text()) for path in sorted(files, key=lambda path: int(path.name.split("_")[1]))]
    assert len(tables) == 2
    for step, table in zip((0, 2), tables, strict=True):
        lines = [json.loads(line) for line in (folder.rollouts / f"step={step}.jsonl").read_text().splitlines()]
        assert len(lines) == 12
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert rows == [{"prompt": line["asked"], "answer": line["answer"], "reward": line["reward"],
                         "rewards/letters": line["rewards"]["letters"], "rewards/length": line["rewards"]["length"],
                         "advantage": line["advantage"], "ended": line["ended"], "missing": ""}
                        for line in lines[:2 * TABLE_PROMPTS]]


def test_a_table_of_answers_shows_why_rewards_are_missing():
    logged = []
    logger = SimpleNamespace(log_table=lambda name, **table: logged.append((name, table)))
    line = {"prompt": 3, "asked": "Say it.", "answer": "It", "reward": None, "rewards": {"a": None, "b": 0.5},
            "missing": {"a": "took more than 10 s"}, "advantage": 0.0, "ended": False}
    table = RolloutTable()
    for step in (0, 4, 5, 9, 10):
        table.log([object(), logger], [line], step, every=5)
    assert [(name, content["step"]) for name, content in logged] == [("rollouts", step) for step in (0, 5, 10)]
    assert dict(zip(logged[0][1]["columns"], logged[0][1]["data"][0], strict=True)) == {
        "prompt": "Say it.", "answer": "It", "reward": None, "rewards/a": None, "rewards/b": 0.5, "advantage": 0.0,
        "ended": False, "missing": "a: took more than 10 s"}
    table.log([object()], [line], 99, every=5)
    assert len(logged) == 3


def test_no_secret_is_written_to_the_run_folder(recipe, tmp_path, clean_wandb, monkeypatch):
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


def test_tensorboard_has_the_losses_of_metrics_csv(recipe, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(tmp_path / "run"), "name": "",
                                                               "version": "tensorboard"}}
    assert main(["fit", *recipe(trainer__logger=logger)]) == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    assert logged == {int(row["step"]): pytest.approx(float(row["train/loss"]), rel=1e-6) for row in rows}


def test_logger_names_are_looked_up_in_one_file_only():
    """No other file compares or looks up a logger's class name; messages may contain it."""
    entry = ROOT / "lmmods" / "recipe" / "engines.py"
    sources = [path for folder in ("lmmods", "jax_engine") for path in (ROOT / folder).rglob("*.py") if path != entry]
    for path in sources:
        texts = {node.value for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not texts & LOGGERS.keys(), path


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_is_recognised_by_its_class_name_with_any_prefix(name):
    support = find_support(name)
    assert support is import_module(LOGGERS[name]).SUPPORT
    assert find_support(f"somewhere.My{name}") is support
    assert find_support(f"lightning.pytorch.loggers.{name}") is support
    assert type(find_support(f"{name}Wrapper")) is LoggerSupport
