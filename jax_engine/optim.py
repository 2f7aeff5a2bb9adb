"""Optimisers by the names in `lmmods.core.optimizers`, matching torch, transformers and bitsandbytes step for step.

Everything that depends only on the step (learning rate, bias corrections) is computed on the host in float64 and passed
as a scalar. In float32, `1 - 0.999**1` is off by 5e-5, which would be the largest difference between two otherwise
equal runs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jax_engine.distributed.tree import Path, Tree, flatten, is_stacked, unflatten
from lmmods.core.errors import UserError
from lmmods.core.settings import NS_COEFFICIENTS, NS_EPS, Optimizer

Slots = dict[str, Array]
B_PREFIX = "lora_B/"
AVERAGE = "ema"  # slot of the average of a parameter


class Rule(NamedTuple):
    """Update rule for a single parameter (not a stack of layers).

    Args:
        slots: Parameter -> its initial optimiser state.
        update: (gradient float32, parameter float32, state, decay, scalars) -> change of the parameter, new state.
            `decay` is the parameter's weight decay.
        scalars: (step, from 1; learning rate) -> the step's scalars.
    """

    slots: Callable[[Array], Slots]
    update: Callable[[Array, Array, Slots, float, dict[str, Array]], tuple[Array, Slots]]
    scalars: Callable[[int, float], dict[str, float]]


def build(settings: Optimizer, decays: Tree, depths: Tree | None = None) -> optax.GradientTransformationExtraArgs:
    """Return the optimiser of `settings`; its `update` takes the step's scalars as extra arguments.

    Args:
        decays: True for each parameter with weight decay, that is, for matrices (`Network.decays`). A parameter with
            one more dimension is a stack of layers, which are updated as separate parameters, except for convolutions
            outside the layers.
        depths: Depth of each parameter (`settings.depth`), or of each layer of a stack; needed for `layer_decay`.

    Raises:
        UserError: The optimiser is one of bitsandbytes' (8-bit or paged).
    """
    rule, has_decay = select_rule(settings), flatten(decays)
    matrix_rule = _muon(settings) if settings.spec.has_matrix_rule else rule
    depth_of = None if settings.layer_decay == 1 else flatten(depths)

    def rule_for(path: Path) -> Rule:
        return matrix_rule if has_decay[path] and in_hidden_matrix(path) else rule

    # Matrices decay and vectors do not, so `has_decay` implies the number of dimensions of a single parameter.
    def is_stack(path: Path, param: Array) -> bool:
        return path[0] not in ("embed", "images") and param.ndim > (2 if has_decay[path] else 1)

    def init(params: Tree) -> Tree:
        params_of = flatten(params)
        slots = {path: (jax.vmap(rule_for(path).slots) if is_stack(path, p) else rule_for(path).slots)(p)
                 for path, p in params_of.items()}
        if settings.ema_decay is not None:
            slots = {path: {**param_slots, AVERAGE: params_of[path].astype(jnp.float32)}
                     for path, param_slots in slots.items()}
        return _by_slot(slots)

    def update(gradients: Tree, state: Tree, params: Tree, **scalars: Array) -> tuple[Tree, Tree]:
        states, updates, slots = _by_path(state), {}, {}
        flat_gradients = flatten(gradients)
        for path, param in flatten(params).items():
            decay = settings.weight_decay if has_decay[path] else 0.0

            param_scalars = {name: scalars.get(f"{B_PREFIX}{name}", value) for name, value in scalars.items()
                             } if path[-1] == "lora_B" else scalars
            if depth_of is not None:
                param_scalars = {name: value[np.array(depth_of[path])] for name, value in param_scalars.items()}

            # In float32; slots are cast back to their stored dtype. The defaults bind this iteration's values.
            def update_param(gradient, param, state, scalars, decay=decay, rule=rule_for(path)):
                wide = {name: value.astype(jnp.float32) for name, value in state.items()}
                average = wide.pop(AVERAGE, None)
                change, new = rule.update(gradient.astype(jnp.float32), param.astype(jnp.float32), wide, decay, scalars)
                if average is not None:
                    new = {**new, AVERAGE: _lerp(average, optax.apply_updates(param, change), scalars["ema_weight"])}
                return change, {name: value.astype(state[name].dtype) for name, value in new.items()}

            # Layer by layer, since Adafactor averages over a parameter: a stack would mix its layers' statistics.
            by_layer = (0, 0, 0, None if depth_of is None else 0)
            step = jax.vmap(update_param, in_axes=by_layer) if is_stack(path, param) else update_param
            updates[path], slots[path] = step(flat_gradients[path], param, states.get(path, {}), param_scalars)
        return unflatten(updates), _by_slot(slots)

    return optax.GradientTransformationExtraArgs(init, update)


def _lerp(average: Array, param: Array, weight: Array) -> Array:
    """Return the average moved towards a parameter by the fraction `weight`, as torch.lerp computes it."""
    param = param.astype(jnp.float32)
    distance = param - average
    return jnp.where(weight < 0.5, average + weight * distance, param - distance * (1 - weight))


def in_hidden_matrix(path: Path) -> bool:
    """Return `is_hidden_matrix` for the path of a leaf that decays."""
    return is_stacked(path) and "conv" not in path and not ("experts" in path and path[-1].startswith("lora_"))


def step_scalars(settings: Optimizer, step: int, num_steps: int, num_layers: int = 0
                 ) -> dict[str, np.float32 | np.ndarray]:
    """Return the scalars of optimiser step `step` (from 0) of `num_steps`, including `lr`.

    If the B matrices of adapters have another learning rate, their scalars have names that start with `B_PREFIX`. With
    `layer_decay`, each scalar is an array [num_layers + 2] with a value per depth.
    """
    rate, ratios = settings.lr_at(step, num_steps), {"": 1.0}
    if settings.b_lr_ratio != 1:
        ratios[B_PREFIX] = settings.b_lr_ratio
    all_scalars: dict[str, np.float32 | np.ndarray] = {}
    for prefix, ratio in ratios.items():
        # In this order it rounds as torch does.
        rates = [rate if ratio * scale == 1 else settings.lr * ratio * scale * (rate / (settings.lr or 1.0))
                 for scale in settings.scales(num_layers)]
        by_depth = [{"lr": lr, **select_rule(settings).scalars(step + 1, lr)} for lr in rates]
        if settings.ema_decay is not None:  # the average starts with the result of the first step
            by_depth = [{**scalars, "ema_weight": 1 - settings.ema_decay if step else 1.0} for scalars in by_depth]
        for name in by_depth[0]:
            values = np.array([scalars[name] for scalars in by_depth], np.float32)
            all_scalars[prefix + name] = values[0] if settings.layer_decay == 1 else values
    return all_scalars


def select_rule(settings: Optimizer) -> Rule:
    """Return the update rule of `settings`; for `muon`, the rule of parameters that are not matrices of a layer."""
    if settings.name not in RULES:
        raise UserError(f"optimizer.name is {settings.name}, which the JAX engine does not support. Use one of "
                        f"{', '.join(RULES)}, or engine: torch.")
    return RULES[settings.name](settings)


def _adamw(settings: Optimizer) -> Rule:
    """AdamW (Loshchilov & Hutter 2019), in the order of torch's fused kernel."""
    beta1, beta2 = settings.betas

    def update(gradient, param, state, decay, scalars):
        mean = beta1 * state["exp_avg"] + (1 - beta1) * gradient
        square = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
        # Bias corrections as in torch: of the root here, of the mean in `step_size` = lr / (1 - beta1^step).
        root = jnp.sqrt(square) / scalars["bias2_root"] + settings.eps
        change = -(scalars["lr"] * decay) * param - scalars["step_size"] * mean / root
        return change, {"exp_avg": mean, "exp_avg_sq": square}

    # As in torch, slots have the dtype of their parameter.
    return Rule(lambda p: {"exp_avg": jnp.zeros_like(p), "exp_avg_sq": jnp.zeros_like(p)}, update,
                lambda step, lr: {"step_size": lr / (1 - beta1**step), "bias2_root": math.sqrt(1 - beta2**step)})


def _adafactor(_settings: Optimizer) -> Rule:
    """Adafactor (Shazeer & Stern 2018) with the recipe's learning rate, as transformers' Trainer sets it up."""

    def slots(param):
        if param.ndim < 2:
            return {"exp_avg_sq": jnp.zeros(param.shape, jnp.float32)}
        return {"exp_avg_sq_row": jnp.zeros(param.shape[:-1], jnp.float32),
                "exp_avg_sq_col": jnp.zeros((*param.shape[:-2], param.shape[-1]), jnp.float32)}

    def update(gradient, param, state, decay, scalars):
        def average(old, new):
            return scalars["beta2"] * old + scalars["one_minus_beta2"] * new

        square = gradient * gradient + 1e-30
        if "exp_avg_sq" in state:
            new = {"exp_avg_sq": average(state["exp_avg_sq"], square)}
            change = jax.lax.rsqrt(new["exp_avg_sq"]) * gradient
        else:
            row = average(state["exp_avg_sq_row"], square.mean(-1))
            col = average(state["exp_avg_sq_col"], square.mean(-2))
            new = {"exp_avg_sq_row": row, "exp_avg_sq_col": col}
            # The second moment is estimated by rows and columns, as row * col / mean(row): [out, 1] times [1, in].
            factors = jax.lax.rsqrt(row / row.mean(-1, keepdims=True))[..., None] * jax.lax.rsqrt(col)[..., None, :]
            change = factors * gradient
        # Update clipping, with threshold 1 (section 6 of the paper).
        rms = jnp.sqrt(jnp.mean(change * change))
        change = change / jnp.maximum(rms, 1.0)
        decayed = param - (scalars["lr"] * decay) * param
        return (decayed - scalars["lr"] * change) - param, new  # decay first: rounds as transformers does

    # Both are passed: 1 - beta2 in float32 would lose digits.
    return Rule(slots, update, lambda step, _: {"beta2": 1 - step**-0.8, "one_minus_beta2": step**-0.8})


def _sgd(settings: Optimizer) -> Rule:
    """torch's SGD. Weight decay is part of the gradient, and so of the momentum."""

    def update(gradient, param, state, decay, scalars):
        gradient = gradient + decay * param
        if settings.momentum:
            # torch starts the buffer with the first gradient, which zeros give as well without dampening.
            gradient = settings.momentum * state["momentum_buffer"] + gradient
            state = {"momentum_buffer": gradient}
        return -scalars["lr"] * gradient, state

    return Rule(lambda p: {"momentum_buffer": jnp.zeros_like(p)} if settings.momentum else {}, update, lambda *_: {})


def _lion(settings: Optimizer) -> Rule:
    """Lion (Chen et al. 2023), with the state of bitsandbytes' Lion32bit."""
    beta1, beta2 = settings.betas

    def update(gradient, param, state, decay, scalars):
        # The sign is of an average with beta1, while the stored moment decays with beta2.
        moment = state["state1"]
        change = -(scalars["lr"] * decay) * param - scalars["lr"] * jnp.sign(beta1 * moment + (1 - beta1) * gradient)
        return change, {"state1": beta2 * moment + (1 - beta2) * gradient}

    return Rule(lambda p: {"state1": jnp.zeros(p.shape, jnp.float32)}, update, lambda *_: {})


def _muon(settings: Optimizer) -> Rule:
    """Muon (Jordan et al. 2024) as in torch.optim.Muon, for a matrix [A, B] or a stack of experts [E, A, B]."""
    momentum, dtype = settings.muon_momentum, jnp.dtype(settings.ns_dtype)

    def update(gradient, param, state, decay, scalars):
        mean = momentum * state["momentum_buffer"] + (1 - momentum) * gradient
        ahead = momentum * mean + (1 - momentum) * gradient if settings.nesterov else mean
        factor = settings.muon_factor(*param.shape[-2:])
        change = orthogonalize(ahead, settings.ns_steps, dtype).astype(jnp.float32)
        return -(scalars["lr"] * decay) * param - (scalars["lr"] * factor) * change, {"momentum_buffer": mean}

    return Rule(lambda p: {"momentum_buffer": jnp.zeros_like(p)}, update, lambda *_: {})


RULES: dict[str, Callable[[Optimizer], Rule]] = {"adamw": _adamw, "adafactor": _adafactor, "sgd": _sgd, "lion": _lion,
                                                 "muon": _adamw}  # matrices of layers use `_muon`


def orthogonalize(matrix: Array, num_steps: int, dtype: jnp.dtype) -> Array:
    """Return approximately U V^T for matrices U S V^T [..., A, B], by the Newton-Schulz iterations of Muon.

    As in torch, results have `dtype`, while products are summed in float32.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if is_tall else matrix).astype(dtype)
    wide = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(wide * wide, axis=(-2, -1), keepdims=True)).astype(dtype)
    x = x / jnp.maximum(norm, NS_EPS).astype(dtype)
    # Without "highest" GPUs and TPUs would round float32 factors to fewer bits.
    multiply = partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32)
    a, b, c = NS_COEFFICIENTS
    for _ in range(num_steps):
        gram = multiply(x, x.mT).astype(dtype)
        polynomial = (b * gram.astype(jnp.float32) + c * multiply(gram, gram)).astype(dtype)
        x = (a * x.astype(jnp.float32) + multiply(polynomial, x)).astype(dtype)
    return x.mT if is_tall else x


def _by_slot(slots: dict[Path, Slots]) -> Tree:
    """Convert {path: {slot: array}} to {slot: tree}."""
    return unflatten({(name, *path): value for path, state in slots.items() for name, value in state.items()})


def _by_path(state: Tree) -> dict[Path, Slots]:
    """Convert {slot: tree} to {path: {slot: array}}, the inverse of `_by_slot`."""
    by_path: dict[Path, Slots] = {}
    for (name, *path), value in flatten(state).items():
        by_path.setdefault(tuple(path), {})[name] = value
    return by_path
