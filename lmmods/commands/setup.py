"""Build what a recipe describes on its engine: trainer, model and data module."""

import inspect
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lmmods.core.errors import UserError, is_out_of_memory, what_to_lower
from lmmods.core.redaction import find_redacted, redacted
from lmmods.data.base import DataModule
from lmmods.recipe.classes import FOLDERS, declared, implementation
from lmmods.recipe.engines import load_engine
from lmmods.recipe.keys import BLOCKS, keys_of
from lmmods.recipe.objects import ClassArguments, fill, objects
from lmmods.recipe.reader import Recipe, with_library_classes
from lmmods.recipe.tasks.base import Scorer, TaskFields
from lmmods.recipe.trust import FLAG, PACKAGES, check_recipe, is_trusted
from lmmods.runs.csv_logger import MetricsCSV
from lmmods.runs.engine import Engine
from lmmods.runs.folder import RunFolder
from lmmods.runs.identity import RunIdentity
from lmmods.runs.loggers import find_support
from lmmods.runs.run_files import find_escape


class Setup:
    """Objects built from a recipe: `trainer`, `model` and `datamodule` of its engine.

    As a context, it reports what to lower if an engine runs out of memory.

    Args:
        recipe: The recipe of a command line.
        longest_first: Train on the longest rows first, to measure the memory of the largest batch.
        trainer: Arguments of the trainer that replace the recipe's.

    Raises:
        UserError: The engine does not support the recipe, or the recipe is not trusted.
    """

    def __init__(self, recipe: Recipe, longest_first: bool = False, **trainer: Any) -> None:
        self.types = load_engine(recipe.engine)
        recipe.seed = pl.seed_everything(None if recipe.seed is True else recipe.seed, workers=True)
        self.recipe = recipe = with_library_classes(recipe)
        self._check()
        self._configure_loggers()
        self.blocks = {name: self.types.blocks[name](**objects(fields, recipe.explicit[name]))
                       for name, fields in BLOCKS.items()}
        self.datamodule: DataModule = self._make("data")
        self.model: TaskFields = self._make("model")
        self.model.check_data(self.datamodule)
        self.model.drop_unused(recipe.command)
        self.trainer: Engine = self._trainer(trainer)
        self._describe(longest_first)

    def __enter__(self) -> "Setup":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        # XLA raises ValueError, see `is_out_of_memory`.
        if isinstance(error, RuntimeError | MemoryError | ValueError) and is_out_of_memory(error):
            checkpoint = self.trainer.run_folder.find("last") if self.recipe.command == "fit" else None
            raise what_to_lower(error, checkpoint and checkpoint.name) from error

    def _configure_loggers(self) -> None:
        """Remove loggers that the command does not use, set options of the others, and check where they write."""
        recipe, trainer = self.recipe, self.recipe.explicit["trainer"]
        folder = RunFolder(recipe.values("trainer")["default_root_dir"])
        loggers = [spec for spec in _as_list(trainer.get("logger")) if isinstance(spec, ClassArguments)]
        if recipe.command != "fit" and trainer.get("logger") is not None:
            # predict logs its table to the run of fit; other commands only write metrics.json.
            loggers = [spec for spec in loggers if recipe.command == "predict"
                       and find_support(spec.class_path).continues(folder.root)]
            trainer["logger"] = loggers or None
        _check_complete(recipe.whole())
        resumes = recipe.command == "predict" or bool(recipe.options.get("ckpt_path"))
        for spec in loggers:
            find_support(spec.class_path).configure(spec.init_args, folder.root, resumes)
        check_outputs(trainer, folder)

    def _check(self) -> None:
        """Raise UserError if the recipe would run untrusted code, or names a strategy that is not supported."""
        check_recipe(self.recipe.values("model"), self.recipe.is_typed_true("model.trust_remote_code"))
        strategy = self.recipe.explicit["trainer"].get("strategy")
        if isinstance(strategy, ClassArguments) and strategy.class_path.endswith(".DeepSpeedStrategy"):
            raise UserError("trainer.strategy: Lightning's DeepSpeedStrategy is not supported, as its steps are not "
                            "exact. Use lmmods.strategies.DeepSpeed.")

    def _make(self, block: str) -> Any:
        """Return the object of `model` or `data`."""
        cls = self.recipe.classes[block]
        arguments = objects(cls, self.recipe.explicit[block])
        if cls in declared(block).values():
            cls = implementation(cls, FOLDERS[self.recipe.engine][block])
        return cls(**arguments)

    def _trainer(self, overrides: dict[str, Any]) -> Any:
        values = objects(self.recipe.fields_class("trainer"), self.recipe.values("trainer"))
        # Blocks that are callbacks are added to the trainer's callbacks; `_describe` makes the others its attributes.
        callbacks = [block for block in self.blocks.values() if isinstance(block, Callback)]
        if callbacks:
            values["callbacks"] = [*_as_list(values["callbacks"]), *callbacks]
        self.trainer_arguments = values  # arguments of the trainer, without overrides
        return self.types.trainer(**values | overrides)

    def _describe(self, longest_first: bool) -> None:
        """Set the trainer's recipe and identity, and connect the data module to the model."""
        recipe, defaults = redacted(self.recipe.whole()), self._defaults()
        recipe["trainer"]["callbacks"] = _as_list(recipe["trainer"].get("callbacks")) or None
        # config.yaml works on both engines: with short class names, and without Lightning's own keys that are not set.
        for block in (recipe["model"], recipe["data"], *_as_list(recipe["trainer"]["callbacks"])):
            block["class_path"] = short_name(block["class_path"])
        parameters = inspect.signature(self.types.trainer.__init__).parameters
        for key, value in list(recipe["trainer"].items()):
            if value == defaults["trainer"][key] and (value is None or key not in parameters):
                del recipe["trainer"][key]
        recipe["trainer"]["precision"] = self.trainer.precision  # resolved value of `auto`
        self.blocks["checkpoint"].rank_by(*self.model.ranked_by)
        if not isinstance(self.blocks["checkpoint"], Callback):
            vars(self.trainer).update(self.blocks)
        self.trainer.recipe, self.trainer.identity = recipe, RunIdentity(recipe, defaults)
        self._connect(longest_first)

    def _connect(self, longest_first: bool) -> None:
        """Set the data module's attributes that depend on the model."""
        def read_scorer(name: str, key: str) -> Scorer:
            from lmmods.commands.reward_model import read_reward_model

            return read_reward_model(name, key, self.datamodule.has_chats)

        self.datamodule.connect(seed=self.recipe.seed, longest_first=longest_first,
                                **self.model.data_facts(self.recipe.command, read_scorer))

    def _defaults(self) -> dict[str, Any]:
        """Return the defaults of all keys, in recipe blocks but without `class_path` and `init_args`."""
        tree = {name: fill(self.recipe.fields_class(name), {}) for name in ("trainer", *BLOCKS)}
        for block, instance in (("model", self.model), ("data", self.datamodule)):
            tree[block] = {name: parameter.default for base in reversed(type(instance).__mro__)
                           for name, parameter in inspect.signature(base.__init__).parameters.items()
                           if parameter.default is not parameter.empty}
            tree[block] |= {name: vars(value) for name, value in tree[block].items() if is_dataclass(value)}
        return tree


# Keys of `trainer` that a dry run overrides.
DRY_RUN_KEYS = {"max_epochs": -1, "min_epochs": None, "min_steps": None, "max_time": None, "fast_dev_run": False,
                "profiler": None, "barebones": False, "callbacks": None, "enable_checkpointing": False,
                "enable_progress_bar": False, "limit_val_batches": 0, "num_sanity_val_steps": 0,
                "val_check_interval": None, "check_val_every_n_epoch": 10**9}


def dry_setup(recipe: Recipe, longest_first: bool = False, **trainer: Any) -> Setup:
    """Build a recipe for measurements: nothing is logged, sampled or saved, and no folder is created.

    Args:
        longest_first: See `Setup`.
        trainer: Keys of the recipe's trainer to set.
    """
    names = keys_of(recipe.fields_class("trainer"))
    changes = {name: value for name, value in (DRY_RUN_KEYS | trainer).items() if name in names}
    values = recipe.explicit | dict.fromkeys(BLOCKS, {}) | {"trainer": recipe.explicit["trainer"] | changes}
    return Setup(replace(recipe, explicit=values), longest_first)


def short_name(class_path: str) -> str:
    """Return the class name that both engines accept; other classes keep their import path."""
    return class_path.rsplit(".", 1)[-1] if class_path.split(".")[0] in PACKAGES else class_path


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_complete(recipe: dict[str, Any]) -> None:
    """Raise UserError if a value is a redacted one from a run's config.yaml."""
    if key := next(find_redacted(recipe), None):
        option = key.replace(".init_args.", ".")
        raise UserError(f"{key} has *** for a password or token, because config.yaml does not store them. Set the "
                        f"whole value again, on the command line (--{option} …) or in a later recipe (--config).")


# ---------------------------------------------------------------------------------------------------------------------
# Output locations of Lightning classes: only the run folder, unless the command line trusts the recipe.
#
# Lightning's loggers and profilers write to the paths in their settings, overwrite existing files and follow links, so
# their settings are checked before they are built.

PROFILERS = ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler")
PROFILES = ("*.txt", "*.prof", "*.json")  # files that they overwrite; `*` stands for the file name in the recipe
TRUST = f"or, if you trust the recipe, add {FLAG} true to the command line."


def check_outputs(trainer: Any, folder: RunFolder) -> None:
    """Check where the loggers and profilers of a parsed recipe would write.

    Raises:
        UserError: A Lightning class would write outside the run folder, over foreign files, or to an unknown path.
    """
    for key in ("logger", "profiler"):
        for spec in _as_list(trainer.get(key)):
            class_path = str(getattr(spec, "class_path", ""))
            if class_path.split(".")[0] in PACKAGES[:2] and not is_trusted():
                _check_class(f"trainer.{key}", class_path, spec.init_args, folder)
            elif class_path and spec.kind is MetricsCSV:
                raise UserError("trainer.logger: every run has MetricsCSV already. Remove it.")


def _check_class(key: str, class_path: str, options: dict[str, Any], folder: RunFolder) -> None:
    name = class_path.rpartition(".")[2]
    if options.get("settings"):  # wandb.Settings holds many paths
        raise UserError(f"{key}: {name} has `settings`, which may contain any output path. Remove them, {TRUST}")
    if key == "trainer.logger":
        folders, files = find_support(class_path).folders(options), find_support(class_path).overwrites
    else:
        folders, files = [options.get("dirpath")] if name in PROFILERS else None, PROFILES
        folders = [] if name == "PassThroughProfiler" else folders
    if folders is None:
        raise UserError(f"{key}: the output path of {name} is unknown. Use another class (docs/extending.md), {TRUST}")
    for target in filter(None, folders):
        escape = target if _is_expanded(target) else find_escape(folder.root, target)
        if escape is not None:
            raise UserError(f"{key}: {name} would write to {escape}, but a run only writes inside its folder. Set a "
                            f"folder in {folder.root}, {TRUST}")
        existing = [path for pattern in files for path in Path(target).glob(pattern)]
        if existing and not folder.has_run():
            raise UserError(f"{key}: {name} would overwrite {existing[0]}, which no run wrote. Set another folder in "
                            f"{folder.root}, {TRUST}")


def _is_expanded(path: str) -> bool:
    """True if a library may expand a path: a URL, a home directory or an environment variable."""
    return path.startswith(("~", "file:", "local:")) or any(sign in path for sign in ("://", "::", "$"))
