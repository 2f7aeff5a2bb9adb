"""Map the operations in a CPU trace of XLA to parts of a step.

The text of a compiled program, which XLA writes with `--xla_dump_to`, has the source lines and functions of each
operation.
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
CONTAINERS = {"while", "call", "conditional", "tuple", "parameter"}  # their content is traced separately
# Part by file name. The first of these files among an operation's callers decides.
PART_BY_FILE = {"distributed/loss.py": "head and loss", "quant.py": "dequantisation",
                "jax_engine/optim.py": "optimiser", "optax": "optimiser"}


@dataclass
class Operation:
    """Instruction of a program, with the computation that is fused into it."""

    name: str
    opcode: str
    dims: set[str]  # of its result
    operands: list[str]
    frame: int
    calls: str | None
    is_batched: bool  # a product of matrices one by one, such as the scores of each head


@dataclass
class Program:
    """Parsed text of a compiled program."""

    operations: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))  # by computation
    files: dict[int, str] = field(default_factory=dict)
    locations: dict[int, int] = field(default_factory=dict)  # their files
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)  # location and parent


def sum_parts(trace: Path, hlo_folder: Path, vocab_size: int) -> dict[str, float]:
    """Return the microseconds of each part of the steps in a trace.

    Args:
        trace: Folder of `jax.profiler.start_trace`.
        hlo_folder: Folder of `--xla_dump_to`.
    """
    programs = [map_parts(read_program(path), str(vocab_size)) for path in hlo_folder.glob("*after_optimizations.txt")]
    newest = max(trace.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    runs: dict[str, list[tuple[str, float]]] = defaultdict(list)  # by run of a program
    for event in json.loads(gzip.open(newest).read())["traceEvents"]:
        if "hlo_op" in event.get("args", {}):
            runs[event["args"]["run_id"]].append((event["args"]["hlo_op"], event["dur"]))
    parts: dict[str, float] = defaultdict(float)
    for operations in runs.values():
        names = {name for name, _ in operations}
        # A step is compiled for each batch shape under the same name; only their operations distinguish them.
        program = max(programs, key=lambda candidate: len(names & candidate.keys()))
        for name, microseconds in operations:
            if name in program:
                parts[program[name]] += microseconds
    return parts


def map_parts(program: Program, vocab_size: str) -> dict[str, str]:
    """Return the part of each operation of a program that has times in a trace."""
    return {operation.name: find_part(operation, operations, program, vocab_size)
            for operations in program.operations.values() for operation in operations
            if operation.opcode not in CONTAINERS}


def read_program(path: Path) -> Program:
    """Parse the text of a program."""
    program, section, computation = Program(), "", ""
    for line in path.read_text().splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section == "FileNames" and (match := re.match(r'(\d+) "(.*)"', line)):
            program.files[int(match[1])] = match[2]
        elif section == "FileLocations" and (match := re.match(r"(\d+) {file_name_id=(\d+)", line)):
            program.locations[int(match[1])] = int(match[2])
        elif section == "StackFrames" and (
                match := re.match(r"(\d+) {file_location_id=(\d+)(?: parent_frame_id=(\d+))?", line)):
            program.frames[int(match[1])] = int(match[2]), int(match[3] or 0)
        elif line.startswith(("%", "ENTRY")):
            section, computation = "", line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif match := INSTRUCTION.match(line):
            frame, calls = FRAME.search(line), CALLS.search(line)
            program.operations[computation].append(Operation(
                match[1], match[3], set(re.findall(r"\d+", match[2].partition("{")[0])),
                re.findall(r"%([\w.-]+)", match[4]), int(frame[1]) if frame else 0, calls and calls[1],
                "lhs_batch_dims={" in line))
    return program


def find_part(operation: Operation, neighbours: list[Operation], program: Program, vocab_size: str) -> str:
    """Return the part of a step that an operation belongs to, by its source code.

    XLA may lose the source of products in loops, so a product with the size of the vocabulary belongs to the head, and
    a batched product to the attention.

    Args:
        neighbours: All operations of its computation.
    """
    fused = program.operations.get(operation.calls or "", [])
    product = next((candidate for candidate in [operation, *fused] if candidate.opcode == "dot"), None)
    origin = product or next((candidate for candidate in [operation, *fused] if candidate.frame), operation)
    callers = find_files(origin.frame, program)
    for file, name in PART_BY_FILE.items():
        if any(file in caller for caller in callers):
            return name
    if product:
        operand_dims = [other.dims for other in (fused or neighbours) if other.name in product.operands]
        if vocab_size in set().union(product.dims, *operand_dims):
            return "head and loss"
        return "attention" if product.is_batched else "products"
    model_file = next((caller for caller in callers if "jax_engine/models" in caller), "")
    parts = {"attention.py": "attention", "fused.py": "attention", "linear.py": "products", "lora.py": "products"}
    return parts.get(Path(model_file).name, "norms, activations and the rest")


def find_files(frame: int, program: Program) -> list[str]:
    """Return the files of the functions that created an operation, the innermost first."""
    files = []
    while frame in program.frames:
        location, parent = program.frames[frame]
        files.append(program.files[program.locations[location]])
        if parent == frame:
            break
        frame = parent
    return files
