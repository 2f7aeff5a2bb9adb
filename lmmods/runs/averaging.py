"""The average of parameters over steps (`optimizer.ema_decay`) in checkpoints: part of the optimiser's state."""

from typing import Any

from lmmods.core.settings import Optimizer
from lmmods.runs.checkpoint import CheckpointContent


def averaged_parameters(content: CheckpointContent, layers: int) -> dict[str, Any]:
    """Return the parameters to evaluate a checkpoint with: its average, or those in training if it has none.

    Args:
        layers: `settings.num_layers` of the network.
    """
    params, identity = content["state_dict"], content.get("identity") or {}
    settings = (identity.get("model") or {}).get("optimizer") or {}
    if settings.get("ema_decay") is None:
        return params
    # Parameters are numbered through the groups of the run's own settings, whatever those of this recipe are.
    own = Optimizer(**settings)
    ordered = sorted(content["param_names"], key=lambda name: own.group_of(name, params[name].ndim, layers))
    (optimizer,) = content["optimizer_states"]
    averages = {ordered[index]: entry["ema"] for index, entry in optimizer["state"].items() if "ema" in entry}
    return {**params, **averages}
