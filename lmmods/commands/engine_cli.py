"""LightningCLI for either engine: which classes a recipe may name, and how its mistakes are told."""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from lmmods.commands.argument_parser import OnlyHelp, Parser, untried_strategy
from lmmods.commands.lightning_compat import CLI
from lmmods.commands.trainer_keys import check_blocks, check_nulls, check_values
from lmmods.commands.trust import FLAG, PACKAGES, check_recipe
from lmmods.core.engines import ENGINES, import_all
from lmmods.core.errors import UserError
from lmmods.core.hf_config import position_limit, tells_token_types
from lmmods.core.out_of_memory import is_out_of_memory, what_to_lower
from lmmods.core.redaction import left_out, redacted
from lmmods.runs.folder import RunFolder
from lmmods.runs.identity import RunIdentity
from lmmods.runs.wandb import known_wandb_id, settle_wandb, wandb_loggers


@dataclass
class Engine:
    """The types that an engine's recipes are made of."""

    trainer: type
    module: type
    data: type
    checkpoint: type
    samples: type
    mmlu: type
    publish: type
    reason_against: Callable[[str], str | None] = lambda _: None  # a callback of this import path


def torch_engine() -> Engine:
    from lmmods.data.base import DataModule
    from lmmods.torch_engine.callbacks.allowed import reason_against
    from lmmods.torch_engine.callbacks.checkpoint import Checkpoint
    from lmmods.torch_engine.callbacks.mmlu import MMLU
    from lmmods.torch_engine.callbacks.publish import Publish
    from lmmods.torch_engine.callbacks.samples import Samples
    from lmmods.torch_engine.tasks.base import TaskModule
    from lmmods.torch_engine.trainer import Trainer

    import_all("lmmods.torch_engine.tasks")
    import_all("lmmods.data")
    return Engine(Trainer, TaskModule, DataModule, Checkpoint, Samples, MMLU, Publish, reason_against)


def jax_engine() -> Engine:
    from lmmods.data.base import DataModule

    trainer, task, rules, samples, questions, publisher = importlib.import_module("jax_engine.engine").load()
    import_all("lmmods.data")
    return Engine(trainer, task, DataModule, rules, samples, questions, publisher)


class EngineCLI(CLI):
    """fit, validate, test, predict and inspect over one engine's classes.

    Args:
        engine: Its classes.
        engine_name: `torch` or `jax`, the only value that the key `engine` may then have.
        args: Arguments without the program's name; None takes them from the command line.
    """

    def __init__(self, engine: Engine, engine_name: str, args: list[str] | None = None):
        self.engine, self.engine_name = engine, engine_name
        Parser.hidden = {"trainer.callbacks": engine.reason_against, "trainer.strategy": untried_strategy}
        try:
            super().__init__(  # parses, builds and runs the command
                engine.module,
                engine.data,
                trainer_class=engine.trainer,
                save_config_callback=None,
                seed_everything_default=42,
                parser_class=Parser,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                args=args,
            )
        except (RuntimeError, MemoryError, ValueError) as error:  # the last of XLA: see is_out_of_memory
            if not is_out_of_memory(error):
                raise
            trains = getattr(self, "subcommand", None) == "fit" and hasattr(self, "trainer")
            last = self.trainer.run_folder.find("last") if trains else None
            raise what_to_lower(error, last and last.name) from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**CLI.subcommands(), "inspect": {"model", "datamodule"}}

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        self.arguments, self.config = args, self._parsed(parser, args)
        recipe = self.config[self.config.subcommand]
        check_blocks(recipe)
        check_nulls(self.parser.commands[self.config.subcommand], recipe)
        check_values(recipe, self.engine_name)
        for spec in _as_list(recipe.trainer.get("callbacks")):
            reason = self.engine.reason_against(spec.class_path)
            if reason:
                raise UserError(f"trainer.callbacks: {spec.class_path.rsplit('.', 1)[-1]} does not work here. {reason}")

    @staticmethod
    def _parsed(parser: LightningArgumentParser, args: list[str]) -> Any:
        try:
            return parser.parse_args(args)
        except (UnicodeDecodeError, OSError) as error:  # of a file that a key names, as --trainer FILE
            raise UserError(f"A file that the command line names cannot be read ({error}).") from error

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--engine", type=Literal[ENGINES], default=self.engine_name,
                            help="torch (Lightning) or jax (Flax)")
        parser.add_argument(FLAG, action=OnlyHelp)
        parser.add_lightning_class_args(self.engine.checkpoint, "checkpoint")
        parser.add_lightning_class_args(self.engine.samples, "samples")
        parser.add_lightning_class_args(self.engine.mmlu, "mmlu")
        parser.add_lightning_class_args(self.engine.publish, "publish")

    def before_instantiate_classes(self) -> None:
        self.recipe = self.config[self.subcommand]
        typed = any(re.match(r"--model\.(init_args\.)?trust_remote_code\b", word) for word in self.arguments)
        check_recipe(self.recipe, typed)
        strategy = self.recipe.trainer.get("strategy")
        if str(getattr(strategy, "class_path", "")).endswith(".DeepSpeedStrategy"):
            raise UserError("trainer.strategy: use lmmods.strategies.DeepSpeed, whose steps are exact, instead of "
                            "Lightning's DeepSpeedStrategy.")
        folder = RunFolder(self.recipe.trainer.default_root_dir)
        if self.subcommand == "predict" and known_wandb_id(folder):  # its table belongs to the run
            self.recipe.trainer.logger = wandb_loggers(self.recipe.trainer.logger) or None
        elif self.subcommand != "fit":
            self.recipe.trainer.logger = None  # the other commands log nowhere but metrics.json
        _check_complete(self.recipe.as_dict())
        for logger in wandb_loggers(self.recipe.trainer.logger):
            settle_wandb(logger.init_args, folder, self.subcommand == "predict" or bool(self.recipe.get("ckpt_path")))

    def after_instantiate_classes(self) -> None:
        dump = self.parser.commands[self.subcommand].dump(self.recipe, skip_none=False)
        recipe = redacted(yaml.safe_load(dump))
        for key in ("config", "ckpt_path", "overwrite"):
            recipe.pop(key, None)
        defaults = self._defaults()
        self._make_engine_neutral(recipe, defaults["trainer"])
        recipe["trainer"]["precision"] = self.trainer.precision  # what `auto` has become
        if not issubclass(self.engine.checkpoint, Callback):  # else they are among the trainer's callbacks
            made = self.config_init[self.subcommand]
            self.trainer.checkpoint, self.trainer.samples, self.trainer.mmlu, self.trainer.publish = (
                made.checkpoint, made.samples, made.mmlu, made.publish)
        self.trainer.recipe, self.trainer.identity = recipe, RunIdentity(recipe, defaults)
        fields = self.model.config_fields()
        self.datamodule.connect(
            pretrained=self.model.pretrained,
            revision=self.model.revision,
            trust_remote_code=self.model.trust_remote_code,
            seed=self.recipe.seed_everything,
            max_positions=position_limit(fields),
            token_types=tells_token_types(fields),
        )

    def _defaults(self) -> dict[str, Any]:
        """The default of every key, in blocks as a recipe has them, but without `class_path` and `init_args`."""
        tree = self.parser.commands[self.subcommand].get_defaults().as_dict()
        for block, instance in (("model", self.model), ("data", self.datamodule)):
            tree[block] = {name: parameter.default for base in reversed(type(instance).__mro__)
                           for name, parameter in inspect.signature(base.__init__).parameters.items()
                           if parameter.default is not parameter.empty}
            tree[block] |= {name: vars(value) for name, value in tree[block].items() if is_dataclass(value)}
        return tree

    def _make_engine_neutral(self, recipe: dict[str, Any], defaults: dict[str, Any]) -> None:
        """A run's config.yaml serves both engines: short names of classes, and of Lightning's own keys what is set."""
        recipe["trainer"]["callbacks"] = _as_list(recipe["trainer"].get("callbacks")) or None
        for part in (recipe["model"], recipe["data"], *_as_list(recipe["trainer"]["callbacks"])):
            if part["class_path"].split(".")[0] in PACKAGES:
                part["class_path"] = part["class_path"].rsplit(".", 1)[-1]
        ours = inspect.signature(self.engine.trainer.__init__).parameters
        for key, value in list(recipe["trainer"].items()):
            if value == defaults[key] and (value is None or key not in ours):
                del recipe["trainer"][key]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_complete(recipe: dict[str, Any]) -> None:
    """Refuse what a run's config.yaml has left out. Raises UserError."""
    if key := next(left_out(recipe), None):
        short = key.replace(".init_args.", ".")
        raise UserError(f"{key} has *** where a password or token was: config.yaml of a run keeps none. Give the whole "
                        f"value again, on the command line (--{short} …) or in a recipe behind it (--config).")
