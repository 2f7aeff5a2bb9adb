"""LoRA adapters: target modules, trainable leaves, loading and saving PEFT folders. The computation is in linear.py."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jax_engine.distributed.tree import Path as LeafPath
from jax_engine.distributed.tree import Tree, flatten, unflatten
from jax_engine.models.experts import MATRICES
from jax_engine.models.heads import HEADS
from jax_engine.models.names import EXPERTS, TOKEN_ROWS
from jax_engine.models.network import Network
from jax_engine.models.quant import Quantized
from lmmods.core.adapters import (
    ANSWER_HEADS,
    SETTINGS,
    WEIGHTS,
    adapted_layers,
    adapted_parameters,
    adapter_config,
    adapter_weights,
    check_head,
    check_rows,
    does_not_fit,
    fitting_adapter,
    left_over,
    modules_in_full,
    no_numbers,
    saved_name,
    token_indices,
    trained_rows,
)
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.initialization import row_norms
from lmmods.core.lazy_array import LazyArray
from lmmods.core.principal import Principal, exported_factor, no_whole_weights
from lmmods.core.settings import LoRA

# Names of heads that PEFT records as saved in full for its task types, whatever the model's own head is called.
PEFT_HEADS = {*ANSWER_HEADS, "classifier", "score"}
# Further settings that a PEFT folder may have, and the values with which they have no effect.
NEUTRAL = {"peft_type": "LORA", "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False,
           "layers_to_transform": None, "layer_replication": None, "exclude_modules": None,
           "megatron_config": None, "alora_invocation_tokens": None, "use_qalora": False, "use_bdlora": None,
           "ensure_weight_tying": False}


def adapt(network: Network, lora: LoRA, rows: dict[str, list[int]]) -> None:
    """Add adapters on the targets to a network in place; `modules_to_save` and new heads train in full.

    Args:
        rows: Tokens whose rows also train, by torch's name of their table.

    Raises:
        UserError: A target or module to save matches nothing, or not every layer.
    """
    # Targets are named as in torch, one module per layer; a path of ours stands for the module in all layers.
    linear, modules = _by_torch_name(network)
    head = HEADS[network.head]
    # A new head always trains in full, named or not.
    lora = dataclasses.replace(lora, modules_to_save=_without_head(network, lora.modules_to_save) or None)
    adapted = adapted_paths(network, lora)
    in_full, matrices = modules_in_full(lora, modules, linear), _matrices_of_experts(network)
    of_experts = _in_every_layer("lora.target_parameters", adapted_parameters(lora, matrices, in_full), matrices)
    to_save = _in_every_layer("lora.modules_to_save", in_full, modules)
    # A module includes those inside it: of Gemma 4's router, its projection.
    to_save |= {inner for inner in network.modules() if inner.startswith(tuple(
        f"{outer}." for outer in to_save if outer.startswith("layers.")))}
    to_save |= {*network.modules()} & {*head.in_full}
    if both := sorted(adapted & to_save):
        raise UserError(f"lora.modules_to_save: {network.torch_modules(both[0])[0]} is also among lora.targets: "
                        "take it out of one of them.")
    ends = {"embed.tokens", "head"} & to_save
    if head.shares_table and ends:
        raise UserError("lora.modules_to_save: the embedding and the output of a masked LM are one matrix, which the "
                        "JAX engine does not train apart. Take them out, or use engine: torch.")
    if lora.dropout and head.shares_table and "head.dense" in adapted:
        say("lora.dropout acts inside the encoder: the head, which sees masked positions of many rows, has none.")
    # A tied pair stays one table unless one of the two trains.
    arch = network.arch
    if head.vocabulary and arch.tied and ends:
        arch = dataclasses.replace(arch, tied=False)  # one of the two trains a copy, as with PEFT
    trained = {modules[name]: tuple(tokens) for name, tokens in rows.items()}
    build = dataclasses.replace(network.build, lora=lora, adapted=frozenset(adapted), rows=trained,
                                adapted_experts=tuple(name for name in MATRICES if name in of_experts))
    network.adapt(arch, build, frozenset(to_save))


def adapted_paths(network: Network, lora: LoRA) -> set[str]:
    """Return our paths of the linear layers that get an adapter. Raises UserError as `adapt`."""
    linear, _ = _by_torch_name(network)
    targets = adapted_layers(lora, linear, network.arch.experts is not None, network.config.model_type)
    return _in_every_layer("lora.targets", targets, linear)


class PrincipalParts:
    """Splits the matrices with a principal adapter as they are read; of each, A and B are the adapter's first values.

    Args:
        adapted: Our paths of the adapted layers.
    """

    def __init__(self, network: Network, lora: LoRA, adapted: Collection[str]):
        self._network, self._lora = network, lora
        self._paths = {(*ours.split("."), "weight") for ours in adapted}
        self._found: dict[LeafPath, dict[int | None, Principal]] = {}  # by layer

    def rest(self, path: LeafPath, layer: int | None, weight: LazyArray | Quantized) -> LazyArray | Quantized:
        """Return what the base keeps of a weight; the weight itself without an adapter."""
        if path not in self._paths:
            return weight
        name = next(name for name, *place in self._network.names(plain=True) if place == [path, layer])
        if isinstance(weight, Quantized):
            raise no_whole_weights(name)
        conv1d = self._network.arch.conv1d
        part = Principal(weight.transposed() if conv1d else weight, self._lora.rank, self._lora.scaling, name,
                         lambda values: np.asarray(values, np.float32), lambda values: values.astype(weight.dtype))
        self._found.setdefault(path, {})[layer] = part
        return part.rest.transposed() if conv1d else part.rest

    def factors(self) -> dict[LeafPath, np.ndarray]:
        """Return the first A and B, float32, of all layers stacked."""
        found = {}
        for path, layers in self._found.items():
            parts = [layers[layer] for layer in sorted(layers)] if None not in layers else [layers[None]]
            for name, place in (("lora_A", 0), ("lora_B", 1)):
                values = [part.factors[place] for part in parts]
                found[*path[:-1], name] = values[0] if None in layers else np.stack(values)
        return found


def rows_beside(network: Network, lora: LoRA, tokens: list[int]) -> dict[str, list[int]]:
    """Return the rows of new tokens that train alongside an adapter, by torch's name of their table.

    Args:
        network: Without adapters.

    Raises:
        UserError: PEFT cannot train these rows.
    """
    linear, modules = _by_torch_name(network)
    embedding, output = _ends(network)
    return trained_rows(tokens, embedding, output, modules_in_full(lora, modules, linear),
                        tied=HEADS[network.head].shares_table or network.arch.tied,
                        has_bias=HEADS[network.head].shares_table or network.arch.head_bias)


def _by_torch_name(network: Network) -> tuple[dict[str, str], dict[str, str]]:
    """Return our path of each torch module: for linear layers, and for all modules."""
    # Add the head: a tied one has no weights of its own, but may still be named.
    return tuple({name: ours for ours in modules for name in network.torch_modules(ours)}
                 for modules in (network.linears(), {*network.modules(), "head"}))


def _ends(network: Network) -> tuple[str, str | None]:
    """Return torch's names of the token embedding and of the output layer, None if it is not one of the vocabulary."""
    return (network.torch_modules("embed.tokens")[0],
            network.torch_modules("head")[0] if HEADS[network.head].vocabulary else None)


def _without_head(network: Network, names: list[str] | None) -> list[str]:
    """Return the names of modules to save without those of a head that trains in full anyway."""
    own = _in_head(network)
    return [name for name in names or [] if not _names_one(name, own)]


def _in_head(network: Network) -> set[str]:
    """Return torch's names of the modules of a head that train in full alongside any adapter."""
    return {name for ours in HEADS[network.head].in_full if ours in network.modules()
            for name in (network.torch_modules(ours)[0], network.head_module(ours))}


def _names_one(target: str, names: Collection[str]) -> bool:
    """Return True if a name of a recipe or of PEFT's settings means one of these modules: it is the end of its name."""
    return any(f".{name}".endswith(f".{target}") for name in names)


def _matrices_of_experts(network: Network) -> dict[str, str]:
    """Return the expert matrix (`gate_up_proj` or `down_proj`) of each torch name of a layer's stacked experts."""
    modules = network.torch_modules(EXPERTS) if network.arch.experts is not None else []
    return {f"{module}.{name}": name for module in modules for name in MATRICES}


def _in_every_layer(key: str, names: set[str], ours: dict[str, str]) -> set[str]:
    """Return our paths of these torch names, which must cover all layers; `ours` maps every torch name."""
    found = {ours[name] for name in names}
    for part in sorted(found):
        in_layers = {name for name, own in ours.items() if own == part}
        if not names >= in_layers:
            name = min(names & in_layers)
            raise UserError(f"{key}: {name} is named in some layers only. The JAX engine adapts all layers alike: "
                            "leave the layer's number out, or use engine: torch.")
    return found


def add_adapter(network: Network, base: Tree, seed: int, principal: PrincipalParts | None = None) -> Tree:
    """Add new float32 adapters to the base (host arrays): random A, zero B, DoRA's |W|, copies of token rows.

    Args:
        principal: Gives A and B instead, of the weights that the base is made of.
    """
    leaves = flatten(base)
    if ("head", "weight") in flatten(network.shapes) and ("head", "weight") not in leaves:
        # An adapter unties the two matrices and trains one of them, so the head needs a leaf of its own.
        table = leaves["embed", "tokens", "weight"]
        leaves["head", "weight"] = table.copy() if isinstance(table, np.ndarray) else table
    # Drawn by torch's names of the leaves, so that both engines start from the same adapter.
    drawn = [path for path in flatten(network.shapes) if path[-1] in ("lora_A", "lora_B")]
    leaves |= flatten(network.init(seed, paths=drawn)) if principal is None else principal.factors()
    for path, shape in flatten(network.shapes).items():
        if path[-1] == TOKEN_ROWS:
            tokens = network.build.rows[".".join(path[:-1])]
            leaves[path] = np.asarray(leaves[(*path[:-1], "weight")])[list(tokens)].astype(np.float32)
        elif path[-1] == "lora_magnitude_vector":
            weight = leaves[(*path[:-1], "weight")]
            # Norms are those of the dequantised weight, which is what the product uses. Lazy parts are read first.
            if isinstance(weight, Quantized):
                weight = jax.tree.map(np.asarray, weight)
            weight = np.asarray(weight.astype(np.float32))
            # [layers, out, in] or a single [out, in] -> one norm per layer and output.
            norms = [row_norms(layer, network.arch.conv1d) for layer in weight.reshape(-1, *weight.shape[-2:])]
            leaves[path] = np.stack(norms).reshape(shape.shape)
    return unflatten(leaves)


def save_adapter(network: Network, params: Tree, folder: str | Path, base: str | None = None,
                 dtype: str | None = None) -> None:
    """Save the trainable parameters as a PEFT folder.

    Args:
        params: The trainable leaves, or the whole tree.
        base: Name of the base model, recorded for PEFT's loaders.
        dtype: Dtype of the written weights; None keeps that of each.
    """
    folder, lora = Path(folder), network.lora
    folder.mkdir(parents=True, exist_ok=True)
    trained, _ = network.split(params)
    if lora.is_principal:
        lora, leaves = lora.of_change(), flatten(trained)
        for path, first in network.first_factors.items():
            # [..., r, in] and [..., out, r]: the rank is the second last axis of A, and the last of B.
            halves = exported_factor(path[-1], np.asarray(leaves[path], np.float32), first.astype(np.float32))
            leaves[path] = np.concatenate(halves, -2 if path[-1] == "lora_A" else -1).astype(leaves[path].dtype)
        trained = unflatten(leaves)
    if dtype is not None:
        trained = jax.tree.map(lambda x: x.astype(dtype), trained)
    save_file({saved_name(name): np.ascontiguousarray(value) for name, value in network.to_torch(trained).items()},
              folder / WEIGHTS, metadata={"format": "pt"})
    adapted = sorted(name for ours in network.build.adapted for name in network.torch_modules(ours))
    to_save = sorted({network.saved_module(ours, place) for ours in network.to_save for place in network.places(ours)})
    rows = {network.torch_modules(ours)[0]: list(tokens) for ours, tokens in network.build.rows.items()}
    settings = {
        "peft_type": "LORA", "task_type": HEADS[network.head].peft_task, "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_dora": lora.dora,
        "use_rslora": lora.rslora, "target_modules": adapted if lora.targets == "all-linear" else lora.targets,
        "target_parameters": lora.target_parameters, "modules_to_save": to_save or None, "bias": "none",
        "trainable_token_indices": token_indices(rows, _ends(network)[0]), "fan_in_fan_out": network.arch.conv1d,
        "init_lora_weights": True, "inference_mode": True}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def adapter_settings(folder: str | Path, network: Network) -> LoRA:
    """Return the settings of the adapter in a PEFT folder.

    Args:
        network: Without adapters.

    Raises:
        UserError: There is no adapter, or it is of a kind that the JAX engine does not support.
    """
    found, own = adapter_config(folder), _in_head(network)
    if HEADS[network.head].in_full:
        check_head(folder, network.torch_modules("head")[0])
    excluded = found.get("exclude_modules")
    if isinstance(excluded, list) and all(_names_one(name, own) for name in excluded):
        del found["exclude_modules"]  # torch's, for a head that trains in full; none has an adapter here
    for name, neutral in NEUTRAL.items():
        if found.get(name, neutral) not in (neutral, None, []):  # PEFT writes an empty list of experts' parameters
            raise _unsupported(folder, name, found[name])
    targets = found.get("target_modules")
    if targets is None and not found.get("target_parameters"):
        raise _unsupported(folder, "target_modules", None)  # PEFT chooses targets by model type
    targets = targets or []
    if isinstance(targets, str) and targets != "all-linear":
        raise UserError(f"model.adapter: {folder}/{SETTINGS} has a pattern as target_modules, {targets!r}; the JAX "
                        "engine takes lists of names. Use engine: torch.")
    if isinstance(targets, list):  # PEFT's all-linear may list a head that it then leaves out, as it trains in full
        linear = _by_torch_name(network)[0]
        targets = [name for name in targets if not _names_one(name, own) or _names_one(name, linear)]
    # Those that PEFT records train in full anyway.
    to_save = [name for name in found.get("modules_to_save") or [] if name not in PEFT_HEADS]
    try:
        return LoRA(rank=found.get("r", 8), alpha=found.get("lora_alpha", 8), dropout=found.get("lora_dropout", 0.0),
                    targets=targets, target_parameters=found.get("target_parameters") or None,
                    modules_to_save=to_save or None, dora=found.get("use_dora", False),
                    rslora=found.get("use_rslora", False))
    except UserError as error:  # names a key that is not in the recipe
        raise does_not_fit(folder, error) from error


def adapter_rows(network: Network, lora: LoRA, folder: str | Path) -> dict[str, list[int]]:
    """Return the token rows of the adapter in a PEFT folder, by torch's name of their table.

    Args:
        network: Without adapters.
        lora: The adapter's settings.

    Raises:
        UserError: The model lacks these tokens, or the JAX engine does not support such rows.
    """
    check_rows(folder, network.config.vocab_size)
    found = adapter_config(folder).get("trainable_token_indices")
    if not found:
        return {}
    ends = [name for name in _ends(network) if name]
    by_key = found if isinstance(found, dict) else {ends[0]: found}
    rows = {next((name for name in ends if name.endswith(key)), key): ids for key, ids in by_key.items()}
    # With tied tables PEFT records the rows of both; here there is one table.
    if network.arch.tied and len(ends) == len(rows) == 2 and rows[ends[0]] == rows[ends[1]]:
        del rows[ends[1]]
    # `rows_beside` names the tables whose rows can train, whichever the tokens are: 0 is a stand-in.
    if not rows.keys() <= rows_beside(network, lora, [0]).keys():
        raise _unsupported(folder, "trainable_token_indices", found)
    return rows


def load_adapter(network: Network, folder: str | Path) -> Tree:
    """Load the trainable leaves from a PEFT folder, for a network made with its `adapter_settings`.

    Raises:
        UserError: Weights are missing, unexpected, of another shape, or not finite.
    """
    file = adapter_weights(folder)
    if file.name != WEIGHTS:
        raise UserError(f"model.adapter: {folder} holds no {WEIGHTS}, and the JAX engine does not read {file.name}. "
                        "Use engine: torch.")
    with fitting_adapter(folder):
        tensors = load_file(file)
    # Report all differences at once, before anything is converted.
    wanted = {saved_name(name): (name, network.shape(path)) for name, path, _ in network.names()
              if network.trains(path)}
    wrong = [f"{name} {tensors[name].shape} (wanted {shape})" for name, (_, shape) in wanted.items()
             if name in tensors and tensors[name].shape != shape]
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra or wrong:
        raise does_not_fit(folder, left_over(missing, [*extra, *wrong]))
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise does_not_fit(folder, no_numbers(name))
    return network.from_torch({wanted[name][0]: value for name, value in tensors.items()})


def _unsupported(folder: str | Path, name: str, value: object) -> UserError:
    return UserError(f"model.adapter: {folder}/{SETTINGS} has {name}: {value!r}, which the JAX engine does not "
                     "support. Use engine: torch.")
