"""The command line: which command, over which engine, and errors as one message."""

import gc
import os
import signal
import sys
import traceback
from typing import Any

from lmmods.commands.trust import guarded_imports, taken_flag, trusting
from lmmods.core.engines import ENGINES
from lmmods.core.errors import UserError, user_error_in
from lmmods.core.out_of_memory import is_out_of_memory, what_to_lower
from lmmods.core.recipes import config_argument
from lmmods.core.redaction import redact

# Set before the libraries are imported: nothing phones home, and tokenizers do not warn about workers.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
if not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a bar in a log file is a long line of debris


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 done, 2 the user's mistake, 130 interrupted; our own bugs raise.

    Args:
        argv: Arguments without the program's name; None takes them from the command line.
    """
    if argv is None:  # a program of its own
        sys.excepthook = show_bug
    arguments = sys.argv[1:] if argv is None else argv
    try:
        arguments, trusted = taken_flag(arguments)
        if arguments[:1] == ["report"]:  # reads files only, so it starts without the libraries
            from lmmods.commands.report.command import main as report

            enable_collector()
            report(arguments[1:])
            return 0
        with trusting(trusted):
            return run_interruptible(arguments)
    except SystemExit as stop:  # the parser has spoken
        return int(stop.code or 0)
    except Exception as error:
        from lmmods.runs.saving import disk_error_in

        mistake = user_error_in(error) or disk_error_in(error)
        if mistake is not None:
            return _fail(str(mistake))
        if is_out_of_memory(error):
            return _fail(str(what_to_lower(error, None)))
        raise
    finally:
        enable_collector()


def run_interruptible(arguments: list[str]) -> int:
    """Run a command that loads the libraries. Returns 0, or 130 after Ctrl+C or SIGTERM."""
    from lmmods.commands.registry import COMMANDS, run_command
    from lmmods.core.console import quiet_libraries, tell
    from lmmods.core.signals import Interrupted

    quiet_libraries()

    def interrupt(number: int, _frame: Any) -> None:
        raise Interrupted("Interrupted before training began; nothing was written.")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        if arguments and arguments[0] in COMMANDS:
            enable_collector()
            run_command(arguments[0], arguments[1:])
        else:
            run_engine(arguments)
    except Interrupted as stop:
        tell(str(stop))
        return 130
    return 0


def run_engine(arguments: list[str]) -> None:
    """Build the parser for the engine that `arguments` ask for, and run the command."""
    from lmmods.commands.early_check import check_early

    engine = peek_engine(arguments)
    check_early(arguments, engine)
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lmmods.commands.engine_cli import EngineCLI, jax_engine, torch_engine

    classes = jax_engine() if engine == "jax" else torch_engine()
    enable_collector()
    try:
        with guarded_imports():
            EngineCLI(classes, engine, arguments)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error


def enable_collector() -> None:
    """Switch Python's garbage collector on where train.py has left it off; what is imported by now it never visits."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def peek_engine(arguments: list[str]) -> str:
    """The engine named by `--engine`, or else by the last `--config` that names one.

    It decides which classes the parser knows, so it is read before the parser is built. Raises UserError: a recipe file
    cannot be read, or no engine has this name.
    """
    engine = "torch"
    for value in _values(arguments, ("--config", "-c")):
        engine = config_argument(value).get("engine", engine)
    engine = next(reversed(_values(arguments, ("--engine",))), engine)
    if engine not in ENGINES:
        raise UserError(f"engine is {engine!r}, but must be torch or jax.")
    return engine


def _values(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    found = []
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found.append(value if equals else arguments[i + 1] if i + 1 < len(arguments) else "")
    return found


def show_bug(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A traceback as Python shows it, without passwords and tokens."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _fail(message: str) -> int:
    print(redact(f"error: {message}"), file=sys.stderr, flush=True)
    return 2
