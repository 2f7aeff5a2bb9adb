"""Facts that identify a model folder or hub repository: its configuration, and a fingerprint of its weights."""

import json
from pathlib import Path
from typing import Any

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.files import read_text
from lmmods.core.task_fields import TaskFields

# What libraries write about themselves, and how the weights are stored there.
_BOOKKEEPING = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "peft_version",
                "base_model_name_or_path", "inference_mode"}


READ = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"}  # what loading may read of a folder


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
        # who loads it refuses a pipe, which this would wait for
        files = [path for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
                 if path.is_file()]
        facts["weights"] = fingerprints.joined(fingerprints.sampled_file(path) for path in files)
    if (folder / file).is_file():
        facts["config"] = _configuration(folder / file)
    return facts


def first_weights(fields: TaskFields, precision: str, seed: int) -> dict[str, Any]:
    """All that decides about the network of a task as it stands before its first step, and about its numbers.

    Args:
        precision: Lightning's name.
        seed: Of all parameters that no file holds.

    Raises:
        UserError: A file cannot be read.
    """
    def of(name: str | dict[str, Any] | None, adapter: bool = False) -> Any:
        if not isinstance(name, str):
            return name
        return model_facts(name, None if adapter else fields.revision, adapter, name != fields.config) or name

    facts = {"pretrained": of(fields.pretrained), "config": of(fields.config), "adapter": of(fields.adapter, True),
             "overrides": fields.config_overrides, "quantize": fields.quantize, "double_quant": fields.double_quant,
             "frozen": fields.trains_adapter, "precision": precision, "seed": seed}
    if fields.quantize == "int8" or _is_saved_in_8bit(facts["pretrained"]):
        facts["activations"] = "as they are"  # numbers of a network that rounded them may lie in the cache
    return facts


def _is_saved_in_8bit(pretrained: dict[str, Any] | str | None) -> bool:
    config = pretrained.get("config", {}) if isinstance(pretrained, dict) else {}
    return bool((config.get("quantization_config") or {}).get("load_in_8bit"))


def described_model(name: str, revision: str | None, file: str) -> dict[str, Any]:
    """What a manifest says of a model, an adapter or a tokenizer: `path`, and `files` with size and hash.

    Weights are read as little as for `model_facts`. Of a hub model also `commit`; without `files` where nothing of it
    is on this machine.

    Args:
        file: One that it has, such as config.json.

    Raises:
        UserError: A file cannot be read.
    """
    place, told = Path(name).expanduser(), {"path": name}
    if place.is_file():
        return {**told, "files": {place.name: fingerprints.described(place)}}
    if not place.is_dir():
        found = _from_hub_cache(name, file, revision)
        if found is None:
            return {**told, "revision": revision}
        place = found.parent
        told |= {"revision": revision, "commit": place.name}
    paths = sorted(path for path in place.iterdir() if path.suffix in READ and path.is_file())
    return {**told, "files": {path.name: fingerprints.described(path) for path in paths}}


def _configuration(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_text(path))
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
