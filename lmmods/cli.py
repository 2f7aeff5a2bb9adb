"""Entry point: dispatch to a command and an engine, and report user errors as a single message."""

import gc
import os
import signal
import sys
import traceback
from typing import Any

# Other imports are inside functions, because Ctrl+C prints a traceback until `program` has installed its handlers.
from lmmods.core.signals import BEFORE, STATUS, STOP_SIGNALS, end_at_signals, raise_at_signals, watch_blocked_calls

# Set before the libraries are imported: disables telemetry and the tokenizers' warning about forked workers.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
if not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars clutter log files


def program() -> None:
    """Entry point of `lmmods` and `python train.py`: run the command and exit with its status."""
    end_at_signals()
    gc.disable()  # during the imports, which leave little garbage; `main` enables it again
    watch_blocked_calls()
    try:
        status = main()
        for signal_number in STOP_SIGNALS:  # at interpreter shutdown, handlers may need modules that are gone
            signal.signal(signal_number, signal.SIG_DFL)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again on exit
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0 done, 2 user error, 130 interrupted. Bugs raise other exceptions.

    Args:
        argv: Arguments without the program name; None reads sys.argv.
    """
    from lmmods.core.errors import is_out_of_memory, user_error_in, what_to_lower
    from lmmods.core.files import disk_error_in, wrong_path_in
    from lmmods.recipe.files import with_shipped_recipes
    from lmmods.recipe.trust import pop_trust_flag, trusting

    if argv is None:  # not called from another program
        sys.excepthook = show_bug
    arguments = sys.argv[1:] if argv is None else argv
    try:
        arguments, trusted = pop_trust_flag(arguments)
        with trusting(trusted):
            return run_interruptible(with_shipped_recipes(arguments))
    except SystemExit as stop:  # the parser has printed help or an error
        return int(stop.code or 0)
    except Exception as error:
        mistake = user_error_in(error) or disk_error_in(error) or wrong_path_in(error)
        if mistake is not None:
            return _fail(str(mistake))
        if is_out_of_memory(error):
            return _fail(str(what_to_lower(error, None)))
        raise
    finally:
        enable_collector()


def run_interruptible(arguments: list[str]) -> int:
    """Run a command or print the program help. Return 0, or 130 after Ctrl+C or SIGTERM.

    Raises:
        UserError: The command does not exist, or it raises one.
    """
    from lmmods.commands.registry import COMMANDS, check_command, program_help
    from lmmods.core.console import quiet_libraries, tell
    from lmmods.core.errors import UserError
    from lmmods.core.signals import Interrupted, Stopped

    quiet_libraries()

    try:
        if arguments[:1] in (["--help"], ["-h"], ["help"]):
            print(program_help())
        elif not arguments or arguments[0].startswith("-"):
            later = next((word for word in arguments if word in COMMANDS), None)
            raise UserError(f"The command must come first. Use python train.py {later} …, followed by its options."
                            if later else f"A command is missing.\n\n{program_help()}")
        else:
            command, *words = arguments
            check_command(command)
            if COMMANDS[command].takes == "recipe":
                run_with_recipe(command, words)
            else:
                run_alone(command, words)
    except Interrupted as stop:
        tell(str(stop))
        return 0 if isinstance(stop, Stopped) else STATUS
    return 0


def run_alone(command: str, words: list[str]) -> None:
    """Run a command that does not read a recipe, or print its help."""
    from lmmods.commands.help import help_of, wants_help
    from lmmods.commands.registry import function_of, parse_command

    if wants_help(words):
        return print(help_of(command, words))
    enable_collector()
    raise_at_signals("Interrupted.")
    function_of(command)(**parse_command(command, words))


def run_with_recipe(command: str, words: list[str]) -> None:
    """Read a recipe and run a command on its engine, or print the help or the recipe."""
    from lmmods.core.peers import Peers

    Peers.current().begin()  # before the imports, which take seconds
    with Peers.current().end_together():
        _run_watched(command, words)


def _run_watched(command: str, words: list[str]) -> None:
    from lmmods.commands.help import help_of, wants_help
    from lmmods.commands.registry import COMMANDS, function_of, options_of
    from lmmods.core.console import say
    from lmmods.core.waiting import sleep_if_busy
    from lmmods.recipe.reader import parse

    if wants_help(words):
        return print(help_of(command, words))
    options, _ = options_of(command)
    print_options = [word for word in words if word.partition("=")[0] == "--print_config"]
    parsed = parse([command, *words], options, COMMANDS[command].example, checked=not print_options)
    if print_options:
        from lmmods.commands.print_config import print_config

        return print_config(parsed, print_options[-1])
    if parsed.engine == "torch" and (line := sleep_if_busy()):
        say(line)
    _import_engine(parsed.engine)
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lmmods.core.errors import UserError

    enable_collector()
    raise_at_signals(BEFORE if command == "fit" else "Interrupted.")
    try:
        function_of(command)(parsed, **parsed.options)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error


def _import_engine(engine: str) -> None:
    """Import an engine's libraries while the garbage collector is off, and silence them, as they set up logging."""
    from lmmods.core.console import quiet_libraries
    from lmmods.recipe.engines import load_engine

    load_engine(engine)
    quiet_libraries()


def enable_collector() -> None:
    """Enable the garbage collector if `program` has disabled it, and exempt all objects that exist by now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def show_bug(error_type: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback in Python's format, with passwords and tokens redacted."""
    from lmmods.core.redaction import redact

    sys.stderr.write(redact("".join(traceback.format_exception(error_type, error, trace))))


def _fail(message: str) -> int:
    from lmmods.core.redaction import redact

    print(redact(f"error: {message}"), file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
