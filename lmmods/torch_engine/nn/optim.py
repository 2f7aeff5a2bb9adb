"""Optimisers and learning-rate schedules, by the names in `lmmods.core.optimizers`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from lmmods.core.console import say
from lmmods.core.settings import NS_COEFFICIENTS, NS_EPS, Optimizer, num_layers
from lmmods.torch_engine.compat.torch import is_plain
from lmmods.torch_engine.nn import sharding


def build_optimizer(named_params: Iterable[tuple[str, nn.Parameter]], settings: Optimizer) -> torch.optim.Optimizer:
    """Build the optimiser of the trainable parameters among `named_params`.

    Weight decay applies to matrices, not to biases and norms; each parameter is in one group (`Optimizer.group_of`).
    """
    named_params = list(named_params)
    optimizer = _build(named_params, settings)
    return optimizer if settings.ema_decay is None else keep_average(optimizer, settings.ema_decay)


def _build(named_params: list[tuple[str, nn.Parameter]], settings: Optimizer) -> torch.optim.Optimizer:
    layers = num_layers(name for name, _ in named_params)
    groups = [{"params": [], **options} for options in settings.groups(layers)]
    for name, param in named_params:
        if param.requires_grad:
            groups[settings.group_of(name, param.ndim, layers)]["params"].append(param)
    for index, group in enumerate(groups):
        if settings.is_of_muon(index, layers):
            group.update(settings.muon_options)
    return FACTORIES[settings.name]([group for group in groups if group["params"]], settings)


AVERAGE = "ema"  # key in the state of a parameter


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> torch.optim.Optimizer:
    """Make an optimiser keep the exponential moving average of each parameter, in float32, in its state.

    As in torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn, it starts with the first step's result.
    """
    @torch.no_grad()
    def update(*_: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            # A parameter without gradient has not changed, and its optimiser must see an empty state as new.
            if param.grad is None:
                continue
            state = optimizer.state[param]
            if AVERAGE in state:
                state[AVERAGE].lerp_(param.float(), 1 - decay)
            else:
                state[AVERAGE] = param.detach().to(torch.float32, copy=True)

    optimizer.register_step_post_hook(update)
    return _keep_dtypes(optimizer, AVERAGE)


@contextmanager
def averages(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set parameters to their averages, if they have one, and restore their values afterwards."""
    # Not in inference mode, which does not count changes of tensors, so that cached casts of them would be stale.
    with torch.inference_mode(False), torch.no_grad():
        originals = {param: param.detach().clone() for param, state in optimizer.state.items() if AVERAGE in state}
        for param in originals:
            param.copy_(optimizer.state[param][AVERAGE])
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for param, value in originals.items():
                param.copy_(value)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for all other parameters.

    The update of torch.optim.Muon, which only computes in bfloat16 and does not support stacks of matrices. State and
    groups are as in torch's two optimisers.

    Args:
        groups: Groups with `Optimizer.muon_options` have matrices [A, B] and stacks of matrices [E, A, B].
    """

    def __init__(self, groups: list[dict[str, Any]], settings: Optimizer) -> None:
        self._settings = settings
        super().__init__(groups, {"lr": settings.lr})
        # AdamW adds its defaults to these groups; `step` passes it the groups of a loaded checkpoint.
        others = [group for group in self.param_groups if "ns_steps" not in group]
        self._adamw = _adamw(others or [{"params": []}], settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, after computing loss and gradients with `closure`; return its result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"] if "ns_steps" in group else ():
                if param.grad is not None:
                    self._move(param, group)
        self._adamw.param_groups = [group for group in self.param_groups if "ns_steps" not in group]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _move(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        mean = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
        update = param.grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        update = orthogonalize(update, group["ns_steps"], getattr(torch, self._settings.ns_dtype))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * self._settings.muon_factor(*param.shape[-2:]))


def orthogonalize(matrix: torch.Tensor, num_steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return about U V^T for matrices U S V^T, [..., A, B]: the Newton-Schulz iterations of Muon, computed in `dtype`.

    Singular values become about 1, between 0.7 and 1.2, not exactly 1.
    """
    x = matrix.to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    # As in `total_norm`, norms of rows first. The singular values are then at most 1.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32), dim=-1)
    x = x / norm[..., None, None].to(dtype).clamp(min=NS_EPS)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    a, b, c = NS_COEFFICIENTS
    for _ in range(num_steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together, accurate to float32 rounding.

    Norms of rows are computed first: on a CPU torch sums the squares of a whole matrix sequentially, with an
    error of up to 3e-3 for an embedding of 50,000 tokens (torch 2.13).
    """
    meshes = {grad.device_mesh for grad in grads if isinstance(grad, DTensor)}
    if len(meshes) < 2:
        return torch.nn.utils.get_total_norm([_row_norms(grad) for grad in grads])
    # torch does not combine norms of DTensors on several meshes, so sum squares of local shards. Every process that has
    # a shard counts it, hence the division by the number of copies.
    squares = [torch.nn.utils.get_total_norm([_row_norms(sharding.local(grad))]).square() / sharding.num_copies(grad)
               for grad in grads]
    total = torch.stack(squares).sum()
    torch.distributed.all_reduce(total)
    return total.sqrt()


def _row_norms(grad: torch.Tensor) -> torch.Tensor:
    # Accumulated in float32 also for 16-bit gradients.
    return torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float32) if grad.ndim > 1 else grad


def build_schedule(optimizer: torch.optim.Optimizer, settings: Optimizer, num_steps: int) -> LambdaLR:
    """Return `Optimizer.lr_at` as a torch scheduler, stepped once per optimiser step."""
    peak = settings.lr or 1.0  # avoids division by 0; with lr 0 every factor is 0
    return LambdaLR(optimizer, lambda step: settings.lr_at(step, num_steps) / peak)


def recipe_lr(optimizer: torch.optim.Optimizer, settings: Optimizer) -> float:
    """Return the recipe's learning rate at this step; the groups' rates are multiples of it."""
    group = optimizer.param_groups[0]
    peak = group.get("initial_lr", settings.lr)  # set by a schedule
    return group["lr"] if peak == settings.lr else group["lr"] / peak * settings.lr


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group, without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def follow_recipe(optimizer: torch.optim.Optimizer, schedule: LambdaLR, settings: list[dict[str, Any]]) -> None:
    """Restore the recipe's settings and schedule after loading a checkpoint, which also contains settings.

    Args:
        settings: The `group_settings` of the recipe's optimiser, from before the checkpoint was loaded.
    """
    for index, values in enumerate(settings):
        # The recipe's factor at the checkpoint's step. `lr` is set too, as the scheduler only does so at its next step.
        group, factor = optimizer.param_groups[index], schedule.lr_lambdas[index](schedule.last_epoch)
        group.update(values, initial_lr=values["lr"], lr=values["lr"] * factor)
        schedule.base_lrs[index] = values["lr"]


# ---------------------------------------------------------------------------------------------------------------------
# Factories: build an optimiser from parameter groups and settings.

def _adamw(groups: list[dict[str, Any]], settings: Optimizer) -> torch.optim.Optimizer:
    # The fused kernel is for floating-point plain tensors on CPU or CUDA.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() and is_plain(p.data)
                for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=settings.lr, fused=fused, **settings.options)


def _sgd(groups: list[dict[str, Any]], settings: Optimizer) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.lr, **settings.options)


def _adafactor(groups: list[dict[str, Any]], settings: Optimizer) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    # As in transformers' Trainer: use the recipe's learning rate, not Adafactor's relative one.
    return _keep_dtypes(Adafactor(groups, lr=settings.lr, scale_parameter=False, relative_step=False))


def _keep_dtypes(optimizer: torch.optim.Optimizer, *keys: str) -> torch.optim.Optimizer:
    """Make `load_state_dict` keep the saved dtypes, for all tensors of the state or for these keys.

    torch casts the state to the parameters' dtypes, but bfloat16 parameters may have float32 state.
    """
    loaded: dict[str, Any] = {}

    def put_back(_: torch.optim.Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, values in loaded.pop("state").items():
            optimizer.state[params[index]] |= {key: value.to(params[index].device, copy=True)
                                               for key, value in values.items()
                                               if torch.is_tensor(value) and (not keys or key in keys)}

    optimizer.register_load_state_dict_pre_hook(lambda _, saved: loaded.update(state=saved["state"]))
    optimizer.register_load_state_dict_post_hook(put_back)
    return optimizer


def _bitsandbytes(groups: list[dict[str, Any]], settings: Optimizer, name: str) -> torch.optim.Optimizer:
    import bitsandbytes as bnb

    if name.startswith("Paged") and not torch.cuda.is_available():
        say(f"optimizer.name {settings.name}: without a GPU there is no paging; the state stays in host memory.")
    return getattr(bnb.optim, name)(groups, lr=settings.lr, **settings.options)


FACTORIES: dict[str, Callable[[list[dict[str, Any]], Optimizer], torch.optim.Optimizer]] = {
    "adamw": _adamw, "adafactor": _adafactor, "sgd": _sgd, "muon": Muon,
    "lion": partial(_bitsandbytes, name="Lion32bit"),
    "adamw_8bit": partial(_bitsandbytes, name="AdamW8bit"),
    "lion_8bit": partial(_bitsandbytes, name="Lion8bit"),
    "sgd_8bit": partial(_bitsandbytes, name="SGD8bit"),
    "paged_adamw_32bit": partial(_bitsandbytes, name="PagedAdamW32bit"),
    "paged_adamw_8bit": partial(_bitsandbytes, name="PagedAdamW8bit"),
    "paged_lion_8bit": partial(_bitsandbytes, name="PagedLion8bit"),
}
