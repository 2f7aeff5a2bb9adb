"""LightningCLI for both engines: build objects from a parsed recipe and call the trainer method of a command."""

import importlib
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lmmods.commands.command_line import CommandLine, RecipeTypes
from lmmods.commands.trainer_keys import BLOCKS, check_recipe_values
from lmmods.core.errors import UserError, is_out_of_memory, what_to_lower
from lmmods.core.hf_config import position_limit, tells_token_types
from lmmods.core.redaction import left_out, redacted
from lmmods.recipe.allowed_callbacks import check_callback
from lmmods.recipe.engines import import_all
from lmmods.recipe.files import Loader
from lmmods.recipe.trust import FLAG, PACKAGES, check_recipe, is_trusted
from lmmods.runs.folder import RunFolder
from lmmods.runs.identity import RunIdentity
from lmmods.runs.inside import way_out
from lmmods.runs.wandb import known_wandb_id, settle_wandb, wandb_loggers

# ---------------------------------------------------------------------------------------------------------------------
# Overrides of LightningCLI internals that have no public hook. Source: lightning 2.6.


class CLI(LightningCLI):
    """LightningCLI with an external parser and folder checkpoints."""

    def use_parser(self, parser: ArgumentParser, commands: Mapping[str, ArgumentParser],
                   options: Mapping[str, list[str]]) -> None:
        """Use this parser instead of the one that `setup_parser` would build.

        Args:
            commands: Subcommand parsers by name; `callback_keys` of each lists the blocks that are callbacks.
            options: Arguments of each command's method.
        """
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = parser, commands, options

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would unpickle the file that --ckpt_path names and take classes from it.

        LightningCLI's constructor calls this regardless of `load_from_checkpoint_support`. The value of --ckpt_path
        is checked by `lmmods.runs.folder.RunFolder.resolve`.
        """

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a command that is a method of this class; Lightning only looks for methods of the trainer."""
        if not hasattr(self, subcommand):
            return super()._run_subcommand(subcommand)
        getattr(self, subcommand)(**self._prepare_subcommand_kwargs(subcommand))


def torch_engine() -> RecipeTypes:
    """Return the recipe types of the torch engine."""
    from lmmods.data.base import DataModule
    from lmmods.torch_engine.callbacks.checkpoint import Checkpoint
    from lmmods.torch_engine.callbacks.evaluation import MMLU, Samples
    from lmmods.torch_engine.callbacks.export import Publish
    from lmmods.torch_engine.tasks.base import TaskModule
    from lmmods.torch_engine.trainer import Trainer

    import_all("lmmods.torch_engine.tasks")
    import_all("lmmods.data")
    return RecipeTypes(Trainer, TaskModule, DataModule, Checkpoint, Samples, MMLU, Publish)


def jax_engine() -> RecipeTypes:
    """Return the recipe types of the JAX engine."""
    from lmmods.data.base import DataModule

    trainer, task, *blocks = importlib.import_module("jax_engine.engine").load()
    import_all("lmmods.data")
    return RecipeTypes(trainer, task, DataModule, *blocks)


def types_of(engine: str) -> RecipeTypes:
    """Return the recipe types of an engine."""
    return jax_engine() if engine == "jax" else torch_engine()


class EngineCLI(CLI):
    """Command line for fit, validate, test, predict and inspect with one engine's classes."""

    def __init__(self, types: RecipeTypes, engine: str, arguments: list[str]):
        self.types, self.engine, self.arguments = types, engine, arguments
        try:
            super().__init__(types.model, types.data, trainer_class=types.trainer, save_config_callback=None,
                             subclass_mode_model=True, subclass_mode_data=True, auto_configure_optimizers=False,
                             load_from_checkpoint_support=False)  # parses, builds and runs the command
        except (RuntimeError, MemoryError, ValueError) as error:  # XLA raises ValueError: see is_out_of_memory
            if not is_out_of_memory(error):
                raise
            trains = getattr(self, "subcommand", None) == "fit" and hasattr(self, "trainer")
            last = self.trainer.run_folder.find("last") if trains else None
            raise what_to_lower(error, last and last.name) from error

    def setup_parser(self, *_: Any) -> None:
        """Install our own parser instead of Lightning's."""
        self.command_line = CommandLine(self.types, self.engine, self.arguments)
        for parser in self.command_line.commands.values():
            parser.dump_header = [f"lightning.pytorch=={pl.__version__}"]
            # Lightning adds blocks that are callbacks to the trainer's callbacks.
            parser.callback_keys = [key for key in BLOCKS[1:] if issubclass(getattr(self.types, key), Callback)]
        self.use_parser(self.command_line.parser, self.command_line.commands, self.command_line.options)

    def parse_arguments(self, *_: Any) -> None:
        self.config = self.command_line.parse(self.arguments)
        recipe = self.config[self.config.subcommand]
        check_recipe_values(self.parser.commands[self.config.subcommand], recipe, self.engine)
        for spec in _as_list(recipe.trainer.get("callbacks")):
            if self.engine == "torch":
                check_callback(spec.class_path)

    def instantiate_classes(self) -> None:
        """Instantiate as Lightning does, but report errors of Lightning classes as mistakes in the recipe."""
        self.config_init = self.parser.instantiate(self.config, instantiators=[
            (_built, kind, True) for kind in (Callback, Logger, Strategy, Profiler)])
        self.datamodule, self.model = (self.config_init[self.subcommand][key] for key in ("data", "model"))
        self.model.check_data(self.datamodule)
        self.trainer = self.instantiate_trainer()

    def before_instantiate_classes(self) -> None:
        self.recipe = self.config[self.subcommand]
        typed = any(re.match(r"--model\.(init_args\.)?trust_remote_code\b", word) for word in self.arguments)
        check_recipe(self.recipe, typed)
        strategy = self.recipe.trainer.get("strategy")
        if str(getattr(strategy, "class_path", "")).endswith(".DeepSpeedStrategy"):
            raise UserError("trainer.strategy: use lmmods.strategies.DeepSpeed, whose steps are exact, instead of "
                            "Lightning's DeepSpeedStrategy.")
        folder = RunFolder(self.recipe.trainer.default_root_dir)
        if self.subcommand == "predict" and known_wandb_id(folder):  # log the predictions table to the run
            self.recipe.trainer.logger = wandb_loggers(self.recipe.trainer.logger) or None
        elif self.subcommand != "fit":
            self.recipe.trainer.logger = None  # other commands only write metrics.json
        _check_complete(self.recipe.as_dict())
        for logger in wandb_loggers(self.recipe.trainer.logger):
            settle_wandb(logger.init_args, folder, self.subcommand == "predict" or bool(self.recipe.get("ckpt_path")))
        check_outputs(self.recipe.trainer, folder)

    def whole_recipe(self) -> dict[str, Any]:
        """Return the recipe as plain values with defaults filled in, secrets included."""
        dump = self.parser.commands[self.subcommand].dump(self.recipe, skip_none=False, skip_validation=True)
        return yaml.load(dump, Loader=Loader)

    def after_instantiate_classes(self) -> None:
        recipe = redacted(self.whole_recipe())
        for key in ("config", "ckpt_path", "overwrite", "stop_at"):
            recipe.pop(key, None)
        defaults = self._defaults()
        self._make_engine_neutral(recipe, defaults["trainer"])
        recipe["trainer"]["precision"] = self.trainer.precision  # resolved value of `auto`
        recipe["engine"] = self.engine  # --engine wins even over a later --config
        if not issubclass(self.types.checkpoint, Callback):  # else already among the trainer's callbacks
            made = self.config_init[self.subcommand]
            self.trainer.checkpoint, self.trainer.samples, self.trainer.mmlu, self.trainer.publish = (
                made.checkpoint, made.samples, made.mmlu, made.publish)
        self.trainer.recipe, self.trainer.identity = recipe, RunIdentity(recipe, defaults)
        fields = self.model.config_fields()
        self.datamodule.connect(pretrained=self.model.pretrained, revision=self.model.revision,
                                trust_remote_code=self.model.trust_remote_code, seed=self.recipe.seed_everything,
                                max_positions=position_limit(fields), token_types=tells_token_types(fields),
                                answers=self.model.answers)

    def _defaults(self) -> dict[str, Any]:
        """Return the defaults of all keys, in recipe blocks but without `class_path` and `init_args`."""
        tree = self.parser.commands[self.subcommand].get_defaults().as_dict()
        for block, instance in (("model", self.model), ("data", self.datamodule)):
            tree[block] = {name: parameter.default for base in reversed(type(instance).__mro__)
                           for name, parameter in inspect.signature(base.__init__).parameters.items()
                           if parameter.default is not parameter.empty}
            tree[block] |= {name: vars(value) for name, value in tree[block].items() if is_dataclass(value)}
        return tree

    def _make_engine_neutral(self, recipe: dict[str, Any], defaults: dict[str, Any]) -> None:
        """Make config.yaml usable with both engines: short class names, and only the Lightning keys that are set."""
        recipe["trainer"]["callbacks"] = _as_list(recipe["trainer"].get("callbacks")) or None
        for part in (recipe["model"], recipe["data"], *_as_list(recipe["trainer"]["callbacks"])):
            part["class_path"] = short_name(part["class_path"])
        ours = inspect.signature(self.types.trainer.__init__).parameters
        for key, value in list(recipe["trainer"].items()):
            if value == defaults[key] and (value is None or key not in ours):
                del recipe["trainer"][key]


def _built(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Instantiate a class; errors of Lightning classes become UserError, others propagate."""
    if not kind.__module__.startswith("lightning."):
        return kind(*args, **kwargs)
    try:
        return kind(*args, **kwargs)
    except (MisconfigurationException, ModuleNotFoundError, TypeError, ValueError) as error:
        raise UserError(f"{kind.__name__}: {error}") from error


def short_name(class_path: str) -> str:
    """Return the class name that both engines accept; other classes keep their import path."""
    return class_path.rsplit(".", 1)[-1] if class_path.split(".")[0] in PACKAGES else class_path


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_complete(recipe: dict[str, Any]) -> None:
    """Reject values that a run's config.yaml left out. Raises UserError."""
    if key := next(left_out(recipe), None):
        short = key.replace(".init_args.", ".")
        raise UserError(f"{key} has *** where a password or token was: config.yaml of a run keeps none. Give the whole "
                        f"value again, on the command line (--{short} …) or in a recipe behind it (--config).")


# ---------------------------------------------------------------------------------------------------------------------
# Output locations of Lightning classes: only the run folder, unless the command line trusts the recipe.
#
# Lightning's loggers and profilers write wherever their settings say, overwrite existing files and follow links, so
# their settings are checked before any of them is built.

PROFILERS = ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler")
# Files that are overwritten under fixed names; `*` stands for the profile name given in the recipe.
FILES = {"CSVLogger": ("metrics.csv", "hparams.yaml"), "TensorBoardLogger": ("hparams.yaml",),
         **dict.fromkeys(PROFILERS, ("*.txt", "*.prof", "*.json"))}
SERVERS = ("http://", "https://", "databricks")
TRUST = f"or, if you trust the recipe, add {FLAG} true to the command line."


def check_outputs(trainer: Any, folder: RunFolder) -> None:
    """Check where the loggers and profilers of a parsed recipe would write.

    Raises:
        UserError: A Lightning class would write outside the run folder, over foreign files, or to an unknown place.
    """
    for key in ("logger", "profiler"):
        given = trainer.get(key)
        for spec in given if isinstance(given, list) else [given]:
            path = str(getattr(spec, "class_path", ""))
            if path.split(".")[0] in PACKAGES[:2] and not is_trusted():
                options = {name: value for part in ("init_args", "dict_kwargs") for name, value in
                           (spec.get(part) or {}).items()}
                _check(f"trainer.{key}", path.rsplit(".", 1)[-1], options, folder)
            elif path == "lmmods.runs.csv_logger.MetricsCSV":
                raise UserError("trainer.logger: MetricsCSV does not work here. Every run has it already.")


def _check(key: str, name: str, options: dict[str, Any], folder: RunFolder) -> None:
    if options.get("settings"):  # wandb.Settings holds many paths
        raise UserError(f"{key}: {name} is given settings, which can name any place to write to. Leave them out, "
                        f"{TRUST}")
    places = _places(name, options)
    if places is None:
        raise UserError(f"{key}: it is not known where {name} writes. Name another one (docs/extending.md), {TRUST}")
    for place in filter(None, places):
        out = place if _is_odd(place) else way_out(folder.root, place)
        if out is not None:
            raise UserError(f"{key}: {name} would write to {out}, and what a run writes lies in its folder. Name a "
                            f"folder in {folder.root}, {TRUST}")
        taken = [path for pattern in FILES.get(name, ()) for path in Path(place).glob(pattern)]
        if taken and not folder.holds_run():
            raise UserError(f"{key}: {name} would write over {taken[0]}, which no run wrote. Name another folder in "
                            f"{folder.root}, {TRUST}")


def _places(name: str, options: dict[str, Any]) -> list[str] | None:
    """Return the folders that a class writes to, None if unknown; a None entry means the run folder."""
    if name in ("CSVLogger", "TensorBoardLogger"):
        version = options.get("version")
        version = version if isinstance(version, str | None) else f"version_{version}"
        return [os.path.join(*(str(part or "") for part in (options.get("save_dir"), options.get("name"), version,
                                                             options.get("sub_dir"))))]
    if name == "WandbLogger":
        return [options.get("save_dir"), options.get("dir")]
    if name == "MLFlowLogger":
        store = options.get("tracking_uri") or options.get("save_dir")
        is_users = str(store).startswith(SERVERS) or store == os.environ.get("MLFLOW_TRACKING_URI")
        return [None if is_users else _folder_of(store), _folder_of(options.get("artifact_location"))]
    if name in PROFILERS:
        return [options.get("dirpath")]
    return [] if name == "PassThroughProfiler" else None


def _folder_of(store: str | None) -> str | None:
    """Return the folder of an MLflow store: the store itself, or the folder of its SQLite database."""
    file = str(store).removeprefix("sqlite:///")
    return store if file == str(store) else os.path.dirname(file) or "."


def _is_odd(place: str) -> bool:
    """True if a library may expand a path to another one: a URL, a home directory or an environment variable."""
    return place.startswith(("~", "file:", "local:")) or any(mark in place for mark in ("://", "::", "$"))
