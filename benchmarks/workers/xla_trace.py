"""Which part of a step each operation in a trace of XLA on CPUs belongs to.

XLA names the operations of a compiled program; the text of the program, which it writes under `--xla_dump_to`, says
from which lines of which functions each of them came.
"""

import gzip
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*?)\)")
CALLS = re.compile(r"calls=%([\w.-]+)")
FRAME = re.compile(r"stack_frame_id=(\d+)")
CONTAINERS = {"while", "call", "conditional", "tuple", "parameter"}  # what they contain is traced by itself
# Names of files, of which the first that is among an operation's callers decides.
FILES = {"distributed/loss.py": "head and loss", "quant.py": "dequantisation", "jax_engine/optim.py": "optimiser",
         "optax": "optimiser"}


@dataclass
class Operation:
    """An instruction of a program, and what is fused into it."""

    name: str
    opcode: str
    dims: set[str]  # of its result
    operands: list[str]
    frame: int
    calls: str | None
    is_batched: bool  # a product of matrices one by one, such as the scores of each head


@dataclass
class Program:
    """The text of a compiled program."""

    operations: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))  # by computation
    files: dict[int, str] = field(default_factory=dict)
    locations: dict[int, int] = field(default_factory=dict)  # their files
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)  # location and parent


def parts_of(trace: Path, programs: Path, vocab_size: int) -> dict[str, float]:
    """Microseconds of each part of the steps in a trace.

    Args:
        trace: Folder of `jax.profiler.start_trace`.
        programs: Folder of `--xla_dump_to`.
    """
    known = [parts_by_name(read(path), str(vocab_size)) for path in programs.glob("*after_optimizations.txt")]
    newest = max(trace.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    runs: dict[str, list[tuple[str, float]]] = defaultdict(list)  # of programs
    for event in json.loads(gzip.open(newest).read())["traceEvents"]:
        if "hlo_op" in event.get("args", {}):
            runs[event["args"]["run_id"]].append((event["args"]["hlo_op"], event["dur"]))
    parts: dict[str, float] = defaultdict(float)
    for operations in runs.values():
        names = {name for name, _ in operations}
        # A step is compiled for each shape of batch, under one name: the trace tells them by their operations alone.
        program = max(known, key=lambda each: len(names & each.keys()))
        for name, microseconds in operations:
            if name in program:
                parts[program[name]] += microseconds
    return parts


def parts_by_name(program: Program, vocab_size: str) -> dict[str, str]:
    """The part of each operation of a program that a trace has times of."""
    return {each.name: part(each, operations, program, vocab_size) for operations in program.operations.values()
            for each in operations if each.opcode not in CONTAINERS}


def read(path: Path) -> Program:
    """Parse the text of a program."""
    program, section, computation = Program(), "", ""
    for line in path.read_text().splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section == "FileNames" and (found := re.match(r'(\d+) "(.*)"', line)):
            program.files[int(found[1])] = found[2]
        elif section == "FileLocations" and (found := re.match(r"(\d+) {file_name_id=(\d+)", line)):
            program.locations[int(found[1])] = int(found[2])
        elif section == "StackFrames" and (
                found := re.match(r"(\d+) {file_location_id=(\d+)(?: parent_frame_id=(\d+))?", line)):
            program.frames[int(found[1])] = int(found[2]), int(found[3] or 0)
        elif line.startswith(("%", "ENTRY")):
            section, computation = "", line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif found := INSTRUCTION.match(line):
            frame, calls = FRAME.search(line), CALLS.search(line)
            program.operations[computation].append(Operation(
                found[1], found[3], set(re.findall(r"\d+", found[2].partition("{")[0])),
                re.findall(r"%([\w.-]+)", found[4]), int(frame[1]) if frame else 0, calls and calls[1],
                "lhs_batch_dims={" in line))
    return program


def part(operation: Operation, beside: list[Operation], program: Program, vocab_size: str) -> str:
    """The part of a step that an operation belongs to, by the code that it came from.

    Of products in loops XLA may forget that, so those that have the size of the vocabulary are the head's, and those
    of many matrices one by one are of the attention.

    Args:
        beside: All operations of its computation.
    """
    fused = program.operations.get(operation.calls or "", [])
    product = next((each for each in [operation, *fused] if each.opcode == "dot"), None)
    traced = product or next((each for each in [operation, *fused] if each.frame), operation)
    callers = stack(traced.frame, program)
    for file, name in FILES.items():
        if any(file in caller for caller in callers):
            return name
    if product:
        taken = [each.dims for each in (fused or beside) if each.name in product.operands]
        if vocab_size in set().union(product.dims, *taken):
            return "head and loss"
        return "attention" if product.is_batched else "products"
    own = next((caller for caller in callers if "jax_engine/models" in caller), "")
    inside = {"attention.py": "attention", "fused.py": "attention", "linear.py": "products", "lora.py": "products"}
    return inside.get(Path(own).name, "norms, activations and the rest")


def stack(frame: int, program: Program) -> list[str]:
    """Files of the functions that made an operation, the innermost first."""
    found = []
    while frame in program.frames:
        location, parent = program.frames[frame]
        found.append(program.files[program.locations[location]])
        if parent == frame:
            break
        frame = parent
    return found
