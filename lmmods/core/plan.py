"""What a training step needs on devices that need not be here, and what follows from it for the whole run."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lmmods.core.hardware import Target
from lmmods.core.settings import LoRA

GIB = 2**30
# compiled: the target's own compiler says so. simulated: counted in the program of simulated devices of this machine,
# or in a step on tensors without values. assumed: arithmetic, or what only the device could show.
Source = Literal["compiled", "simulated", "assumed"]
# What of a collective's whole array each of n devices sends, times (n - 1) / n (ring algorithms).
_SENT = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}


@dataclass(frozen=True)
class Variant:
    """What a plan may change in a recipe.

    Args:
        rows: Of a micro-batch on each rank.
        accumulated: Micro-batches of a step.
        strategy: `trainer.strategy`.
        changed: What is unlike the recipe, in its keys.
    """

    rows: int
    accumulated: int
    checkpointing: bool | str
    strategy: Any
    quantize: str | None
    lora: LoRA | None
    changed: tuple[str, ...] = ()

    def smaller(self) -> Iterator["Variant"]:
        """Variants with the same rows in a step and fewer in a micro-batch: a half, a quarter, ... one."""
        rows, accumulated = self.rows, self.accumulated
        while rows > 1:
            factor = next(number for number in range(2, rows + 1) if rows % number == 0)
            rows, accumulated = rows // factor, accumulated * factor
            yield replace(self, rows=rows, accumulated=accumulated, changed=(
                *self.changed, f"data.batch_size: {rows}, trainer.accumulate_grad_batches: {accumulated}"))


def remedies(recipe: Variant, num_devices: int, may_quantize: bool, may_shard: bool = True) -> list[Variant]:
    """Ways to need less memory, the cheapest first; each includes those before it, but for rows.

    Args:
        may_quantize: Whether the model starts from weights that can be frozen.
        may_shard: Whether the rest of the recipe goes with `fsdp`.
    """
    found, last = [], recipe
    if not recipe.checkpointing:
        last = replace(last, checkpointing=True, changed=(*last.changed, "model.gradient_checkpointing: true"))
        found.append(last)
    if may_shard and num_devices > 1 and recipe.strategy in ("auto", "ddp"):
        last = replace(last, strategy="fsdp", changed=(*last.changed, "trainer.strategy: fsdp"))
        found.append(last)
    if may_quantize and recipe.quantize is None:
        lora = recipe.lora or LoRA(rank=16, alpha=32, dropout=0.05)
        added = () if recipe.lora else ("model.lora: {rank: 16, alpha: 32, dropout: 0.05}",)
        found.append(replace(last, quantize="nf4", lora=lora,
                             changed=(*last.changed, *added, "model.quantize: nf4")))
    return found


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step.

    Args:
        count: How many each device takes part in.
        num_bytes: Of the whole arrays, added up: what an all-gather results in, what a reduce-scatter or an all-reduce
            sums.
        group: Devices that take part in one.
        span: Neighbouring devices among which these are; 0: they are neighbours.
    """

    count: int
    num_bytes: int
    group: int
    span: int = 0

    def plus(self, other: "Traffic", times: int = 1) -> "Traffic":
        """Both, the other several times; of two groups the larger."""
        return Traffic(self.count + times * other.count, self.num_bytes + times * other.num_bytes,
                       max(self.group, other.group), max(self.span, other.span))

    def sent(self, kind: str) -> float:
        """Bytes that each device sends."""
        return _SENT.get(kind.partition(" ")[0], 1) * self.num_bytes * (self.group - 1) / max(self.group, 1)


@dataclass(frozen=True)
class StepPlan:
    """What an optimiser step needs on each device.

    Args:
        source: Of memory and collectives.
        memory: Bytes by part.
        parts: Of the temporaries among them, roughly.
        room: Bytes that a run can have.
        refusal: What the compiler has against the program; None: it takes it.
        traffic: Collectives by kind; those of fewer devices than others of the kind as `KIND of N`.
        flops: Arithmetic.
        dtype: Of the products.
        num_tokens: Of all devices, padding included.
        notes: What is assumed beside.
        counted: How the arithmetic is known.
        kernels: Fused attention in the programs: how often each kernel stands there.
    """

    target: Target
    source: Source
    memory: dict[str, int]
    parts: dict[str, int]
    room: float
    refusal: str | None
    traffic: dict[str, Traffic]
    flops: float
    dtype: str
    num_tokens: int
    ranks: int
    notes: list[str] = field(default_factory=list)
    counted: Source = "assumed"
    kernels: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of each device at the worst moment."""
        return sum(self.memory.values())

    @property
    def kept(self) -> int:
        """Those of them that stay from step to step, however few rows are computed."""
        return sum(self.memory.get(part, 0) for part in ("parameters", "optimiser state"))

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        if self.source == "compiled" and self.target.platform == "tpu":
            return self.refusal is None  # the compiler knows what it moves out of the way, its figures do not
        return self.refusal is None and self.total <= self.room

    def bounds(self) -> dict[str, float]:
        """Seconds that a step takes at least, by what bounds it; empty where the target's figures are not known."""
        target, sent = self.target, {kind: found.sent(kind) for kind, found in self.traffic.items()}
        peak = target.peak(self.dtype)
        if target.kind is None or peak is None:
            return {}
        links = sum(num_bytes / target.link(max(self.traffic[kind].group, self.traffic[kind].span))
                    for kind, num_bytes in sent.items())
        # Parameters and optimiser state are read and written once.
        return {"arithmetic": self.flops / peak, "links": links, "memory": target.streams(2 * self.kept)}

    def lines(self, num_steps: int | None) -> Iterator[str]:
        """The plan as text, each line with its source.

        Args:
            num_steps: Of the whole run; None: it has no end.
        """
        verdict = "fits" if self.fits else "does not fit"
        yield _line("memory of each device", self.source, f"{verdict}: {_size(self.total)} of {_size(self.room)}")
        yield from (_line(f"  {part}", self.source, _size(size)) for part, size in self.memory.items())
        yield from (_line(f"    {part}", "assumed", f"about {_size(size)}") for part, size in self.parts.items())
        if self.refusal:
            yield _line("compiler", self.source, self.refusal)
        if self.kernels:
            yield _line("fused attention", self.source, ", ".join(f"{name} x {n}" for name, n in self.kernels.items()))
        for kind, found in sorted(self.traffic.items()):
            yield _line(kind, self.source, f"{found.count} a step, {_size(found.num_bytes)} among "
                        f"{found.group} devices")
        yield _line("arithmetic of a step", self.counted, f"{self.flops / 1e12:,.3g} TFLOP on each device")
        if bounds := self.bounds():
            seconds = max(bounds.values())
            each = ", ".join(f"{name} {_time(value)}" for name, value in bounds.items())
            yield _line("a step takes at least", "assumed", f"{_time(seconds)} ({each})")
            yield _line("so at most", "assumed", f"{self.num_tokens / seconds:,.0f} tokens per second, "
                        f"{self.num_tokens:,} a step")
            if num_steps is not None:
                hours = num_steps * seconds / 3600 * self.target.num_devices
                yield _line("the whole run at least", "assumed", f"{num_steps:,} steps, {_time(num_steps * seconds)}, "
                            f"{hours:,.3g} device-hours")
        else:
            yield _line("time", "assumed", "not bounded: no data sheet of this device is known")
        yield from (_line("note", "assumed", note) for note in self.notes)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.2f} MiB"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 3600:,.3g} hours"


def _line(name: str, source: Source, text: str) -> str:
    return f"{name:<26}{source:<11}{text}"
