"""Which parameters train, by regular expressions over their names in the Hugging Face folder."""

import re
from collections.abc import Collection, Mapping, Sequence

from lmmods.core.errors import UserError


def check_patterns(key: str, patterns: Sequence[str] | None) -> None:
    """Raise UserError unless all patterns are regular expressions, and there is one if the key is set."""
    if patterns is not None and not patterns:
        raise UserError(f"{key} is an empty list. Add patterns of parameters, or set it to null.", key)
    for pattern in patterns or []:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{key}: '{pattern}' is not a valid regular expression ({error}). Fix it; "
                            r"write \. for a literal dot.", key) from error


def chosen(names: Mapping[str, Collection[str]], trainable: Sequence[str] | None, frozen: Sequence[str] | None
           ) -> set[str]:
    """Return the parameters that train: `trainable` matches them and `frozen` does not.

    Args:
        names: All names of each parameter; tied ones have several, and one that matches is enough.
        trainable: Regular expressions that match anywhere in a name; None matches all.
        frozen: Regular expressions too; None matches none.

    Raises:
        UserError: A pattern matches nothing, or nothing trains.
    """
    trained = set(names) if trainable is None else _match("model.trainable_parameters", names, trainable)
    trained -= _match("model.frozen_parameters", names, frozen or [])
    if not trained:
        raise UserError("model.frozen_parameters matches all parameters that would train. Remove patterns from it.")
    return trained


def _match(key: str, names: Mapping[str, Collection[str]], patterns: Sequence[str]) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        hits = {name for name, aliases in names.items() if any(re.search(pattern, alias) for alias in aliases)}
        if not hits:
            all_names = list(names)
            raise UserError(f"{key}: '{pattern}' matches no parameter of this model. Its {len(all_names)} parameters "
                            f"have names like {all_names[0]}, {all_names[len(all_names) // 2]} and {all_names[-1]}.")
        matched |= hits
    return matched


def check_new_tokens(tokens: Collection[int], trains: bool) -> None:
    """Raise UserError for tokens without a trained embedding while the embedding is frozen."""
    if tokens and not trains:
        raise UserError(f"model.trainable_parameters and model.frozen_parameters leave the embedding frozen, but "
                        f"{len(tokens)} tokens are new to the model and must be learned. Train the embedding, or "
                        "remove data.add_tokens.")
