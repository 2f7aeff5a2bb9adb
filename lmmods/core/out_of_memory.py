"""Out of memory, on a device or the host: recognised, and answered with what to lower."""

from lmmods.core.errors import UserError

WORDS = ("out of memory", "can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")
KINDS = ("OutOfMemoryError", "XlaRuntimeError", "JaxRuntimeError", "RuntimeError", "AcceleratorError")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch (which has no exception type for it on CPUs), XLA, numpy or Python itself ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, ValueError):  # of XLA where a compiled program is called again
        return str(error).startswith("RESOURCE_EXHAUSTED")
    return type(error).__name__ in KINDS and any(word in str(error) for word in WORDS)


def what_to_lower(error: BaseException, checkpoint: str | None) -> UserError:
    """The message of a command that ran out of memory; `checkpoint` names the last one, if there is any."""
    reason = next(iter(str(error).strip().splitlines()), "")[:300] or type(error).__name__
    goes_on = f" The last checkpoint is {checkpoint}: go on from it with --ckpt_path last." if checkpoint else ""
    return UserError(
        f"Out of memory ({reason}). What lowers it most, first: data.batch_size (raise trainer.accumulate_grad_batches "
        "by the same factor and every step stays what it was) and data.eval_batch_size; data.max_length; "
        "model.gradient_checkpointing: true; model.lora instead of full tuning, with model.quantize: nf4; an optimizer "
        f"in 8 bits; on several devices trainer.strategy: fsdp.{goes_on}")
