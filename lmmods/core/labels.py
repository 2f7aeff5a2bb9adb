"""Labels of a batch, as written by data modules and read by losses."""

IGNORED = -100  # label of a position that is not a target
PER_ROW = "per_row/"  # names of columns that belong to rows, whatever their shape, start with this


def has_tokens(name: str, ndim: int, is_float: bool, token_axis: int) -> bool:
    """Return True if a column of a batch has a value for each token.

    Args:
        name: Name of the column. Float labels belong to rows: [B], or [B, K] for several labels.
        ndim: Number of its axes.
        is_float: True if its values are floats.
        token_axis: The last axis of `input_ids`.
    """
    return ndim > token_axis and not (name == "labels" and is_float) and not name.startswith(PER_ROW)
