"""Lightning's MLFlowLogger."""

import os
from collections.abc import Mapping
from typing import Any

from lmmods.runs.loggers import LoggerSupport

SERVERS = ("http://", "https://", "databricks")


class MLFlowSupport(LoggerSupport):
    """It writes to a server, into a folder or into an SQLite database."""

    def folders(self, options: Mapping[str, Any]) -> list[str | None]:
        """Return the folders of runs and artifacts."""
        store = options.get("tracking_uri") or options.get("save_dir")
        is_users = str(store).startswith(SERVERS) or store == os.environ.get("MLFLOW_TRACKING_URI")
        return [None if is_users else _folder_of(store), _folder_of(options.get("artifact_location"))]


def _folder_of(store: str | None) -> str | None:
    """Return the folder of a store: the store itself, or the folder of its SQLite database."""
    file = str(store).removeprefix("sqlite:///")
    return store if file == str(store) else os.path.dirname(file) or "."


SUPPORT = MLFlowSupport()
