"""The fields are those of the real classes, and what the reader accepts can be built."""

import inspect
import itertools
import random
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import yaml

from lmmods.cli import main
from lmmods.commands.registry import COMMANDS, RECIPE_COMMANDS, options_of
from lmmods.core.errors import UserError
from lmmods.recipe.classes import (
    CLASSES,
    FOLDERS,
    declared,
    implementation,
    module_of,
    unsupported_reason,
)
from lmmods.recipe.engines import load_engine
from lmmods.recipe.keys import TRAINERS, keys_of, library_classes, members, recipe_keys, task_classes, walk
from lmmods.recipe.objects import ClassArguments, objects
from lmmods.recipe.reader import Recipe, parse, with_library_classes
from lmmods.recipe.tasks import base, clm, sft
from tests.faults.test_mutations import RECIPES, key_paths, mutate
from tests.faults.test_odd_recipes import VALUES

ENGINES = ["torch", "jax"]
OWN = {"MetricsCSV", "DummyLogger"}  # loggers that no recipe needs
UNTRIED = {"CometLogger", "XLAProfiler", "PassThroughProfiler"}  # of Lightning's, or without a use
STRATEGIES = {"DDPStrategy", "SingleDeviceStrategy", "FSDP2", "DeepSpeed", "MeshSharding"}  # that trainers accept
# What stands on the command line beside a recipe.
OPTIONS = [["--model", "SFT"], ["--model", "CLM"], ["--model.class_path", "CLM"], ["--model.lora.rank", "3"],
           ["--model.lora.rank", "x"], ["--model.lora", "null"], ["--model.optimizer.lr=fast"],
           ["--data.batch_size", "0"], ["--data", "SFTData"], ["--data.source", "rows.jsonl"],
           ["--model.optimizer", "{lr: 1, name: adamm}"],
           ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "x"], ["--trainer.logger+=CSVLogger"],
           ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/loss"],
           ["--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: x}}]"],
           ["--trainer", "{max_steps: 3}"], ["--trainer", "{max_stepz: 3}"], ["--trainer.logger", "3"],
           ["--trainer.strategy", "ddp"], ["--trainer.strategy", "fast"], ["--trainer.devices", "[0, 1]"],
           ["--model", "nowhere.Mine", "--model.rank", "3"], ["--model.optimizer.class_path", "x.Mine"],
           ["--model.lora", "{class_path: lmmods.core.settings.LoRA, init_args: {rank: 3}}"],
           ["--model.lora", "{class_path: os.system}"], ["--data.source", "{path: x, limit: 3}"],
           ["--data.source", "{path: x, limit: many}"], ["--samples.prompts", "[a, b]"], ["--mmlu.limit", "x"],
           ["--unknown", "1"], ["--seed_everything", "x"], ["--config", "trainer: {max_steps: 3}"],
           ["--config", "model: {class_path: lmmods.recipe.tasks.base.TaskFields}"], ["stray"]]


def read(arguments: list[str], engine: str = "torch") -> Recipe:
    command = arguments[0]
    words = arguments if engine == "torch" else [*arguments, "--engine", engine]
    return parse(words, options_of(command)[0], COMMANDS[command].example)


# Fields --------------------------------------------------------------------------------------------------------------


def of_class(kind: type) -> dict[str, tuple]:
    """Type and default of each argument of a constructor."""
    return {name: (key.type, key.default) for name, key in keys_of(kind).items()}


def substituted(hint: Any, classes: dict[type, Any]) -> Any:
    """A type with stand-ins replaced by the classes that they stand for."""
    kinds = [list[substituted(get_args(each)[0], classes)] if get_origin(each) is list else
             classes.get(each, each) if inspect.isclass(each) else each for each in members(hint)]
    return Union[tuple(kinds)]  # noqa: UP007 - members from a list


@pytest.mark.parametrize("engine", ENGINES)
def test_fields_of_the_trainer_are_those_of_the_engine(engine):
    """On torch most of them are Lightning's: names, types and defaults."""
    types = load_engine(engine)
    fields = {name: (substituted(key.type, types.libraries), key.default)
              for name, key in keys_of(TRAINERS[engine]).items()}
    assert fields == of_class(types.trainer)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("block", ["model", "data"])
def test_tasks_and_data_modules_have_their_fields(engine, block):
    real = {kind.__name__: kind for kind in subclasses(getattr(load_engine(engine), block))
            if not inspect.isabstract(kind) and kind.__module__.startswith(("lmmods.", "jax_engine."))
            and not kind.__name__.startswith("Causal")}
    assert set(declared(block)) <= set(real)
    for name, fields in declared(block).items():
        assert issubclass(real[name], fields) and real[name].__module__ == module_of(fields, FOLDERS[engine][block])
        assert of_class(fields) == of_class(real[name]), name


def subclasses(base: type) -> list[type]:
    return [each for kind in base.__subclasses__() for each in (kind, *subclasses(kind))]


@pytest.mark.parametrize("engine", ENGINES)
def test_classes_of_libraries_are_listed_as_they_are(engine):
    types, fields = load_engine(engine), keys_of(TRAINERS[engine], "trainer")
    for key, names in CLASSES[engine].items():
        bases = [types.libraries[each] for each in library_classes(fields[key.partition(".")[2]].type)]
        # Not what another test of this process has derived from them.
        listed = {kind.__name__ for base in bases for kind in (base, *subclasses(base)) if not inspect.isabstract(kind)
                  and kind.__module__.startswith(("lightning.", "lmmods.", "jax_engine."))} - OWN - {
                      base.__name__ for base in bases if key != "trainer.strategy" and base.__subclasses__()}
        if key == "trainer.callbacks":
            listed = {name for name in listed if not unsupported_reason(f"lightning.pytorch.callbacks.{name}")}
        if key in ("trainer.logger", "trainer.profiler"):
            listed -= UNTRIED
        if key == "trainer.strategy":
            listed &= STRATEGIES
        assert {name.rsplit(".", 1)[-1] for name in names} == listed, key


@pytest.mark.parametrize("command", RECIPE_COMMANDS)
def test_trainers_take_the_options_of_their_commands(command):
    for engine in ENGINES:
        performer = getattr(load_engine(engine).trainer, command, None)
        if command in ("fit", "validate", "test", "predict"):
            theirs = inspect.signature(performer).parameters
            assert {name: key.default for name, key in options_of(command)[0].items()} == {
                name: theirs[name].default for name in options_of(command)[0]}


# What is accepted can be built ---------------------------------------------------------------------------------------


def outcome(arguments: list[str], engine: str) -> str | None:
    """The message with which a recipe is refused; None where its model and data can be built. Nothing else happens."""
    try:
        recipe = read(arguments, engine)
        recipe = with_library_classes(recipe)
        for value in recipe.given["trainer"].values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ClassArguments):
                    each.build()
        model, data = (built(recipe, block) for block in ("model", "data"))
        model.check_data(data)
    except UserError as error:
        return str(error)
    return None


def built(recipe: Recipe, block: str) -> Any:
    kind = recipe.classes[block]
    arguments = objects(kind, recipe.given[block])
    if kind in declared(block).values():
        kind = implementation(kind, FOLDERS[recipe.engine][block])
    return kind(**arguments)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_odd_values(engine, recipe):
    refused = [said for _, (key, value, _) in enumerate(VALUES)
               if (said := outcome(["fit", *recipe(**{key: value})], engine))]
    assert len(refused) > len(VALUES) // 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_options(engine, recipe):
    said = [outcome(["fit", *recipe(), *extra], engine) for extra in OPTIONS]
    assert None in said and len(list(filter(None, said))) > len(OPTIONS) // 3
    mine = recipe(model__class_path="nowhere.Mine", model__init_args={"surprise": 1})
    assert all(outcome(["fit", *mine, *extra], engine) for extra in OPTIONS)  # there is no such class


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.parent.name == "recipes")) for path in RECIPES])
def test_mutated_recipes(engine, path, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    layers = ["--config", "configs/sft_qlora.yaml"] if path.stem == "smoke" else []
    assert read(["fit", *layers, "--config", str(path)], engine)
    chance, base = random.Random(path.stem), yaml.safe_load(path.read_text())
    for _ in range(6):
        tree, _ = mutate(base, key_paths(base), chance)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True))
        outcome(["fit", *layers, "--config", str(tmp_path / "recipe.yaml")], engine)


def test_layers_go_over_each_other(recipe, tmp_path):
    """Blocks are merged key by key, other mappings and lists replaced; an option may set one entry or append."""
    (tmp_path / "over.yaml").write_text("model: {lora: {alpha: 3}, config_overrides: {b: 2}}\n"
                                        "data: {columns: {b: output}, add_tokens: [x]}\n")
    first = recipe(model__init_args__config_overrides={"a": 1}, data__init_args__columns={"a": "instruction"})
    given = read(["fit", *first, "--config", str(tmp_path / "over.yaml"), "--data.columns.c", "input",
                  "--data.add_tokens+", "y", "--data.add_tokens+=z"]).given
    assert given["model"]["lora"] == {"rank": 4, "dropout": 0.1, "alpha": 3}
    assert given["model"]["config_overrides"] == {"b": 2}
    assert given["data"]["columns"] == {"b": "output", "c": "input"}
    assert given["data"]["add_tokens"] == ["x", "y", "z"]


def test_a_mapping_that_names_a_source_replaces_one(recipe, tmp_path):
    """As its path alone would. One without a path, and an option for one entry, change the source that is there."""
    (tmp_path / "over.yaml").write_text("data: {source: {path: over.jsonl}}\n")
    first = recipe(data__init_args__source={"path": "first.jsonl", "columns": {"q": "instruction"}, "limit": 3})
    for words, source in (
            (["--data.source", "{path: x.jsonl}"], {"path": "x.jsonl"}), (["--data.source", "x.jsonl"], "x.jsonl"),
            (["--config", str(tmp_path / "over.yaml")], {"path": "over.jsonl"}),
            (["--data.source", "{limit: 5}"], {"path": "first.jsonl", "columns": {"q": "instruction"}, "limit": 5}),
            (["--data.source.path", "x.jsonl"],
             {"path": "x.jsonl", "columns": {"q": "instruction"}, "limit": 3})):
        assert read(["fit", *first, *words]).given["data"]["source"] == source


opened: list[str] | None = None  # files opened in this process, while a test counts them


def test_a_recipe_is_read_once(recipe):
    global opened

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and opened is not None:
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    words, opened = recipe(), []
    try:
        read(["fit", *words])
        assert opened.count(words[1]) == 1
    finally:
        opened = None


def test_what_is_typed_goes_before_files():
    """Of what deletes a run or runs code, whichever comes first on the command line."""
    file = ["--config", "{overwrite: true, trainer: {default_root_dir: x}, model: {trust_remote_code: true}}"]
    task = ["--model", "SFT", "--data", "SFTData"]

    def parsed(*words: str) -> Recipe:
        return parse(["fit", *task, *words], options_of("fit")[0], checked=False)

    assert parsed(*file).options["overwrite"] and not parsed("--overwrite", "false", *file).options["overwrite"]
    assert not parsed(*file, "--overwrite=false").options["overwrite"]
    assert parsed("--overwrite", "true", "--config", "{overwrite: false}").options["overwrite"]
    for words, is_typed in ((["--model.trust_remote_code", "false", *file], False), (file, False),
                            (["--model.init_args.trust_remote_code=true", *file], True)):
        recipe = parsed(*words)
        assert recipe.given["model"]["trust_remote_code"]
        assert recipe.is_typed_true("model.trust_remote_code") is is_typed


def test_names_that_are_almost_right(recipe, capsys):
    for words in (["--print_configs"], ["--data", "lmmods.data.nowhere.SFTData"]):
        assert main(["fit", *recipe(), *words]) == 2
        assert words[-1].lstrip("-") in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "key", "value", "message"), [
    ("torch", "model__class_path", "SFTT",
     f"model is SFTT, but must be {', '.join(declared('model'))} or the import path of a class. Did you mean SFT?"),
    ("jax", "data__class_path", "Data",
     f"data is Data, but must be {', '.join(declared('data'))} or the import path of a class."),
    ("torch", "trainer__logger", [{"class_path": "WandbLoger"}], "Did you mean WandbLogger?"),
    ("jax", "trainer__callbacks", [{"class_path": "Timer"}], "trainer.callbacks is Timer, but must be EarlyStopping"),
    ("torch", "trainer__callbacks", [{"class_path": "Timer"}], "Timer is not supported. Set trainer.max_time"),
    ("torch", "data__init_args__batch_size", 0, "data.batch_size is 0, but must be 1 or more"),
    ("jax", "model__init_args__lora", {"rank": 0}, "lora.rank is 0, but must be 1 or more."),
    ("jax", "samples", {"every_n_steps": 0}, "samples.every_n_steps is 0, but must be 1 or more."),
])
def test_wrong_names_and_values_of_fields_are_errors(recipe, engine, key, value, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read(["fit", *recipe(**{key: value})], engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("task", "other"), itertools.product(declared("model"), declared("model")))
def test_a_task_on_data_of_another_is_refused(recipe, engine, task, other):
    own, data = (declared("model")[name].takes for name in (task, other))
    needed = {"rewards": [{"name": "exact_match"}]} if task == "GRPO" else {}
    layers = recipe(model={"class_path": task, "init_args": {"pretrained": "m", **needed}},
                    data={"class_path": data, "init_args": {"source": "rows.jsonl"}})
    if other == task:
        read(["fit", *layers], engine)
        return
    for command in ("fit", "validate", "test", "predict", "inspect", "plan", "find"):
        with pytest.raises(UserError, match=f"^model.class_path is {task}, which trains on {own}, but "
                                            f"data.class_path is {data}. Set it to {own}, or model.class_path to "
                                            f"{other}.$"):
            read([command, *layers, *(["--on", "cpu"] if command == "plan" else [])], engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_classes_of_ones_own_are_of_the_kind_that_they_inherit(engine):
    """What the early check leaves to the engine is held to the same; what says nothing goes with anything."""
    causal = import_module(f"{FOLDERS[engine]['model']}.clm").CLM
    own = type("Own", (causal,), {})(pretrained="m")
    mine = type("Mine", (sft.SFTDataFields,), {})("rows.jsonl")
    with pytest.raises(UserError, match="model.class_path is Own, .* but data.class_path is Mine. Set it to CLMData"):
        own.check_data(mine)
    own.check_data(type("Texts", (clm.CLMDataFields,), {})("rows.jsonl"))
    own.check_data(type("Plain", (base.DataFields,), {})("rows.jsonl"))
    type("Free", (causal,), {"takes": None})(pretrained="m").check_data(mine)


@pytest.mark.parametrize(("engine", "key", "value"), [
    ("torch", "model__class_path", "CausalModule"), ("jax", "model__class_path", "CausalTask"),
    ("torch", "data__class_path", "DataModule"), ("torch", "trainer__callbacks", [{"class_path": "StartReport"}]),
    ("jax", "trainer__logger", [True]), ("torch", "trainer__logger", [{"class_path": "mine.Logger"}])])
def test_names_that_only_the_engine_can_judge_are_left_to_it(recipe, engine, key, value):
    read(["fit", *recipe(**{key: value})], engine)


def test_help_of_a_class(capsys):
    for words in (["--model.help", "SFT"], ["--model.help=SFT"]):
        assert main(["fit", *words]) == 0
        assert capsys.readouterr().out.startswith("model (SFT): Fine-tune a causal LM")
    assert main(["fit", "--trainer.logger.help", "CSVLogger"]) == 0
    assert "--trainer.logger.save_dir" in capsys.readouterr().out
    assert main(["fit", "--trainer.loger.help", "CSVLogger"]) == 2
    assert "Did you mean trainer.logger?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["fit", "--trainer.max_step", "3"], ["inspect", "--stop", "3"], ["find", "--step", "3"], ["plan", "--o", "cpu"],
    ["fit", "--checkpoint.keep=1"], ["merge", "--ru", "x"], ["new", "x", "--mod", "gpt2"], ["chat", "--gen.top_k", "3"],
    ["sweep", "data.seed=1,2", "--trial", "3"], ["report", "x", "--ou", "y"], ["verify", "x", "--fir", "2"]])
def test_a_beginning_of_a_name_is_not_the_name(words, capsys):
    assert main(words) == 2
    assert words[-2 if "=" not in words[-1] else -1].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_is_explained(engine):
    classes = {block: task_classes(block) for block in ("model", "data")}
    for command in RECIPE_COMMANDS:
        for key in walk(recipe_keys(options_of(command)[0], engine), classes):
            assert key.text or key.name == "overwrite", f"{command}: {key.name}"
