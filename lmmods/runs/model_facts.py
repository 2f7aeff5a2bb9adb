"""Facts that identify a model folder or hub repository: its configuration, and a fingerprint of its weights."""

import json
from pathlib import Path
from typing import Any

from lmmods.core import fingerprints
from lmmods.core.errors import UserError

# What libraries write about themselves, and how the weights are stored there.
_BOOKKEEPING = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "peft_version",
                "base_model_name_or_path", "inference_mode"}


def model_facts(name: str, revision: str | None, adapter: bool, weights: bool) -> dict[str, Any]:
    """Configuration and weights behind a folder's or hub repository's name; as much as can be had without a download.

    Returns:
        `config`; of a folder `weights`, a fingerprint of sizes and blocks of the files; of a hub model `commit`.

    Raises:
        UserError: A file cannot be read.
    """
    file = "adapter_config.json" if adapter else "config.json"
    folder, facts = Path(name).expanduser(), {}
    if not folder.is_dir():
        config = _from_hub_cache(name, file, revision)
        if config is None:
            return {}
        folder, facts["commit"] = config.parent, config.parent.name
    elif weights:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        facts["weights"] = fingerprints.joined(fingerprints.sampled_file(path) for path in files)
    if (folder / file).is_file():
        facts["config"] = _configuration(folder / file)
    return facts


def _configuration(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in fields.items() if key not in _BOOKKEEPING}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: this configuration cannot be read ({error}). Fetch or save the model again."
                        ) from error


def find_file(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a folder, or of a hub repository as far as it has been downloaded; None if it is not there."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return _from_hub_cache(name, file, revision)
    return folder / file if (folder / file).is_file() else None


def _from_hub_cache(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # neither folder nor hub id; who loads it says so
        return None
    return Path(found) if isinstance(found, str) else None
