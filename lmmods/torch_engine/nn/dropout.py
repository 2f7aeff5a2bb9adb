"""Dropout by token instead of by draw, in any network of transformers and PEFT: see `core.dropout`.

A module of torch's Dropout is given another forward. What other modules call, torch's functions `dropout` and
`scaled_dot_product_attention`, are others while such a module's forward runs, so the site is the module that calls.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial, update_wrapper
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.console import say
from lmmods.core.dropout import FINAL_1, FINAL_2, feature_seeds, keep_scale, least_kept, site_seed
from lmmods.torch_engine.compat.torch import has_values
from lmmods.torch_engine.compat.transformers import attention_of
from lmmods.torch_engine.nn.attention import FLOAT32, VARLEN

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


# ---------------------------------------------------------------------------------------------------------------------
# The masks of `core.dropout` in torch, and tensors under them.
#
# torch's own draws are serial on CPUs. Here a few passes of 32-bit products, shifts and exclusive-ors, in pieces that
# stay in the cache, decide about two features at a time: a sixth of the time on one core. int32 products wrap as
# uint32's do; a shift to the right is made a logical one.

# Words at a time on CPUs: with their temporaries they fit a core's cache, and torch gives them to one thread. Threads
# that meet after each of so many short passes cost more than they gain, all the more where others use the machine.
CHUNK = 2**15


def feature_mask(seeds: Tensor, site: int, num: int, rate: float) -> Tensor:
    """`core.dropout.feature_mask`: [N, num] of the seeds [N] of tokens."""
    if not has_values(seeds):  # in a plan, where each piece would take as long as a large one
        return torch.empty(len(seeds), num, dtype=torch.bool, device=seeds.device)
    words, half = _folded(finalise(seeds ^ _signed(site))), -(-num // 2)
    kept = torch.empty(len(seeds), 2, half, dtype=torch.bool, device=seeds.device)
    _decide(words.view(1, -1, 1), _features(half, seeds.device).view(1, 1, -1), kept[None, :, 0], kept[None, :, 1],
            least_kept(rate))
    return kept.view(len(seeds), 2 * half)[:, :num]


def attention_mask(seeds: Tensor, site: int, num_heads: int, rate: float) -> Tensor:
    """`core.dropout.attention_mask`: [B, num_heads, T, T] of the seeds [B, T] of tokens."""
    (batch, length), half = seeds.shape, -(-num_heads // 2)
    if not has_values(seeds):
        return torch.empty(batch, num_heads, length, length, dtype=torch.bool, device=seeds.device)
    queries = _folded(finalise(seeds ^ _signed(site)))
    pairs = torch.from_numpy(feature_seeds(half).view(np.int32)).to(seeds.device)
    kept = torch.empty(batch, 2 * half, length, length, dtype=torch.bool, device=seeds.device)
    for pair in range(half):
        keys = _folded(finalise(seeds ^ pairs[pair]))
        _decide(queries[:, :, None], keys[:, None], kept[:, pair], kept[:, half + pair], least_kept(rate))
    return kept[:, :num_heads]


def finalise(h: Tensor) -> Tensor:
    """MurmurHash3's finaliser of int32."""
    h = _folded(h) * _signed(FINAL_1)
    h = (h ^ ((h >> 13) & 0x7FFFF)) * _signed(FINAL_2)
    return _folded(h)


def _folded(h: Tensor) -> Tensor:
    """The finaliser's first step, and its last. Of an exclusive-or it is that of its sides."""
    return h ^ ((h >> 16) & 0xFFFF)


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


@lru_cache(16)
def _features(num: int, device: torch.device) -> Tensor:
    return _folded(torch.from_numpy(feature_seeds(num).view(np.int32))).to(device)


def _decide(queries: Tensor, keys: Tensor, upper: Tensor, lower: Tensor, least: int) -> None:
    """Finalise the exclusive-or of folded words, and compare the upper halves of the result, and the lower ones.

    Args:
        queries: [B, T, 1].
        keys: [B or 1, 1, S].
        upper: [B, T, S] bool, written to; `lower` the same.
    """
    batch, length, width = upper.shape
    rows = min(max(CHUNK // width, 1), length) if queries.device.type == "cpu" else length
    together = max(CHUNK // (length * width), 1) if queries.device.type == "cpu" else batch
    bits = torch.empty(min(together, batch), rows, width, dtype=torch.int32, device=queries.device)
    other = torch.empty_like(bits)
    for first in range(0, batch, together):
        some = slice(first, first + together)
        of_keys = keys if len(keys) == 1 else keys[some]
        for start in range(0, length, rows):
            part = queries[some, start : start + rows]
            x, y = bits[: part.shape[0], : part.shape[1]], other[: part.shape[0], : part.shape[1]]
            torch.bitwise_xor(part, of_keys, out=x)
            x.mul_(_signed(FINAL_1))
            torch.bitwise_right_shift(x, 13, out=y)
            x.bitwise_xor_(y.bitwise_and_(0x7FFFF)).mul_(_signed(FINAL_2))
            torch.bitwise_left_shift(x, 16, out=y)  # of x folded: the last step changes lower halves alone
            y.bitwise_xor_(x)
            torch.ge(x, least, out=upper[some, start : start + rows])
            torch.ge(y, least, out=lower[some, start : start + rows])


class Dropped(torch.autograd.Function):
    """x where it is kept, times the scale, else 0. The backward pass needs the mask alone."""

    @staticmethod
    def forward(ctx, x: Tensor, kept: Tensor, rate: float) -> Tensor:  # noqa: D102
        ctx.save_for_backward(kept)
        ctx.scale = keep_scale(rate)
        return (x * ctx.scale).mul_(kept)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return (gradient * ctx.scale).mul_(*ctx.saved_tensors), None, None
