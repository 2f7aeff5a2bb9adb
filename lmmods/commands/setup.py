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
from lmmods.runs.loggers import support_of
from lmmods.runs.run_files import find_escape


class Setup:
    """Objects built from a recipe: `trainer`, `model` and `datamodule` of its engine.

    Used as a context, it names what to lower where an engine runs out of memory.

    Args:
        recipe: The recipe of a command line.
        longest_first: Train on the longest rows first, to measure the memory of the largest batch.
        trainer: Arguments of the trainer that replace the recipe's.

    Raises:
        UserError: The engine cannot do what the recipe asks for, or the recipe is not trusted.
    """

    def __init__(self, recipe: Recipe, longest_first: bool = False, **trainer: Any) -> None:
        self.types = load_engine(recipe.engine)
        recipe.seed = pl.seed_everything(None if recipe.seed is True else recipe.seed, workers=True)
        self.recipe = recipe = with_library_classes(recipe)
        self._check()
        self._configure_loggers()
        self.blocks = {name: self.types.blocks[name](**objects(fields, recipe.given[name]))
                       for name, fields in BLOCKS.items()}
        self.datamodule: DataModule = self._make("data")
        self.model: TaskFields = self._make("model")
        self.model.check_data(self.datamodule)
        self.model.drop_unused(recipe.command)
        self.trainer: Engine = self._trainer(trainer)
        self._describe(longest_first)

    def __enter__(self) -> "Setup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        # XLA raises ValueError: see is_out_of_memory.
        if isinstance(error, RuntimeError | MemoryError | ValueError) and is_out_of_memory(error):
            last = self.trainer.run_folder.find("last") if self.recipe.command == "fit" else None
            raise what_to_lower(error, last and last.name) from error

    def _configure_loggers(self) -> None:
        """Leave out loggers that the command does not use, set the options of the others, and check where they write.
        """
        recipe, trainer = self.recipe, self.recipe.given["trainer"]
        folder = RunFolder(recipe.values("trainer")["default_root_dir"])
        loggers = [spec for spec in _as_list(trainer.get("logger")) if isinstance(spec, ClassArguments)]
        if recipe.command != "fit" and trainer.get("logger") is not None:
            # predict logs its table to the run of fit; other commands write metrics.json alone.
            loggers = [spec for spec in loggers if recipe.command == "predict"
                       and support_of(spec.class_path).continues(folder.root)]
            trainer["logger"] = loggers or None
        _check_complete(recipe.whole())
        resumes = recipe.command == "predict" or bool(recipe.options.get("ckpt_path"))
        for spec in loggers:
            support_of(spec.class_path).configure(spec.init_args, folder.root, resumes)
        check_outputs(trainer, folder)

    def _check(self) -> None:
        """Reject a recipe that would run code which it may not, or a class that does not work here."""
        check_recipe(self.recipe.values("model"), self.recipe.is_typed_true("model.trust_remote_code"))
        strategy = self.recipe.given["trainer"].get("strategy")
        if isinstance(strategy, ClassArguments) and strategy.class_path.endswith(".DeepSpeedStrategy"):
            raise UserError("trainer.strategy: use lmmods.strategies.DeepSpeed, whose steps are exact, instead of "
                            "Lightning's DeepSpeedStrategy.")

    def _make(self, block: str) -> Any:
        """Return the object of `model` or `data`."""
        kind = self.recipe.classes[block]
        arguments = objects(kind, self.recipe.given[block])
        if kind in declared(block).values():
            kind = implementation(kind, FOLDERS[self.recipe.engine][block])
        return kind(**arguments)

    def _trainer(self, replaced: dict[str, Any]) -> Any:
        values = objects(self.recipe.kind("trainer"), self.recipe.values("trainer"))
        # Blocks that are callbacks go to the trainer's; the others are attributes of it.
        callbacks = [block for block in self.blocks.values() if isinstance(block, Callback)]
        if callbacks:
            values["callbacks"] = [*_as_list(values["callbacks"]), *callbacks]
        self.asked = values  # arguments of the trainer as the recipe has them
        return self.types.trainer(**values | replaced)

    def _describe(self, longest_first: bool) -> None:
        """Give the trainer the complete recipe and its identity, and the data module what it needs of the model."""
        recipe, defaults = redacted(self.recipe.whole()), self._defaults()
        recipe["trainer"]["callbacks"] = _as_list(recipe["trainer"].get("callbacks")) or None
        # config.yaml serves both engines: short class names, and of Lightning's own keys those that are set.
        for part in (recipe["model"], recipe["data"], *_as_list(recipe["trainer"]["callbacks"])):
            part["class_path"] = short_name(part["class_path"])
        ours = inspect.signature(self.types.trainer.__init__).parameters
        for key, value in list(recipe["trainer"].items()):
            if value == defaults["trainer"][key] and (value is None or key not in ours):
                del recipe["trainer"][key]
        recipe["trainer"]["precision"] = self.trainer.precision  # resolved value of `auto`
        self.blocks["checkpoint"].rank_by(*self.model.ranked_by)
        if not isinstance(self.blocks["checkpoint"], Callback):
            vars(self.trainer).update(self.blocks)
        self.trainer.recipe, self.trainer.identity = recipe, RunIdentity(recipe, defaults)
        self._connect(longest_first)

    def _connect(self, longest_first: bool) -> None:
        """Give the data module what depends on the model."""
        def read_scorer(name: str, key: str) -> Scorer:
            from lmmods.commands.reward_model import read_reward_model

            return read_reward_model(name, key, self.datamodule.has_chats)

        self.datamodule.connect(seed=self.recipe.seed, longest_first=longest_first,
                                **self.model.data_facts(self.recipe.command, read_scorer))

    def _defaults(self) -> dict[str, Any]:
        """Return the defaults of all keys, in recipe blocks but without `class_path` and `init_args`."""
        tree = {name: fill(self.recipe.kind(name), {}) for name in ("trainer", *BLOCKS)}
        for block, instance in (("model", self.model), ("data", self.datamodule)):
            tree[block] = {name: parameter.default for base in reversed(type(instance).__mro__)
                           for name, parameter in inspect.signature(base.__init__).parameters.items()
                           if parameter.default is not parameter.empty}
            tree[block] |= {name: vars(value) for name, value in tree[block].items() if is_dataclass(value)}
        return tree


# Keys of `trainer` that a dry run overrides.
DRY = {"max_epochs": -1, "min_epochs": None, "min_steps": None, "max_time": None, "fast_dev_run": False,
       "profiler": None, "barebones": False, "callbacks": None, "enable_checkpointing": False,
       "enable_progress_bar": False, "limit_val_batches": 0, "num_sanity_val_steps": 0, "val_check_interval": None,
       "check_val_every_n_epoch": 10**9}


def dry_setup(recipe: Recipe, longest_first: bool = False, **trainer: Any) -> Setup:
    """Build a recipe to measure what it computes: nothing is logged, sampled or saved, and no folder is created.

    Args:
        longest_first: As of `Setup`.
        trainer: Keys of the recipe's trainer to set.
    """
    names = keys_of(recipe.kind("trainer"))
    changes = {name: value for name, value in (DRY | trainer).items() if name in names}
    given = recipe.given | dict.fromkeys(BLOCKS, {}) | {"trainer": recipe.given["trainer"] | changes}
    return Setup(replace(recipe, given=given), longest_first)


def short_name(class_path: str) -> str:
    """Return the class name that both engines accept; other classes keep their import path."""
    return class_path.rsplit(".", 1)[-1] if class_path.split(".")[0] in PACKAGES else class_path


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_complete(recipe: dict[str, Any]) -> None:
    """Reject values that a run's config.yaml left out. Raises UserError."""
    if key := next(find_redacted(recipe), None):
        short = key.replace(".init_args.", ".")
        raise UserError(f"{key} has *** where a password or token was, as a run's config.yaml stores none. Set the "
                        f"whole value again, on the command line (--{short} …) or in a later recipe (--config).")


# ---------------------------------------------------------------------------------------------------------------------
# Output locations of Lightning classes: only the run folder, unless the command line trusts the recipe.
#
# Lightning's loggers and profilers write wherever their settings say, overwrite existing files and follow links, so
# their settings are checked before any of them is built.

PROFILERS = ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler")
PROFILES = ("*.txt", "*.prof", "*.json")  # files that they overwrite; `*` stands for the name given in the recipe
TRUST = f"or, if you trust the recipe, add {FLAG} true to the command line."


def check_outputs(trainer: Any, folder: RunFolder) -> None:
    """Check where the loggers and profilers of a parsed recipe would write.

    Raises:
        UserError: A Lightning class would write outside the run folder, over foreign files, or to an unknown place.
    """
    for key in ("logger", "profiler"):
        for spec in _as_list(trainer.get(key)):
            path = str(getattr(spec, "class_path", ""))
            if path.split(".")[0] in PACKAGES[:2] and not is_trusted():
                _check(f"trainer.{key}", path, spec.init_args, folder)
            elif path and spec.kind is MetricsCSV:
                raise UserError("trainer.logger: MetricsCSV does not work here. Every run has it already.")


def _check(key: str, path: str, options: dict[str, Any], folder: RunFolder) -> None:
    name = path.rpartition(".")[2]
    if options.get("settings"):  # wandb.Settings holds many paths
        raise UserError(f"{key}: {name} is given settings, which can name any place to write to. Leave them out, "
                        f"{TRUST}")
    if key == "trainer.logger":
        places, files = support_of(path).folders(options), support_of(path).overwrites
    else:
        places, files = [options.get("dirpath")] if name in PROFILERS else None, PROFILES
        places = [] if name == "PassThroughProfiler" else places
    if places is None:
        raise UserError(f"{key}: it is not known where {name} writes. Name another one (docs/extending.md), {TRUST}")
    for place in filter(None, places):
        out = place if _is_odd(place) else find_escape(folder.root, place)
        if out is not None:
            raise UserError(f"{key}: {name} would write to {out}, and what a run writes lies in its folder. Name a "
                            f"folder in {folder.root}, {TRUST}")
        taken = [path for pattern in files for path in Path(place).glob(pattern)]
        if taken and not folder.holds_run():
            raise UserError(f"{key}: {name} would write over {taken[0]}, which no run wrote. Name another folder in "
                            f"{folder.root}, {TRUST}")


def _is_odd(place: str) -> bool:
    """True if a library may expand a path to another one: a URL, a home directory or an environment variable."""
    return place.startswith(("~", "file:", "local:")) or any(mark in place for mark in ("://", "::", "$"))
