"""What a run is: which changes a resumed run refuses, which it tells, and what is no change at all."""

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
    """Facts of a DataModule."""

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


def compared(was: dict, now: dict, defaults: dict | None = None) -> tuple[list[str], list[str]]:
    found = Comparison(json.loads(json.dumps(was)), now, defaults or {})
    return [change.key for change in found.refused], [change.key for change in found.reported]


# Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_key_is_in_one_list(by_task):  # noqa: F811
    from jax_engine.trainer import Trainer

    keys = {key for keys in by_task.values() for key in keys} - {"ckpt_path", "overwrite", "stop_at"}
    keys |= {f"trainer.{name}" for name in inspect.signature(Trainer).parameters}
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    for key in leaves:
        assert [is_among(key, each) for each in (REPORTED, CUT, NOT_COMPARED)].count(True) <= 1, key
    assert all(any(is_among(each, {key}) for each in keys) for key in REPORTED | CUT)
    shown = marks()
    for key in leaves:  # each is in a table, under its name or that of its block, with the mark of its list
        parts = key.split(".")
        names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        mark = "‡" if is_among(key, CUT) else "†" if is_among(key, REPORTED | NOT_COMPARED) else ""
        assert next((shown[name] for name in names if name in shown), None) == mark, key


def test_the_page_explains_the_marks():
    section = (Path(__file__).parents[2] / "docs" / "fields.md").read_text().split("## What may change on resume")[1]
    assert all(f"**{mark} " in section for mark in set(marks().values()) if mark)
    assert set(marks().values()) == {"", "†", "‡"}


def test_a_key_that_nobody_knows_is_refused():
    now = tree()
    now["model"]["brand_new"] = now["data"]["brand_new"] = 1
    assert compared(tree(), now) == (["model.brand_new", "data.brand_new"], [])
    assert compared(tree(), now, {"model": {"brand_new": 1}, "data": {"brand_new": 1.0}}) == ([], [])


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
def test_another_spelling_is_no_change(changes):
    assert compared(tree(), tree(**changes)) == compared(tree(**changes), tree()) == ([], [])


def test_columns_of_all_sources_are_those_of_each():
    everywhere = tree(data__init_args__columns={"q": "instruction"})
    assert compared(everywhere, tree(data__init_args__source={"path": "rows.jsonl", "columns": {"q": "instruction"}})
                    ) == ([], [])
    assert compared(everywhere, tree()) == (["data.source.columns"], [])


@pytest.mark.parametrize(("key", "told"), [("model__init_args__optimizer__warmup", True),
                                           ("trainer__limit_train_batches", False)])
def test_a_whole_number_is_no_share(key, told):
    name = key.replace("init_args__", "").replace("__", ".")
    refused_and_told = ([], [name]) if told else ([name], [])
    assert compared(tree(**{key: 1}), tree(**{key: 1.0})) == refused_and_told
    assert compared(tree(**{key: 0}), tree(**{key: 0.0})) == ([], [])


def test_what_moved_is_the_same_where_its_content_is():
    moved = {"data__init_args__source": "elsewhere/rows.jsonl"}
    assert compared(tree(), tree(**moved)) == ([], ["data.source.path"])
    assert compared(tree(), tree(Data("b"), **moved)) == (["data.source.content"], ["data.source.path"])
    assert compared(tree(), tree(Data("b"))) == (["data.source.content"], [])
    assert compared(tree(Data(None)), tree(**moved)) == (["data.source.path"], [])  # nobody can tell
    trusting = Comparison(tree(), tree(None, **moved), {}, trusts_paths=True)  # another process can
    assert not trusting.refused
    assert Comparison(tree(None), tree(), {}).unknown == ["data.source.content", "data.tokenizer.content"]


def test_each_source_is_named():
    two = {"data__init_args__source": ["rows.jsonl", {"path": "more.jsonl", "limit": 5}]}
    both, changed = (tree(Data("a", last), **two) for last in ("b", "c"))
    assert compared(both, changed) == (["data.source[1].content"], [])
    assert compared(tree(), both) == (["data.source"], [])


def test_an_adapter_that_comes_or_goes_is_one_line():
    with_one = tree(model__init_args__lora={"rank": 4, "alpha": 16.0})
    assert compared(tree(), with_one) == compared(with_one, tree()) == (["model.lora"], [])
    assert compared(with_one, tree(model__init_args__lora={"rank": 8, "alpha": 16})) == (["model.lora.rank"], [])
    # As checkpoints are that name no first values.
    assert compared(with_one, tree(model__init_args__lora={"rank": 4, "alpha": 16, "init": "kaiming"})) == ([], [])
    principal = tree(model__init_args__lora={"rank": 4, "alpha": 16, "init": "pissa"})
    assert compared(with_one, principal) == (["model.lora.init"], [])


def test_logger_names_of_a_start_do_not_count():
    def logging(**options) -> dict:
        return {"trainer": {**tree()["trainer"], "logger": [{"class_path": "W", "init_args": options}]}}

    assert compared(tree() | logging(id="a", save_dir="x"), tree() | logging(id="b", save_dir="y")) == ([], [])
    assert compared(tree() | logging(project="a"), tree() | logging(project="b"))[1] == [
        "trainer.logger.init_args.project"]


# Models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(llama_folder, tmp_path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "base"))


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_model_is_its_configuration_and_its_weights(model_folder, llama_folder):
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


def test_large_files_are_sampled(tmp_path, monkeypatch):
    from lmmods.core import fingerprints

    monkeypatch.setattr(fingerprints, "SAMPLED_ABOVE", 2**20)
    path, seen = tmp_path / "weights", set()
    for place in (None, 0, 2**22, 2**23 - 1):  # the middle is where a block begins
        content = bytearray(2**23)
        if place is not None:
            content[127 * (2**23 - 2**14) // 255 if place == 2**22 else place] = 1
        path.write_bytes(content)
        seen.add(fingerprints.hash_sampled(path))
    assert len(seen) == 4


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
    """A function that resumes with changes, up to where the data would be read; returns status and what is said."""
    engine, run = trained

    def stop(data: DataModule) -> None:
        raise UserError("far enough")

    monkeypatch.setattr(DataModule, "prepare_data", stop)

    def resumed(command: str = "fit", ckpt: Path | None = None, **changes) -> tuple[str, str]:
        capfd.readouterr()
        assert main([command, *recipe(**{**common(engine), "trainer__max_steps": 4, **changes}),
                     "--ckpt_path", str(ckpt or run.resolve("last"))]) == 2
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return said.out, said.err

    return resumed


def optimizer(**settings) -> dict:
    return {"model__init_args__optimizer": {**SETTINGS, **settings}}


def lines(text: str) -> list[str]:
    """Rows of a table, with one space between columns."""
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith("  ")]


REFUSALS = [
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
TELLINGS = [
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


def together(cases: list[tuple[dict, str]]) -> tuple[dict, set[str]]:
    return {key: value for changes, _ in cases for key, value in changes.items()}, {line for _, line in cases}


@pytest.mark.slow
def test_what_would_be_another_run_is_refused_in_one_message(resume):
    changes, expected = together(REFUSALS)
    _, error = resume(**changes)
    assert error.startswith("error: ") and "belongs to another run" in error
    assert set(lines(error)) == {"key was now", *expected}


def test_another_rule_alone_is_refused(resume):
    _, error = resume(**optimizer(name="sgd"))
    assert lines(error) == ["key was now", "model.optimizer.name adamw sgd"]


def test_what_may_change_on_resume_stands_in_one_table(resume):
    changes, expected = together(TELLINGS)
    said, error = resume(**changes)
    assert error == "error: far enough\n"
    assert lines(said)[0] == "key was now" and set(lines(said)) == {"key was now", *expected}


@pytest.mark.parametrize(("was", "now", "fits"), [
    ((2, 4, 1), (2, 4, 4), (2, 1, 4)), ((2, 4, 1), (2, 4, 2), (2, 2, 2)), ((2, 4, 1), (8, 4, 2), (4, 1, 2)),
    ((4, 3, 1), (5, 1, 1), (4, 3, 1)), ((3, 2, 1), (3, 2, 4), (2, 1, 3)), ((1, 1, 1), (9, 9, 9), (1, 1, 1)),
    ((6, 2, 2), (4, 5, 3), (4, 2, 3)),
])
def test_settings_that_keep_the_rows_of_a_step(was, now, fits):
    size, accumulated, ranks = fits
    assert BatchSplit(*fits).step == BatchSplit(*was).step
    assert suggest_split(BatchSplit(*was).step, BatchSplit(*now)) == (
        f"with {ranks} device{'s' if ranks > 1 else ''}, data.batch_size {size} and trainer.accumulate_grad_batches "
        f"{accumulated} make {BatchSplit(*was).step}")


def cuts(was: tuple[int, int, int], now: tuple[int, int, int], limits: tuple = (None, None), num_rows: int | None = 64,
         key: str = "limit_train_batches") -> str:
    """What is wrong with another cut; `limits` on an epoch then and now."""
    sides = [{"trainer": {"accumulate_grad_batches": cut[1], key: limit},
              "data": {"class_path": "lmmods.data.sft.SFTData", "batch_size": cut[0]}}
             for cut, limit in zip((was, now), limits, strict=True)]
    state = {"world_size": was[2], "SFTData": {} if num_rows is None else {"num_rows": num_rows}}
    return BatchSplitChange(state, *sides, {}, BatchSplit(*now)).problem()


def test_what_another_cut_must_keep():
    assert cuts((2, 4, 1), (8, 1, 1)) == cuts((2, 4, 1), (1, 2, 4)) == cuts((2, 4, 1), (1, 2, 4), num_rows=None) == ""
    assert cuts((2, 4, 1), (2, 4, 2)) == (
        "Its steps have 8 rows (data.batch_size 2 x trainer.accumulate_grad_batches 4 x 1 device), but this "
        "recipe's have 16 rows (data.batch_size 2 x trainer.accumulate_grad_batches 4 x 2 devices): with 2 devices, "
        "data.batch_size 2 and trainer.accumulate_grad_batches 2 make 8.")


@pytest.mark.parametrize("key", ["limit_train_batches", "overfit_batches"])
def test_another_cut_of_a_limited_epoch(key):
    """A limit counts micro-batches: an epoch keeps its rows where the limit is scaled with them."""
    assert cuts((2, 4, 1), (1, 2, 4), (10, 5), key=key) == cuts((2, 4, 1), (8, 1, 1), (99, 99), key=key) == ""
    assert cuts((2, 4, 1), (1, 2, 4), (10, 5), None, key=key) == ""
    assert cuts((2, 4, 1), (1, 2, 4), (10, 10), key=key) == (
        f"trainer.{key} counts micro-batches, of 2 rows then and of 4 now: an epoch had 20 rows and would have 40. Set "
        f"trainer.{key} 5, or keep data.batch_size 2 with 1 device.")
    assert "Keep data.batch_size 2 with 1 device" in cuts((2, 4, 1), (8, 1, 1), (10, 10), key=key)
    assert cuts((2, 4, 1), (8, 1, 1), (0.5, 0.5), key=key) == ""
    assert "had 30 rows and would have 24" in cuts((2, 4, 1), (8, 1, 1), (0.48, 0.48), key=key)


def test_the_same_micro_batches_have_the_same_epochs():
    """Whether a limit may change then is asked of the key alone."""
    assert cuts((2, 4, 1), (1, 4, 2), (10, 5)) == ""


def test_a_step_of_other_rows_is_refused_in_one_message(resume):
    _, error = resume(trainer__accumulate_grad_batches=1)
    assert lines(error) == ["key was now", "trainer.accumulate_grad_batches 2 1"]
    assert "steps have 8 rows (data.batch_size 4 x trainer.accumulate_grad_batches 2 x 1 device)" in error
    assert "data.batch_size 4 and trainer.accumulate_grad_batches 2 make 8." in error


def test_validations_counted_in_micro_batches_are_told(trained, resume, tmp_path):
    """As earlier versions did: where that is another number of steps."""
    checkpoint = Path(shutil.copytree(trained[1].resolve("last"), tmp_path / "checkpoints" / "step=2"))

    def told(interval: int) -> list[str]:
        state = json.loads((checkpoint / "state.json").read_text())
        state["identity"]["trainer"]["val_check_interval"] = interval
        write_json(checkpoint / "state.json", state)
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint)
        return [line for line in lines(resume(ckpt=checkpoint)[0]) if "val_check" in line]

    assert told(8) == [] and told(4) == ["trainer.val_check_interval 2 steps 4 steps"]
    assert told(3) == ["trainer.val_check_interval 3 micro-batches 4 steps"]


def test_rows_that_moved_and_rows_that_changed(resume, instructions, tmp_path):
    elsewhere = Path(shutil.copy(instructions, tmp_path / "copy.jsonl"))
    said, error = resume(data__init_args__source=str(elsewhere))
    assert "data.source.path" in said and error == "error: far enough\n"
    elsewhere.write_text(elsewhere.read_text().replace("Add", "Sum", 1))
    _, error = resume(data__init_args__source=str(elsewhere))
    assert "data.source.content" in error and "belongs to another run" in error


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_another_base_is_refused(resume, model_folder, command):
    moved = {"model__init_args__pretrained": str(model_folder)}
    said, error = resume(command, **moved)
    assert "model.pretrained" in said and error == "error: far enough\n"
    edit(model_folder / "config.json", attention_dropout=0.0, intermediate_size=48)
    _, error = resume(command, **moved)
    assert "model.pretrained.config.attention_dropout  0.1  0.0" in error
    assert "model.pretrained.config.intermediate_size  96   48" in error
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    _, error = resume(command, **moved)
    assert "model.pretrained.weights" in error


def test_what_asks_a_model_may_have_other_data_and_settings(resume, instructions, tmp_path):
    other = Path(shutil.copy(instructions, tmp_path / "other.jsonl"))
    other.write_text(other.read_text() * 2)
    said, error = resume("validate", seed_everything=1, data__init_args__source=str(other), **optimizer(name="sgd"),
                         data__init_args__batch_size=3, model__init_args__quantize="nf4")
    assert error == "error: far enough\n"
    assert "model.quantize" in said and "optimizer" not in said and "data." not in said
    _, error = resume("validate", model__init_args__lora={**LORA, "alpha": 4})
    assert "model.lora.alpha  16.0  4" in error.replace("4.0", "4")


@pytest.mark.slow
def test_a_resume_is_noted_and_its_identity_is_the_new_one(trained, recipe, tmp_path, capfd):
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
    was, now = (json.loads((each.resolve("last") / "state.json").read_text())["identity"] for each in (run, folder))
    assert was["data"] == now["data"] and now["model"]["optimizer"]["lr"] == 0.02
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    said = capfd.readouterr().out
    assert "Changed since" not in said and "Raise it to train longer" in said


def older(run: RunFolder, to: Path) -> Path:
    """The last checkpoint of a run as it was written before there were identities."""
    checkpoint = Path(shutil.copytree(run.resolve("last"), to / "checkpoints" / "step=2"))
    state = json.loads((checkpoint / "state.json").read_text())
    del state["identity"]
    write_json(checkpoint / "state.json", state)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    return checkpoint


def test_older_checkpoints_are_compared_with_config_yaml(trained, resume, recipe, tmp_path, capfd):
    engine, run = trained
    checkpoint = older(run, tmp_path / "older")

    def resumed(**changes) -> tuple[str, str]:
        assert main(["fit", *recipe(**{**common(engine), **changes}), "--ckpt_path", str(checkpoint)]) == 2
        return capfd.readouterr()

    said, error = resumed(seed_everything=8, trainer__max_steps=4)
    assert "changes cannot be detected" in said and error == "error: far enough\n"
    shutil.copy(run.config, tmp_path / "older" / "config.yaml")
    said, error = resumed(seed_everything=8)
    assert "seed_everything  7    8" in error
    said, error = resumed()
    assert "Not compared" in said and "model.pretrained.weights" in said and error == "error: far enough\n"
    (tmp_path / "older" / "config.yaml").write_text("- a")
    assert "config.yaml cannot be read" in resumed().err
    (checkpoint / "state.json").write_text("{}")
    assert "state.json has changed since it was written" in resumed().err


def test_a_checkpoint_without_recipe_is_held_against_the_network(trained, recipe, tmp_path, capfd):
    engine, run = trained
    checkpoint = older(run, tmp_path / "older")
    for lora, message in (({**LORA, "rank": 8}, "have another shape in it"),
                          ({**LORA, "targets": ["q_proj"]}, "are not in the model")):
        changes = {**common(engine), "model__init_args__lora": lora, "trainer__max_steps": 4}
        assert main(["fit", *recipe(**changes), "--ckpt_path", str(checkpoint)]) == 2
        error = capfd.readouterr().err
        assert "This checkpoint belongs to another model" in error and message in error



def data_module(source: Path, tokenizer: Path, cache: Path) -> SFTData:
    return SFTData(str(source), template="alpaca", tokenizer=str(tokenizer), max_length=256, cache_dir=str(cache))


def test_other_processes_take_the_hashes_of_the_first(instructions, tokenizer_folder, tmp_path, monkeypatch):
    first = data_module(instructions, tokenizer_folder, tmp_path / "cache")
    first.prepare_data()
    trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda _: first.sources.contents), data_rank=1,
                              num_data_ranks=2, batches_per_step=2, state=None, overfit_batches=0)
    second = data_module(instructions, tokenizer_folder, tmp_path / "cache")
    second.trainer = trainer
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
        second.setup("fit")
    assert len(second.train_batches()) == 18
    # A machine of its own, with its own cache: it builds, and looks what it builds from.
    other = Path(shutil.copy(instructions, tmp_path / "rows.jsonl"))
    sources = data_module(other, tokenizer_folder, tmp_path).sources.by_role["train"]
    contents = first.sources.contents.values()
    first.sources.contents = {repr(source): content for source, content in zip(sources, contents, strict=True)}
    third = data_module(other, tokenizer_folder, tmp_path / "third")
    third.trainer = trainer
    third.setup("fit")
    other.write_text(other.read_text().replace("Add", "Sum"))
    fourth = data_module(other, tokenizer_folder, tmp_path / "fourth")
    fourth.trainer = trainer
    with pytest.raises(UserError, match="differs from the first machine's"):
        fourth.setup("fit")
