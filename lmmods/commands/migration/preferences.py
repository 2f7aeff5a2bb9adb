"""Preference optimisation of the other programs: their names of losses, and what goes with them."""

from collections.abc import Sequence

from lmmods.commands.migration.draft import Draft
from lmmods.core.preference_losses import METHODS, REFUSED

NEAREST = {"kto_pair": "kto"}  # LLaMA-Factory's KTO of pairs; here each answer of a pair is a row of its own
ROWS_DIFFER = ("packing", "neat_packing", "padding_free", "sample_packing")
SCORED = ("train_on_prompt", "mask_history", "train_on_inputs", "completion_only_loss", "assistant_only_loss")


def take_loss(draft: Draft, name: str, origin: str) -> str:
    """Put the task with a loss, or with sigmoid where there is none of this name; returns which."""
    loss = name if name in METHODS else NEAREST.get(name, "sigmoid")
    if loss != name:
        draft.lose(origin, f"{REFUSED.get(name, f'there is no loss {name}')}; {loss} stands in its place")
    draft.put("model", "Preference", "")
    draft.put("model.loss", loss, origin)
    return loss


def take_number(draft: Draft, ours: str, key: str, default: float) -> None:
    """Put a setting of the loss; a default of theirs where nothing is said."""
    draft.put(f"model.{ours}", float(draft.get(key, default)), key)


def take_smoothing(draft: Draft, loss: str, key: str, used_by: Sequence[str]) -> None:
    """Put the label smoothing where their loss uses it.

    Args:
        used_by: Losses that do so there.
    """
    value = draft.get(key)
    if value and loss in used_by and METHODS[loss].smooths:
        draft.put("model.label_smoothing", float(value), key)
    elif value:
        draft.lose(key, f"the loss {loss} does not use it there")


def take_reference(draft: Draft, loss: str) -> None:
    """Put where the reference's log-probabilities come from, if they are computed beforehand."""
    key = "precompute_ref_log_probs"
    if draft.get(key) and METHODS[loss].has_reference:
        draft.put("model.reference", "cache", key)


def take_data(draft: Draft) -> None:
    """Put the data module; what it has not is told."""
    draft.put("data", "PreferenceData", "")
    for key in ROWS_DIFFER:
        if draft.get(key):
            draft.lose(key, "answers of a pair stay beside each other; data.group_by_length saves most of the padding")
    for key in SCORED:
        if draft.get(key):
            draft.lose(key, "what is scored are the answers")


def note_differences(draft: Draft) -> None:
    """What is not the same of every loss."""
    draft.note("Each term of the loss is divided once by the pairs (or answers) of the whole step; there it is divided "
               "in each micro-batch, some terms by its tokens.")
    draft.note("Dropout is off, but for model.lora.dropout and the rates that model.config_overrides names.")
