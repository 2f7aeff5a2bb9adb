"""LoRA adapters on both engines: which modules get one, which others train fully, and the files of an adapter."""

import json
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError

from lmmods.core.console import say
from lmmods.core.errors import UserError, first_line, is_out_of_memory
from lmmods.core.files import read_text
from lmmods.core.settings import LoRA

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
KEY = "model.adapter"  # the key that names an adapter, unless a command has an option for it
# Names of the output layer for answer spans; it is newly initialised, so it trains fully alongside an adapter.
ANSWER_HEADS = ("qa_outputs", "classifier")
# Layers by model type that PEFT (0.21) mistakes for experts, which used to have these names.
_MISTAKEN_FOR_EXPERTS = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def adapted_layers(lora: LoRA, linear: Iterable[str], has_experts: bool = False, model_type: str = "") -> set[str]:
    """Return the names of the layers that get an adapter. A target matches module names that end in it, as in PEFT.

    Args:
        lora: Settings of the adapter.
        linear: Names of all candidates: linear layers, quantised or not, without the output head.
        has_experts: True if the model has experts, which are no candidates: all of a layer are one parameter.
        model_type: `model_type` of the configuration.

    Raises:
        UserError: A target matches none of them.
    """
    names, skipped = list(linear), _MISTAKEN_FOR_EXPERTS.get(model_type, ())
    linear = [name for name in names if name.rpartition(".")[2] not in skipped]
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    if "all-linear" in targets:
        if len(linear) < len(names):
            say(f"lora.targets: all-linear skips {', '.join(skipped)} in layers without experts: PEFT takes these "
                "names for experts.")
        # Most routers are not linear layers; Gemma 4's has one, which gets no adapter either.
        return {name for name in linear if not has_experts or "router" not in name.split(".")}
    note = (" Experts and their router are not linear layers: lora.target_parameters gives experts adapters, and "
            "lora.modules_to_save trains both fully.") if has_experts else ""
    return _match("lora.targets", targets, linear, linear, note)


def adapted_parameters(lora: LoRA, stacked: Iterable[str], in_full: Collection[str]) -> set[str]:
    """Return the names of the parameters with an adapter per expert.

    Args:
        lora: Settings of the adapter.
        stacked: Names of all candidates: matrices of experts, [E, ...].
        in_full: Names of the modules that train fully.

    Raises:
        UserError: A target matches none of them, or is in a module that trains fully.
    """
    stacked = list(stacked)
    if lora.target_parameters and not stacked:
        raise UserError("lora.target_parameters: this model has no stacked experts. Remove it.")
    matches = _match("lora.target_parameters", lora.target_parameters or [], stacked, stacked, kind="parameter")
    if both := sorted(name for name in matches if name.rpartition(".")[0] in in_full):
        raise UserError(f"lora.target_parameters: {both[0]} is in a module that lora.modules_to_save trains fully. "
                        "Remove it from one of them.")
    return matches


def modules_in_full(lora: LoRA, modules: Iterable[str], linear: Iterable[str]) -> set[str]:
    """Return the names of the modules that `modules_to_save` matches. Raises UserError if an entry matches none."""
    return _match("lora.modules_to_save", lora.modules_to_save or [], list(modules), linear)


class Vocabulary(Protocol):
    """A data module's tokens."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer."""

    @property
    def trainable_new_tokens(self) -> list[int]:
        """Ids of new tokens to train."""


def tokens_to_train(data: Vocabulary, num_rows: int) -> list[int]:
    """Return the ids of tokens whose rows train alongside an adapter: new ones, and ones that the embedding lacks.

    Args:
        data: The data module. A token used only for padding is never learned.
        num_rows: Rows of the model's own embedding.
    """
    tokenizer = data.tokenizer
    # Another role of the padding token gives it a meaning to learn.
    padding = {tokenizer.pad_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    return sorted({*data.trainable_new_tokens, *range(num_rows, len(tokenizer))} - padding)


def trained_rows(tokens: list[int], embedding: str, output: str | None, in_full: Collection[str], *, tied: bool,
                 has_bias: bool) -> dict[str, list[int]]:
    """Return the rows of new tokens that train alongside an adapter, by module.

    An untied output layer needs rows too: a row that is the mean of all rows gives the mean of all logits, which is
    never the largest, so the token would never be chosen.

    Args:
        tokens: Ids of the tokens that are new to the model.
        embedding: Name of the embedding.
        output: Name of the output layer of the vocabulary, if there is one.
        in_full: Names of the modules that train fully, including these rows.
        tied: True if the embedding and the output layer share one matrix.
        has_bias: True if the output layer has a bias.

    Raises:
        UserError: PEFT does not support such an adapter.
    """
    frozen = [name for name in (embedding, output) if name is not None and name not in in_full]
    if not tokens or not frozen:
        return {}
    if has_bias and output in frozen:
        raise UserError(f"model.lora: the output layer {output} has a bias, which PEFT omits when rows of new tokens "
                        f"train. Add it and {embedding} to lora.modules_to_save, set model.lora to null, or "
                        "remove data.add_tokens.")
    if tied and output is not None and output not in frozen:
        raise UserError(f"lora.modules_to_save: {output} trains fully, but of {embedding}, to which it is tied, only "
                        f"new rows train, which PEFT does not support. Add {embedding} too, or remove {output}.")
    # Tied rows are trained once, under the name of the embedding.
    return dict.fromkeys(frozen[:1] if tied else frozen, tokens)


def token_indices(rows: dict[str, list[int]], embedding: str) -> dict[str, list[int]] | list[int] | None:
    """Convert `trained_rows` to PEFT's `trainable_token_indices`: a list if only the embedding has trained rows."""
    return rows.get(embedding) if rows.keys() <= {embedding} else rows


def check_rows(folder: str | Path, num_rows: int) -> None:
    """Raise UserError if an adapter has rows of tokens beyond the `num_rows` rows of the base model's embedding."""
    token_ids = adapter_config(folder).get("trainable_token_indices") or []
    id_lists = token_ids.values() if isinstance(token_ids, dict) else [token_ids]
    largest = max((max(ids) for ids in id_lists if ids), default=0)
    if largest >= num_rows:
        raise UserError(f"model.adapter: the adapter in {folder} has an embedding for token {largest}, but the model "
                        f"has {num_rows} tokens. Set data.tokenizer to that folder.")


def quantised_in_full(module: str, kind: str) -> str:
    """Return the message for a module in `modules_to_save` whose weight is quantised."""
    instead = "its matrices in lora.target_parameters" if module.endswith("experts") else "it in lora.targets"
    return (f"lora.modules_to_save: {module} is stored in {kind}, so it cannot be trained fully. Name {instead} "
            "instead, or set model.quantize to null.")


def saved_name(name: str) -> str:
    """Return PEFT's name of a parameter in its file, given its name in the model, which includes the adapter's."""
    name = name.replace(".modules_to_save.default.", ".").replace(".lora_magnitude_vector.default.weight",
                                                                  ".lora_magnitude_vector")
    # For example q_proj.lora_A.default.weight -> q_proj.lora_A.weight.
    return re.sub(r"\.(lora_\w+|trainable_tokens_delta)\.default\b", r".\1", name)


# Reading a PEFT folder, which is not trusted ----------------------------------------------------------------------

MAX_RANK, MAX_NUMBER, MAX_SETTINGS = 2**16, 1e30, 2**24  # MAX_SETTINGS in bytes


def _is_rank(value: object) -> bool:
    # Not isinstance: True is an int in Python.
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= MAX_NUMBER  # False for NaN


def _is_list(value: object, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_item, value))


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_NAMES = ("a list of names or null", lambda value: value is None or _is_list(value, _is_string))
_STRING = ("a string or null", lambda value: value is None or _is_string(value))
_PATTERN = ("a pattern, a list of names or null", lambda value: _STRING[1](value) or _NAMES[1](value))
_FLAG = ("true or false", _is_bool)
# LoRA settings whose types are relied on, here or by PEFT, without further checks.
_LORA = {
    "r": (f"an integer from 1 to {MAX_RANK}", _is_rank),
    "lora_alpha": ("a number", _is_number),
    "lora_dropout": ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "target_modules": _PATTERN, "exclude_modules": _PATTERN, "layers_pattern": _PATTERN,
    "modules_to_save": _NAMES, "target_parameters": _NAMES,
    "bias": ("none, all or lora_only", lambda value: value in ("none", "all", "lora_only")),
    "use_dora": _FLAG, "use_rslora": _FLAG, "fan_in_fan_out": _FLAG, "lora_bias": _FLAG,
    "rank_pattern": ("ranks by name", lambda value: isinstance(value, dict) and all(map(_is_rank, value.values()))),
    "alpha_pattern": ("numbers by name",
                      lambda value: isinstance(value, dict) and all(map(_is_number, value.values()))),
    "layers_to_transform": ("a layer index, a list of them or null",
                            lambda value: value is None or _is_id(value) or _is_list(value, _is_id)),
    "trainable_token_indices": ("a list of token ids, such lists by name, or null", lambda value: value is None or all(
        _is_list(ids, _is_id) for ids in (value.values() if isinstance(value, dict) else [value]))),
}
_EVERY_TYPE = {"peft_type": ("a string", _is_string), "base_model_name_or_path": _STRING, "revision": _STRING,
               "task_type": _STRING, "inference_mode": _FLAG}  # settings of every peft_type


def adapter_config(folder: str | Path, key: str = KEY) -> dict[str, Any]:
    """Read the settings in a PEFT folder and check their types.

    Args:
        key: Recipe key or option that names the folder.

    Raises:
        UserError: They are missing, cannot be read, or have an invalid value.
    """
    path = Path(folder) / SETTINGS
    try:
        settings = json.loads(read_text(path, MAX_SETTINGS))
    except FileNotFoundError as error:
        raise UserError(f"{key}: {folder} has no {SETTINGS}. Use a folder written by PEFT's "
                        "save_pretrained, for example runs/NAME/model.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {path} cannot be read ({error}). Download or save the adapter again.") from error
    if not isinstance(settings, dict) or "peft_type" not in settings:
        raise UserError(f"{key}: {path} has no peft_type, so PEFT did not write it. Download or save the "
                        "adapter again.")
    for name, (expected, fits) in {**_EVERY_TYPE, **(_LORA if settings["peft_type"] == "LORA" else {})}.items():
        if name in settings and not fits(settings[name]):
            shown = repr(settings[name])
            raise UserError(f"{key}: {path} has {name}: {shown if len(shown) <= 60 else f'{shown[:60]}…'}, which must "
                            f"be {expected}. Fix it, or download or save the adapter again.")
    return settings


def adapter_weights(folder: str | Path, key: str = KEY) -> Path:
    """Return the weights file that PEFT reads. Raises UserError if it is missing, or clearly not a weights file."""
    # In PEFT's order. A dangling link counts as existing, so that it is reported rather than skipped.
    for name in (WEIGHTS, "adapter_model.bin"):
        if os.path.lexists(path := Path(folder) / name):
            check_file(key, path)
            return path
    raise UserError(f"{key}: {folder} has no {WEIGHTS}. Download or save the adapter again.")


def check_head(folder: str | Path, head: str) -> None:
    """Raise UserError if an adapter to continue from lacks a task's output layer, which is new to its base.

    Args:
        head: Name of the output layer.
    """
    saved = adapter_config(folder).get("modules_to_save") or []
    # A module is saved with its submodules.
    if not any(f".{name}." in f".{head}." for name in saved):
        raise UserError(f"model.adapter: the adapter in {folder} is for another task, without {head}. Merge it (python "
                        "train.py merge), set model.pretrained to the merged model, and train a new one with "
                        "model.lora.")


def mismatch_error(folder: str | Path, reason: object, key: str = KEY) -> UserError:
    """Build the error for an adapter that does not fit its base model."""
    return UserError(f"{key}: the adapter in {folder} does not fit the base model: {reason}")


def left_over(missing: Iterable[str], extra: Iterable[str]) -> str:
    """Return the reason why an adapter does not fit: weights that its file lacks, or that the model does not have."""
    missing, extra = sorted(missing)[:5], sorted(extra)[:5]
    return f"Missing: {', '.join(missing) or 'nothing'}. Not expected: {', '.join(extra) or 'nothing'}."


def not_finite_reason(name: str) -> str:
    """Return the reason to reject an adapter with a weight that is infinite or NaN."""
    return f"{name} has values that are not finite."


@contextmanager
def fitting_adapter(folder: str | Path, key: str = KEY) -> Iterator[None]:
    """Wrap loading of an adapter by PEFT or safetensors. Raises UserError if they reject it in any way."""
    try:
        yield
    except (*UNREADABLE, ArithmeticError, AssertionError, ImportError, LookupError, re.error) as error:
        if is_out_of_memory(error):
            raise
        reason = first_line(error)
        is_clear = isinstance(error, OSError | ValueError | RuntimeError)
        raise mismatch_error(folder, reason if is_clear else f"{type(error).__name__}: {reason}", key) from error


def _match(key: str, targets: list[str], names: list[str], linear: Iterable[str], note: str = "",
           kind: str = "module") -> set[str]:
    matches = set()
    for target in targets:
        # Dots in front, so that a target matches whole parts of a name: `proj` is not the end of `q_proj`.
        hits = {name for name in names if f".{name}".endswith(f".{target}")}
        if not hits:
            candidates = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise UserError(f"{key}: {target!r} matches no {kind} of this model. Candidates: {', '.join(candidates)}."
                            + note)
        matches |= hits
    return matches


# ---------------------------------------------------------------------------------------------------------------------
# Weights files that cannot be read: one clear message, the same in both engines.

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, AttributeError, TypeError, pickle.UnpicklingError,
              SafetensorError)
TORCH_FILES = (b"PK\x03\x04", b"\x80")  # zip, and the pickle of torch before 1.6
POINTER = b"version https://git-lfs"


@contextmanager
def reading_weights(pretrained: str) -> Iterator[None]:
    """Wrap the reading of a folder's or hub id's weights. Raises UserError if they cannot be read."""
    try:
        yield
    # Also in UNREADABLE, but with its own message: loading with pickle would run foreign code.
    except pickle.UnpicklingError as error:
        raise UserError(
            f"model.pretrained: a pytorch_model.bin of {pretrained} is damaged or contains more than tensors. It is "
            "not loaded, because that would run code in it. Download it again, or use a folder with "
            "model.safetensors; convert a file that you trust with torch.load(…, weights_only=False) and "
            "safetensors.torch.save_file.") from error
    except UNREADABLE as error:
        if is_out_of_memory(error) or isinstance(error, UserError):
            raise
        reason = first_line(error)
        reason = reason if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {reason}"
        raise UserError(f"model.pretrained: cannot load {pretrained!r}: {reason}") from error


def check_weights(pretrained: str) -> None:
    """Raise UserError for files that are not weights at all, for which libraries have unhelpful messages."""
    folder = Path(pretrained)
    # torch's files are read only if there are no safetensors files.
    for file in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        check_file("model.pretrained", file)


def check_file(key: str, file: Path) -> None:
    """Like `check_weights`, for one file.

    Args:
        key: Recipe key or option that names it, for messages.
    """
    if not file.is_file():
        raise UserError(f"{key}: {file} is not a regular file. Download it again.")
    with open(file, "rb") as opened:
        start = opened.read(len(POINTER))
    if start == POINTER:
        raise UserError(f"{key}: {file} is a Git LFS pointer, not the weights. Run git lfs pull in its folder.")
    if not start or file.suffix == ".bin" and not start.startswith(TORCH_FILES):
        raise UserError(f"{key}: {file} is {'empty' if not start else 'not a torch file'}. Download it again.")
