"""User-facing errors. The CLI prints a UserError as one message without a traceback and exits with status 2."""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

from lmmods.core.redaction import redact


class UserError(Exception):
    """A mistake in the recipe, the data or the environment.

    The message says what is wrong, where (file and line, row, or key) and what to do about it. Passwords and tokens in
    it are redacted.

    Args:
        keys: Keys of the recipe that decide whether this is a mistake, the one to change first. A class that is part of
            several blocks names them without the block: `optimizer.lr`.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(readable(redact(message)))
        self.keys = keys


_gathered: ContextVar[list[UserError] | None] = ContextVar("gathered", default=None)


@contextlib.contextmanager
def gathering() -> Iterator[list[UserError]]:
    """Collect errors about wrong values in a list, so that all of them can be reported."""
    errors: list[UserError] = []
    token = _gathered.set(errors)
    try:
        yield errors
    finally:
        _gathered.reset(token)


def refuse_value(message: str, *keys: str) -> None:
    """Raise a UserError about one value, or record it within `gathering`; see UserError for the arguments."""
    error, errors = UserError(message, *keys), _gathered.get()
    if errors is None:
        raise error
    errors.append(error)


def readable(message: str) -> str:
    """Shorten very long words of a message, such as a number of 5000 digits."""
    return re.sub(r"(\S{200})\S{400,}", r"\1…", message)


def user_error_in(error: BaseException | None) -> UserError | None:
    """Return the UserError in the chain of causes of an exception, if any: parsers wrap what constructors raise."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, without the advice after it; empty if there is no message."""
    return next(iter(str(error).strip().splitlines()), "")


def one_line(error: BaseException) -> str:
    """Return a library's whole message on one line."""
    return " ".join(str(error).split())


# ---------------------------------------------------------------------------------------------------------------------
# Out of memory, on a device or the host: detection, and advice on what to lower.

WORDS = ("out of memory", "can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")
KINDS = ("OutOfMemoryError", "XlaRuntimeError", "JaxRuntimeError", "RuntimeError", "AcceleratorError")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch (without an exception type for it on CPUs), XLA, numpy or Python ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, ValueError):  # from XLA when a compiled program is called again
        return str(error).startswith("RESOURCE_EXHAUSTED")
    return type(error).__name__ in KINDS and any(word in str(error) for word in WORDS)


def what_to_lower(error: BaseException, checkpoint: str | None) -> UserError:
    """Build the error for running out of memory. `checkpoint` is the last checkpoint, if any."""
    reason = next(iter(str(error).strip().splitlines()), "")[:300] or type(error).__name__
    resume = f" Resume from the last checkpoint, {checkpoint}, with --ckpt_path last." if checkpoint else ""
    return UserError(
        f"Out of memory ({reason}). Try, in this order: a lower data.batch_size (raise "
        "trainer.accumulate_grad_batches by the same factor to keep the step) and data.eval_batch_size; "
        "data.max_length; model.gradient_checkpointing: true; model.lora instead of full fine-tuning, with "
        f"model.quantize: nf4; an 8-bit optimiser; on several devices trainer.strategy: fsdp.{resume}")
