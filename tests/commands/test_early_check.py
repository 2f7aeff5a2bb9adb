"""The declarations say what the real classes say, and the check over them refuses nothing that the engine accepts."""

import importlib
import inspect
import random
import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lmmods.cli import main
from lmmods.commands import declarations, engine_cli
from lmmods.commands.command_line import CommandLine
from lmmods.commands.early_check import EarlyCommandLine, check_early
from lmmods.commands.inspector import Inspector
from lmmods.commands.planner import Planning
from lmmods.commands.registry import ENGINE_COMMANDS
from lmmods.commands.trainer_keys import check_recipe_values
from lmmods.core.errors import UserError, user_error_in
from lmmods.extras.find import Finder
from lmmods.recipe import data_fields
from lmmods.recipe.allowed_callbacks import reason_against
from lmmods.recipe.jsonargparse_compat import options_of, type_of
from lmmods.recipe.trust import guarded_imports
from tests.faults.test_mutations import RECIPES, mutate, places
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
           ["--config", "model: {class_path: lmmods.recipe.task_fields.TaskFields}"], ["stray"]]


@pytest.fixture(scope="module", params=ENGINES)
def parsers(request) -> tuple[EarlyCommandLine, CommandLine]:
    """The parser of `fit` over declarations, and over the engine's classes."""
    types = getattr(engine_cli, f"{request.param}_engine")()
    return EarlyCommandLine(request.param, ["fit"]), CommandLine(types, request.param, ["fit"])


def keys(parser: ArgumentParser, without: object = ()) -> dict[str, tuple]:
    """Type and default of each key."""
    return {option.dest: (type_of(option), option.default) for option in options_of(parser)
            if type_of(option) is not None and option.dest not in without and not option.dest.endswith(".help")}


def of_class(kind: type) -> dict[str, tuple]:
    parser = ArgumentParser()
    parser.add_class_arguments(kind, fail_untyped=False)
    return keys(parser)


def test_keys_types_and_defaults_are_those_of_the_engine(parsers):
    early, real = (parser.commands["fit"] for parser in parsers)
    classes = {*declarations.CLASSES[parsers[0].engine], *declarations.TASKS}
    assert keys(early, classes) == keys(real, classes)
    assert keys(early).keys() == keys(real).keys()


def test_tasks_and_data_modules_are_declared_with_their_fields(parsers):
    for key, names in declarations.TASKS.items():
        base = keys(parsers[1].commands["fit"])[key][0].__args__[0]
        real = {kind.__name__: kind for kind in subclasses(base) if not inspect.isabstract(kind)
                and kind.__module__.startswith(("lmmods.", "jax_engine.")) and not kind.__name__.startswith("Causal")}
        assert set(names) <= set(real)
        for name in names:
            assert of_class(getattr(declarations, name)) == of_class(real[name]), name


def subclasses(base: type) -> list[type]:
    return [each for kind in base.__subclasses__() for each in (kind, *subclasses(kind))]


def test_classes_of_libraries_are_listed_as_they_are(parsers):
    early, real = parsers
    for action in options_of(real.commands["fit"]):
        if action.dest in declarations.CLASSES[early.engine]:
            # Not what another test of this process has derived from them.
            listed = {path.rsplit(".", 1)[-1] for path in re.findall(r"[\w.]+\.\w+", action.extra_help())
                      if path.startswith(("lightning.", "lmmods.", "jax_engine."))} - OWN
            if action.dest == "trainer.callbacks":
                listed = {name for name in listed if not reason_against(f"lightning.pytorch.callbacks.{name}")}
            if action.dest in ("trainer.logger", "trainer.profiler"):
                listed -= UNTRIED
            if action.dest == "trainer.strategy":
                listed = listed & STRATEGIES or {"MeshSharding"}  # a dataclass, which jsonargparse does not list
            declared = {name.rsplit(".", 1)[-1] for name in declarations.CLASSES[early.engine][action.dest]}
            assert declared == listed, action.dest


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_commands_take_what_performs_them_takes(parsers, command):
    def own(function) -> dict[str, tuple]:
        ours = inspect.signature(getattr(declarations.EngineCommands, command)).parameters
        return {name: (each.annotation, each.default) for name, each in inspect.signature(function).parameters.items()
                if name in ours and name != "self"}

    performers = {"find": Finder, "inspect": Inspector, "plan": Planning}
    performer = performers.get(command) or engine_cli.types_of(parsers[0].engine).trainer
    assert own(getattr(performer, command)) == own(getattr(declarations.EngineCommands, command))


# Verdicts ---------------------------------------------------------------------------------------------------------


def verdict(judge, capsys) -> str | None:
    """The message with which a parser refuses; None where it does not."""
    try:
        judge()
    except UserError as error:
        return str(error)
    except SystemExit as stop:
        assert stop.code == 2
        return capsys.readouterr().err.removeprefix("error: ").strip()
    return None


def compare(parsers, arguments, capsys) -> tuple[str | None, str | None]:
    """Both verdicts. The first must be none, or the second's unless that is about what the first leaves to it."""
    early, real = parsers

    def judge_for_real() -> None:
        with guarded_imports():
            config = real.parse(arguments)
            check_recipe_values(real.commands["fit"], config.fit, early.engine)
            for key in declarations.CLASSES[early.engine]:
                config.fit[key] = None
            try:
                made = real.parser.instantiate(config).fit
                made.model.check_data(made.data)
            except Exception as error:
                raise user_error_in(error) or error from error

    first = verdict(lambda: early.judge(arguments), capsys)
    second = verdict(judge_for_real, capsys)
    left = "|".join([*declarations.CLASSES[early.engine], *declarations.TASKS])
    left = re.match(f"({left})( is |: )", second or "")
    assert first is None or left or plain(first) == plain(second or "accepted"), arguments
    return first, second


def plain(message: str) -> str:
    """A message without its suggestion and the modules of classes."""
    message = re.sub(r" Did you mean .*", "", message)
    return re.sub(r"\b(?:Task|TaskModule)\b", "a task", re.sub(r"\b(?:lmmods|jax_engine)\.[\w.]*\.(?=\w)", "", message))


@pytest.mark.slow
def test_odd_values(parsers, recipe, capsys):
    found = [compare(parsers, ["fit", *recipe(**{key: value})], capsys) for _, (key, value, _) in enumerate(VALUES)]
    refused = [second for _, second in found if second]
    assert len(refused) > len(VALUES) // 2
    assert sum(first is not None for first, _ in found) > 0.9 * len(refused)


@pytest.mark.slow
def test_options(parsers, recipe, capsys):
    for extra in OPTIONS:
        compare(parsers, ["fit", *recipe(), *extra], capsys)
    mine = recipe(model__class_path="nowhere.Mine", model__init_args={"surprise": 1})
    for extra in OPTIONS:
        first, _ = compare(parsers, ["fit", *mine, *extra], capsys)
        assert first is None or "Mine" not in first


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.parent.name == "recipes")) for path in RECIPES])
def test_mutated_recipes(parsers, path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    layers = ["--config", "configs/sft_qlora.yaml"] if path.stem == "smoke" else []
    assert compare(parsers, ["fit", *layers, "--config", str(path)], capsys) == (None, None)
    chance, base = random.Random(path.stem), yaml.safe_load(path.read_text())
    for _ in range(6):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(mutate(base, places(base), chance)[0], allow_unicode=True))
        compare(parsers, ["fit", *layers, "--config", str(tmp_path / "recipe.yaml")], capsys)


@pytest.mark.parametrize(("engine", "key", "value", "message"), [
    ("torch", "model__class_path", "SFTT",
     "model is SFTT, but must be CLM, MLM, Preference, QA, SFT or the import path of a class. Did you mean SFT?"),
    ("jax", "data__class_path", "Data",
     "data is Data, but must be CLMData, MLMData, PreferenceData, QAData, SFTData or the import path of a class."),
    ("torch", "trainer__logger", [{"class_path": "WandbLoger"}], "Did you mean WandbLogger?"),
    ("jax", "trainer__callbacks", [{"class_path": "Timer"}], "trainer.callbacks is Timer, but must be EarlyStopping"),
    ("torch", "trainer__callbacks", [{"class_path": "Timer"}], "Timer does not work here. Set trainer.max_time"),
    ("torch", "data__init_args__batch_size", 0, "data.batch_size is 0, but must be 1 or more"),
    ("jax", "model__init_args__lora", {"rank": 0}, "lora.rank is 0, but must be 1 or more."),
    ("jax", "samples", {"every_n_steps": 0}, "samples.every_n_steps is 0, but must be 1 or more."),
])
def test_wrong_names_and_values_of_fields_are_errors(recipe, engine, key, value, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_early(["fit", *recipe(**{key: value})], engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("task", "data"), [(task, f"{other}Data") for task in declarations.TASKS["model"]
                                            for other in declarations.TASKS["model"]])
def test_a_task_on_data_of_another_is_refused(recipe, engine, task, data):
    layers = recipe(model={"class_path": task, "init_args": {"pretrained": "m"}},
                    data={"class_path": data, "init_args": {"source": "rows.jsonl"}})
    if data == f"{task}Data":
        return check_early(["fit", *layers], engine)
    for command in ("fit", "validate", "test", "predict", "inspect", "plan", "find"):
        with pytest.raises(UserError, match=f"^model.class_path is {task}, which trains on {task}Data, but "
                                            f"data.class_path is {data}: set it to {task}Data, or model.class_path to "
                                            f"{data.removesuffix('Data')}.$"):
            check_early([command, *layers, *(["--on", "cpu"] if command == "plan" else [])], engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_classes_of_ones_own_are_of_the_kind_that_they_inherit(engine):
    """What the early check leaves to the engine is held to the same; what says nothing goes with anything."""
    causal = importlib.import_module(f"{declarations.FOLDERS[engine]['model']}.clm").CLM
    own = type("Own", (causal,), {})(pretrained="m")
    mine = type("Mine", (data_fields.SFTDataFields,), {})("rows.jsonl")
    with pytest.raises(UserError, match="model.class_path is Own, .* but data.class_path is Mine: set it to CLMData"):
        own.check_data(mine)
    own.check_data(type("Texts", (data_fields.CLMDataFields,), {})("rows.jsonl"))
    own.check_data(type("Plain", (data_fields.DataFields,), {})("rows.jsonl"))
    type("Free", (causal,), {"takes": None})(pretrained="m").check_data(mine)


@pytest.mark.parametrize(("engine", "key", "value"), [
    ("torch", "model__class_path", "CausalModule"), ("jax", "model__class_path", "CausalTask"),
    ("torch", "data__class_path", "DataModule"), ("torch", "trainer__callbacks", [{"class_path": "StartReport"}]),
    ("jax", "trainer__logger", [True]), ("torch", "trainer__logger", [{"class_path": "mine.Logger"}])])
def test_names_that_only_the_engine_can_judge_are_left_to_it(recipe, engine, key, value):
    check_early(["fit", *recipe(**{key: value})], engine)


def test_words_that_only_the_engine_understands_are_left_to_it(recipe, capsys):
    for words in (["--trainer.logger.help", "evil.Mine"], ["--model.help", "Mine"], ["--model.help=Mine"]):
        check_early(["fit", *recipe(trainer__max_stepz=1), *words], "torch")
    for words in (["--print_config"], ["--trainer", "s3://bucket/trainer.yaml"]):
        check_early(["fit", *recipe(), *words], "torch")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [
    ["fit", "--trainer.max_step", "3"], ["inspect", "--stop", "3"], ["find", "--step", "3"], ["plan", "--o", "cpu"],
    ["fit", "--checkpoint.keep=1"], ["merge", "--ru", "x"], ["new", "x", "--mod", "gpt2"], ["chat", "--gen.top_k", "3"],
    ["sweep", "data.seed=1,2", "--trial", "3"], ["report", "x", "--ou", "y"], ["verify", "x", "--fir", "2"]])
def test_a_beginning_of_a_name_is_not_the_name(words, capsys):
    assert main(words) == 2
    assert words[-2 if "=" not in words[-1] else -1].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_every_key_is_explained(engine):
    for command, parser in EarlyCommandLine(engine, []).commands.items():
        for action in options_of(parser):
            assert action.help, f"{command}: {action.dest}"
