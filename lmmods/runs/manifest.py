"""manifest.json of a run: its inputs and outputs, so that both can be verified.

    starts      one entry per start of the run, the first and each resume
      time, step, checkpoint      time of the start, and the checkpoint it resumed from
      engine, recipe              the recipe as in config.yaml
      code                        version, fingerprint of the sources, git commit, changed files
      python, platform, packages  versions of the libraries that training may use
      machine                     processor, devices, processes, settings of the engine that change numbers
      variables                   environment variables that change numbers
      inputs                      files of data, base, adapter and tokenizer with size and hash; hub commits
    end         of a finished run: time, step, and its result files with size and SHA-256
"""

import functools
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmmods.core import fingerprints
from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.core.files import read_text
from lmmods.core.hardware import processor, variables
from lmmods.core.redaction import redacted
from lmmods.core.versions import code_version, installed_packages, python_version
from lmmods.recipe.classes import named_models
from lmmods.runs.eval_results import FOLDER as EVAL_RESULTS
from lmmods.runs.folder import RunFolder
from lmmods.runs.model_card import describe_model
from lmmods.runs.run_files import write_json

RESULT_FILES = ("config.yaml", "data_report.json", "metrics.csv", "samples.jsonl")  # besides model/
READERS = 4  # threads; each hashes about 1 GB per second


@dataclass
class Manifest:
    """Content of manifest.json."""

    starts: list[dict[str, Any]]
    end: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Inverse of `write`. Raises UserError if the file does not exist or is damaged."""
        try:
            content = json.loads(read_text(path))
            starts, end = content["starts"], content["end"]
            is_complete = starts and all(isinstance(start["step"], int) and isinstance(start["recipe"], dict)
                                         and isinstance(start["inputs"], dict) for start in starts)
            if not is_complete or not (end is None or isinstance(end["files"], dict)):
                raise ValueError("not written by a run")
        except FileNotFoundError as error:
            raise UserError(f"{path} does not exist. Use a run folder that has one; old versions did not write it."
                            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is damaged ({error}), so the run's inputs are unknown. Restore the file."
                            ) from error
        return cls(starts, end)

    def write(self, folder: RunFolder) -> None:
        folder.files.claim(folder.manifest.name)
        write_json(folder.manifest, redacted(vars(self)))


def start_manifest(folder: RunFolder, recipe: dict[str, Any], sources: dict[str, list[dict[str, Any]]],
                   machine: dict[str, Any], checkpoint: Path | None, step: int) -> None:
    """Add the start of a run to the manifest.

    Args:
        recipe: As in config.yaml.
        sources: The data module's description of its sources, by key.
        machine: The engine's description of its devices and settings.
        checkpoint: Checkpoint to resume from.
        step: Step at this start.

    Raises:
        UserError: An input cannot be read.
    """
    starts: list[dict[str, Any]] = []
    if folder.manifest.exists():
        try:
            starts = Manifest.read(folder.manifest).starts
        except UserError as error:
            warn(f"{error} Starting a new manifest.")
    start = {
        "time": _now(), "step": step, "checkpoint": str(checkpoint) if checkpoint else None,
        "engine": recipe.get("engine"), "recipe": recipe, **describe_environment(), "machine": machine,
        "inputs": {**{f"data.{key}": files for key, files in sources.items() if files}, **_models(recipe)},
    }
    Manifest([*starts, start]).write(folder)


@functools.cache
def _code_of_process() -> dict[str, Any]:
    """Return the version of the code that runs, which later changes to its files do not affect."""
    return code_version()


def describe_environment() -> dict[str, Any]:
    """Describe code, libraries and environment of this process."""
    return {"code": _code_of_process(), "python": python_version(), "platform": platform.platform(),
            "processor": processor(), "packages": installed_packages(), "variables": variables()}


def end_manifest(folder: RunFolder, step: int) -> None:
    """Record the files of a finished run. Raises UserError if the manifest cannot be read."""
    if not folder.manifest.exists():
        return  # a run of an earlier version
    manifest = Manifest.read(folder.manifest)
    names = [name for name in RESULT_FILES if (folder.root / name).is_file()]
    # Without scores: test and evaluate change them after the end of the run.
    names += sorted(f"model/{name}" for name in folder.files.inside("model")
                    if not name.startswith(f"{EVAL_RESULTS}/") and (folder.model / name).is_file())
    with ThreadPoolExecutor(READERS) as threads:
        hashes = threads.map(lambda name: fingerprints.sha256(folder.root / name), names)
        manifest.end = {"time": _now(), "step": step, "files": dict(zip(names, hashes, strict=True))}
    manifest.write(folder)


def _models(recipe: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Describe the models, adapters and tokenizers that a recipe names, by key."""
    model, data = ((recipe.get(block) or {}).get("init_args") or {} for block in ("model", "data"))
    files = {"adapter": "adapter_config.json"}
    entries = {f"model.{named.key}": [describe_model(named.name, named.revision, files.get(named.last, "config.json"))]
               for named in named_models(model)}
    tokenizer = data.get("tokenizer")
    if isinstance(tokenizer, str) and tokenizer != model.get("pretrained"):
        entries["data.tokenizer"] = [describe_model(tokenizer, None, "tokenizer_config.json")]
    return entries


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
