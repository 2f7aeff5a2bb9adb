"""Strict loading of Hugging Face weights: every key fills one leaf, and every leaf is filled."""

import importlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_engine.distributed.tree import Path as LeafPath
from jax_engine.distributed.tree import Tree, flatten, unflatten
from jax_engine.models import expert_files, mxfp4, quant
from jax_engine.models import lora as adapters
from jax_engine.models.heads import HEADS
from jax_engine.models.network import Network
from jax_engine.models.quant import ProcessGroup, Scales, from_bitsandbytes, split_key
from lmmods.core import hub, lazy_array
from lmmods.core.adapters import check_weights, reading_weights
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hf_config import is_of_text_part, loading_notes, no_model, some, text_name
from lmmods.core.lazy_array import LazyArray, Part

PREFIXES = ("transformer.", "model.", "bert.", "roberta.", "albert.", "distilbert.", "electra.", "gpt_neox.",
            "deberta.")
# Buffers saved by older transformers versions, which are not weights.
BUFFERS = re.compile(r"(^|\.)(att(n|ention)\.(masked_)?bias|position_ids|token_type_ids|rotary_emb\.inv_freq|"
                     r"pos_encoding)$")
# Poolers and heads of other tasks, which are ignored.
OTHER_HEADS = re.compile(r"^(pooler|cls|lm_head|qa_outputs|predictions|sop_classifier|vocab_transform|vocab_projector|"
                         r"vocab_layer_norm|classifier|pre_classifier|score|multiple_choice_head|sequence_summary|head|"
                         r"decoder|discriminator_predictions|generator_predictions|generator_lm_head|lm_predictions|"
                         r"mask_predictions|mtp)\.")
_AT_ONCE = 1 << 24  # values compared at a time
Slot = tuple[LeafPath, int | None]  # a leaf, and the layer if it is stacked


def load(network: Network, folder: str, revision: str | None = None, dtype: str = "float32", seed: int = 0,
         quantize: quant.Quantize | None = None, double_quant: bool = True) -> Tree:
    """Return `open_weights` as numpy arrays."""
    return jax.tree.map(np.asarray, open_weights(network, folder, revision, dtype, seed, quantize, double_quant))


def open_weights(network: Network, folder: str, revision: str | None = None, dtype: str = "float32", seed: int = 0,
                 quantize: quant.Quantize | None = None, double_quant: bool = True,
                 processes: ProcessGroup = ProcessGroup(), principal: adapters.PrincipalParts | None = None) -> Tree:
    """Return the weights of a folder or hub id as lazy arrays, with new adapters if the network has them.

    Every leaf must be filled once, and every key of the files must be used, tied, or known to be unneeded. A head that
    a base model lacks is initialised at random and reported.

    Args:
        seed: Seed of randomly initialised parameters.
        quantize: Quantise the leaves of `network.quantised` to this format when they are read.
        double_quant: Also quantise the scales of 4-bit codes.
        processes: The processes that read together.
        principal: Subtracts a principal adapter, which is added later, from the base.

    Raises:
        UserError: Keys are missing, unexpected, or of another shape.
    """
    # Assign each tensor of the files to a slot. Values are not read yet; problems are collected and reported together.
    if network.lora and network.lora.is_principal:
        principal = adapters.PrincipalParts(network, network.lora, network.build.adapted)
    leaves = Leaves(network, jnp.dtype(dtype), quantize, double_quant, processes, principal)
    entries = _list_entries(network)
    quantised: dict[Slot, dict[str, LazyArray]] = {}  # tensors of weights that are saved quantised
    copies: dict[str, tuple[Slot, LazyArray]] = {}
    problems, ignored, borrowed = [], [], _list_borrowed(network)
    tensors = list(_tensors(folder, revision))
    has_parts = network.arch.images is None and any(is_of_text_part(key) for key, _ in tensors)
    for key, value in tensors:
        if has_parts and (key := text_name(key)) is None:
            continue  # of a part of the model that is not loaded
        # A tensor may belong to a quantised weight (codes, scales), or be one expert's part of a stacked matrix.
        owner, tensor_name = mxfp4.split_key(key) or split_key(key)
        owner, part = expert_files.find_leaf(network.family, owner)
        entry = _match(owner, entries, network)
        if entry is None:
            (ignored if _is_unneeded(key) or owner.rpartition(".")[0] in borrowed else problems).append(key)
            continue
        *slot, tied = entry
        slot = tuple(slot)
        if part is not None:
            problems += [f"{key} ({problem})" for problem in leaves.put_part(slot, part, value)]
        elif tensor_name != "weight" or leaves.is_quantised(slot, value):
            quantised.setdefault(slot, {})[tensor_name] = value
            if quantised[slot].keys() == mxfp4.TENSORS:
                problems += [f"{key} ({problem})" for problem in leaves.put_mxfp4(slot, **quantised.pop(slot))]
        elif value.shape != network.shape(slot[0]) and _scores_labels(network, slot[0]):
            ignored.append(key)  # a head with other labels
        elif value.shape != network.shape(slot[0]):
            problems.append(f"{key} {value.shape} (expected {network.shape(slot[0])})")
        elif tied:
            copies[key] = (slot, value)
        elif slot in leaves.filled:
            problems.append(f"{key} (duplicate)")
        else:
            leaves.put(slot, value)
    # The tensors of a weight may be in several files, so it is assembled only now.
    for slot, tensors in quantised.items():
        if mxfp4.TENSORS & tensors.keys():
            continue  # only one of two, so the weight is missing
        leaves.put(slot, from_bitsandbytes(tensors, network.arch.conv1d))
    # If files have only the copy of a tied weight, it is the weight. Otherwise the two are compared below.
    for key, (slot, value) in list(copies.items()):
        if slot not in leaves.filled:
            leaves.put(slot, value)
            del copies[key]
    if HEADS[network.head].vocabulary and network.config.tie_word_embeddings and not network.arch.tied:
        # An adapter unties the two matrices and trains one of them, so the head needs a separate leaf.
        leaves.put((("head", "weight"), None), leaves.values_by_layer["embed", "tokens", "weight"][None])
    missing_head = _check_complete(network, leaves, problems, folder)
    # Compare after the check for completeness, because this reads values.
    for key, ((path, layer), value) in copies.items():
        if not _are_equal(leaves.values_by_layer[path][layer], value.astype(leaves.dtype)):
            raise UserError(f"{folder}: {key} differs from the weight that the configuration ties it to. Set "
                            "tie_word_embeddings: false in its config.json.")
    for line in loading_notes(folder, list(missing_head), [key for key in ignored if not BUFFERS.search(key)]):
        say(line)
    tree = leaves.tree()
    if missing_head:
        # A base model has no head: initialise it.
        head_paths = [path for name, path, _ in network.names(plain=True) if name in missing_head]
        initial = flatten(network.initial_values(seed, leaves.dtype, head_paths))
        if principal is not None:
            initial = {path: principal.residual(path, None, leaf) for path, leaf in initial.items()}
        tree = unflatten(flatten(tree) | initial)
    return adapters.add_adapter(network, tree, seed, principal) if network.lora else tree


class Leaves:
    """Leaves of a network, collected from files; each slot is filled once.

    Args:
        quantize: Quantisation of linear layers and, for 4 bits, experts.
        double_quant: Also quantise the scales of 4-bit codes.
        processes: The processes that read together.
        principal: Splits the matrices before they are quantised.
    """

    def __init__(self, network: Network, dtype: np.dtype, quantize: quant.Quantize | None, double_quant: bool,
                 processes: ProcessGroup, principal: adapters.PrincipalParts | None = None):
        self.network, self.dtype = network, dtype
        self.values_by_layer: dict[LeafPath, dict[int | None, LazyArray | quant.Quantized]] = {}
        self.filled: set[Slot] = set()
        self._quantize, self._double_quant = quantize, double_quant
        self._processes, self._scales, self._principal = processes, Scales(), principal
        self._linear = {(*module.split("."), "weight") for module in network.linears()}
        self._quantised = network.quantised(quantize)
        self._parts: dict[Slot, dict[expert_files.Part, LazyArray]] = {}  # of separately stored experts

    def is_quantised(self, slot: Slot, value: LazyArray) -> bool:
        """Return True if the value is a linear layer's weight in quantised codes."""
        return slot[0] in self._linear and value.dtype in (np.uint8, np.int8)

    def put(self, slot: Slot, value: LazyArray | quant.Quantized) -> None:
        """Fill a slot, quantising the value if the leaf is to be quantised."""
        path, layer = slot
        self.filled.add(slot)
        if isinstance(value, LazyArray):
            value = value.astype(self.dtype)
        if self._principal is not None:
            value = self._principal.residual(path, layer, value)
        if isinstance(value, LazyArray) and path in self._quantised:
            value = quant.quantize(value, self._quantize, self._double_quant, self.network.arch.conv1d, self._processes,
                                   self._scales, slot)
        self.values_by_layer.setdefault(path, {})[layer] = value

    def put_part(self, slot: Slot, part: expert_files.Part, value: LazyArray) -> list[str]:
        """Fill a part of a slot; return the problems with it."""
        shape = self.network.shape(slot[0])
        # Stack the parts once all of them have been read.
        expected = expert_files.list_parts(slot[0][-1], shape[0])
        parts = self._parts.setdefault(slot, {})
        if part not in expected:
            return [f"expected {shape[0]} experts"]
        if part in parts or slot in self.filled:
            return ["duplicate"]
        if value.shape != (part_shape := (shape[1] // part[1], *shape[2:])):
            return [f"{value.shape}, expected {part_shape}"]
        parts[part] = value
        if parts.keys() == expected:
            self.put(slot, expert_files.stack_experts(parts, shape, self.dtype))
        return []

    def put_mxfp4(self, slot: Slot, blocks: LazyArray, scales: LazyArray) -> list[str]:
        """Fill a slot with dequantised MXFP4 codes; return the problems with them."""
        shape = self.network.shape(slot[0])
        if mxfp4.shape(blocks) != shape or blocks.shape[:-1] != scales.shape:
            return [f"codes of {mxfp4.shape(blocks)}, expected {shape}"]
        self.put(slot, mxfp4.values(blocks, scales, self.dtype))
        return []

    def tree(self) -> Tree:
        """Return the tree of all leaves, with stacked layers."""
        return unflatten({path: parts[None] if None in parts else jax.tree.map(
            # Stack layers by index; a leaf outside the layers is stored under None.
            lambda *layers: lazy_array.stack(layers), *(parts[layer] for layer in sorted(parts)))
            for path, parts in self.values_by_layer.items()})


def _are_equal(one: LazyArray, other: LazyArray) -> bool:
    """Return True if two arrays of the same shape are equal; compare some rows at a time, to bound memory."""
    step = max(1, _AT_ONCE * one.shape[0] // one.size)
    return all(np.array_equal(one.read_rows(rows), other.read_rows(rows))
               for rows in (slice(start, start + step) for start in range(0, one.shape[0], step)))


def _check_complete(network: Network, leaves: Leaves, problems: list[str], folder: str) -> set[str]:
    """Return the head's missing names, if the files lack it; raise UserError for other missing or unexpected keys."""
    missing = {name for name, path, layer in network.names(plain=True) if (path, layer) not in leaves.filled}
    head = {name: path for name, path, _ in network.names(plain=True) if path[0] == "head"}
    # The first layers of a head without a vocabulary may come from another head in the files. The rest of the head must
    # then be missing, and is initialised.
    needed = {name for name, path in head.items() if HEADS[network.head].vocabulary or _scores_labels(network, path)}
    missing_head = missing & head.keys() if needed <= missing else set()
    if missing - missing_head or problems:
        raise UserError(f"{folder} does not fit {network.config.model_type} with the {network.head} head. "
                        f"Missing: {some(sorted(missing - missing_head)) or 'nothing'}. "
                        f"Not expected: {some(sorted(problems)) or 'nothing'}. Check its config.json, or download "
                        "it again.")
    return missing_head


def _scores_labels(network: Network, path: LeafPath) -> bool:
    """Return True for the output layer of a head without a vocabulary."""
    return not HEADS[network.head].vocabulary and path[0] == "head" and len(path) == 2


def _list_entries(network: Network) -> dict[str, tuple[LeafPath, int | None, bool]]:
    """Return every key that a file may have, with its leaf, layer, and True if it is a tied copy."""
    entries = {name: (path, layer, False) for name, path, layer in network.names(plain=True)}
    for name, module in network.family.tied.get(network.head, {}).items():
        if name not in entries:
            entries[name] = (tuple(module.split(".")), None, True)
    return entries


def _match(key: str, entries: dict[str, tuple], network: Network) -> tuple[LeafPath, int | None, bool] | None:
    """Return the entry of a key, in current or older spelling: gamma and beta, another base prefix or none."""
    # TensorFlow's names of a norm's parameters, in old BERT files.
    key = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", key))
    for old, current in {**network.family.in_files, **network.family.older}.items():
        key = current + key.removeprefix(old) if key.startswith(old) else key
    bare = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    base = network.family.prefix(network.head)
    return next((entries[name] for name in (key, f"{base}.{bare}", f"{base}.{key}") if name in entries), None)


def _list_borrowed(network: Network) -> set[str]:
    """Return torch's names of keys and values that some files have in layers that borrow those of earlier layers."""
    parts = (network.family.modules.get(f"layers.attn.{part}") for part in ("k", "v", "k_norm"))
    return {network.fill_layer(part, layer, in_base=True) for part in parts if part
            for layer, kind in enumerate(network.arch.kinds) if kind.keys == "borrowed"}


def _is_unneeded(key: str) -> bool:
    bare = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    return bool(BUFFERS.search(key) or OTHER_HEADS.match(key) or OTHER_HEADS.match(bare))


def _tensors(folder: str, revision: str | None) -> Iterator[tuple[str, LazyArray]]:
    """Yield as `_open`; raise UserError for unreadable files, on opening or on reading a lazy array."""
    check_weights(folder)
    tensors = _open(folder, revision)
    while True:
        # Files are opened as the iterator advances, so errors are raised here.
        with reading_weights(folder):
            item = next(tensors, None)
        if item is None:
            return
        key, array = item

        # The default binds this iteration's array: the function is called in later iterations.
        def read(part: Part, array: LazyArray = array) -> np.ndarray:
            with reading_weights(folder):
                return array[part]

        yield key, LazyArray(array.shape, array.dtype, read)


def _open(folder: str, revision: str | None) -> Iterator[tuple[str, LazyArray]]:
    """Yield the name and lazy values of every tensor of a folder or hub id."""
    folder = _download(folder, revision)
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        # A folder may also have other safetensors files; the index lists the model's.
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{folder}: {index.name} lists files that do not exist: {some(missing)}. Download the folder "
                        "again.")
    for file in files:
        yield from lazy_array.lazy_file(file).items()
    if not files:
        yield from _open_pickled(folder)


def _open_pickled(folder: Path) -> Iterator[tuple[str, LazyArray]]:
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"{folder} has no weights: it contains neither model*.safetensors nor pytorch_model*.bin. "
                        "Download it again.")
    # The only use of torch in this engine, for its safe unpickler; imported only for such a folder.
    torch = importlib.import_module("torch")
    for file in files:
        # Files of torch before 1.6 are not zip archives and cannot be memory-mapped.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        for key, tensor in content.items():
            # numpy has no bfloat16, so its bits are passed as int16. The default binds this iteration's tensor.
            def read(part: Part, tensor: Any = tensor) -> np.ndarray:
                tensor = tensor[part].contiguous()
                return (tensor.view(torch.int16).numpy().view(jnp.bfloat16) if tensor.dtype == torch.bfloat16
                        else tensor.numpy())

            # Reading an empty part gives the dtype without values.
            dtype = read((slice(0, 0),) * tensor.ndim).dtype
            yield key, LazyArray(tensor.shape, dtype, read)


def _download(folder: str, revision: str | None) -> Path:
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import snapshot_download

    try:
        with hub.loading("model.pretrained", folder, revision=revision):
            patterns = ["model*.safetensors*", "generation_config.json"]  # an export keeps the second
            # safetensors only; pickled files are downloaded if there are none.
            path = Path(snapshot_download(folder, revision=revision, allow_patterns=patterns))
            if not list(path.glob("model*.safetensors")):
                path = Path(snapshot_download(folder, revision=revision, allow_patterns=["pytorch_model*.bin"]))
                if not list(path.glob("pytorch_model*.bin")):
                    raise FileNotFoundError("it has neither model*.safetensors nor pytorch_model*.bin")
    except (OSError, ValueError) as error:
        raise no_model(folder, error) from error
    return path
