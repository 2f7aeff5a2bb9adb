"""A sweep that W&B leads: the file that `wandb sweep` reads, from which `wandb agent` starts runs."""

import shlex
from pathlib import Path
from typing import Any

from lmmods.commands.programs import TYPED
from lmmods.commands.sweep.space import Parameter
from lmmods.core.errors import UserError
from lmmods.core.recipes import CONFIG_OPTIONS, as_yaml, config_argument, option_values
from lmmods.core.redaction import redact

METHODS = {"tpe": "bayes", "random": "random", "grid": "grid"}


def sweep_file(folder: Path, recipe: list[str], space: list[Parameter], sampler: str, metric: str, mode: str) -> str:
    """The text of the file.

    Args:
        folder: Gets a run folder for each run, of the name of its id.
        recipe: Arguments of fit.

    Raises:
        UserError: The recipe logs nothing to W&B, or the command holds a password, which W&B would see.
    """
    fit = shlex.join([*TYPED, "fit", *recipe])
    if redact(fit) != fit:
        raise UserError("sweep: the command line holds a password or token, which W&B would get to see. Put it into "
                        "the recipe's file or the environment.")
    place = f'{shlex.quote(str(folder))}/"$WANDB_RUN_ID"'
    content = {
        "name": folder.name, "project": _project(recipe), "program": TYPED[-1], "method": METHODS[sampler],
        "metric": {"name": metric, "goal": f"{mode}imize"},
        "parameters": {parameter.key: _distribution(parameter, sampler) for parameter in space},
        # A shell, as the agent puts no variable into a command, and each run needs a folder of its own.
        "command": ["sh", "-c", f'exec {fit} --trainer.default_root_dir {place} "$@"', "sh", "${args}"]}
    return as_yaml(content)


def _project(recipe: list[str]) -> str:
    """The W&B project that the recipe logs to. Raises UserError: it has no WandbLogger."""
    loggers: Any = None
    for value in option_values(recipe, *CONFIG_OPTIONS):
        trainer = config_argument(value).get("trainer")
        loggers = trainer.get("logger", loggers) if isinstance(trainer, dict) else loggers
    typed = [word for word in recipe if "WandbLogger" in word]
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if "WandbLogger" in str(logger):
            options = logger.get("init_args") if isinstance(logger, dict) else None
            return str((options or {}).get("project") or "lmmods")
    if not typed:
        raise UserError("sweep: the recipe logs nothing to W&B, which so would learn nothing. Add class_path: "
                        "WandbLogger to trainer.logger, or sweep on this machine with --backend optuna.")
    return "lmmods"


def _distribution(parameter: Parameter, sampler: str) -> dict[str, Any]:
    """A parameter in the words of W&B's sweep files."""
    if parameter.values or parameter.step is not None or sampler == "grid":
        return {"values": list(parameter.grid())}
    ends = {"min": parameter.low, "max": parameter.high}
    if parameter.log:
        whole = {"distribution": "q_log_uniform_values", "q": 1} if parameter.is_whole else {
            "distribution": "log_uniform_values"}
        return whole | ends
    return {"distribution": "int_uniform" if parameter.is_whole else "uniform"} | ends
