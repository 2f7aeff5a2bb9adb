"""Measure the time and arithmetic of a recipe's steps on either of our engines, and the time of each operation.

Writes {folder}/{engine}.json, described in `Watch`.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rounds import read_settings

FIRST, MEASURED, PROFILED = "warm-up", "measured", "profiled"


class Watch:
    """Three phases of optimiser steps: warm-up, measured and profiled; then it writes the report and exits.

    The report has `cpu` and `wall`, seconds of the measured steps; their `tokens`, `scored` (labelled) tokens and
    `pairs` of positions within rows; `parts`, microseconds of the profiled steps by part; and `traced`, their seconds.
    On torch it also has `products`, the shapes of the matrix products, the result of `count_sizes`, and `bfloat16`.

    Args:
        settings: `folder`, `engine`, and the number of steps per phase: `warm_up`, `steps`, `traced` (0 for none).
        begin: Function that starts the profiler.
        end: Function that stops the profiler and returns its results.
    """

    def __init__(self, settings: dict[str, Any], begin: Any, end: Any) -> None:
        self._settings, self._begin, self._end = settings, begin, end
        self._phase, self._steps_left = FIRST, settings["warm_up"]
        self.report: dict[str, Any] = {"tokens": 0, "scored": 0, "pairs": 0}

    @property
    def is_last_step(self) -> bool:
        """True if the next step ends a phase, so that the caller must wait for work on the device."""
        return self._steps_left == 1

    def record_step(self, batch: Any) -> None:
        """Record an optimiser step on a batch of host arrays."""
        if self._phase == MEASURED:
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
        else:
            traced = time.perf_counter() - self._wall
            self.report |= {"traced": traced, **self._end()}
            self._write()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _write(self) -> None:
        path = Path(self._settings["folder"]) / f"{self._settings['engine']}.json"
        path.write_text(json.dumps(self.report))
        os._exit(0)  # exits from within a library's loop


# torch ----------------------------------------------------------------------------------------------------------------

# Operations whose time, with everything that they call, belongs to one part. Not `Optimizer.step`, in which Lightning
# computes the loss and its gradient.
PART_BY_NAME = {"enumerate(DataLoader)": "data", "_fused_adam": "optimiser", "norm of the gradient": "optimiser",
                "_ChunkedSums": "head and loss", "cross_entropy": "head and loss", "log_softmax": "head and loss",
                "dequantize": "dequantisation", "scaled_dot_product": "attention", "_Attention": "attention"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::linear", "aten::matmul")


def watch_torch(settings: dict[str, Any]) -> None:
    """Profile Lightning's loop with torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from lmmods.torch_engine.callbacks.run_events import RunEvents
    from lmmods.torch_engine.tasks.base import TaskModule

    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def end() -> dict[str, Any]:
        profiler.__exit__(None, None, None)
        return sum_parts(profiler.events())

    watch = Watch(settings, profiler.__enter__, end)
    on_train_batch_end, clip = RunEvents.on_train_batch_end, TaskModule.on_before_optimizer_step

    def on_step_end(self, trainer, module, outputs, batches, batch_idx):  # noqa: ANN001, ANN202
        on_train_batch_end(self, trainer, module, outputs, batches, batch_idx)
        watch.report |= {**count_sizes(module.model), "bfloat16": trainer.precision.startswith("bf16")}
        watch.record_step(batches[0])

    def timed_clip(self, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
        with record_function("norm of the gradient"):
            clip(self, *args, **kwargs)

    RunEvents.on_train_batch_end, TaskModule.on_before_optimizer_step = on_step_end, timed_clip
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


def sum_parts(events: Any) -> dict[str, Any]:
    """Return the microseconds by part, and the number of matrix products by shape: rows, inner and columns."""
    parts: dict[str, float] = defaultdict(float)
    products: dict[str, int] = defaultdict(int)
    for event in events:
        if event.name.startswith("ProfilerStep"):
            continue
        parts[find_part(event)] += event.self_cpu_time_total
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = [shape for shape in event.input_shapes if len(shape) == 2][-2:]
            products[f"{left[0]} {left[1]} {right[1]}"] += 1
    return {"parts": parts, "products": products}


def find_part(event: Any) -> str:
    """Return the part of the step that an operation belongs to, by its name and its callers' names."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    for name in reversed(names):
        for pattern, part in PART_BY_NAME.items():
            if pattern in name:
                return part
    if any(name in PRODUCTS for name in names):
        return "products"
    return "norms, activations and the rest" if names[0].startswith("aten::") else "Python and other"


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
        from xla_trace import sum_parts as sum_trace_parts

        jax.profiler.stop_trace()
        model = json.loads((Path(settings["folder"]) / "model" / "config.json").read_text())
        return {"parts": sum_trace_parts(folder, Path(settings["folder"]) / "hlo", model["vocab_size"])}

    watch = Watch(settings, begin, end)
    train_step = Loop.train_step

    def watched_train_step(self, batches, num_batches):  # noqa: ANN001, ANN202
        batches = list(batches)
        train_step(self, iter(batches), num_batches)
        if watch.is_last_step:
            jax.block_until_ready(self.run.state)
        for batch in batches:
            watch.record_step(batch.host)

    Loop.train_step = watched_train_step


def main() -> None:
    settings = read_settings()
    sys.path.insert(0, settings["root"])
    folder, engine = Path(settings["folder"]), settings["engine"]
    if engine == "jax":  # set it before JAX is first used
        dump = f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}"
    from lmmods.cli import main as run

    {"torch": watch_torch, "jax": watch_jax}[engine](settings)
    sys.exit(run(["fit", "--config", str(folder / "recipe.yaml"), "--engine", engine, "--overwrite", "true",
                  "--trainer.default_root_dir", str(folder / engine), *settings["options"]]))


if __name__ == "__main__":
    main()
