"""Log-probabilities of answers under the reference model, as a column of preference batches."""

from typing import Any

import numpy as np

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.hardware import REFERENCE, cache_folder
from lmmods.data.preference import PreferenceData
from lmmods.data.read.by_role import STAGE_ROLES, Role
from lmmods.data.store.cache import fingerprint
from lmmods.data.store.references import REFERENCE_LOGPS, ReferenceStore


def begin_references(data: PreferenceData, stage: str) -> list[Role]:
    """Add `reference_logps` to batches, unknown so far. Return the sets that need a call of `adopt_references`.

    Raises:
        UserError: Rows of a stream are not known before training.
    """
    if data.streaming and stage == "fit":
        raise UserError("model.reference cache reads all rows before training, which data.streaming does not "
                        "allow. Set data.streaming to false, or remove model.reference")
    data.add_column(REFERENCE_LOGPS)
    return [role for role in STAGE_ROLES[stage] if role in data.sets and role != "predict"]


def reference_store(data: PreferenceData, role: Role, network: dict[str, Any]) -> ReferenceStore:
    """Return the store of a set's log-probabilities under a reference model.

    Args:
        network: All that determines the reference model's numbers.
    """
    rows, items, answers = data.rows(role), data.items(role), data.codec.model.answers
    # The second answer is another row's, selected by the seed and truncated to max_length.
    lent = {"seed": data.seed, "max_length": data.max_length} if answers == "mismatched" else {}
    key = fingerprint({"network": network, "answers": answers, **lent,
                       "stores": [store.name for store in rows.stores],
                       "files": data.codec.fingerprint_files(rows), "rows": fingerprints.of_array(rows.selection)})
    return ReferenceStore(cache_folder(data.cache_dir) / f"{REFERENCE}-{key}", (len(items), items.num_answers))


def adopt_references(data: PreferenceData, role: Role, logps: np.ndarray) -> None:
    """Set the log-probabilities [rows, answers] for the batches of a set."""
    data.fill_column(role, REFERENCE_LOGPS, _OfRows(logps))


class _OfRows:
    """A value of each row; picklable, for processes that prepare batches."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __call__(self, row: int, item: dict[str, Any]) -> np.ndarray:
        return self._values[row]
