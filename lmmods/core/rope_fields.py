"""Rotary positions in transformers' configurations: `rope_parameters`, and the older fields that end up there."""

from typing import Any

from lmmods.core.errors import UserError, one_line

OLDER = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # of transformers 4, which configurations still take
ROPE_FIELDS = ("rope_parameters", *OLDER)
KEPT = ("rope_theta", "partial_rotary_factor")  # what a model was trained with, whatever its positions are scaled by


def rope_with(config: Any, field: str, value: Any) -> dict[str, Any]:
    """The `rope_parameters` of a configuration with one of `ROPE_FIELDS` set.

    Where layers of several types have their own, as in Gemma 3, a field without types is that of `full_attention`,
    as transformers reads `rope_scaling` there. `KEPT` stay the model's unless they are given.
    """
    before = config.rope_parameters or {}
    if not any(isinstance(part, dict) for part in before.values()):
        return _merged(before, field, value)
    parts = value if isinstance(value, dict) and value.keys() <= before.keys() else {"full_attention": value}
    return {**before, **{kind: _merged(before.get(kind) or {}, field, part) for kind, part in parts.items()}}


def _merged(before: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    if field in KEPT:
        return {**before, field: value}
    if not isinstance(value, dict):
        raise UserError(f"model.config_overrides.{field}: {value!r} is no mapping; give for example "
                        "{rope_type: yarn, factor: 4.0}.")
    named = {"rope_type" if name == "type" else name: part for name, part in value.items()}
    return {**{name: before[name] for name in KEPT if name in before}, **named}


def check_rope(config: Any) -> None:
    """UserError unless transformers can compute the rotary positions of a configuration, if it has any."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config.standardize_rope_params()
    parts = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    known = {"default", *ROPE_INIT_FUNCTIONS}
    if unknown := {part["rope_type"] for part in parts} - known:
        raise UserError(f"model.config: rope_parameters {parameters} cannot be used: there is no rope_type "
                        f"{min(unknown)!r}. Known: {', '.join(sorted(known))}.")
    try:
        config.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"model.config: rope_parameters {parameters} cannot be used: {one_line(error)}.") from error
