"""LightningCLI for either engine: which classes a recipe may name, and how its mistakes are told."""

import difflib
import importlib
import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lmmods.architectures import position_limit, tells_token_types
from lmmods.cli import ENGINES, import_all
from lmmods.commands import COMMANDS, command_parser
from lmmods.errors import UserError
from lmmods.redaction import left_out, redact, redacted
from lmmods.runs.folder import RunFolder
from lmmods.settings import Generation, LoRA, Optimizer
from lmmods.wandb_runs import known_wandb_id, settle_wandb, wandb_loggers


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


def torch_engine() -> Engine:
    from lmmods.callbacks.checkpoint import Checkpoint
    from lmmods.callbacks.mmlu import MMLU
    from lmmods.callbacks.publish import Publish
    from lmmods.callbacks.samples import Samples
    from lmmods.data.base import DataModule
    from lmmods.modules.base import TaskModule
    from lmmods.trainer import Trainer

    import_all("lmmods.modules")
    import_all("lmmods.data")
    return Engine(Trainer, TaskModule, DataModule, Checkpoint, Samples, MMLU, Publish)


def jax_engine() -> Engine:
    from lmmods.data.base import DataModule

    trainer, task, rules, samples, questions, publisher = importlib.import_module("jax_engine.engine").load()
    import_all("lmmods.data")
    return Engine(trainer, task, DataModule, rules, samples, questions, publisher)


class Parser(LightningArgumentParser):
    """A parser whose errors are one line with a suggestion."""

    def error(self, message: str, ex: Exception | None = None) -> None:
        """Tell what is wrong and leave with status 2."""
        sys.stderr.write(redact(f"error: {_tidy(message)}{self._suggestion(message)}\n"))
        sys.exit(2)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """A recipe as text, of `--print_config` and of config.yaml, without passwords and tokens."""
        return redact(super().dump(*args, **kwargs))

    def add_subcommands(self, **kwargs: Any):
        from lmmods.report.command import report_parser

        subcommands = super().add_subcommands(**kwargs)
        for name, parser in [*((name, command_parser(name)) for name in COMMANDS), ("report", report_parser())]:
            subcommands.add_subcommand(name, parser, help=parser.description)
        return subcommands

    def add_lightning_class_args(self, lightning_class: type, nested_key: str, subclass_mode: bool = False,
                                 required: bool = True) -> list[str]:
        """As Lightning's, for classes of either engine."""
        if issubclass(lightning_class, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            added = self.add_subclass_arguments(lightning_class, nested_key, fail_untyped=False, required=required)
        else:  # trainers are made later, when their callbacks have been
            added = self.add_class_arguments(lightning_class, nested_key, fail_untyped=False, sub_configs=True,
                                             instantiate=nested_key != "trainer")
        for action in self._actions:
            # Otherwise a string that happens to be a file, like `source: rows.jsonl`, is read as a configuration.
            if getattr(action, "_enable_path", False):
                action._enable_path = False
                action.sub_add_kwargs["sub_configs"] = False
        return added

    def _suggestion(self, message: str) -> str:
        known = sorted(_known_names(self))
        for name in re.findall(r"'(?:--)?([\w.]+)'|--([\w.]+)", message):
            wrong = (name[0] or name[1]).rsplit(".", 1)[-1]
            near = difflib.get_close_matches(wrong, known, 1, 0.7)
            if near and wrong not in known:
                return f" Did you mean {near[0]}?"
        return ""


def _known_names(parser: LightningArgumentParser) -> set[str]:
    """Last parts of all keys and the short names of all classes that a recipe may hold."""
    parsers = [parser]
    if parser._subcommands_action is not None:
        parsers += parser._subcommands_action._name_parser_map.values()
    names = {option.rsplit(".", 1)[-1].lstrip("-")
             for each in parsers for action in each._actions for option in action.option_strings}
    classes = [Optimizer, LoRA, Generation]
    for each in parsers:
        for action in each._actions:
            for kind in getattr(action, "_typehint", None) and get_args(action._typehint) or ():
                classes += [kind, *kind.__subclasses__()] if isinstance(kind, type) else []
    for kind in classes:
        names.add(kind.__name__)
        names |= {name for base in kind.__mro__ if base.__module__.startswith("lmmods")
                  for name in inspect.signature(base.__init__).parameters}
    return names - {"self", "kwargs", "args", "common"}


def _check_complete(recipe: dict[str, Any]) -> None:
    """Refuse what a run's config.yaml has left out. Raises UserError."""
    if key := next(left_out(recipe), None):
        short = key.replace(".init_args.", ".")
        raise UserError(f"{key} has *** where a password or token was: config.yaml of a run keeps none. Give the whole "
                        f"value again, on the command line (--{short} …) or in a recipe behind it (--config).")


def _tidy(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip()


class EngineCLI(LightningCLI):
    """fit, validate, test, predict and inspect over one engine's classes.

    Args:
        engine: Its classes.
        engine_name: `torch` or `jax`, the only value that the key `engine` may then have.
        args: Arguments without the program's name; None takes them from the command line.
    """

    def __init__(self, engine: Engine, engine_name: str, args: list[str] | None = None):
        self.engine, self.engine_name = engine, engine_name
        super().__init__(
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

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "inspect": {"model", "datamodule"}}

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:
        self.config = parser.parse_args(args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--engine", type=Literal[ENGINES], default=self.engine_name,
                            help="torch (Lightning) or jax (Flax)")
        parser.add_lightning_class_args(self.engine.checkpoint, "checkpoint")
        parser.add_lightning_class_args(self.engine.samples, "samples")
        parser.add_lightning_class_args(self.engine.mmlu, "mmlu")
        parser.add_lightning_class_args(self.engine.publish, "publish")

    def before_instantiate_classes(self) -> None:
        self.recipe = self.config[self.subcommand]
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
        dump = self._parser(self.subcommand).dump(self.recipe, skip_none=False)
        recipe = redacted(yaml.safe_load(dump))
        for key in ("config", "ckpt_path", "overwrite"):
            recipe.pop(key, None)
        self._make_engine_neutral(recipe)
        recipe["trainer"]["precision"] = self.trainer.precision  # what `auto` has become
        if not issubclass(self.engine.checkpoint, Callback):  # else they are among the trainer's callbacks
            made = self.config_init[self.subcommand]
            self.trainer.checkpoint, self.trainer.samples, self.trainer.mmlu, self.trainer.publish = (
                made.checkpoint, made.samples, made.mmlu, made.publish)
        self.trainer.recipe = recipe
        fields = self.model.config_fields()
        self.datamodule.connect(
            pretrained=self.model.pretrained,
            revision=self.model.revision,
            trust_remote_code=self.model.trust_remote_code,
            seed=self.recipe.seed_everything,
            max_positions=position_limit(fields),
            token_types=tells_token_types(fields),
        )

    def _make_engine_neutral(self, recipe: dict[str, Any]) -> None:
        """A run's config.yaml serves both engines: short names of classes, and of Lightning's own keys what is set."""
        for part in (recipe["model"], recipe["data"], *(recipe["trainer"].get("callbacks") or [])):
            part["class_path"] = part["class_path"].rsplit(".", 1)[-1]
        ours = inspect.signature(self.engine.trainer.__init__).parameters
        defaults = self._parser(self.subcommand).get_defaults()["trainer"]
        for key, value in list(recipe["trainer"].items()):
            if value == defaults[key] and (value is None or key not in ours):
                del recipe["trainer"][key]
