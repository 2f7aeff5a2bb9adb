"""Log-probabilities of answers under the reference model: computed once, stored next to the tokens.

They are a folder of the cache, named by the fingerprint of everything they depend on, with the same numbers on both
engines:

    logps.npy       [rows, answers] float32
    manifest.json   its size and checksum
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmmods.core.console import tell
from lmmods.core.fingerprints import stamps
from lmmods.data.store.arrow_store import MANIFEST, damage
from lmmods.data.store.cache import commit, remove, reporting_writes

LOGPS = "logps"
REFERENCE_LOGPS = "reference_logps"  # column of batches
COMPUTING = "Computing the log-probabilities of the answers of {rows} rows ({role}) under the reference."


@dataclass(frozen=True)
class ArrayStore:
    """Arrays of numbers in a folder of the cache.

    Args:
        folder: Path, existing or not yet.
        shapes: Shape of each array, by name.
        content: Name of the arrays in messages.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    content: str

    def read(self) -> dict[str, np.ndarray] | None:
        """Return the arrays, mapped from their files; None if they have not been computed."""
        if not self.folder.exists():
            return None
        files = tuple(f"{name}.npy" for name in self.shapes)
        # Checksums included: wrong numbers would change the loss without any other sign.
        wrong = damage(self.folder, files=files)
        if wrong is None:
            arrays = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                      for name in self.shapes}
            if all(array.shape == self.shapes[name] for name, array in arrays.items()):
                return arrays
            wrong = f"{files[0]} belongs to other rows"
        tell(f"The cached {self.content} in {self.folder} are damaged ({wrong}); recomputing them.")
        remove(self.folder)
        return None

    def write(self, arrays: dict[str, np.ndarray]) -> None:
        """Store the arrays, or keep those that another process wrote first. Raises UserError."""
        parent = self.folder.parent
        with reporting_writes(parent):
            parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.tmp-", dir=parent))
            try:
                for name, array in arrays.items():
                    np.save(temporary / f"{name}.npy", array)
                files = tuple(f"{name}.npy" for name in arrays)
                (temporary / MANIFEST).write_text(json.dumps(stamps([temporary / file for file in files])))
                commit(temporary, self.folder, files)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


class ReferenceStore:
    """The stored log-probabilities of one set of rows.

    Args:
        folder: Path, existing or not yet.
        shape: Numbers of rows and answers.
    """

    def __init__(self, folder: Path, shape: tuple[int, int]) -> None:
        self.folder, self.shape = folder, shape
        self._arrays = ArrayStore(folder, {LOGPS: shape}, "log-probabilities")

    def read(self) -> np.ndarray | None:
        """Return the log-probabilities [rows, answers], or None if they have not been computed."""
        arrays = self._arrays.read()
        return None if arrays is None else np.array(arrays[LOGPS])

    def write(self, logps: np.ndarray) -> None:
        """Store the log-probabilities, or keep those that another process wrote first. Raises UserError."""
        self._arrays.write({LOGPS: logps.astype(np.float32)})
