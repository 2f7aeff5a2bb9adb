"""What fits into memory: full tuning, LoRA or QLoRA, the batch size, and gradient checkpointing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmmods.core.model_sizes import NetworkShape, step_bytes
from lmmods.core.settings import LoRA

ROOM = 0.8  # of the memory is planned for: the estimate is right within some tens of percent
FULL_BELOW = 10**9  # parameters up to which full tuning is the first choice
ADAPTER = LoRA(rank=16, alpha=32, dropout=0.05)
SMALLEST_PLAIN_BATCH = 4  # smaller ones only with gradient checkpointing, which costs a third of the time


@dataclass(frozen=True)
class MemoryPlan:
    """How a network is trained, and what a step then takes.

    Args:
        lora: Whether an adapter trains instead of the model itself.
        quantize: Whether the base is stored in nf4.
        batch_size: Rows per micro-batch.
        needed: Bytes of a step.
        fits: Whether that is within `ROOM` of the memory.
    """

    lora: bool
    quantize: bool
    batch_size: int
    checkpointing: bool
    needed: int
    fits: bool


@dataclass(frozen=True)
class Machine:
    """What is trained on.

    Args:
        memory: Bytes of a device.
        compute_bytes: Bytes of an activation, and of a weight of a frozen base.
        tokens_at_once: A micro-batch is computed in pieces of so many tokens; 0 computes it whole.
        name: In words.
    """

    memory: int
    compute_bytes: int
    tokens_at_once: int
    name: str


def this_machine(hidden: int) -> Machine:
    """The device that `accelerator: auto` takes here, with the precision that `auto` takes on it."""
    import torch

    from lmmods.torch_engine.nn.micro_batching import tokens_per_piece
    from lmmods.torch_engine.nn.summary import available_bytes
    from lmmods.torch_engine.precision import choose_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision, _ = choose_precision("auto")
    name = "this GPU" if device.type == "cuda" else "this machine"
    return Machine(available_bytes(device), 4 if precision == "32-true" else 2,
                   tokens_per_piece(None, True, device, hidden), name)


def gpu_of(gibibytes: float) -> Machine:
    """A GPU with so much memory that computes in bfloat16."""
    return Machine(int(gibibytes * 2**30), 2, 0, "--memory")


def plan_memory(shape: NetworkShape, machine: Machine, max_length: int, batch: int, is_quantized: bool,
                is_preference: bool = False) -> MemoryPlan:
    """The first plan that fits, or the smallest where none does.

    Args:
        max_length: Longest row in tokens.
        batch: Rows of a step; at most so many are a micro-batch.
        is_quantized: Whether the model is saved in 4 or 8 bits already, so that only an adapter can train.
        is_preference: Whether a row is two answers, beside whose model full tuning keeps a copy to compare with.
    """
    tried = None
    for lora, quantize, size, checkpointing in _choices(shape, batch, is_quantized):
        tokens = size * max_length * (2 if is_preference else 1)
        if machine.tokens_at_once:
            tokens = min(tokens, max(machine.tokens_at_once, max_length))
        trainable = shape.lora_per_rank * ADAPTER.rank if lora else shape.num_params
        weights = shape.base_bytes(quantize or is_quantized, machine.compute_bytes) + 4 * trainable if lora \
            else 4 * shape.num_params * (2 if is_preference else 1)
        needed = step_bytes(shape.widths, weights, trainable, "adamw", tokens, checkpointing, machine.compute_bytes)
        tried = MemoryPlan(lora, quantize, size, checkpointing, needed, needed <= ROOM * machine.memory)
        if tried.fits:
            break
    return tried


def _choices(shape: NetworkShape, batch: int, is_quantized: bool) -> Iterator[tuple[bool, bool, int, bool]]:
    """(lora, quantize, batch size, checkpointing), the most wanted first."""
    kinds = [(True, False)] if is_quantized else [(True, False), (True, True)]
    if shape.num_params < FULL_BELOW and not is_quantized:
        kinds.insert(0, (False, False))
    sizes = [size for size in (32, 16, 8, 4, 2, 1) if size <= batch]
    plain = [size for size in sizes if size >= min(SMALLEST_PLAIN_BATCH, batch)]
    for lora, quantize in kinds:
        yield from ((lora, quantize, size, False) for size in plain)
        yield from ((lora, quantize, size, True) for size in sizes)


def as_options(plan: MemoryPlan) -> dict[str, Any]:
    """The keys of `model` that the plan sets."""
    return {**({"quantize": "nf4"} if plan.quantize else {}),
            **({"lora": {"rank": ADAPTER.rank, "alpha": ADAPTER.alpha, "dropout": ADAPTER.dropout,
                         "targets": ADAPTER.targets}} if plan.lora else {})}
