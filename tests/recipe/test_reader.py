"""The recipe fields equal those of the real classes, and every accepted recipe can be built."""

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
OWN = {"MetricsCSV", "DummyLogger"}  # loggers for internal use
UNTRIED = {"CometLogger", "XLAProfiler", "PassThroughProfiler"}  # of Lightning, without tests or use
STRATEGIES = {"DDPStrategy", "SingleDeviceStrategy", "FSDP2", "DeepSpeed", "MeshSharding"}  # accepted by the trainers
# Options next to a recipe.
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


def constructor_arguments(cls: type) -> dict[str, tuple]:
    """Return type and default of each constructor argument."""
    return {name: (key.type, key.default) for name, key in keys_of(cls).items()}


def substitute(hint: Any, classes: dict[type, Any]) -> Any:
    """Return a type with placeholders replaced by the real classes."""
    types = [list[substitute(get_args(member)[0], classes)] if get_origin(member) is list else
             classes.get(member, member) if inspect.isclass(member) else member for member in members(hint)]
    return Union[tuple(types)]  # noqa: UP007 - members from a list


@pytest.mark.parametrize("engine", ENGINES)
def test_trainer_fields_equal_the_arguments_of_the_engine_trainer(engine):
    """Names, types and defaults, most of them of Lightning on torch."""
    types = load_engine(engine)
    fields = {name: (substitute(key.type, types.libraries), key.default)
              for name, key in keys_of(TRAINERS[engine]).items()}
    assert fields == constructor_arguments(types.trainer)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("block", ["model", "data"])
def test_declared_fields_equal_the_arguments_of_the_classes(engine, block):
    classes = {cls.__name__: cls for cls in subclasses(getattr(load_engine(engine), block))
               if not inspect.isabstract(cls) and cls.__module__.startswith(("lmmods.", "jax_engine."))
               and not cls.__name__.startswith("Causal")}
    assert set(declared(block)) <= set(classes)
    for name, fields in declared(block).items():
        assert issubclass(classes[name], fields)
        assert classes[name].__module__ == module_of(fields, FOLDERS[engine][block])
        assert constructor_arguments(fields) == constructor_arguments(classes[name]), name


def subclasses(base: type) -> list[type]:
    return [cls for child in base.__subclasses__() for cls in (child, *subclasses(child))]


@pytest.mark.parametrize("engine", ENGINES)
def test_listed_library_classes_equal_those_of_the_libraries(engine):
    types, fields = load_engine(engine), keys_of(TRAINERS[engine], "trainer")
    for key, names in CLASSES[engine].items():
        bases = [types.libraries[name] for name in library_classes(fields[key.partition(".")[2]].type)]
        # Skip subclasses made by other tests in this process.
        listed = {cls.__name__ for base in bases for cls in (base, *subclasses(base)) if not inspect.isabstract(cls)
                  and cls.__module__.startswith(("lightning.", "lmmods.", "jax_engine."))} - OWN - {
                      base.__name__ for base in bases if key != "trainer.strategy" and base.__subclasses__()}
        if key == "trainer.callbacks":
            listed = {name for name in listed if not unsupported_reason(f"lightning.pytorch.callbacks.{name}")}
        if key in ("trainer.logger", "trainer.profiler"):
            listed -= UNTRIED
        if key == "trainer.strategy":
            listed &= STRATEGIES
        assert {name.rsplit(".", 1)[-1] for name in names} == listed, key


@pytest.mark.parametrize("command", RECIPE_COMMANDS)
def test_options_of_commands_equal_the_arguments_of_the_trainer(command):
    for engine in ENGINES:
        method = getattr(load_engine(engine).trainer, command, None)
        if command in ("fit", "validate", "test", "predict"):
            parameters = inspect.signature(method).parameters
            assert {name: key.default for name, key in options_of(command)[0].items()} == {
                name: parameters[name].default for name in options_of(command)[0]}


# Accepted recipes can be built ---------------------------------------------------------------------------------------


def build_error(arguments: list[str], engine: str) -> str | None:
    """Build the model and data of a recipe; return the error message, or None."""
    try:
        recipe = read(arguments, engine)
        recipe = with_library_classes(recipe)
        for value in recipe.explicit["trainer"].values():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ClassArguments):
                    item.build()
        model, data = (build_block(recipe, block) for block in ("model", "data"))
        model.check_data(data)
    except UserError as error:
        return str(error)
    return None


def build_block(recipe: Recipe, block: str) -> Any:
    cls = recipe.classes[block]
    arguments = objects(cls, recipe.explicit[block])
    if cls in declared(block).values():
        cls = implementation(cls, FOLDERS[recipe.engine][block])
    return cls(**arguments)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_many_odd_values_are_rejected_without_a_crash(engine, recipe):
    errors = [error for _, (key, value, _) in enumerate(VALUES)
              if (error := build_error(["fit", *recipe(**{key: value})], engine))]
    assert len(errors) > len(VALUES) // 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_options_are_accepted_or_rejected_without_a_crash(engine, recipe):
    errors = [build_error(["fit", *recipe(), *extra], engine) for extra in OPTIONS]
    assert None in errors and len(list(filter(None, errors))) > len(OPTIONS) // 3
    invalid = recipe(model__class_path="nowhere.Mine", model__init_args={"surprise": 1})
    assert all(build_error(["fit", *invalid, *extra], engine) for extra in OPTIONS)  # no such class exists


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.parent.name == "recipes")) for path in RECIPES])
def test_mutated_recipes_are_built_or_rejected_without_a_crash(engine, path, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    layers = ["--config", "configs/sft_qlora.yaml"] if path.stem == "smoke" else []
    assert read(["fit", *layers, "--config", str(path)], engine)
    rng, base = random.Random(path.stem), yaml.safe_load(path.read_text())
    for _ in range(6):
        tree, _ = mutate(base, key_paths(base), rng)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True))
        build_error(["fit", *layers, "--config", str(tmp_path / "recipe.yaml")], engine)


def test_later_layers_override_earlier_ones(recipe, tmp_path):
    """Blocks are merged by key, other mappings and lists are replaced; an option may set one entry or append."""
    (tmp_path / "over.yaml").write_text("model: {lora: {alpha: 3}, config_overrides: {b: 2}}\n"
                                        "data: {columns: {b: output}, add_tokens: [x]}\n")
    first = recipe(model__init_args__config_overrides={"a": 1}, data__init_args__columns={"a": "instruction"})
    values = read(["fit", *first, "--config", str(tmp_path / "over.yaml"), "--data.columns.c", "input",
                   "--data.add_tokens+", "y", "--data.add_tokens+=z"]).explicit
    assert values["model"]["lora"] == {"rank": 4, "dropout": 0.1, "alpha": 3}
    assert values["model"]["config_overrides"] == {"b": 2}
    assert values["data"]["columns"] == {"b": "output", "c": "input"}
    assert values["data"]["add_tokens"] == ["x", "y", "z"]


def test_a_mapping_with_a_path_replaces_the_source(recipe, tmp_path):
    """Like a path alone. A mapping without a path, and an option for one entry, change the existing source."""
    (tmp_path / "over.yaml").write_text("data: {source: {path: over.jsonl}}\n")
    first = recipe(data__init_args__source={"path": "first.jsonl", "columns": {"q": "instruction"}, "limit": 3})
    for words, source in (
            (["--data.source", "{path: x.jsonl}"], {"path": "x.jsonl"}), (["--data.source", "x.jsonl"], "x.jsonl"),
            (["--config", str(tmp_path / "over.yaml")], {"path": "over.jsonl"}),
            (["--data.source", "{limit: 5}"], {"path": "first.jsonl", "columns": {"q": "instruction"}, "limit": 5}),
            (["--data.source.path", "x.jsonl"],
             {"path": "x.jsonl", "columns": {"q": "instruction"}, "limit": 3})):
        assert read(["fit", *first, *words]).explicit["data"]["source"] == source


opened: list[str] | None = None  # files opened in this process while a test records them


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


def test_dangerous_keys_on_the_command_line_override_files():
    """For keys that delete a run or run code, in any order on the command line."""
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
        assert recipe.explicit["model"]["trust_remote_code"]
        assert recipe.is_typed_true("model.trust_remote_code") is is_typed


def test_a_misspelt_option_or_module_is_named(recipe, capsys):
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
def test_a_task_with_data_of_another_task_is_rejected(recipe, engine, task, other):
    expected_data, data = (declared("model")[name].takes for name in (task, other))
    required = {"rewards": [{"name": "exact_match"}]} if task == "GRPO" else {}
    layers = recipe(model={"class_path": task, "init_args": {"pretrained": "m", **required}},
                    data={"class_path": data, "init_args": {"source": "rows.jsonl"}})
    if other == task:
        read(["fit", *layers], engine)
        return
    for command in ("fit", "validate", "test", "predict", "inspect", "plan", "find"):
        with pytest.raises(UserError, match=f"^model.class_path is {task}, which trains on {expected_data}, but "
                                            f"data.class_path is {data}. Set it to {expected_data}, or "
                                            f"model.class_path to {other}.$"):
            read([command, *layers, *(["--on", "cpu"] if command == "plan" else [])], engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_user_classes_accept_the_data_of_the_task_that_they_extend(engine):
    """The engine checks user classes by the same rule; a class without `takes` works with any data."""
    causal = import_module(f"{FOLDERS[engine]['model']}.clm").CLM
    task = type("Own", (causal,), {})(pretrained="m")
    sft_data = type("Mine", (sft.SFTDataFields,), {})("rows.jsonl")
    with pytest.raises(UserError, match="model.class_path is Own, .* but data.class_path is Mine. Set it to CLMData"):
        task.check_data(sft_data)
    task.check_data(type("Texts", (clm.CLMDataFields,), {})("rows.jsonl"))
    task.check_data(type("Plain", (base.DataFields,), {})("rows.jsonl"))
    type("Free", (causal,), {"takes": None})(pretrained="m").check_data(sft_data)


@pytest.mark.parametrize(("engine", "key", "value"), [
    ("torch", "model__class_path", "CausalModule"), ("jax", "model__class_path", "CausalTask"),
    ("torch", "data__class_path", "DataModule"), ("torch", "trainer__callbacks", [{"class_path": "StartReport"}]),
    ("jax", "trainer__logger", [True]), ("torch", "trainer__logger", [{"class_path": "mine.Logger"}])])
def test_names_that_only_the_engine_knows_pass_the_reader(recipe, engine, key, value):
    read(["fit", *recipe(**{key: value})], engine)


def test_help_of_a_class_lists_its_options(capsys):
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
def test_option_names_may_not_be_abbreviated(words, capsys):
    assert main(words) == 2
    assert words[-2 if "=" not in words[-1] else -1].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_is_explained(engine):
    classes = {block: task_classes(block) for block in ("model", "data")}
    for command in RECIPE_COMMANDS:
        for key in walk(recipe_keys(options_of(command)[0], engine), classes):
            assert key.text or key.name == "overwrite", f"{command}: {key.name}"
