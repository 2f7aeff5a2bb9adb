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
    fitting_adapter,
    left_over,
    mismatch_error,
    modules_in_full,
    not_finite_reason,
    saved_name,
    token_indices,
    trained_rows,
)
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.image_models import OTHERS
from lmmods.core.initialization import row_norms
from lmmods.core.lazy_array import LazyArray
from lmmods.core.principal import Principal, exported_factor, no_whole_weights
from lmmods.core.settings import LoRA

# Names of heads that PEFT records as saved in full for its task types, whatever the model's own head is called.
PEFT_HEADS = {*ANSWER_HEADS, "classifier", "score"}
# Other settings that a PEFT folder may have, and the values with which they have no effect.
NEUTRAL = {"peft_type": "LORA", "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False,
           "layers_to_transform": None, "layer_replication": None, "exclude_modules": None,
           "megatron_config": None, "alora_invocation_tokens": None, "use_qalora": False, "use_bdlora": None,
           "ensure_weight_tying": False}


def adapt(network: Network, lora: LoRA, rows: dict[str, list[int]]) -> None:
    """Add adapters on the targets to a network in place; `modules_to_save` and new heads train in full.

    Args:
        rows: Tokens with trainable rows, by torch's name of their table.

    Raises:
        UserError: A target or module to save matches nothing, or not every layer.
    """
    # Targets are named as in torch, one module per layer; our paths name a module of all layers.
    linear, modules = _map_torch_names(network)
    head = HEADS[network.head]
    # A new head always trains in full, named or not.
    lora = dataclasses.replace(lora, modules_to_save=_exclude_head(network, lora.modules_to_save) or None)
    adapted = adapted_paths(network, lora)
    in_full, matrices = modules_in_full(lora, modules, linear), _find_expert_matrices(network)
    adapted_matrices = _check_every_layer("lora.target_parameters", adapted_parameters(lora, matrices, in_full),
                                          matrices)
    to_save = _check_every_layer("lora.modules_to_save", in_full, modules)
    if any(path.startswith("image") for path in to_save):
        raise UserError("lora.modules_to_save: the JAX engine trains only modules of the language model next to an "
                        "adapter. Remove the others, or use engine: torch.")
    # A module includes those inside it, such as the projection in Gemma 4's router.
    to_save |= {module for module in network.modules() if module.startswith(tuple(
        f"{outer}." for outer in to_save if outer.startswith("layers.")))}
    to_save |= {*network.modules()} & {*head.in_full}
    if overlap := sorted(adapted & to_save):
        raise UserError(f"lora.modules_to_save: {network.torch_modules(overlap[0])[0]} is also among lora.targets. "
                        "Remove it from one of them.")
    tables = {"embed.tokens", "head"} & to_save
    if head.shares_table and tables:
        raise UserError("lora.modules_to_save: the embedding and the output of a masked LM are one matrix, which the "
                        "JAX engine cannot train separately. Remove them, or use engine: torch.")
    if lora.dropout and head.shares_table and "head.dense" in adapted:
        say("lora.dropout applies to the encoder only, not to the head, which computes masked positions of many rows.")
    arch = network.arch
    if head.vocabulary and arch.tied and tables:
        arch = dataclasses.replace(arch, tied=False)  # one of the tied pair trains a copy, as with PEFT
    trained = {modules[name]: tuple(tokens) for name, tokens in rows.items()}
    build = dataclasses.replace(network.build, lora=lora, adapted=frozenset(adapted), rows=trained,
                                adapted_experts=tuple(name for name in MATRICES if name in adapted_matrices))
    network.adapt(arch, build, frozenset(to_save))


def adapted_paths(network: Network, lora: LoRA) -> set[str]:
    """Return our paths of the linear layers that get an adapter. Raises UserError as `adapt`."""
    linear, _ = _map_torch_names(network)
    targets = adapted_layers(lora, linear, network.arch.experts is not None, network.config.model_type)
    return _check_every_layer("lora.targets", targets, linear)


class PrincipalParts:
    """Splits the matrices with a principal adapter into initial A and B and the base's residual, as they are read.

    Args:
        adapted: Our paths of the adapted layers.
    """

    def __init__(self, network: Network, lora: LoRA, adapted: Collection[str]):
        self._network, self._lora = network, lora
        self._paths = {(*module.split("."), "weight") for module in adapted}
        self._parts: dict[LeafPath, dict[int | None, Principal]] = {}  # by layer

    def residual(self, path: LeafPath, layer: int | None, weight: LazyArray | Quantized
                 ) -> LazyArray | Quantized:
        """Return the base's part of a weight; without an adapter, the weight itself."""
        if path not in self._paths:
            return weight
        name = next(name for name, *position in self._network.names(plain=True) if position == [path, layer])
        if isinstance(weight, Quantized):
            raise no_whole_weights(name)
        conv1d = self._network.arch.conv1d
        part = Principal(weight.transposed() if conv1d else weight, self._lora.rank, self._lora.scaling, name,
                         lambda values: np.asarray(values, np.float32), lambda values: values.astype(weight.dtype))
        self._parts.setdefault(path, {})[layer] = part
        return part.residual.transposed() if conv1d else part.residual

    def factors(self) -> dict[LeafPath, np.ndarray]:
        """Return the initial A and B, float32, stacked over all layers."""
        factors = {}
        for path, layers in self._parts.items():
            parts = [layers[layer] for layer in sorted(layers)] if None not in layers else [layers[None]]
            for name, index in (("lora_A", 0), ("lora_B", 1)):
                values = [part.factors[index] for part in parts]
                factors[*path[:-1], name] = values[0] if None in layers else np.stack(values)
        return factors


def trainable_rows(network: Network, lora: LoRA, tokens: list[int]) -> dict[str, list[int]]:
    """Return the rows of new tokens that train alongside an adapter, by torch's name of their table.

    Args:
        network: Without adapters.

    Raises:
        UserError: PEFT cannot train these rows.
    """
    linear, modules = _map_torch_names(network)
    embedding, output = _find_vocabulary_modules(network)
    return trained_rows(tokens, embedding, output, modules_in_full(lora, modules, linear),
                        tied=HEADS[network.head].shares_table or network.arch.tied,
                        has_bias=HEADS[network.head].shares_table or network.arch.head_bias)


def _map_torch_names(network: Network) -> tuple[dict[str, str], dict[str, str]]:
    """Return our path of each torch module: for linear layers, and for all modules."""
    # Add the head: a tied one has no weights, but a recipe may still name it.
    return tuple({name: module for module in modules for name in network.torch_modules(module)}
                 for modules in (network.linears(), {*network.modules(), "head"}))


def _find_vocabulary_modules(network: Network) -> tuple[str, str | None]:
    """Return torch's names of the token embedding and of the output layer; None if its outputs are not tokens."""
    return (network.torch_modules("embed.tokens")[0],
            network.torch_modules("head")[0] if HEADS[network.head].vocabulary else None)


def _exclude_head(network: Network, names: list[str] | None) -> list[str]:
    """Return the names of modules to save, without those of a head that trains in full anyway."""
    head_modules = _find_head_modules(network)
    return [name for name in names or [] if not _matches_any(name, head_modules)]


def _find_head_modules(network: Network) -> set[str]:
    """Return torch's names of the modules of a head that train in full alongside any adapter."""
    return {name for module in HEADS[network.head].in_full if module in network.modules()
            for name in (network.torch_modules(module)[0], network.head_module(module))}


def _matches_any(target: str, names: Collection[str]) -> bool:
    """Return True if a name in a recipe or PEFT's settings matches one of these modules: it is the end of its name."""
    return any(f".{name}".endswith(f".{target}") for name in names)


def _find_expert_matrices(network: Network) -> dict[str, str]:
    """Return `gate_up_proj` or `down_proj` for each torch name of stacked expert matrices, one per layer."""
    modules = network.torch_modules(EXPERTS) if network.arch.experts is not None else []
    return {f"{module}.{name}": name for module in modules for name in MATRICES}


def _check_every_layer(key: str, names: set[str], modules: dict[str, str]) -> set[str]:
    """Return our paths of these torch names, which must cover all layers; `modules` maps torch names to our paths."""
    paths = {modules[name] for name in names}
    for path in sorted(paths):
        in_layers = {name for name, module in modules.items() if module == path}
        if not names >= in_layers:
            name = min(names & in_layers)
            raise UserError(f"{key}: {name} matches in some layers only, but the JAX engine adapts all layers alike. "
                            "Remove the layer index, or use engine: torch.")
    return paths


def add_adapter(network: Network, base: Tree, seed: int, principal: PrincipalParts | None = None) -> Tree:
    """Add new float32 adapters to the base (host arrays): random A, zero B, DoRA's |W|, copies of token rows.

    Args:
        principal: Provides A and B instead; it has split the weights of the base.
    """
    leaves = flatten(base)
    if ("head", "weight") in flatten(network.shapes) and ("head", "weight") not in leaves:
        # An adapter unties the two matrices and trains one of them, so the head needs a separate leaf.
        table = leaves["embed", "tokens", "weight"]
        leaves["head", "weight"] = table.copy() if isinstance(table, np.ndarray) else table
    # Sampled by torch's names of the leaves, so that both engines start from the same adapter.
    factors = [path for path in flatten(network.shapes) if path[-1] in ("lora_A", "lora_B")]
    leaves |= flatten(network.init(seed, paths=factors)) if principal is None else principal.factors()
    for path, shape in flatten(network.shapes).items():
        if path[-1] == TOKEN_ROWS:
            tokens = network.build.rows[".".join(path[:-1])]
            leaves[path] = np.asarray(leaves[(*path[:-1], "weight")])[list(tokens)].astype(np.float32)
        elif path[-1] == "lora_magnitude_vector":
            weight = leaves[(*path[:-1], "weight")]
            # Products use the dequantised weight, so use its norms. Read lazy arrays first.
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
        dtype: Dtype of the written weights; None keeps each weight's dtype.
    """
    folder, lora = Path(folder), network.lora
    folder.mkdir(parents=True, exist_ok=True)
    trained, _ = network.split(params)
    if lora.is_principal:
        lora, leaves = lora.for_export(), flatten(trained)
        for path, first in network.first_factors.items():
            # [..., r, in] and [..., out, r]: the rank is the second last axis of A, and the last axis of B.
            halves = exported_factor(path[-1], np.asarray(leaves[path], np.float32), first.astype(np.float32))
            leaves[path] = np.concatenate(halves, -2 if path[-1] == "lora_A" else -1).astype(leaves[path].dtype)
        trained = unflatten(leaves)
    if dtype is not None:
        trained = jax.tree.map(lambda x: x.astype(dtype), trained)
    save_file({saved_name(name): np.ascontiguousarray(value) for name, value in network.to_torch(trained).items()},
              folder / WEIGHTS, metadata={"format": "pt"})
    adapted = sorted(name for module in network.build.adapted for name in network.torch_modules(module))
    to_save = sorted({network.saved_module(module, index) for module in network.to_save
                      for index in network.stacked_indices(module)})
    rows = {network.torch_modules(module)[0]: list(tokens) for module, tokens in network.build.rows.items()}
    settings = {
        "peft_type": "LORA", "task_type": HEADS[network.head].peft_task, "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_dora": lora.dora,
        "use_rslora": lora.rslora, "target_modules": adapted if lora.targets == "all-linear" else lora.targets,
        "target_parameters": lora.target_parameters, "modules_to_save": to_save or None, "bias": "none",
        "exclude_modules": None if network.arch.images is None else OTHERS,
        "trainable_token_indices": token_indices(rows, _find_vocabulary_modules(network)[0]),
        "fan_in_fan_out": network.arch.conv1d, "init_lora_weights": True, "inference_mode": True}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def adapter_settings(folder: str | Path, network: Network) -> LoRA:
    """Return the settings of the adapter in a PEFT folder.

    Args:
        network: Without adapters.

    Raises:
        UserError: There is no adapter, or the JAX engine does not support its type.
    """
    config, head_modules = adapter_config(folder), _find_head_modules(network)
    if HEADS[network.head].in_full:
        check_head(folder, network.torch_modules("head")[0])
    excluded = config.get("exclude_modules")
    if isinstance(excluded, list) and all(_matches_any(name, head_modules) for name in excluded):
        del config["exclude_modules"]  # the torch engine's, for a head that trains in full; here no head has an adapter
    if network.arch.images is not None and excluded == OTHERS:
        del config["exclude_modules"]
    for name, neutral in NEUTRAL.items():
        if config.get(name, neutral) not in (neutral, None, []):  # PEFT writes an empty list of experts' parameters
            raise _unsupported(folder, name, config[name])
    targets = config.get("target_modules")
    if targets is None and not config.get("target_parameters"):
        raise _unsupported(folder, "target_modules", None)  # PEFT chooses targets by model type
    targets = targets or []
    if isinstance(targets, str) and targets != "all-linear":
        raise UserError(f"model.adapter: {folder}/{SETTINGS} has a pattern as target_modules, {targets!r}, but the JAX "
                        "engine supports only lists of names. Use engine: torch.")
    if isinstance(targets, list):  # PEFT's all-linear may list a head that it then skips, because it trains in full
        linear = _map_torch_names(network)[0]
        targets = [name for name in targets if _matches_any(name, linear)
                   or not _matches_any(name, head_modules) and not (network.arch.images and excluded == OTHERS)]
    # The heads that PEFT records train in full anyway.
    to_save = [name for name in config.get("modules_to_save") or [] if name not in PEFT_HEADS]
    try:
        return LoRA(rank=config.get("r", 8), alpha=config.get("lora_alpha", 8), dropout=config.get("lora_dropout", 0.0),
                    targets=targets, target_parameters=config.get("target_parameters") or None,
                    modules_to_save=to_save or None, dora=config.get("use_dora", False),
                    rslora=config.get("use_rslora", False))
    except UserError as error:  # its message names a key that is not in the recipe
        raise mismatch_error(folder, error) from error


def adapter_rows(network: Network, lora: LoRA, folder: str | Path) -> dict[str, list[int]]:
    """Return the token rows of the adapter in a PEFT folder, by torch's name of their table.

    Args:
        network: Without adapters.
        lora: The adapter's settings.

    Raises:
        UserError: The model lacks these tokens, or the JAX engine does not support such rows.
    """
    check_rows(folder, network.arch.vocab_size)
    saved = adapter_config(folder).get("trainable_token_indices")
    if not saved:
        return {}
    tables = [name for name in _find_vocabulary_modules(network) if name]
    by_key = saved if isinstance(saved, dict) else {tables[0]: saved}
    rows = {next((name for name in tables if name.endswith(key)), key): ids for key, ids in by_key.items()}
    # For tied tables, PEFT records the rows of both; here there is one table.
    if network.arch.tied and len(tables) == len(rows) == 2 and rows[tables[0]] == rows[tables[1]]:
        del rows[tables[1]]
    # `trainable_rows` returns the tables with trainable rows, whatever the tokens are, so any token will do.
    if not rows.keys() <= trainable_rows(network, lora, [0]).keys():
        raise _unsupported(folder, "trainable_token_indices", saved)
    return rows


def load_adapter(network: Network, folder: str | Path) -> Tree:
    """Load the trainable leaves from a PEFT folder, for a network made with its `adapter_settings`.

    Raises:
        UserError: Weights are missing, unexpected, of another shape, or not finite.
    """
    file = adapter_weights(folder)
    if file.name != WEIGHTS:
        raise UserError(f"model.adapter: {folder} has no {WEIGHTS}, and the JAX engine does not support {file.name}. "
                        "Use engine: torch.")
    with fitting_adapter(folder):
        tensors = load_file(file)
    # Report all differences at once, before converting anything.
    expected = {saved_name(name): (name, network.shape(path)) for name, path, _ in network.names()
                if network.trains(path)}
    mismatches = [f"{name} {tensors[name].shape} (expected {shape})" for name, (_, shape) in expected.items()
                  if name in tensors and tensors[name].shape != shape]
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra or mismatches:
        raise mismatch_error(folder, left_over(missing, [*extra, *mismatches]))
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise mismatch_error(folder, not_finite_reason(name))
    return network.from_torch({expected[name][0]: value for name, value in tensors.items()})


def _unsupported(folder: str | Path, name: str, value: object) -> UserError:
    return UserError(f"model.adapter: {folder}/{SETTINGS} has {name}: {value!r}, which the JAX engine does not "
                     "support. Use engine: torch.")
