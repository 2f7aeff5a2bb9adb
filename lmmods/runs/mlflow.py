"""Lightning's MLFlowLogger."""

import os
from collections.abc import Mapping
from typing import Any

from lmmods.runs.loggers import LoggerSupport

SERVERS = ("http://", "https://", "databricks")


class MLFlowSupport(LoggerSupport):
    """MLflow logs to a server, a folder or an SQLite database."""

    def folders(self, options: Mapping[str, Any]) -> list[str | None]:
        """Return the folders of runs and artifacts."""
        store = options.get("tracking_uri") or options.get("save_dir")
        is_elsewhere = str(store).startswith(SERVERS) or store == os.environ.get("MLFLOW_TRACKING_URI")
        return [None if is_elsewhere else _find_folder(store), _find_folder(options.get("artifact_location"))]


def _find_folder(store: str | None) -> str | None:
    """Return the folder of a store: the store itself, or the folder of its SQLite database."""
    file = str(store).removeprefix("sqlite:///")
    return store if file == str(store) else os.path.dirname(file) or "."


SUPPORT = MLFlowSupport()
