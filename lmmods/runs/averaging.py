"""Averages of parameters over steps (`optimizer.ema_decay`), which checkpoints keep in the optimiser's state."""

from typing import Any

from lmmods.core.settings import Optimizer
from lmmods.runs.checkpoint import CheckpointContent


def load_averages(content: CheckpointContent, layers: int) -> dict[str, Any]:
    """Return the parameters to evaluate a checkpoint with: their averages if it has any, else the trained ones.

    Args:
        layers: `settings.num_layers` of the network.
    """
    params, identity = content["state_dict"], content.get("identity") or {}
    options = (identity.get("model") or {}).get("optimizer") or {}
    if options.get("ema_decay") is None:
        return params
    # The optimiser's state numbers parameters by the groups of the run that wrote it; this recipe may have others.
    optimizer = Optimizer(**options)
    ordered = sorted(content["param_names"], key=lambda name: optimizer.group_of(name, params[name].ndim, layers))
    (state,) = content["optimizer_states"]
    averages = {ordered[index]: entry["ema"] for index, entry in state["state"].items() if "ema" in entry}
    return {**params, **averages}
