"""Measure the time and arithmetic of a recipe's steps on either of our engines, and the time of each operation.

Writes {folder}/{engine}.json, described in `Watch`.
"""

import json
import os
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rounds import read_settings
from step_time import WINDOW, Span, divide

FIRST, MEASURED, PROFILED = "warm-up", "measured", "profiled"


class Watch:
    """Three phases of optimiser steps: warm-up, measured and profiled; then it writes the report and exits.

    The report has `cpu` and `wall`, seconds of the measured steps; their `tokens`, `scored` (labelled) tokens and
    `pairs` of positions within rows; `traced`, seconds of the profiled steps; and the result of `divide` for them. On
    torch it also has `products`, the shapes of the matrix products, the result of `count_sizes`, and `bfloat16`.

    Args:
        settings: `folder`, `engine`, and the number of steps per phase: `warm_up`, `steps`, `traced` (0 for none).
        begin: Function that starts the profiler.
        end: Function that stops the profiler and returns its results.
        make_range: Class of the profiler's ranges, which takes a name.
    """

    def __init__(self, settings: dict[str, Any], begin: Any, end: Any, make_range: Any) -> None:
        self._settings, self._begin, self._end, self._make_range = settings, begin, end, make_range
        self._phase, self._steps_left = FIRST, settings["warm_up"]
        self.report: dict[str, Any] = {"tokens": 0, "scored": 0, "pairs": 0}

    @property
    def is_last_step(self) -> bool:
        """True if the next step ends a phase, so that the caller must wait for work on the device."""
        return self._steps_left == 1

    def record_step(self, batches: list[Any]) -> None:
        """Record an optimiser step on micro-batches."""
        for batch in batches if self._phase == MEASURED else []:
            rows = batch["attention_mask"].reshape(-1, batch["attention_mask"].shape[-1])
            lengths = rows.sum(-1).tolist()
            labels = batch.get("labels")
            self.report["tokens"] += int(sum(lengths))
            self.report["pairs"] += int(sum(length * length for length in lengths))
            self.report["scored"] += int((labels >= 0).sum()) if labels is not None else 0
        self._steps_left -= 1
        if self._steps_left == 0:
            self._next()

    def _next(self) -> None:
        if self._phase == FIRST:
            self._phase, self._steps_left = MEASURED, self._settings["steps"]
        elif self._phase == MEASURED:
            self.report |= {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}
            self._phase, self._steps_left = PROFILED, self._settings["traced"]
            if not self._steps_left:
                self._write()
            self._begin()
            self._window = self._make_range(WINDOW)
            self._window.__enter__()
        else:
            traced = time.perf_counter() - self._wall
            self._window.__exit__(None, None, None)
            self.report |= {"traced": traced, **self._end()}
            self._write()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _write(self) -> None:
        path = Path(self._settings["folder"]) / f"{self._settings['engine']}.json"
        path.write_text(json.dumps(self.report))
        os._exit(0)  # exits from within a library's loop


# torch ----------------------------------------------------------------------------------------------------------------

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_"}
DEVICE_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_EVENTS = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
OPERATOR = re.compile(r"(?!autograd|torch::autograd)\w+::")  # its time is not Python's


def watch_torch(settings: dict[str, Any]) -> None:
    """Profile Lightning's loop with torch's profiler."""
    import torch
    from torch.profiler import profile, record_function

    from lmmods.torch_engine.callbacks.run_events import RunEvents

    profiler, trace = profile(record_shapes=True), Path(settings["folder"]) / "torch_trace.json"

    def end() -> dict[str, Any]:
        profiler.__exit__(None, None, None)
        profiler.export_chrome_trace(str(trace))
        return read_torch_trace(trace, settings["vocab_size"], settings["rank"])

    watch = Watch(settings, profiler.__enter__, end, record_function)
    on_train_batch_end = RunEvents.on_train_batch_end

    def on_step_end(self, trainer, module, outputs, batches, batch_idx):  # noqa: ANN001, ANN202
        on_train_batch_end(self, trainer, module, outputs, batches, batch_idx)
        watch.report |= {**count_sizes(module.model), "bfloat16": trainer.precision.startswith("bf16")}
        if watch.is_last_step and torch.cuda.is_available():
            torch.cuda.synchronize()
        watch.record_step(batches)

    RunEvents.on_train_batch_end = on_step_end
    torch.manual_seed(0)


def count_sizes(model: Any) -> dict[str, Any]:
    """Return the number of parameters in matrix products (`body`, `head`), trained ones, layers and attention width."""
    from lmmods.torch_engine.nn.summary import num_elements

    head = model.get_output_embeddings()
    weight = None if head is None else head.weight
    embedding = model.get_input_embeddings().weight
    body = [parameter for parameter in model.parameters() if parameter is not weight and parameter is not embedding]
    config = model.config.get_text_config()
    return {"body": sum(map(num_elements, body)), "head": 0 if weight is None else num_elements(weight),
            "body_trained": sum(num_elements(parameter) for parameter in body if parameter.requires_grad),
            "head_trained": num_elements(weight) if weight is not None and weight.requires_grad else 0,
            "layers": config.num_hidden_layers, "features": config.hidden_size}


def read_torch_trace(path: Path, vocab_size: int, rank: int | None) -> dict[str, Any]:
    """Return the result of `divide`, and the number of matrix products by shape: rows, inner and columns.

    On a GPU, time is the device's: a kernel has the callers of the call that launched it. On a CPU, it is the time of
    the operators of the thread that trains.

    Args:
        path: File of `export_chrome_trace`.
        vocab_size: Dimension by which the products of the output head are recognised.
        rank: Dimension of the adapters' products; None without adapters.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    window = next(event for event in events if event["name"] == WINDOW and event["cat"] == "user_annotation")
    origins: dict[int, str] = {}  # by number of a launch
    spans, products, thread = [], defaultdict(int), None
    callers: list[tuple[float, str]] = []  # end and origin
    host_events = [event for event in events if event["cat"] in HOST_EVENTS and event is not window]
    for event in sorted(host_events, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        name, arguments, end = event["name"], event.get("args", {}), event["ts"] + event["dur"]
        if event["tid"] != thread:
            thread, callers = event["tid"], []
        while callers and callers[-1][0] <= event["ts"]:
            callers.pop()
        origin = f"{callers[-1][1]} > {name}" if callers else name
        if name in PRODUCTS:
            left, right = [shape for shape in arguments["Input Dims"] if len(shape) == 2][-2:]
            products[f"{left[0]} {left[1]} {right[1]}"] += 1
            dims = {*left, *right}
            origin += " [vocabulary]" if vocab_size in dims else " [rank]" if rank in dims else " [product]"
        callers.append((end, origin))
        if event["cat"] != "cpu_op":
            origins[arguments.get("correlation")] = origin
        elif thread == window["tid"] and OPERATOR.match(name):
            spans.append(Span(thread, event["ts"] / 1e6, end / 1e6, origin, name))
    kernels = [event for event in events if event["cat"] in DEVICE_EVENTS]
    if kernels:
        spans = [Span(event["tid"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6,
                      f"{origins.get(event['args'].get('correlation'), '')} > {event['name']}", event["name"])
                 for event in kernels]
    start = window["ts"] / 1e6
    return {**divide(spans, start, start + window["dur"] / 1e6), "products": products}


# JAX ------------------------------------------------------------------------------------------------------------------


def watch_jax(settings: dict[str, Any]) -> None:
    """Profile our JAX loop with XLA's trace of the operations of a compiled step."""
    import jax

    from jax_engine.trainer import Loop

    folder = Path(settings["folder"]) / "trace"

    def begin() -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(folder), profiler_options=options)

    def end() -> dict[str, Any]:
        from xla_trace import read_jax_trace

        jax.profiler.stop_trace()
        return read_jax_trace(folder, Path(settings["folder"]) / "hlo", settings["vocab_size"], settings["rank"])

    watch = Watch(settings, begin, end, jax.profiler.TraceAnnotation)
    train_step = Loop.train_step

    def watched_train_step(self, batches, num_batches):  # noqa: ANN001, ANN202
        batches = list(batches)
        train_step(self, iter(batches), num_batches)
        if watch.is_last_step:
            jax.block_until_ready(self.run.state)
        watch.record_step([batch.host for batch in batches])

    Loop.train_step = watched_train_step


def main() -> None:
    settings = read_settings()
    sys.path.insert(0, settings["root"])
    folder, engine = Path(settings["folder"]), settings["engine"]
    if engine == "jax":  # set it before JAX is first used
        # On GPUs, operations in command buffers would be traced without their names.
        flags = f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text --xla_gpu_enable_command_buffer="
        # Programs from a cache are not written there, and need their source.
        os.environ |= {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}", "JAX_ENABLE_COMPILATION_CACHE": "0",
                       "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "10"}
    from lmmods.cli import main as run

    {"torch": watch_torch, "jax": watch_jax}[engine](settings)
    sys.exit(run(["fit", "--config", str(folder / "recipe.yaml"), "--engine", engine, "--overwrite", "true",
                  "--trainer.default_root_dir", str(folder / engine), *settings["options"]]))


if __name__ == "__main__":
    main()
