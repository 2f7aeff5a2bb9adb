"""Our trainer, either engine, on a recipe: the time and the arithmetic of its steps, and which operations take it.

Writes {folder}/{engine}.json: see `Watch`.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rounds import settings

FIRST, MEASURED, PROFILED = "warm-up", "measured", "profiled"


class Watch:
    """Three stretches of optimiser steps: warm-up, measured, and profiled; then the report, and the process ends.

    The report has `cpu` and `wall`, seconds of the measured steps, what they computed on (`tokens`; `scored`, the
    labelled ones; `pairs`, of positions of a row), `parts`, microseconds of the profiled steps by operation, and
    `traced`, their seconds. On torch also `products`, the shapes of the matrix products, what `torch_sizes` returns,
    and whether they are `bfloat16`.

    Args:
        asked: `folder`, `engine`, and the number of steps of each stretch: `warm_up`, `steps`, `traced` (0 for none).
        begin, end: Start the profiler, and return what it found.
    """

    def __init__(self, asked: dict[str, Any], begin: Any, end: Any) -> None:
        self._asked, self._begin, self._end = asked, begin, end
        self._stretch, self._left = FIRST, asked["warm_up"]
        self.report: dict[str, Any] = {"tokens": 0, "scored": 0, "pairs": 0}

    @property
    def closing(self) -> bool:
        """Whether a stretch ends with the next step, so that it must have been computed."""
        return self._left == 1

    def step(self, batch: Any) -> None:
        """Note an optimiser step over a batch of arrays on the host."""
        if self._stretch == MEASURED:
            rows = batch["attention_mask"].reshape(-1, batch["attention_mask"].shape[-1])
            lengths = rows.sum(-1).tolist()
            labels = batch.get("labels")
            self.report["tokens"] += int(sum(lengths))
            self.report["pairs"] += int(sum(length * length for length in lengths))
            self.report["scored"] += int((labels >= 0).sum()) if labels is not None else 0
        self._left -= 1
        if self._left == 0:
            self._next()

    def _next(self) -> None:
        if self._stretch == FIRST:
            self._stretch, self._left = MEASURED, self._asked["steps"]
        elif self._stretch == MEASURED:
            self.report |= {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}
            self._stretch, self._left = PROFILED, self._asked["traced"]
            if not self._left:
                self._write()
            self._begin()
        else:
            traced = time.perf_counter() - self._wall
            self.report |= {"traced": traced, **self._end()}
            self._write()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _write(self) -> None:
        path = Path(self._asked["folder"]) / f"{self._asked['engine']}.json"
        path.write_text(json.dumps(self.report))
        os._exit(0)  # in the midst of a library's loop


# torch ----------------------------------------------------------------------------------------------------------------

# Operations whose whole time, with that of all that they call, is of one part. Not `Optimizer.step`: Lightning computes
# the loss and its gradient within it.
WHOLE = {"enumerate(DataLoader)": "data", "_fused_adam": "optimiser", "norm of the gradient": "optimiser",
         "_ChunkedSums": "head and loss", "cross_entropy": "head and loss", "log_softmax": "head and loss",
         "dequantize": "dequantisation", "scaled_dot_product": "attention", "_Attention": "attention"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::linear", "aten::matmul")


def watch_torch(asked: dict[str, Any]) -> None:
    """Profile Lightning's loop by torch's own profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from lmmods.torch_engine.callbacks.run_events import RunEvents
    from lmmods.torch_engine.tasks.base import TaskModule

    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def end() -> dict[str, Any]:
        profiler.__exit__(None, None, None)
        return torch_parts(profiler.events())

    watch = Watch(asked, profiler.__enter__, end)
    on_train_batch_end, clip = RunEvents.on_train_batch_end, TaskModule.on_before_optimizer_step

    def ended(self, trainer, module, outputs, batches, batch_idx):  # noqa: ANN001, ANN202
        on_train_batch_end(self, trainer, module, outputs, batches, batch_idx)
        watch.report |= {**torch_sizes(module.model), "bfloat16": trainer.precision.startswith("bf16")}
        watch.step(batches[0])

    def clipped(self, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
        with record_function("norm of the gradient"):
            clip(self, *args, **kwargs)

    RunEvents.on_train_batch_end, TaskModule.on_before_optimizer_step = ended, clipped
    torch.manual_seed(0)


def torch_sizes(model: Any) -> dict[str, Any]:
    """Parameters that are multiplied: `body` and `head`, how many of each train, layers, width of the attention."""
    from lmmods.torch_engine.nn.summary import num_elements

    head = model.get_output_embeddings()
    weight = None if head is None else head.weight
    looked_up = model.get_input_embeddings().weight
    body = [parameter for parameter in model.parameters() if parameter is not weight and parameter is not looked_up]
    config = model.config.get_text_config()
    return {"body": sum(map(num_elements, body)), "head": 0 if weight is None else num_elements(weight),
            "body_trained": sum(num_elements(parameter) for parameter in body if parameter.requires_grad),
            "head_trained": num_elements(weight) if weight is not None and weight.requires_grad else 0,
            "layers": config.num_hidden_layers, "features": config.hidden_size}


def torch_parts(events: Any) -> dict[str, Any]:
    """Microseconds by part, and the matrix products: rows, inner and columns, with their number."""
    parts: dict[str, float] = defaultdict(float)
    products: dict[str, int] = defaultdict(int)
    for event in events:
        if event.name.startswith("ProfilerStep"):
            continue
        parts[torch_part(event)] += event.self_cpu_time_total
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = [shape for shape in event.input_shapes if len(shape) == 2][-2:]
            products[f"{left[0]} {left[1]} {right[1]}"] += 1
    return {"parts": parts, "products": products}


def torch_part(event: Any) -> str:
    """The part of the step that an operation belongs to, by its name and those of its callers."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    for name in reversed(names):
        for beginning, part in WHOLE.items():
            if beginning in name:
                return part
    if any(name in PRODUCTS for name in names):
        return "products"
    return "norms, activations and the rest" if names[0].startswith("aten::") else "Python and other"


# JAX ------------------------------------------------------------------------------------------------------------------


def watch_jax(asked: dict[str, Any]) -> None:
    """Profile our loop by the trace that XLA writes of each operation of a compiled step."""
    import jax

    from jax_engine.trainer import Loop

    folder = Path(asked["folder"]) / "trace"

    def begin() -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(folder), profiler_options=options)

    def end() -> dict[str, Any]:
        from xla_trace import parts_of

        jax.profiler.stop_trace()
        model = json.loads((Path(asked["folder"]) / "model" / "config.json").read_text())
        return {"parts": parts_of(folder, Path(asked["folder"]) / "hlo", model["vocab_size"])}

    watch = Watch(asked, begin, end)
    train_step = Loop.train_step

    def counted(self, batches, num_batches):  # noqa: ANN001, ANN202
        batches = list(batches)
        train_step(self, iter(batches), num_batches)
        if watch.closing:
            jax.block_until_ready(self.run.state)
        for batch in batches:
            watch.step(batch.host)

    Loop.train_step = counted


def main() -> None:
    asked = settings()
    sys.path.insert(0, asked["root"])
    folder, engine = Path(asked["folder"]), asked["engine"]
    if engine == "jax":  # read when JAX is first used
        dump = f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}"
    from lmmods.cli import main as run

    {"torch": watch_torch, "jax": watch_jax}[engine](asked)
    sys.exit(run(["fit", "--config", str(folder / "recipe.yaml"), "--engine", engine, "--overwrite", "true",
                  "--trainer.default_root_dir", str(folder / engine), *asked["options"]]))


if __name__ == "__main__":
    main()
