"""Compute results for comparison with JAX: transformers' logits, and this project's loss and gradient."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lmmods.core.labels import PER_ROW
from lmmods.core.parity import Row, compared_positions, moved_adapter, row_logits, sequences, write
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.tasks.base import TaskModule
from lmmods.torch_engine.tasks.causal_task import CausalModule
from lmmods.torch_engine.tasks.classifier_task import ClassifierModule


def measure(module: TaskModule, rows: list[Row], folder: Path) -> None:
    """Write loss, logits and gradient of rows [1, ...] to a folder, without dropout; see `core.parity`.

    Args:
        module: A task whose network is on the device.
    """
    network = module.model
    with torch.no_grad():
        for name, param in _by_name(module).items():
            # B is initialised to 0, which would hide errors in A.
            if ".lora_B." in name:
                param.copy_(torch.from_numpy(moved_adapter(name, param.cpu().numpy())))
    batches = [{name: torch.from_numpy(values).to(module.device) for name, values in row.items()} for row in rows]
    total, weight, logits = 0.0, 0.0, []
    with TokenDropout.from_model(network).off():
        module.survey(batches)
        for row, batch in zip(rows, batches, strict=True):
            sums = module(module.batch_loss, module.complete(batch))
            sums.total.backward()
            total, weight = total + sums.total.item(), weight + sums.weight.item()
            positions = torch.from_numpy(compared_positions(row, len(rows)))
            if isinstance(module, ClassifierModule):
                with torch.no_grad():
                    logits.append(row_logits(module(module.outputs, batch).cpu().numpy(), positions.numpy()))
            else:
                logits.append(module(_logits, module, row, positions).cpu().numpy())
    gradients = {name: torch.zeros_like(param) if param.grad is None else param.grad.div_(weight or 1)
                 for name, param in _by_name(module).items()}
    write(folder, total / (weight or 1), weight, np.concatenate(logits),
          {name: gradient.cpu().numpy() for name, gradient in gradients.items()})


def _by_name(module: TaskModule) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by their names in the network."""
    return {name.removeprefix("model."): param for name, param in module.trainable().items()}


@torch.no_grad()
def _logits(module: TaskModule, row: Row, positions: Tensor) -> Tensor:
    """Return the logits of the network's own forward pass at the given tokens, [P, V]; for answer spans [P, 2]."""
    inputs = {name: torch.from_numpy(values).to(module.device) for name, values in sequences(row).items()}
    further_inputs = getattr(module.model, "further_inputs", lambda _: {})(inputs)
    # Packed rows have no mask: with an all-ones mask or a cache, documents would attend to each other.
    unused = ("segment_ids", "attention_mask") if "position_ids" in inputs else ()
    inputs = {name: x for name, x in inputs.items() if not name.startswith((PER_ROW, *unused))} | further_inputs
    options = {"use_cache": False} if isinstance(module, CausalModule) else {}
    # PEFT's wrapper for answer spans drops token_type_ids; the adapters are inside the network itself.
    network = module.model.get_base_model() if module.trains_adapter else module.model
    output = network(**inputs, **options)
    logits = output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)
    return logits.flatten(0, 1)[positions.to(module.device)].float()
