"""Dropout by token instead of by draw, in any network of transformers and PEFT: see `core.dropout`.

A module of torch's Dropout is given another forward. What other modules call, torch's functions `dropout` and
`scaled_dot_product_attention`, are others while such a module's forward runs, so the site is the module that calls.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.console import say
from lmmods.core.dropout import site_seed
from lmmods.torch_engine.compat.transformers import attention_of
from lmmods.torch_engine.nn.attention import FLOAT32, VARLEN
from lmmods.torch_engine.nn.dropout_masks import Dropped, attention_mask, feature_mask

_dropout, _attention = F.dropout, F.scaled_dot_product_attention
ATTENTION = ("eager", "sdpa", FLOAT32, VARLEN)  # what calls torch's functions, or has no dropout
MODULES_ONLY = {"torch", "peft", "bitsandbytes"}  # packages whose modules call no function for dropout
_PEFT = re.compile(r"^base_model\.model\.|\.modules_to_save\.[^.]+|(?<=\.lora_dropout)\.[^.]+")


class TokenDropout:
    """The dropout of one network: whose tokens are passing through, and what was dropped of them already.

    Args:
        compiled: Whether the layers will be compiled: what draws masks and what attends then is left out of that.
    """

    def __init__(self, model: nn.Module, compiled: bool = False):
        self._tokens: Tensor | None = None  # [B, T] int32
        self.own: Callable[[Tensor], Tensor] = lambda tokens: tokens  # those of this process, where rows are cut
        self._calls: dict[str, int] = {}
        self._is_off = False
        self._told: set[str] = set()
        self.has_sites = False
        own_code = any(_package(module) not in MODULES_ONLY | {"transformers", "lmmods"} for module in model.modules())
        calls_functions = has_rates(model.config) or own_code
        if compiled:
            self._drop = torch.compiler.disable(self._drop)
        for name, module in model.named_modules():
            name = _PEFT.sub("", name)
            if isinstance(module, nn.Dropout):
                self.has_sites |= module.p > 0
                module.forward = partial(self._module_forward, module, name)
            elif calls_functions and _package(module) not in MODULES_ONLY and not (compiled and _is_plain(module)):
                self.has_sites = True
                forward = _FunctionsReplaced(self, module, name)
                module.forward = torch.compiler.disable(forward) if compiled else forward
            if hasattr(module, "pos_dropout") and hasattr(module, "disentangled_attention_bias"):
                self._spare_table(module)
        if attention_of(model) not in ATTENTION and has_rates(model.config, "att"):
            self._tell(f"Dropout: {attention_of(model)} draws that of attention itself, so masks depend on how rows "
                       "are cut into batches. With model.attention: sdpa they do not.")
        model.token_dropout = self

    def _spare_table(self, module: nn.Module) -> None:
        """No dropout in DeBERTa's table of relative positions, whose rows are no token's but all rows'."""
        module.pos_dropout.p = 0.0  # before, of the table; within the scores an adapter has dropout too
        # A partial, unlike a function within this one, is copied with the network.
        module.disentangled_attention_bias = partial(self._without, module.disentangled_attention_bias)

    def _without(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        with self.off():
            return function(*args)

    @classmethod
    def of(cls, model: nn.Module) -> "TokenDropout | None":
        """The one that was built for a network."""
        return getattr(model, "token_dropout", None)

    def begin(self, batch: dict[str, Tensor]) -> None:
        """The next forward pass is of this batch, and so is the backward pass behind it."""
        seeds = batch.get("token_seeds")
        self._tokens, self._calls = None if seeds is None else self.own(seeds).flatten(0, -2).int(), {}
        if seeds is None and self.has_sites:
            self._tell("Dropout: the batches have no token_seeds, so masks depend on how rows are cut into batches.")

    @contextmanager
    def off(self) -> Iterator[None]:
        """While a part of the network runs that has no dropout."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def contexts(self) -> tuple[Any, Any]:
        """Around a block under gradient checkpointing, and around its second run, which gets the first one's masks."""
        return nullcontext(), _Again(self, self._tokens, dict(self._calls))

    def swap(self, tokens: Tensor | None, calls: dict[str, int]) -> tuple[Tensor | None, dict[str, int]]:
        """Go on with other tokens and calls; returns those there were."""
        before = self._tokens, self._calls
        self._tokens, self._calls = tokens, calls
        return before

    # What modules call -----------------------------------------------------------------------------------------------

    def _module_forward(self, module: nn.Dropout, name: str, x: Tensor) -> Tensor:
        if not module.training or module.p == 0 or self._is_off:
            return x
        return self._drop(name, x, module.p)

    def function(self, name: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
                  ) -> Tensor:
        """In place of torch's `dropout`."""
        if not training or p == 0 or self._is_off:
            return input
        return self._drop(name, input, p)

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
                ) -> Tensor:
        """In place of torch's `scaled_dot_product_attention`, for which see there; it draws its masks itself."""
        dropout_p = 0.0 if self._is_off else dropout_p
        if not dropout_p or self._tokens is None:
            return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = torch.matmul(query * scale, key.transpose(-2, -1))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores.masked_fill_(~attn_mask, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            scores += attn_mask
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return self._drop(name, weights, dropout_p) @ value

    def _drop(self, name: str, x: Tensor, rate: float) -> Tensor:
        """Dropout of features of tokens, of attention weights, or of features of rows."""
        if self._tokens is None:
            return _dropout(x, rate)
        tokens = self._tokens.to(x.device)  # of a spread model layers lie elsewhere
        (batch, length), shape = tokens.shape, tuple(x.shape)
        if x.ndim == 4 and shape[::3] == (batch, length) and shape[2] == length:
            # a module in the attention means the attention
            name = f"{_attending(name)}.weights"
            kept = attention_mask(tokens, self._site(name), shape[1], rate)
        elif shape[:-1] in ((batch, length), (batch * length,)):
            kept = feature_mask(tokens.flatten(), self._site(name), shape[-1], rate).reshape(shape)
        elif shape[:-1] == (batch,):
            kept = feature_mask(tokens.sum(1, dtype=torch.int32), self._site(name), shape[-1], rate)
        else:
            self._tell(f"Dropout: {name} drops of a tensor {list(shape)}, in which tokens are not told apart, so its "
                       "masks depend on how rows are cut into batches.")
            return _dropout(x, rate)
        return Dropped.apply(x, kept, rate)

    def _site(self, name: str) -> int:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        return site_seed(name, call)

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            say(message)


class _FunctionsReplaced:
    """A module's forward, while which torch's functions are a network's own. transformers reads its signature."""

    def __init__(self, dropout: TokenDropout, module: nn.Module, name: str):
        self._dropout, self._module, self._name, self._own = dropout, module, name, vars(module).get("forward")
        update_wrapper(self, module.forward)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # That of the class which the module has now: FSDP2 gives it another, and transformers checkpoints in the
        # outermost alone.
        return self._own(*args, **kwargs) if self._own else type(self._module).forward(self._module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.training:
            return self._forward(*args, **kwargs)
        before = F.dropout, F.scaled_dot_product_attention
        F.dropout = partial(self._dropout.function, self._name)
        F.scaled_dot_product_attention = partial(self._dropout.attend, self._name)
        try:
            return self._forward(*args, **kwargs)
        finally:
            F.dropout, F.scaled_dot_product_attention = before


class _Again:
    """A context in which the calls of a block are counted as in its first run; may be entered again."""

    def __init__(self, dropout: TokenDropout, tokens: Tensor | None, calls: dict[str, int]):
        self._dropout, self._tokens, self._calls = dropout, tokens, calls

    def __enter__(self) -> None:
        self._before = self._dropout.swap(self._tokens, dict(self._calls))

    def __exit__(self, *_: Any) -> None:
        self._dropout.swap(*self._before)


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _is_plain(module: nn.Module) -> bool:
    """Whether the code of a module's forward speaks of neither attention functions nor dropout."""
    forward = inspect.unwrap(type(module).forward)
    return not {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention", "dropout"} & set(forward.__code__.co_names)


def _attending(name: str) -> str:
    """The module that attends, of itself or of its Dropout."""
    parent, _, last = name.rpartition(".")
    return parent if "drop" in last else name


def has_rates(config: Any, word: str = "") -> bool:
    """Whether a configuration, or one inside it, has a rate of dropout above 0 whose name holds the word."""
    parts = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return any(has_rates(part, word) for part in parts) or any(
        "drop" in name and word in name and isinstance(value, int | float) and value > 0
        for name, value in vars(config).items())
