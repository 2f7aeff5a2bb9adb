"""Collectives of a compiled program, counted in its HLO: how often each runs in a call, and on how many bytes."""

import math
import re

from lmmods.core.plan import Traffic

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "s4": 4, "u4": 4}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|calls|to_apply|async_computation)=%?([\w.\-]+)")


def collectives(hlo: str) -> tuple[dict[str, Traffic], int]:
    """Traffic by kind of one call of a program, and loops whose number of passes its text does not tell.

    Bodies of loops count as often as they run; those whose passes are not known count once.

    Args:
        hlo: Text of the compiled module.
    """
    computations = _computations(hlo)
    # A TPU's program names one collective in several fusions, which start it and wait for it: these by their channel.
    found_once: dict[str, tuple[str, int, int, int]] = {}
    unknown = set()

    def walk(name: str, times: int, above: tuple[str, ...], in_fusion: bool = False) -> None:
        if name in above:
            return
        for line in computations.get(name, ()):
            if (found := _INSTRUCTION.match(line)) is None:
                continue
            kind, passes = found[2].removesuffix("-start"), times
            if kind in KINDS:
                group, channel = _group(line), re.search(r"channel_id=(\d+)", line)
                size = _whole_bytes(kind, found[1], found[2], group)
                # A TPU's program spells one as a fusion of a sum and a slice, in a computation of this name.
                one = ("reduce-scatter" if "all-reduce-scatter" in name else kind, times, size, group)
                key = channel[1] if channel and in_fusion else line
                found_once[key] = max(found_once.get(key, one), one, key=lambda each: each[1])
            if kind == "while":
                known = _passes(line, computations)
                passes = times * (known or 1)
                if known is None:
                    unknown.add(line)
            branches = [part.strip().lstrip("%") for part in ",".join(
                re.findall(r"branch_computations=\{([^}]*)\}", line)).split(",") if part]
            for called in (*_CALLED.findall(line), *branches):
                walk(called, passes, (*above, name), in_fusion or kind == "fusion")

    walk("", 1, ())
    total: dict[str, Traffic] = {}
    for kind, times, size, group in found_once.values():
        if group > 1:
            total[kind] = total.get(kind, Traffic(0, 0, group)).plus(Traffic(times, times * size, group))
    return total, len(unknown)


def _computations(hlo: str) -> dict[str, list[str]]:
    """Lines of each computation by its name; that of the entry is empty."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            name = "" if line.startswith("ENTRY") else line.split()[0].lstrip("%").split("(")[0]
            lines = found[name] = []
        else:
            lines.append(line)
    return found


def _bytes(shapes: str) -> list[int]:
    return [math.prod(int(size) for size in sizes.split(",") if size) * _BITS.get(kind, _width(kind)) // 8
            for kind, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shapes)]


def _width(kind: str) -> int:
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 0


def _whole_bytes(kind: str, shapes: str, operation: str, group: int) -> int:
    """Bytes of the whole array of a collective, whose results have these shapes."""
    sizes = _bytes(shapes)
    if operation.endswith("-start") and kind in ("all-gather", "reduce-scatter"):
        sizes = sizes[len(sizes) // 2:]  # behind the operands
    elif operation.endswith("-start") and kind == "collective-permute":
        sizes = sizes[:1]
    return sum(sizes) * (group if kind == "reduce-scatter" else 1)


def _group(line: str) -> int:
    """Devices that take part in a collective."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return listed[1].count(",") + 1
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(counted[2]) if counted else 2


def _passes(line: str, computations: dict[str, list[str]]) -> int | None:
    """How often a loop runs: as the compiler says, or by the constant that its counter stays below."""
    if known := re.search(r'known_trip_count"?:\s*\{"?n"?:"?(\d+)', line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    text = "\n".join(computations.get(condition[1], ())) if condition else ""
    limits = re.findall(r"= s32\[\](?:\{[^}]*\})? constant\((\d+)\)", text)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in text else None
