"""Read a trace of XLA's operations, on a CPU or a GPU.

The text of a compiled program, which XLA writes with `--xla_dump_to`, has the source lines and functions of each
operation.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from step_time import WINDOW, Span, divide

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*?)\)")
CALLS = re.compile(r"calls=%([\w.-]+)")
FRAME = re.compile(r"stack_frame_id=(\d+)")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
CODES = re.compile(r"[us][48]\[")
BATCHED = re.compile(r'lhs_batch_dims={\d|"lhs_batch_dimensions":\["')
CONTAINERS = {"while", "call", "conditional", "tuple", "parameter"}  # their content is traced separately


@dataclass
class Operation:
    """Instruction of a program, with the computation that is fused into it."""

    name: str
    opcode: str
    dims: set[str]  # of its result
    operands: list[str]
    frame: int
    calls: str | None
    target: str  # of a custom call, such as a kernel of cuBLAS
    is_coded: bool  # its result has 4-bit or 8-bit numbers
    is_batched: bool  # a product of matrices one by one, such as the scores of each head

    @property
    def is_product(self) -> bool:
        return self.opcode == "dot" or "gemm" in self.target or "matmul" in self.target


@dataclass
class Program:
    """Parsed text of a compiled program."""

    operations: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))  # by computation
    files: dict[int, str] = field(default_factory=dict)
    functions: dict[int, str] = field(default_factory=dict)
    locations: dict[int, tuple[int, int]] = field(default_factory=dict)  # their files and functions
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)  # location and parent


def read_jax_trace(trace: Path, hlo_folder: Path, vocab_size: int, rank: int | None) -> dict[str, Any]:
    """Return the result of `divide` for the steps in a trace. On a GPU, time is the device's.

    Args:
        trace: Folder of `jax.profiler.start_trace`.
        hlo_folder: Folder of `--xla_dump_to`.
        vocab_size: Dimension by which the products of the output head are recognised.
        rank: Dimension of the adapters' products; None without adapters.
    """
    from jax.profiler import ProfileData

    programs = [find_origins(read_program(path), str(vocab_size), str(rank))
                for path in hlo_folder.glob("*after_optimizations.txt")]
    newest = max(trace.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(ProfileData.from_file(str(newest)).planes)
    window, operations, ends, has_gpu = None, [], {}, any(plane.name.startswith("/device:GPU") for plane in planes)
    for plane in [plane for plane in planes if plane.name.startswith(("/host:CPU", "/device:GPU"))]:
        is_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            for event in line.events:
                start, end, stats = event.start_ns / 1e9, event.end_ns / 1e9, dict(event.stats)
                if event.name == WINDOW:
                    window = start, end
                elif event.name.startswith("end: "):  # of an operation that other threads compute
                    ends[stats.get("_c")] = start
                elif line.name.startswith("Stream") if has_gpu else "hlo_op" in stats:
                    operations.append((line.name if is_gpu else None, start, end, event.name, stats))
    runs = defaultdict(list)
    for _, *_, stats in operations:
        runs[_run_of(stats)].append(stats.get("hlo_op"))
    # A step is compiled for each batch shape under the same name; only their operations distinguish them.
    program_of = {run: max(programs, key=lambda candidate: len(candidate.keys() & set(names)))
                  for run, names in runs.items()}
    spans = []
    for index, (stream, start, end, name, stats) in enumerate(operations):
        origin = program_of[_run_of(stats)].get(stats.get("hlo_op"))
        if stream:
            spans.append(Span(stream, start, end, f"{origin or stats.get('hlo_op', '')} > {name}", name))
        elif origin:  # not a container. Operations of a CPU overlap, so each has its own lane.
            spans.append(Span(index, start, max(end, ends.get(stats.get("_p"), end)), origin, name))
    return divide(spans, *window)


def _run_of(stats: dict[str, Any]) -> tuple:
    """Return what operations of one program have in common: the run, and on GPUs the program."""
    return stats.get("run_id"), stats.get("hlo_module"), stats.get("program_id")


def find_origins(program: Program, vocab_size: str, rank: str) -> dict[str, str]:
    """Return the origin of each operation of a program that has times in a trace."""
    return {operation.name: find_origin(operation, operations, program, vocab_size, rank)
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
        elif section == "FunctionNames" and (match := re.match(r'(\d+) "(.*)"', line)):
            program.functions[int(match[1])] = match[2]
        elif section == "FileLocations" and (
                match := re.match(r"(\d+) {file_name_id=(\d+) function_name_id=(\d+)", line)):
            program.locations[int(match[1])] = int(match[2]), int(match[3])
        elif section == "StackFrames" and (
                match := re.match(r"(\d+) {file_location_id=(\d+)(?: parent_frame_id=(\d+))?", line)):
            program.frames[int(match[1])] = int(match[2]), int(match[3] or 0)
        elif line.startswith(("%", "ENTRY")):
            section, computation = "", line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif match := INSTRUCTION.match(line):
            frame, calls, target = FRAME.search(line), CALLS.search(line), TARGET.search(line)
            program.operations[computation].append(Operation(
                match[1], match[3], set(re.findall(r"\d+", match[2].partition("{")[0])),
                re.findall(r"%([\w.-]+)", match[4]), int(frame[1]) if frame else 0, calls and calls[1],
                target[1] if target else "", bool(CODES.match(match[2])), bool(BATCHED.search(line))))
    return program


def find_origin(operation: Operation, neighbours: list[Operation], program: Program, vocab_size: str, rank: str) -> str:
    """Return the origin of an operation: the functions that created it, itself, and the mark of a product.

    Of the model's functions only the innermost counts, as the layers of an attention are not its own work. XLA may lose
    the source of operations in loops, so products are marked by their shapes, and what reads quantised weights too.

    Args:
        neighbours: All operations of its computation.
    """
    fused = program.operations.get(operation.calls or "", [])
    product = next((candidate for candidate in [operation, *fused] if candidate.is_product), None)
    source = product or next((candidate for candidate in [operation, *fused] if candidate.frame), operation)
    functions = find_functions(source.frame, program)
    model = next((function for function in functions if "jax_engine/models" in function), None)
    names = [function for function in reversed(functions) if "jax_engine/models" not in function or function is model]
    names.append(" ".join(filter(None, (operation.opcode, operation.target, operation.name))))
    operands = [other for other in (fused or neighbours) if other.name in (product or operation).operands]
    if product:
        dims = product.dims.union(*(operand.dims for operand in operands))
        names.append("[vocabulary]" if vocab_size in dims else "[batched product]" if product.is_batched else
                     "[rank]" if rank in dims else "[product]")
    elif any(other.is_coded for other in (*operands, *fused)):
        names.append("[codes]")
    return " > ".join(names)


def find_functions(frame: int, program: Program) -> list[str]:
    """Return the functions that created an operation as `file:function`, the innermost first."""
    functions = []
    while frame in program.frames:
        location, parent = program.frames[frame]
        file, function = program.locations[location]
        functions.append(f"{program.files[file]}:{program.functions.get(function, '')}")
        if parent == frame:
            break
        frame = parent
    return functions
