"""A run's identity: which changes a resume rejects, which it reports, and which do not count as changes."""

import copy
import hashlib
import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.sft import SFTData
from lmmods.runs.checkpoint import write_manifest
from lmmods.runs.folder import RunFolder, write_json
from lmmods.runs.identity import (
    CUT,
    NOT_COMPARED,
    REPORTED,
    BatchSplitChange,
    Comparison,
    identity_tree,
    is_among,
    suggest_split,
)
from lmmods.runs.model_card import model_facts
from lmmods.runs.progress import BatchSplit
from tests.house.test_docs import by_task, marks  # noqa: F401 - a fixture

ENGINES = ["torch", "jax"]
RECIPE = {
    "seed_everything": 7, "engine": "torch",
    "trainer": {"max_steps": 6, "default_root_dir": "runs/a", "limit_train_batches": None},
    "model": {"class_path": "SFT", "init_args": {"pretrained": "base", "revision": None, "lora": None, "optimizer": {
        "name": "adamw", "lr": 0.01, "betas": [0.9, 0.999], "warmup": 2}}},
    "data": {"class_path": "SFTData", "init_args": {"source": "rows.jsonl", "batch_size": 4, "max_length": 64}},
}


class Data:
    """The identity of a DataModule."""

    def __init__(self, *contents: str | None):
        self.facts = {"source": list(contents) or ["a"], "tokenizer": "t", "max_length": 64}

    def identity(self) -> dict:
        return self.facts


def tree(data: Data | None = Data(), **changes) -> dict:  # noqa: B008 - never changed
    recipe = copy.deepcopy(RECIPE)
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = recipe
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return identity_tree(recipe, data)


def compare(before: dict, after: dict, defaults: dict | None = None) -> tuple[list[str], list[str]]:
    comparison = Comparison(json.loads(json.dumps(before)), after, defaults or {})
    return [change.key for change in comparison.refused], [change.key for change in comparison.reported]


# Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_key_is_in_one_list_and_marked_in_the_docs(by_task):  # noqa: F811
    from jax_engine.trainer import Trainer

    keys = {key for keys in by_task.values() for key in keys} - {"ckpt_path", "overwrite", "stop_at"}
    keys |= {f"trainer.{name}" for name in inspect.signature(Trainer).parameters}
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    for key in leaves:
        assert [is_among(key, group) for group in (REPORTED, CUT, NOT_COMPARED)].count(True) <= 1, key
    assert all(any(is_among(known, {key}) for known in keys) for key in REPORTED | CUT)
    shown = marks()
    for key in leaves:  # documented under its name or its block's, with its list's mark
        parts = key.split(".")
        names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        mark = "‡" if is_among(key, CUT) else "†" if is_among(key, REPORTED | NOT_COMPARED) else ""
        assert next((shown[name] for name in names if name in shown), None) == mark, key


def test_the_docs_explain_every_mark():
    section = (Path(__file__).parents[2] / "docs" / "fields.md").read_text().split("## What may change on resume")[1]
    assert all(f"**{mark} " in section for mark in set(marks().values()) if mark)
    assert set(marks().values()) == {"", "†", "‡"}


def test_an_unknown_key_is_rejected_unless_it_has_its_default():
    now = tree()
    now["model"]["brand_new"] = now["data"]["brand_new"] = 1
    assert compare(tree(), now) == (["model.brand_new", "data.brand_new"], [])
    assert compare(tree(), now, {"model": {"brand_new": 1}, "data": {"brand_new": 1.0}}) == ([], [])


# Meaning, not spelling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"data__init_args__source": {"path": "rows.jsonl", "weight": 1, "limit": None}},
    {"data__init_args__source": ["rows.jsonl"]},
    {"model__init_args__optimizer__betas": (0.9, 0.999)},
    {"model__init_args__optimizer__lr": 1e-2},
    {"data__init_args__batch_size": 4.0},
    {"data__init_args__seed": 7},
    {"data__init_args__tokenizer": "base"},
    {"data__init_args__max_length": None},
    {"data__init_args__columns": {}},
    {"trainer__limit_train_batches": 1.0},
    {"trainer__default_root_dir": "elsewhere"},
], ids=str)
def test_another_spelling_of_a_value_is_not_a_change(changes):
    assert compare(tree(), tree(**changes)) == compare(tree(**changes), tree()) == ([], [])


def test_columns_of_all_sources_apply_to_every_source():
    everywhere = tree(data__init_args__columns={"q": "instruction"})
    assert compare(everywhere, tree(data__init_args__source={"path": "rows.jsonl", "columns": {"q": "instruction"}})
                   ) == ([], [])
    assert compare(everywhere, tree()) == (["data.source.columns"], [])


@pytest.mark.parametrize(("key", "is_reported"), [("model__init_args__optimizer__warmup", True),
                                                  ("trainer__limit_train_batches", False)])
def test_an_integer_is_not_a_fraction_but_zero_is_zero(key, is_reported):
    name = key.replace("init_args__", "").replace("__", ".")
    expected = ([], [name]) if is_reported else ([name], [])
    assert compare(tree(**{key: 1}), tree(**{key: 1.0})) == expected
    assert compare(tree(**{key: 0}), tree(**{key: 0.0})) == ([], [])


def test_a_moved_source_is_the_same_if_its_content_is():
    moved = {"data__init_args__source": "elsewhere/rows.jsonl"}
    assert compare(tree(), tree(**moved)) == ([], ["data.source.path"])
    assert compare(tree(), tree(Data("b"), **moved)) == (["data.source.content"], ["data.source.path"])
    assert compare(tree(), tree(Data("b"))) == (["data.source.content"], [])
    assert compare(tree(Data(None)), tree(**moved)) == (["data.source.path"], [])  # unknown content
    trusting = Comparison(tree(), tree(None, **moved), {}, trusts_paths=True)  # another process compares
    assert not trusting.refused
    assert Comparison(tree(None), tree(), {}).unknown == ["data.source.content", "data.tokenizer.content"]


def test_a_changed_source_is_named_by_its_index():
    two = {"data__init_args__source": ["rows.jsonl", {"path": "more.jsonl", "limit": 5}]}
    both, changed = (tree(Data("a", last), **two) for last in ("b", "c"))
    assert compare(both, changed) == (["data.source[1].content"], [])
    assert compare(tree(), both) == (["data.source"], [])


def test_an_added_or_removed_adapter_is_one_change():
    with_adapter = tree(model__init_args__lora={"rank": 4, "alpha": 16.0})
    assert compare(tree(), with_adapter) == compare(with_adapter, tree()) == (["model.lora"], [])
    assert compare(with_adapter, tree(model__init_args__lora={"rank": 8, "alpha": 16})) == (["model.lora.rank"], [])
    # A checkpoint without `init` has the default.
    assert compare(with_adapter, tree(model__init_args__lora={"rank": 4, "alpha": 16, "init": "kaiming"})) == ([], [])
    pissa = tree(model__init_args__lora={"rank": 4, "alpha": 16, "init": "pissa"})
    assert compare(with_adapter, pissa) == (["model.lora.init"], [])


def test_logger_ids_and_folders_are_not_compared():
    def set_logger(**options) -> dict:
        return {"trainer": {**tree()["trainer"], "logger": [{"class_path": "W", "init_args": options}]}}

    assert compare(tree() | set_logger(id="a", save_dir="x"), tree() | set_logger(id="b", save_dir="y")) == ([], [])
    assert compare(tree() | set_logger(project="a"), tree() | set_logger(project="b"))[1] == [
        "trainer.logger.init_args.project"]


# Models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(llama_folder, tmp_path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "base"))


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_model_is_identified_by_its_configuration_and_weights(model_folder, llama_folder):
    def facts(folder: Path) -> dict:
        return model_facts(str(folder), None, adapter=False, weights=True)

    known = facts(llama_folder)
    assert known == facts(model_folder)
    edit(model_folder / "config.json", transformers_version="0.0", _name_or_path="x")
    assert known == facts(model_folder)
    edit(model_folder / "config.json", attention_dropout=0.5)
    assert facts(model_folder)["config"]["attention_dropout"] == 0.5
    weights = model_folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert facts(model_folder)["weights"] != known["weights"]
    assert model_facts("nobody/nothing", None, False, True) == model_facts("a b/c:d", None, False, True) == {}


def test_sampled_hashes_cover_start_middle_and_end(tmp_path, monkeypatch):
    from lmmods.core import fingerprints

    monkeypatch.setattr(fingerprints, "SAMPLED_ABOVE", 2**20)
    path, hashes = tmp_path / "weights", set()
    for position in (None, 0, 2**22, 2**23 - 1):  # 2**22 stands for the start of a sampled block
        content = bytearray(2**23)
        if position is not None:
            content[127 * (2**23 - 2**14) // 255 if position == 2**22 else position] = 1
        path.write_bytes(content)
        hashes.add(fingerprints.hash_sampled(path))
    assert len(hashes) == 4


# Resuming on both engines -----------------------------------------------------------------------------------------

LORA = {"rank": 4, "dropout": 0.1}
SETTINGS = {"lr": 0.01, "schedule": "linear", "warmup": 2}


def common(engine: str) -> dict:
    return {"engine": engine, "model__init_args__quantize": None, "model__init_args__lora": LORA,
            "trainer__max_steps": 2, "trainer__limit_val_batches": 0, "trainer__accumulate_grad_batches": 2,
            "data__init_args__pad_to_multiple_of": 192}


@pytest.fixture(params=ENGINES)
def trained(request, finished) -> tuple[str, RunFolder]:
    """A run of two steps."""
    return request.param, finished(**common(request.param))


@pytest.fixture
def resume(trained, recipe, monkeypatch, capfd):
    """A function that resumes with changes, up to reading the data; returns stdout and stderr."""
    engine, run = trained

    def stop(data: DataModule) -> None:
        raise UserError("far enough")

    monkeypatch.setattr(DataModule, "prepare_data", stop)

    def resume_with(command: str = "fit", ckpt: Path | None = None, **changes) -> tuple[str, str]:
        capfd.readouterr()
        assert main([command, *recipe(**{**common(engine), "trainer__max_steps": 4, **changes}),
                     "--ckpt_path", str(ckpt or run.resolve("last"))]) == 2
        output = capfd.readouterr()
        assert "Traceback" not in output.err
        return output.out, output.err

    return resume_with


def optimizer(**settings) -> dict:
    return {"model__init_args__optimizer": {**SETTINGS, **settings}}


def table_rows(text: str) -> list[str]:
    """Return the rows of a printed table, with one space between columns."""
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith("  ")]


REJECTIONS = [
    ({"seed_everything": 8}, "seed_everything 7 8"),
    ({"data__init_args__shuffle": False}, "data.shuffle true false"),
    ({"data__init_args__group_by_length": True}, "data.group_by_length false true"),
    ({"data__init_args__batch_size": 2}, "data.batch_size 4 2"),
    ({"data__init_args__val_size": 5}, "data.val_size 4 5"),
    ({"data__init_args__max_length": 128}, "data.max_length 256 128"),
    ({"data__init_args__template": "chatml"}, "data.template alpaca chatml"),
    ({"trainer__overfit_batches": 2}, "trainer.overfit_batches 0.0 2"),
    ({"model__init_args__lora": {"rank": 8, "dropout": 0.0}}, "model.lora.rank 4 8"),
    ({}, "model.lora.dropout 0.1 0.0"),
    ({"model__init_args__quantize": "nf4"}, "model.quantize null nf4"),
    ({"model__init_args__config_overrides": {"hidden_act": "gelu"}},
     'model.config_overrides null {"hidden_act": "gelu"}'),
    (optimizer(name="lion", betas=[0.8, 0.99], lr=0.02), "model.optimizer.name adamw lion"),
    ({}, "model.optimizer.betas [0.9, 0.999] [0.8, 0.99]"),
]
REPORTS = [
    (optimizer(lr=0.02, schedule="cosine", weight_decay=0.1), "model.optimizer.lr 0.01 0.02"),
    ({}, "model.optimizer.schedule linear cosine"),
    ({}, "model.optimizer.weight_decay 0.0 0.1"),
    ({"trainer__accumulate_grad_batches": 4, "data__init_args__batch_size": 2},
     "trainer.accumulate_grad_batches 2 4"),
    ({}, "data.batch_size 4 2"),
    ({"trainer__precision": "bf16-mixed"}, "trainer.precision 32-true bf16-mixed"),
    ({"trainer__gradient_clip_val": 1.0}, "trainer.gradient_clip_val null 1.0"),
    ({"trainer__strategy": "ddp"}, "trainer.strategy auto ddp"),
    ({"checkpoint": {"every_n_steps": 9}}, "checkpoint.every_n_steps 2 9"),
    ({"data__init_args__num_workers": 1}, "data.num_workers 0 1"),
    ({}, "trainer.max_steps 2 4"),
]


def merge_cases(cases: list[tuple[dict, str]]) -> tuple[dict, set[str]]:
    return {key: value for changes, _ in cases for key, value in changes.items()}, {line for _, line in cases}


@pytest.mark.slow
def test_all_rejected_changes_are_in_one_message(resume):
    changes, expected = merge_cases(REJECTIONS)
    _, error = resume(**changes)
    assert error.startswith("error: ") and "belongs to another run" in error
    assert set(table_rows(error)) == {"key was now", *expected}


def test_another_optimiser_alone_is_rejected(resume):
    _, error = resume(**optimizer(name="sgd"))
    assert table_rows(error) == ["key was now", "model.optimizer.name adamw sgd"]


def test_all_reported_changes_are_in_one_table(resume):
    changes, expected = merge_cases(REPORTS)
    output, error = resume(**changes)
    assert error == "error: far enough\n"
    assert table_rows(output)[0] == "key was now" and set(table_rows(output)) == {"key was now", *expected}


@pytest.mark.parametrize(("was", "now", "suggestion"), [
    ((2, 4, 1), (2, 4, 4), (2, 1, 4)), ((2, 4, 1), (2, 4, 2), (2, 2, 2)), ((2, 4, 1), (8, 4, 2), (4, 1, 2)),
    ((4, 3, 1), (5, 1, 1), (4, 3, 1)), ((3, 2, 1), (3, 2, 4), (2, 1, 3)), ((1, 1, 1), (9, 9, 9), (1, 1, 1)),
    ((6, 2, 2), (4, 5, 3), (4, 2, 3)),
])
def test_suggested_settings_keep_the_rows_of_a_step(was, now, suggestion):
    size, accumulated, ranks = suggestion
    assert BatchSplit(*suggestion).step == BatchSplit(*was).step
    assert suggest_split(BatchSplit(*was).step, BatchSplit(*now)) == (
        f"with {ranks} device{'s' if ranks > 1 else ''}, data.batch_size {size} and trainer.accumulate_grad_batches "
        f"{accumulated} make {BatchSplit(*was).step}")


def check(was: tuple[int, int, int], now: tuple[int, int, int], limits: tuple = (None, None), num_rows: int | None = 64,
          key: str = "limit_train_batches") -> str:
    """Return the problem with a new batch split; `limits` are the epoch limits before and after."""
    sides = [{"trainer": {"accumulate_grad_batches": split[1], key: limit},
              "data": {"class_path": "lmmods.data.sft.SFTData", "batch_size": split[0]}}
             for split, limit in zip((was, now), limits, strict=True)]
    state = {"world_size": was[2], "SFTData": {} if num_rows is None else {"num_rows": num_rows}}
    return BatchSplitChange(state, *sides, {}, BatchSplit(*now)).problem()


def test_another_batch_split_must_keep_the_rows_of_a_step():
    assert check((2, 4, 1), (8, 1, 1)) == check((2, 4, 1), (1, 2, 4)) == ""
    assert check((2, 4, 1), (1, 2, 4), num_rows=None) == ""
    assert check((2, 4, 1), (2, 4, 2)) == (
        "Its steps have 8 rows (data.batch_size 2 x trainer.accumulate_grad_batches 4 x 1 device), but this "
        "recipe's have 16 rows (data.batch_size 2 x trainer.accumulate_grad_batches 4 x 2 devices): with 2 devices, "
        "data.batch_size 2 and trainer.accumulate_grad_batches 2 make 8.")


@pytest.mark.parametrize("key", ["limit_train_batches", "overfit_batches"])
def test_another_batch_split_must_keep_the_rows_of_a_limited_epoch(key):
    """A limit counts micro-batches, so an epoch keeps its rows if the limit is scaled with the batch size."""
    assert check((2, 4, 1), (1, 2, 4), (10, 5), key=key) == check((2, 4, 1), (8, 1, 1), (99, 99), key=key) == ""
    assert check((2, 4, 1), (1, 2, 4), (10, 5), None, key=key) == ""
    assert check((2, 4, 1), (1, 2, 4), (10, 10), key=key) == (
        f"trainer.{key} counts micro-batches, of 2 rows then and of 4 now: an epoch had 20 rows and would have 40. Set "
        f"trainer.{key} 5, or keep data.batch_size 2 with 1 device.")
    assert "Keep data.batch_size 2 with 1 device" in check((2, 4, 1), (8, 1, 1), (10, 10), key=key)
    assert check((2, 4, 1), (8, 1, 1), (0.5, 0.5), key=key) == ""
    assert "had 30 rows and would have 24" in check((2, 4, 1), (8, 1, 1), (0.48, 0.48), key=key)


def test_more_ranks_with_the_same_micro_batches_may_change_the_limit():
    """The limit may change here, as far as the batch split is concerned."""
    assert check((2, 4, 1), (1, 4, 2), (10, 5)) == ""


def test_another_number_of_rows_per_step_is_rejected_in_one_message(resume):
    _, error = resume(trainer__accumulate_grad_batches=1)
    assert table_rows(error) == ["key was now", "trainer.accumulate_grad_batches 2 1"]
    assert "steps have 8 rows (data.batch_size 4 x trainer.accumulate_grad_batches 2 x 1 device)" in error
    assert "data.batch_size 4 and trainer.accumulate_grad_batches 2 make 8." in error


def test_a_validation_interval_in_micro_batches_is_reported(trained, resume, tmp_path):
    """In checkpoints of earlier versions, if the interval is another number of steps."""
    checkpoint = Path(shutil.copytree(trained[1].resolve("last"), tmp_path / "checkpoints" / "step=2"))

    def reported_lines(interval: int) -> list[str]:
        state = json.loads((checkpoint / "state.json").read_text())
        state["identity"]["trainer"]["val_check_interval"] = interval
        write_json(checkpoint / "state.json", state)
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint)
        return [line for line in table_rows(resume(ckpt=checkpoint)[0]) if "val_check" in line]

    assert reported_lines(8) == [] and reported_lines(4) == ["trainer.val_check_interval 2 steps 4 steps"]
    assert reported_lines(3) == ["trainer.val_check_interval 3 micro-batches 4 steps"]


def test_moved_rows_are_reported_and_changed_rows_rejected(resume, instructions, tmp_path):
    elsewhere = Path(shutil.copy(instructions, tmp_path / "copy.jsonl"))
    output, error = resume(data__init_args__source=str(elsewhere))
    assert "data.source.path" in output and error == "error: far enough\n"
    elsewhere.write_text(elsewhere.read_text().replace("Add", "Sum", 1))
    _, error = resume(data__init_args__source=str(elsewhere))
    assert "data.source.content" in error and "belongs to another run" in error


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_a_moved_base_is_reported_and_a_changed_base_rejected(resume, model_folder, command):
    moved = {"model__init_args__pretrained": str(model_folder)}
    output, error = resume(command, **moved)
    assert "model.pretrained" in output and error == "error: far enough\n"
    edit(model_folder / "config.json", attention_dropout=0.0, intermediate_size=48)
    _, error = resume(command, **moved)
    assert "model.pretrained.config.attention_dropout  0.1  0.0" in error
    assert "model.pretrained.config.intermediate_size  96   48" in error
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    _, error = resume(command, **moved)
    assert "model.pretrained.weights" in error


def test_validate_accepts_other_data_and_settings_but_not_another_adapter(resume, instructions, tmp_path):
    other = Path(shutil.copy(instructions, tmp_path / "other.jsonl"))
    other.write_text(other.read_text() * 2)
    output, error = resume("validate", seed_everything=1, data__init_args__source=str(other), **optimizer(name="sgd"),
                           data__init_args__batch_size=3, model__init_args__quantize="nf4")
    assert error == "error: far enough\n"
    assert "model.quantize" in output and "optimizer" not in output and "data." not in output
    _, error = resume("validate", model__init_args__lora={**LORA, "alpha": 4})
    assert "model.lora.alpha  16.0  4" in error.replace("4.0", "4")


@pytest.mark.slow
def test_a_resume_is_recorded_and_its_checkpoints_have_the_new_identity(trained, recipe, tmp_path, capfd):
    engine, run = trained
    other = "jax" if engine == "torch" else "torch"
    folder = RunFolder(tmp_path / "run")
    arguments = recipe(**{**common(other), "trainer__max_steps": 3, **optimizer(lr=0.02)})
    assert main(["fit", *arguments, "--ckpt_path", str(run.resolve("last"))]) == 0
    entry, = map(json.loads, folder.resumes.read_text().splitlines())
    assert entry["step"] == 2 and entry["checkpoint"] == "step=2"
    assert entry["changed"] == {"engine": [engine, other], "trainer.max_steps": [2, 3],
                                "model.optimizer.lr": [0.01, 0.02]}
    assert "Changed since that checkpoint" in capfd.readouterr().out
    was, now = (json.loads((root.resolve("last") / "state.json").read_text())["identity"] for root in (run, folder))
    assert was["data"] == now["data"] and now["model"]["optimizer"]["lr"] == 0.02
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    output = capfd.readouterr().out
    assert "Changed since" not in output and "Raise it to train longer" in output


def copy_as_older(run: RunFolder, to: Path) -> Path:
    """Copy a run's last checkpoint without its identity, as older versions wrote it."""
    checkpoint = Path(shutil.copytree(run.resolve("last"), to / "checkpoints" / "step=2"))
    state = json.loads((checkpoint / "state.json").read_text())
    del state["identity"]
    write_json(checkpoint / "state.json", state)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    return checkpoint


def test_older_checkpoints_are_compared_with_config_yaml(trained, resume, recipe, tmp_path, capfd):
    engine, run = trained
    checkpoint = copy_as_older(run, tmp_path / "older")

    def resume_older(**changes) -> tuple[str, str]:
        assert main(["fit", *recipe(**{**common(engine), **changes}), "--ckpt_path", str(checkpoint)]) == 2
        return capfd.readouterr()

    output, error = resume_older(seed_everything=8, trainer__max_steps=4)
    assert "changes cannot be detected" in output and error == "error: far enough\n"
    shutil.copy(run.config, tmp_path / "older" / "config.yaml")
    output, error = resume_older(seed_everything=8)
    assert "seed_everything  7    8" in error
    output, error = resume_older()
    assert "Not compared" in output and "model.pretrained.weights" in output and error == "error: far enough\n"
    (tmp_path / "older" / "config.yaml").write_text("- a")
    assert "config.yaml cannot be read" in resume_older().err
    (checkpoint / "state.json").write_text("{}")
    assert "state.json has changed since it was written" in resume_older().err


def test_a_checkpoint_without_a_recipe_is_compared_with_the_model(trained, recipe, tmp_path, capfd):
    engine, run = trained
    checkpoint = copy_as_older(run, tmp_path / "older")
    for lora, message in (({**LORA, "rank": 8}, "have another shape in it"),
                          ({**LORA, "targets": ["q_proj"]}, "are not in the model")):
        changes = {**common(engine), "model__init_args__lora": lora, "trainer__max_steps": 4}
        assert main(["fit", *recipe(**changes), "--ckpt_path", str(checkpoint)]) == 2
        error = capfd.readouterr().err
        assert "This checkpoint belongs to another model" in error and message in error


def build_data(source: Path, tokenizer: Path, cache: Path) -> SFTData:
    return SFTData(str(source), template="alpaca", tokenizer=str(tokenizer), max_length=256, cache_dir=str(cache))


def test_other_processes_use_the_hashes_of_the_first(instructions, tokenizer_folder, tmp_path, monkeypatch):
    first = build_data(instructions, tokenizer_folder, tmp_path / "cache")
    first.prepare_data()
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda _: first.sources.contents), data_rank=1,
                              num_data_ranks=2, batches_per_step=2, state=None, overfit_batches=0)
    second = build_data(instructions, tokenizer_folder, tmp_path / "cache")
    second.trainer = trainer
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
        second.setup("fit")
    assert len(second.train_batches()) == 18
    # Another machine with its own cache builds the data and compares its hashes.
    other = Path(shutil.copy(instructions, tmp_path / "rows.jsonl"))
    sources = build_data(other, tokenizer_folder, tmp_path).sources.by_role["train"]
    contents = first.sources.contents.values()
    first.sources.contents = {repr(source): content for source, content in zip(sources, contents, strict=True)}
    third = build_data(other, tokenizer_folder, tmp_path / "third")
    third.trainer = trainer
    third.setup("fit")
    other.write_text(other.read_text().replace("Add", "Sum"))
    fourth = build_data(other, tokenizer_folder, tmp_path / "fourth")
    fourth.trainer = trainer
    with pytest.raises(UserError, match="differs from the first machine's"):
        fourth.setup("fit")
