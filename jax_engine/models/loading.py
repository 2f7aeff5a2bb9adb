"""Loading weights of Hugging Face folders, strictly: every key fills one leaf, and every leaf is filled."""

import importlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from tqdm import tqdm

from jax_engine.distributed.tree import Path as LeafPath
from jax_engine.distributed.tree import flatten, unflatten
from jax_engine.models import expert_files, mxfp4, quant
from jax_engine.models import lora as adapters
from jax_engine.models.network import Network, Tree
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hf_config import loading_notes, no_model, some
from lmmods.core.weights_files import check_weights, reading_weights

PREFIXES = ("transformer.", "model.", "bert.", "roberta.", "albert.", "distilbert.", "electra.", "gpt_neox.",
            "deberta.")
# Buffers of older transformers versions: recomputed, never weights.
BUFFERS = re.compile(r"(^|\.)(att(n|ention)\.(masked_)?bias|position_ids|token_type_ids|rotary_emb\.inv_freq|"
                     r"pos_encoding)$")
# Heads of other tasks and poolers, which the networks here do not have.
OTHER_HEADS = re.compile(r"^(pooler|cls|lm_head|qa_outputs|predictions|sop_classifier|vocab_transform|vocab_projector|"
                         r"vocab_layer_norm|classifier|pre_classifier|score|multiple_choice_head|head|decoder|"
                         r"discriminator_predictions|generator_predictions|generator_lm_head|lm_predictions|"
                         r"mask_predictions)\.")
Slot = tuple[LeafPath, int | None]  # a leaf, and the layer where leaves are stacked


def load(network: Network, folder: str, revision: str | None = None, dtype: str = "float32", seed: int = 0,
         quantize: quant.Quantize | None = None, double_quant: bool = True) -> Tree:
    """Weights of a folder or hub id as numpy arrays, with fresh adapters where the network has them.

    Strict: every leaf is filled once, and every key of the files is consumed, tied, or known not to be needed. A head
    that a base model lacks starts at random and is reported. Raises UserError: keys that are missing, left over, or of
    another shape.

    Args:
        seed: Of what starts at random.
        quantize: Keep linear layers in this code, layer by layer, so that the whole model is never there in full.
        double_quant: Quantise the scales of 4-bit codes too.
    """
    leaves = Leaves(network, jnp.dtype(dtype), quantize, double_quant)
    wanted = _wanted(network)
    saved: dict[Slot, dict[str, np.ndarray]] = {}  # pieces of weights that bitsandbytes has quantised
    copies: dict[str, tuple[Slot, np.ndarray]] = {}
    problems, dropped = [], []
    # a bar on terminals only, and only where there is something to wait for
    for key, read in tqdm(_tensors(folder, revision), "loading", unit=" tensors", disable=None, delay=2):
        owner, piece = mxfp4.piece_of(key) or quant.piece_of(key)
        owner, part = expert_files.whole(network.family, owner)
        slot = _match(owner, wanted, network)
        if slot is None:
            (dropped if _needless(key) else problems).append(key)
            continue
        *place, tied = slot
        place, value = tuple(place), read()
        if part is not None:
            problems += [f"{key} ({problem})" for problem in leaves.put_part(place, part, value)]
        elif piece != "weight" or leaves.is_quantised(place, value):
            saved.setdefault(place, {})[piece] = value
            if saved[place].keys() == mxfp4.PIECES:
                problems += [f"{key} ({problem})" for problem in leaves.put_mxfp4(place, **saved.pop(place))]
        elif value.shape != network.shape(place[0]):
            problems.append(f"{key} {value.shape} (the configuration says {network.shape(place[0])})")
        elif tied:
            copies[key] = (place, value)
        elif place in leaves.filled:
            problems.append(f"{key} (a second time)")
        else:
            leaves.put(place, value)
    for place, pieces in saved.items():
        if mxfp4.PIECES & pieces.keys():
            continue  # only one of two, so the weight is missing
        leaves.put(place, quant.from_bitsandbytes(pieces, network.arch.conv1d))
    for place, value in copies.values():
        if place not in leaves.filled:
            leaves.put(place, value)
    if network.head == "causal" and network.config.tie_word_embeddings and not network.arch.tied:
        # An adapter trains one of the two apart, so the other needs a leaf of its own.
        leaves.put((("head", "weight"), None), leaves.arrays["embed", "tokens", "weight"].copy())
    headless = _check_complete(network, leaves, problems, folder)
    for key, ((path, _), value) in copies.items():
        if not np.array_equal(leaves.arrays[path], value.astype(leaves.dtype)):
            raise UserError(f"{folder}: {key} differs from the weight that it is tied to: set tie_word_embeddings: "
                            "false in its config.json.")
    for line in loading_notes(folder, list(headless), [key for key in dropped if not BUFFERS.search(key)]):
        say(line)
    tree = leaves.tree()
    if headless:
        head = [path for name, path, _ in network.names(plain=True) if name in headless]
        tree = unflatten(flatten(tree) | flatten(network.init(seed, leaves.dtype, head)))
    return adapters.add_adapter(network, tree, seed) if network.lora else tree


class Leaves:
    """The leaves of a network as they are filled, each place once.

    Args:
        quantize: Code of the weights of linear layers.
        double_quant: Quantise the scales of 4-bit codes too.
    """

    def __init__(self, network: Network, dtype: np.dtype, quantize: quant.Quantize | None, double_quant: bool):
        self.network, self.dtype = network, dtype
        self.arrays: dict[LeafPath, np.ndarray] = {}
        self.filled: set[Slot] = set()
        self._quantize, self._double_quant = quantize, double_quant
        self._linear = {(*ours.split("."), "weight") for ours in network.linears()}
        self._quantised: dict[LeafPath, dict[int | None, quant.Quantized]] = {}
        self._parts: dict[Slot, set[expert_files.Part]] = {}  # of leaves of experts that files hold one by one

    def is_quantised(self, place: Slot, value: np.ndarray) -> bool:
        """Whether the value of a linear layer comes in codes."""
        return place[0] in self._linear and value.dtype in (np.uint8, np.int8)

    def put(self, place: Slot, value: np.ndarray | quant.Quantized) -> None:
        """Fill a place; plain weights of linear layers are quantised where that is asked for."""
        path, layer = place
        self.filled.add(place)
        if self._quantize and path in self._linear and isinstance(value, np.ndarray):
            value = quant.quantize(value.astype(self.dtype), self._quantize, self._double_quant,
                                   self.network.arch.conv1d)
        if isinstance(value, quant.Quantized):
            self._quantised.setdefault(path, {})[layer] = value
        elif layer is None:
            self.arrays[path] = value.astype(self.dtype)
        else:
            self._layers(path)[layer] = value

    def put_part(self, place: Slot, part: expert_files.Part, value: np.ndarray) -> list[str]:
        """Fill a part of a place. Returns what is wrong with it."""
        path, layer = place
        wanted = expert_files.parts(path[-1], self.network.shape(path)[0])
        found = self._parts.setdefault(place, set())
        if part not in wanted:
            return [f"the configuration says {self.network.shape(path)[0]} experts"]
        if part in found or place in self.filled:
            return ["a second time"]
        target = expert_files.part_of(self._layers(path)[layer], part)
        if value.shape != target.shape:
            return [f"{value.shape}, the configuration says {target.shape}"]
        target[...] = value
        found.add(part)
        if found == wanted:
            self.filled.add(place)
        return []

    def put_mxfp4(self, place: Slot, blocks: np.ndarray, scales: np.ndarray) -> list[str]:
        """Fill a place with the values of MXFP4 codes. Returns what is wrong with them."""
        path, layer = place
        if mxfp4.shape(blocks) != self.network.shape(path) or blocks.shape[:-1] != scales.shape:
            return [f"codes of {mxfp4.shape(blocks)}, the configuration says {self.network.shape(path)}"]
        mxfp4.fill(self._layers(path)[layer], blocks, scales)
        self.filled.add(place)
        return []

    def _layers(self, path: LeafPath) -> np.ndarray:
        """The array of a leaf's layers, filled one by one, so that the peak is one copy."""
        if path not in self.arrays:
            shape = (self.network.num_stacked(path), *self.network.shape(path))
            self.arrays[path] = np.empty(shape, self.dtype)
        return self.arrays[path]

    def tree(self) -> Tree:
        """All of them; quantised layers stacked like the others."""
        stacked = {path: parts[None] if None in parts else jax.tree.map(
            lambda *layers: np.stack(layers), *(parts[layer] for layer in sorted(parts)))
            for path, parts in self._quantised.items()}
        return unflatten(self.arrays | stacked)


def _check_complete(network: Network, leaves: Leaves, problems: list[str], folder: str) -> set[str]:
    """Names of the head that the files lack as a whole; UserError for anything else that is missing or left over."""
    missing = {name for name, path, layer in network.names(plain=True) if (path, layer) not in leaves.filled}
    head = {name: path for name, path, _ in network.names(plain=True) if path[0] == "head"}
    # A head for answer spans may begin with layers that the files have from another head.
    needed = {name for name, path in head.items() if network.head != "qa" or len(path) == 2}
    headless = missing & head.keys() if needed <= missing else set()
    if missing - headless or problems:
        raise UserError(f"{folder} does not fit {network.config.model_type} with the {network.head} head. "
                        f"Missing: {some(sorted(missing - headless)) or 'nothing'}. "
                        f"Not expected: {some(sorted(problems)) or 'nothing'}.")
    return headless


def _wanted(network: Network) -> dict[str, tuple[LeafPath, int | None, bool]]:
    """Every key that a file may have: its leaf, layer, and whether it is a tied copy."""
    wanted = {name: (path, layer, False) for name, path, layer in network.names(plain=True)}
    for name, ours in network.family.tied.get(network.head, {}).items():
        if name not in wanted:
            wanted[name] = (tuple(ours.split(".")), None, True)
    return wanted


def _match(key: str, wanted: dict[str, tuple], network: Network) -> tuple[LeafPath, int | None, bool] | None:
    """The slot of a key, in today's spelling or an older one: gamma and beta, another prefix of the base or none."""
    key = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", key))
    for older, now in network.family.older.items():
        key = now + key.removeprefix(older) if key.startswith(older) else key
    bare = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    base = network.family.prefix(network.head)
    return next((wanted[name] for name in (key, f"{base}.{bare}", f"{base}.{key}") if name in wanted), None)


def _needless(key: str) -> bool:
    bare = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    return bool(BUFFERS.search(key) or OTHER_HEADS.match(key) or OTHER_HEADS.match(bare))


def _tensors(folder: str, revision: str | None) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """As `_open`; UserError for files that cannot be read."""
    check_weights(folder)
    tensors = _open(folder, revision)
    while True:
        with reading_weights(folder):
            found = next(tensors, None)
        if found is None:
            return
        yield found


def _open(folder: str, revision: str | None) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield (key, function that reads it) of every tensor of a folder or hub id."""
    folder = _local(folder, revision)
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    if lost := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{folder}: {index.name} names files that are not there: {some(lost)}.")
    for file in files:
        with safe_open(file, "numpy") as tensors:
            for key in tensors.keys():
                yield key, lambda tensors=tensors, key=key: tensors.get_tensor(key)
    if not files:
        yield from _open_pickled(folder)


def _open_pickled(folder: Path) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"{folder} holds neither model*.safetensors nor pytorch_model*.bin: it has no weights.")
    # The only use of torch in this engine: nothing else reads its pickles safely. Imported only for such a folder.
    torch = importlib.import_module("torch")
    for file in files:
        # Files of torch before 1.6 are no zip and cannot be mapped.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        for key, tensor in content.items():
            yield key, lambda tensor=tensor: (tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
                                              if tensor.dtype == torch.bfloat16 else tensor.numpy())


def _local(folder: str, revision: str | None) -> Path:
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import snapshot_download

    try:
        wanted = ["model*.safetensors*", "generation_config.json"]  # of the second, what an export keeps
        path = Path(snapshot_download(folder, revision=revision, allow_patterns=wanted))
        if not list(path.glob("model*.safetensors")):
            path = Path(snapshot_download(folder, revision=revision, allow_patterns=["pytorch_model*.bin"]))
    except (OSError, ValueError) as error:
        raise no_model(folder, error) from error
    return path
