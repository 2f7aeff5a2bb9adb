"""Entry point: dispatch to a command and an engine, and report user errors as a single message."""

import gc
import os
import signal
import sys
import traceback
from typing import Any

# Everything else is imported where it is used: until `program` installs its handlers, Ctrl+C prints a traceback.
from lmmods.core.signals import ASKED, BEFORE, STATUS, end_at_signals, raise_at_signals, watch_blocked_calls

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
    gc.disable()  # main re-enables it after the imports: they leave little garbage, and collecting is slow
    watch_blocked_calls()
    try:
        status = main()
        for number in ASKED:  # at interpreter shutdown our handlers may find modules gone
            signal.signal(number, signal.SIG_DFL)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again on exit
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0 done, 2 user error, 130 interrupted. Our own bugs raise.

    Args:
        argv: Arguments without the program name; None reads sys.argv.
    """
    from lmmods.core.errors import is_out_of_memory, user_error_in, what_to_lower
    from lmmods.core.files import wrong_path_in
    from lmmods.recipe.files import with_shipped_recipes
    from lmmods.recipe.trust import taken_flag, trusting

    if argv is None:  # not called from another program
        sys.excepthook = show_bug
    arguments = sys.argv[1:] if argv is None else argv
    try:
        arguments, trusted = taken_flag(arguments)
        with trusting(trusted):
            return run_interruptible(with_shipped_recipes(arguments))
    except SystemExit as stop:  # the parser has printed help or an error
        return int(stop.code or 0)
    except Exception as error:
        from lmmods.runs.saving import disk_error_in

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
        UserError: There is no such command, or the command raises one.
    """
    from lmmods.commands.registry import COMMANDS, ENGINE_COMMANDS, check_command, program_help, run_command
    from lmmods.core.console import quiet_libraries, tell
    from lmmods.core.errors import UserError
    from lmmods.core.progress_bar import keep_last_line
    from lmmods.core.signals import Interrupted, Stopped

    # Processes that Lightning launches (LOCAL_RANK > 0) share the terminal of the first one.
    keep_last_line(erases=os.environ.get("LOCAL_RANK", "0") != "0")
    quiet_libraries()

    try:
        if arguments[:1] in (["--help"], ["-h"], ["help"]):
            print(program_help())
        elif not arguments or arguments[0].startswith("-") and not COMMANDS.keys() & set(arguments):
            raise UserError(f"A command is missing.\n\n{program_help()}")
        elif arguments[0].startswith("-") or arguments[0] in ENGINE_COMMANDS:  # or options before the command
            run_engine(arguments)
        else:
            check_command(arguments[0])
            enable_collector()
            raise_at_signals("Interrupted.")
            run_command(arguments[0], arguments[1:])
    except Interrupted as stop:
        tell(str(stop))
        return 0 if isinstance(stop, Stopped) else STATUS
    return 0


def run_engine(arguments: list[str]) -> None:
    """Build the parser of the engine that `arguments` select and run the command."""
    from lmmods.core.peers import Peers

    Peers.current().begin()  # before the imports, which take seconds
    with Peers.current().end_together():
        _run_watched(arguments)


def _run_watched(arguments: list[str]) -> None:
    from lmmods.commands.early_check import check_early
    from lmmods.core.console import quiet_libraries
    from lmmods.core.errors import UserError
    from lmmods.recipe.engines import peek_engine
    from lmmods.recipe.trust import guarded_imports

    engine = peek_engine(arguments)
    check_early(arguments, engine)
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lmmods.commands.engine_cli import types_of
    from lmmods.commands.inspector import Inspector

    classes = types_of(engine)
    quiet_libraries()
    enable_collector()
    raise_at_signals(BEFORE if "fit" in arguments else "Interrupted.")
    try:
        with guarded_imports():
            if arguments[:1] == ["find"]:
                from lmmods.extras.find import find

                find(classes, engine, arguments)
            elif arguments[:1] == ["plan"]:
                from lmmods.commands.planner import plan

                plan(classes, engine, arguments)
            else:
                Inspector(classes, engine, arguments)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error


def enable_collector() -> None:
    """Re-enable the garbage collector if `program` disabled it, and exempt all objects that exist by now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def show_bug(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback in Python's format, with passwords and tokens redacted."""
    from lmmods.core.redaction import redact

    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _fail(message: str) -> int:
    from lmmods.core.redaction import redact

    print(redact(f"error: {message}"), file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
