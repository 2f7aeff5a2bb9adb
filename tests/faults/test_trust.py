"""A recipe is data: code that it names does not run unless the command line trusts it."""

import sys

import pytest
import torch.utils.cpp_extension  # noqa: F401 - its import may print that CUDA is missing
import yaml
from lightning.pytorch import loggers, profilers

from lmmods.cli import main
from lmmods.commands.setup import check_outputs
from lmmods.core.errors import UserError
from lmmods.recipe.objects import ClassArguments
from lmmods.recipe.trust import pop_trust_flag, trusting
from lmmods.runs.folder import RunFolder

EVIL = '''
"""Code that came with a recipe; importing it leaves a mark."""
import pathlib
from lightning.pytorch.loggers import Logger

MARK = pathlib.Path({mark!r})
MARK.write_text("imported")


class Mine(Logger):
    name, version = "mine", "0"

    def __init__(self, text: str = "built"):
        super().__init__()
        MARK.write_text(text)

    def log_metrics(self, metrics, step=None):
        """Nothing."""

    def log_hyperparams(self, *args, **kwargs):
        """Nothing."""


def make() -> Mine:
    MARK.write_text("called")
    return Mine()
'''
KEYS = ("trainer.plugins", "trainer.accelerator", "trainer.logger", "trainer.callbacks", "trainer.strategy",
        "trainer.profiler", "trainer.devices", "trainer.max_time", "trainer", "model", "model.init_args.config",
        "model.init_args.lora", "model.init_args.optimizer", "data", "data.init_args.source", "checkpoint", "mmlu")


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """Return the file that untrusted code writes when it is imported."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(str(folder))
    yield tmp_path / "mark"
    sys.modules.pop("evil", None)


def assert_rejected(capsys, arguments, *words):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    for word in words:
        assert word in error, error


def class_spec(path, mark, **init_args):
    return {"class_path": path, "init_args": init_args or {"command": f"touch {mark}"}}


# Where a class may be named ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "key"), [*(("torch", key) for key in KEYS), ("jax", "trainer.logger"),
                                             ("jax", "trainer.callbacks"), ("jax", "trainer.strategy")])
def test_no_key_of_a_recipe_runs_code(recipe, mark, capsys, key, engine):
    for path, form in (("os.system", "class"), ("evil.Mine", "list"), ("evil.Mine", "text")):
        value = {"class": class_spec(path, mark), "list": [class_spec(path, mark)], "text": path}[form]
        assert_rejected(capsys, ["inspect", "--engine", engine, *recipe(**{key.replace(".", "__"): value})])
        assert not mark.exists(), f"{key}: {value} ran"


@pytest.mark.parametrize(("command", "path"), [
    ("fit", "os.system"), ("fit", "evil.make"), ("inspect", "subprocess.Popen"), ("inspect", "builtins.eval"),
    ("--print_config", "evil.Mine"), ("help", "evil.Mine")])
def test_untrusted_code_is_not_even_imported(recipe, mark, capsys, path, command):
    if command == "help":
        arguments = ["fit", *recipe(), "--trainer.logger.help", path]
    elif command == "--print_config":
        arguments = ["fit", *recipe(trainer__logger=[{"class_path": path}]), command]
    else:
        arguments = [command, *recipe(trainer__logger={"class_path": path})]
    assert_rejected(capsys, arguments, path)
    assert not mark.exists() and "evil" not in sys.modules


@pytest.mark.parametrize(("key", "path"), [
    ("trainer__logger", "torch.hub.load"), ("trainer__callbacks", "torch.load"), ("model", "torch.load"),
    ("trainer__plugins", "torch.utils.cpp_extension.load"), ("trainer__logger", "torch.serialization.os.system"),
    ("trainer__logger", "lightning.pytorch.trainer.trainer.os.system"), ("data", "torch.utils.data.DataLoader"),
    ("model", "lightning.pytorch.LightningModule.load_from_checkpoint"), ("trainer__callbacks", "lmmods.cli.main"),
    ("trainer__profiler", "torch.package.PackageImporter"), ("trainer__strategy", "lightning.pytorch.Trainer")])
def test_a_key_accepts_only_classes_of_its_own_type(recipe, capsys, key, path):
    assert_rejected(capsys, ["inspect", *recipe(**{key: {"class_path": path}})], path.split(".")[-1])


@pytest.mark.parametrize("extra", [["--trainer.logger=evil.Mine"], ["--trainer.logger", "evil.Mine"],
                                   ["--trainer.logger+=evil.Mine"], ["--trainer.callbacks=evil.make"],
                                   ["--trainer", '{"logger": {"class_path": "evil.Mine"}}'], ["--model", "evil.Mine"],
                                   ["--config", "trainer: {logger: {class_path: evil.Mine}}"],
                                   ["--trainer", "SUB"], ["--data", "evil.Mine"]])
def test_untrusted_classes_are_rejected_on_the_command_line_and_in_other_files(recipe, mark, capsys, tmp_path, extra):
    (tmp_path / "sub.yaml").write_text("logger: {class_path: evil.Mine}\n")
    words = [str(tmp_path / "sub.yaml") if word == "SUB" else word for word in extra]
    assert_rejected(capsys, ["inspect", *recipe(), *words])
    assert not mark.exists()


@pytest.mark.parametrize("arguments", [
    {"ddp_comm_hook": "torch.hub.load"}, {"ddp_comm_wrapper": {"class_path": "torch.package.PackageImporter"}},
    {"ddp_comm_hook": "os.system"}])
def test_untrusted_functions_in_nested_arguments_are_rejected(recipe, capsys, arguments):
    strategy = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": arguments}
    assert_rejected(capsys, ["inspect", *recipe(trainer__strategy=strategy)])


def test_environment_variables_do_not_grant_trust(recipe, mark, capsys, monkeypatch):
    for name in ("TRUST_RECIPE_CODE", "LMMODS_TRUST_RECIPE_CODE", "TRAIN_TRUST_RECIPE_CODE"):
        monkeypatch.setenv(name, "true")
    assert_rejected(capsys, ["inspect", *recipe(trainer__logger={"class_path": "evil.Mine"})])
    assert not mark.exists()


# Who may trust ---------------------------------------------------------------------------------------------------


def test_the_command_line_may_trust_a_recipe(recipe, mark, tmp_path):
    trusted = recipe(trainer__logger=[class_spec("evil.Mine", mark, text="built with trust")], trainer__max_steps=1,
                     trainer__limit_val_batches=0)
    assert main(["fit", *trusted, "--trust_recipe_code", "true"]) == 0
    assert mark.read_text() == "built with trust"
    assert "trust_recipe_code" not in (tmp_path / "run" / "config.yaml").read_text()
    mark.unlink()  # the next command does not remember the trust
    sys.modules.pop("evil")
    assert main(["inspect", "--config", str(tmp_path / "run" / "config.yaml")]) == 2
    assert not mark.exists()


@pytest.mark.parametrize("where", ["top", "trainer", "model", "inline", "sub"])
def test_a_file_may_not_trust_itself(recipe, mark, capsys, tmp_path, where):
    changes = {"trainer__logger": {"class_path": "evil.Mine"}}
    extra = []
    if where in ("top", "trainer", "model"):
        changes[{"top": "trust_recipe_code", "trainer": "trainer__trust_recipe_code",
                 "model": "model__init_args__trust_recipe_code"}[where]] = True
    elif where == "inline":
        extra = ["--config", "{trust_recipe_code: true}"]
    else:
        (tmp_path / "sub.yaml").write_text("trust_recipe_code: true\n")
        extra = ["--trainer", str(tmp_path / "sub.yaml")]
    assert_rejected(capsys, ["inspect", *recipe(**changes), *extra], "trust_recipe_code")
    assert not mark.exists()


def test_the_trust_flag_is_removed_from_the_arguments():
    assert pop_trust_flag(["fit", "--trust_recipe_code", "true", "--x"]) == (["fit", "--x"], True)
    assert pop_trust_flag(["fit", "--trust_recipe_code=false"]) == (["fit"], False)
    assert pop_trust_flag(["fit"]) == (["fit"], False)


def test_a_trust_flag_that_is_not_a_boolean_is_rejected(recipe, capsys):
    assert_rejected(capsys, ["inspect", *recipe(), "--trust_recipe_code", "perhaps"], "--trust_recipe_code is perhaps")


def test_print_config_of_a_trusted_recipe_is_a_recipe(recipe, capsys, tmp_path):
    assert main(["fit", *recipe(), "--trust_recipe_code", "true", "--print_config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert main(["fit", "--config", str(tmp_path / "printed.yaml"), "--print_config"]) == 0


def test_help_lists_the_trust_flag(capsys):
    assert main(["fit", "--help"]) == 0
    assert "--trust_recipe_code" in capsys.readouterr().out


# Code that comes with a model ----------------------------------------------------------------------------------------


def test_a_file_does_not_trust_remote_code(recipe, capsys):
    arguments = recipe(model__init_args__trust_remote_code=True)
    assert_rejected(capsys, ["inspect", *arguments], "model.trust_remote_code is set in a file")
    assert main(["inspect", *arguments, "--model.trust_remote_code", "true"]) == 0
    assert main(["inspect", *arguments, "--trust_recipe_code", "true"]) == 0


def test_a_run_folder_does_not_trust_remote_code(recipe, capsys, tmp_path):
    from lmmods.commands.exported_model import FinishedRun

    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    model = {"class_path": "SFT", "init_args": {"pretrained": "someone/something", "trust_remote_code": True}}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert_rejected(capsys, ["merge", "--run", str(run), "--out", str(tmp_path / "out")],
                    "model.trust_remote_code is set")
    with trusting(True):
        assert FinishedRun.read(str(run), "merge").trust_remote_code


@pytest.mark.parametrize("changes", [{"model__init_args__attention": "someone/kernel"},
                                     {"model__init_args__config_overrides": {"_attn_implementation": "a/b"}}])
def test_hub_kernels_need_trust(recipe, capsys, changes):
    assert_rejected(capsys, ["inspect", *recipe(**changes)], "kernel from the hub")


# Where classes of libraries write -----------------------------------------------------------------------------------


def of_library(name, /, **init_args):
    module = profilers if name.endswith("Profiler") else loggers.logger if name == "DummyLogger" else loggers
    return ClassArguments(getattr(module, name), init_args)


def output_error(run, name, /, **init_args):
    """Return the error for a recipe with this Lightning logger or profiler, or an empty string."""
    key = "profiler" if name.endswith("Profiler") else "logger"
    try:
        check_outputs({key: of_library(name, **init_args)}, RunFolder(run))
    except UserError as error:
        return str(error)
    return ""


PATH_KEYS = [("CSVLogger", "save_dir"), ("TensorBoardLogger", "save_dir"), ("WandbLogger", "save_dir"),
             ("WandbLogger", "dir"), ("MLFlowLogger", "save_dir"), ("MLFlowLogger", "tracking_uri"),
             ("MLFlowLogger", "artifact_location"), ("SimpleProfiler", "dirpath"), ("AdvancedProfiler", "dirpath"),
             ("PyTorchProfiler", "dirpath")]


@pytest.mark.parametrize(("name", "key"), PATH_KEYS)
def test_loggers_and_profilers_may_only_write_into_the_run_folder(tmp_path, monkeypatch, name, key):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    inside = {"save_dir": "run/logs"} if name == "MLFlowLogger" else {}
    for path in ("run", "run/logs", str(tmp_path / "run" / "new" / "er"), "run/x/../logs"):
        assert output_error("run", name, **{**inside, key: path}) == "", path
    elsewhere = ("elsewhere", "run/../elsewhere", str(tmp_path), ".", "run2", "/", "~/run", "file:///run/x",
                 "local:run/x", "s3://bucket/run", "simplecache::run/x")
    for path in elsewhere:
        error = output_error("run", name, **{**inside, key: path})
        assert f"{name} would write to" in error and "--trust_recipe_code true" in error, path
    assert f"{name} would write to" in output_error("~", name, **{**inside, key: "~/run"})
    with trusting(True):
        assert output_error("run", name, **{key: "elsewhere"}) == ""


@pytest.mark.parametrize(("name", "init_args"), [
    ("CSVLogger", {"save_dir": "run", "name": "../elsewhere"}), ("CSVLogger", {"save_dir": "run", "name": "/tmp"}),
    ("CSVLogger", {"save_dir": "run", "version": "../../x"}),
    ("TensorBoardLogger", {"save_dir": "run", "sub_dir": "../../../.."}),
    ("TensorBoardLogger", {"save_dir": "run", "name": "$HOME"}), ("MLFlowLogger", {"save_dir": "./mlruns"}),
    ("MLFlowLogger", {"tracking_uri": "sqlite:///mlflow.db"}), ("MLFlowLogger", {"tracking_uri": "sqlite:////x.db"}),
    ("WandbLogger", {"save_dir": "run", "settings": {"root_dir": "elsewhere"}}), ("CometLogger", {}),
    ("LitLogger", {"root_dir": "run"}), ("XLAProfiler", {}), ("DummyLogger", {})])
def test_no_other_setting_leads_out_of_the_run_folder(tmp_path, monkeypatch, name, init_args):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run" / "lightning_logs").mkdir(parents=True)
    assert "--trust_recipe_code true" in output_error("run", name, **init_args)


def test_servers_and_locations_from_the_environment_are_allowed(monkeypatch):
    assert output_error("run", "MLFlowLogger", tracking_uri="https://example.org") == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    assert output_error("run", "MLFlowLogger", tracking_uri="sqlite:///mine.db") == ""
    assert output_error("run", "PassThroughProfiler") == ""


def test_loggers_may_not_write_through_links_in_the_run_folder(tmp_path):
    run, victim = tmp_path / "run", tmp_path / "thesis"
    (run / "csv" / "version_0").mkdir(parents=True)
    victim.write_text("years of work")
    arguments = {"save_dir": str(run / "csv"), "name": "", "version": 0}
    (run / "csv" / "inner").symlink_to(run)
    assert output_error(run, "CSVLogger", **arguments) == ""
    for link, name, init_args in ((run / "csv" / "version_0" / "metrics.csv", "CSVLogger", arguments),
                                  (run / "fit-mine.txt", "SimpleProfiler", {"dirpath": str(run)}),
                                  (run / ".wandb", "WandbLogger", {"save_dir": str(run)})):
        link.symlink_to(victim)
        assert f"{name} would write to {link}" in output_error(run, name, **init_args)
        link.unlink()
    (run / "model").symlink_to(tmp_path)  # check_links covers this
    assert output_error(run, "SimpleProfiler", dirpath=str(run)) == ""


def test_a_logger_may_not_overwrite_files_of_a_foreign_folder(tmp_path):
    """As the recipe also sets the run folder."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "metrics.csv").write_text("years of work")
    arguments = {"save_dir": str(tmp_path), "name": "results", "version": ""}
    assert "would overwrite" in output_error(tmp_path, "CSVLogger", **arguments)
    (tmp_path / "config.yaml").write_text("{}")  # fit itself rejects it if no run wrote it
    assert output_error(tmp_path, "CSVLogger", **arguments) == ""


@pytest.mark.parametrize(("engine", "key", "value"), [
    ("torch", "trainer__profiler", {"class_path": "SimpleProfiler", "init_args": {"dirpath": "x", "filename": "y"}}),
    ("jax", "trainer__logger", [{"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}]),
    ("jax", "trainer__logger", {"class_path": "lmmods.runs.csv_logger.MetricsCSV", "init_args": {"path": "x"}})])
def test_a_run_that_would_write_elsewhere_does_not_start(recipe, capsys, tmp_path, monkeypatch, engine, key, value):
    arguments = recipe(**{key: value})
    monkeypatch.chdir(tmp_path)
    name = value[0]["class_path"] if isinstance(value, list) else value["class_path"]
    assert_rejected(capsys, ["fit", "--engine", engine, *arguments], name.rpartition(".")[2])
    assert not (tmp_path / "x").exists()


# Types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_no_key_has_an_open_type(engine):
    """A key of type Any would accept any class. Dictionaries of Any are allowed: their values are never built."""
    from typing import Any, get_args

    from lmmods.recipe.engines import load_engine
    from lmmods.recipe.keys import keys_of, recipe_keys, task_classes, walk

    def is_open(hint) -> bool:
        return hint in (Any, object) or getattr(hint, "__origin__", None) is not dict and any(
            map(is_open, get_args(hint)))

    types = load_engine(engine)
    classes = {block: task_classes(block) for block in ("model", "data")}
    typed = {key.name: key.type for key in walk(recipe_keys({}, engine), classes)}
    for base in (types.model, types.data):
        for owner in (cls for cls in subclasses(base) if cls.__module__.startswith(("lmmods.", "jax_engine."))):
            typed |= {f"{owner.__name__}.{name}": key.type for name, key in keys_of(owner).items()}
    assert len(typed) > 100
    assert not [name for name, hint in typed.items() if is_open(hint)]


def subclasses(base):
    for cls in base.__subclasses__():
        yield cls
        yield from subclasses(cls)
