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

LOGPS = "logps.npy"
COMPUTING = "Computing the log-probabilities of the answers of {rows} rows ({role}) under the reference."


@dataclass(frozen=True)
class ReferenceStore:
    """The stored log-probabilities of one set of rows.

    Args:
        folder: Path, existing or not yet.
        shape: Numbers of rows and answers.
    """

    folder: Path
    shape: tuple[int, int]

    def read(self) -> np.ndarray | None:
        """Return the log-probabilities [rows, answers], or None if they have not been computed."""
        if not self.folder.exists():
            return None
        # Checksums included: wrong numbers would change the loss without any other sign.
        wrong = damage(self.folder, files=(LOGPS,))
        if wrong is None:
            found = np.load(self.folder / LOGPS, allow_pickle=False)
            if found.shape == self.shape:
                return found
            wrong = f"{LOGPS} is of other rows"
        tell(f"The cached log-probabilities in {self.folder} are damaged ({wrong}); they are computed anew.")
        remove(self.folder)
        return None

    def write(self, logps: np.ndarray) -> None:
        """Store the log-probabilities, or keep those that another process wrote first. Raises UserError."""
        parent = self.folder.parent
        with reporting_writes(parent):
            parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.tmp-", dir=parent))
            try:
                np.save(temporary / LOGPS, logps.astype(np.float32))
                (temporary / MANIFEST).write_text(json.dumps(stamps([temporary / LOGPS])))
                commit(temporary, self.folder, (LOGPS,))
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
