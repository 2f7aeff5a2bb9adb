"""Dropout masks derived from tokens, not from a generator, in any network of transformers and PEFT; see `core.dropout`.

The forward of torch's Dropout modules is replaced. For other modules, torch's functions `dropout` and
`scaled_dot_product_attention` are replaced while their forward runs, so that the mask's site is the calling module.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial, update_wrapper
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.console import say
from lmmods.core.dropout import FINAL_1, FINAL_2, NOISE_SITE, feature_seeds, keep_scale, min_kept, site_seed
from lmmods.core.errors import UserError
from lmmods.torch_engine.compat.transformers import attention_name
from lmmods.torch_engine.nn.attention import CPU, VARLEN

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_dropout, _attention = F.dropout, F.scaled_dot_product_attention
ATTENTION = ("eager", "sdpa", CPU, VARLEN)  # implementations that call torch's functions or have no dropout
MODULES_ONLY = {"torch", "peft", "bitsandbytes"}  # packages whose modules never call dropout as a function
_PEFT = re.compile(r"^base_model\.model\.|\.modules_to_save\.[^.]+|(?<=\.lora_dropout)\.[^.]+")


class TokenDropout:
    """Dropout of one network: the seeds of the current batch's tokens, and the number of calls at each site.

    Args:
        compiled: True if layers will be compiled; mask generation and attention are then excluded.
        abstract: Masks only have a shape, as in `build_network`.
        noise: `TaskFields.neftune_alpha`, 0 for no noise.
    """

    def __init__(self, model: nn.Module, compiled: bool = False, abstract: bool = False, noise: float = 0.0):
        self._abstract, self._noise = abstract, noise
        self._lengths: Tensor | None = None  # [B, T], length of each token's document, 0 in padding
        if noise:
            model.get_input_embeddings().register_forward_hook(self._add_noise)
        self._tokens: Tensor | None = None  # [B, T] int32
        # Selects this process's positions under context parallelism.
        self.take_local: Callable[[Tensor], Tensor] = lambda tokens: tokens
        self._calls: dict[str, int] = {}
        self._is_off = False
        self._reported: set[str] = set()
        self.has_sites = False
        # Code from the hub may use dropout rates that are not in its configuration.
        has_hub_code = any(_package(module) not in MODULES_ONLY | {"transformers", "lmmods"}
                           for module in model.modules())
        calls_functions = has_rates(model.config) or has_hub_code
        if compiled:
            self._drop = torch.compiler.disable(self._drop)
        for name, module in model.named_modules():
            # Site names omit PEFT's prefixes, so a network has the same masks with and without an adapter.
            name = _PEFT.sub("", name)
            if isinstance(module, nn.Dropout):
                self.has_sites |= module.p > 0
                module.forward = partial(self._module_forward, module, name)
            elif calls_functions and _package(module) not in MODULES_ONLY and not (compiled and _is_plain(module)):
                # Wrapped modules are excluded from compilation, so do not wrap modules that call neither function.
                self.has_sites = True
                forward = _FunctionsReplaced(self, module, name)
                module.forward = torch.compiler.disable(forward) if compiled else forward
            if hasattr(module, "pos_dropout") and hasattr(module, "disentangled_attention_bias"):
                self._disable_in_table(module)
        if attention_name(model) not in ATTENTION and has_rates(model.config, "att"):
            self._report(f"Dropout: {attention_name(model)} makes its own dropout masks, so they depend on how rows "
                         "are split into batches. Set model.attention to sdpa to avoid this.")
        model.token_dropout = self

    def _disable_in_table(self, module: nn.Module) -> None:
        """Disable dropout of DeBERTa's table of relative positions, which all rows share and which has no tokens."""
        module.pos_dropout.p = 0.0  # dropout of the table itself; `_run_without` covers an adapter's dropout on it
        # Unlike a nested function, a partial is copied by deepcopy of the network.
        module.disentangled_attention_bias = partial(self._run_without, module.disentangled_attention_bias)

    def _run_without(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        with self.off():
            return function(*args)

    @classmethod
    def from_model(cls, model: nn.Module) -> "TokenDropout | None":
        """Return the TokenDropout of a network, if it has one."""
        return getattr(model, "token_dropout", None)

    def begin(self, batch: dict[str, Tensor]) -> None:
        """Prepare for the forward and backward pass of this batch."""
        seeds = batch.get("token_seeds")
        # [B, A, T] -> [B * A, T] for rows of several sequences, as in the network's input. Reset the call counts.
        self._tokens, self._calls = None if seeds is None else self.take_local(seeds).flatten(0, -2).int(), {}
        if self._noise:
            if seeds is None:
                raise UserError("model.neftune_alpha: the batches have no token_seeds, which determine the noise. Add "
                                "token_seeds in the data module's collator.")
            self._lengths = self.take_local(document_lengths(batch)).flatten(0, -2)
        if seeds is None and self.has_sites:
            self._report("Dropout: the batches have no token_seeds, so masks depend on how rows are split into "
                         "batches.")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable dropout while a part of the network runs."""
        was_off, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = was_off

    def chunks(self, length: int, size: int) -> Iterator[slice]:
        """Yield chunks of a row's positions. Until the next one, a module that runs on a chunk has its masks."""
        tokens, calls = self._tokens, self._calls
        for start in range(0, length, size):
            chunk = slice(start, start + size)
            self.swap(None if tokens is None else tokens[:, chunk], dict(calls))
            yield chunk
        self._tokens = tokens

    def contexts(self) -> tuple[Any, Any]:
        """Return the contexts of a checkpointed block: its forward, and its recomputation with the same masks."""
        # Copy the call counts at the start of the block, so that its recomputation counts from the same values.
        return nullcontext(), _Replay(self, self._tokens, dict(self._calls))

    def swap(self, tokens: Tensor | None, calls: dict[str, int]) -> tuple[Tensor | None, dict[str, int]]:
        """Replace the current tokens and call counts; return the previous ones."""
        previous = self._tokens, self._calls
        self._tokens, self._calls = tokens, calls
        return previous

    # Called by modules -----------------------------------------------------------------------------------------------

    def _module_forward(self, module: nn.Dropout, name: str, x: Tensor) -> Tensor:
        if not module.training or module.p == 0 or self._is_off:
            return x
        return self._drop(name, x, module.p)

    def _add_noise(self, module: nn.Module, _: tuple, x: Tensor) -> Tensor:
        """Forward hook of the embedding, with output x [B, T, d]."""
        if not module.training or self._is_off or self._tokens is None or self._abstract:
            return x
        with torch.no_grad():
            tokens, lengths = self._tokens.to(x.device), self._lengths.to(x.device)
            # alpha / sqrt(L d). Padding has length 0 and no noise.
            scale = self._noise / (lengths * x.shape[-1]).clamp(min=1).float().sqrt() * (lengths > 0)
            noise = feature_noise(tokens.flatten(), site_seed(NOISE_SITE), x.shape[-1]).view(x.shape)
            noise *= scale[..., None]
        return (x.float() + noise).to(x.dtype)

    def function(self, name: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
                ) -> Tensor:
        """Replace torch's `dropout`."""
        if not training or p == 0 or self._is_off:
            return input
        return self._drop(name, input, p)

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
               ) -> Tensor:
        """Replace torch's `scaled_dot_product_attention`, which would make its own masks; same arguments."""
        dropout_p = 0.0 if self._is_off else dropout_p
        if not dropout_p or self._tokens is None:
            return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        # sdpa's formula, with our masks: scores and weights are [B, heads, T, T].
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = torch.matmul(query * scale, key.transpose(-2, -1))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # Not -inf: a query without keys, as in padding, would be NaN.
            scores.masked_fill_(~attn_mask, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            scores += attn_mask
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return self._drop(name, weights, dropout_p) @ value

    def _drop(self, name: str, x: Tensor, rate: float) -> Tensor:
        """Apply dropout to features of tokens, attention weights, or features of rows, distinguished by shape."""
        if self._tokens is None:
            return _dropout(x, rate)
        tokens = self._tokens.to(x.device)  # under model.max_memory layers are on other devices
        (batch, length), shape = tokens.shape, tuple(x.shape)
        if x.ndim == 4 and shape[::3] == (batch, length) and shape[2] == length:  # attention weights [B, heads, T, T]
            # A Dropout inside the attention module has the same site as the module's own attention function.
            name = f"{_attention_site(name)}.weights"
            mask = self._attention_mask(name, tokens, shape[1], rate)
        elif shape[:-1] in ((batch, length), (batch * length,)):  # features [B, T, F] or [B * T, F]
            mask = self._feature_mask(name, tokens.flatten(), shape[-1], rate).reshape(shape)
        elif shape[:-1] == (batch,):  # pooled features [B, F]; the sum of seeds wraps at 32 bits
            mask = self._feature_mask(name, tokens.sum(1, dtype=torch.int32), shape[-1], rate)
        else:
            self._report(f"Dropout: {name} has an input of shape {list(shape)} without a token axis, so its masks "
                         "depend on how rows are split into batches.")
            return _dropout(x, rate)
        return Dropped.apply(x, mask, rate)

    def _feature_mask(self, name: str, tokens: Tensor, num: int, rate: float) -> Tensor:
        if self._abstract:
            return torch.empty(len(tokens), num, dtype=torch.bool, device=tokens.device)
        return feature_mask(tokens, self._site(name), num, rate)

    def _attention_mask(self, name: str, tokens: Tensor, num_heads: int, rate: float) -> Tensor:
        if self._abstract:
            batch, length = tokens.shape
            return torch.empty(batch, num_heads, length, length, dtype=torch.bool, device=tokens.device)
        return attention_mask(tokens, self._site(name), num_heads, rate)

    def _site(self, name: str) -> int:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        return site_seed(name, call)

    def _report(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            say(message)


class _FunctionsReplaced:
    """A module's forward that replaces torch's functions while it runs; keeps the signature for transformers."""

    def __init__(self, dropout: TokenDropout, module: nn.Module, name: str):
        self._dropout, self._module, self._name = dropout, module, name
        self._instance_forward = vars(module).get("forward")
        update_wrapper(self, module.forward)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # Use the forward of the module's current class: FSDP2 changes the class, and transformers applies
        # checkpointing only in the outermost call.
        if self._instance_forward:
            return self._instance_forward(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.training:
            return self._forward(*args, **kwargs)
        originals = F.dropout, F.scaled_dot_product_attention
        F.dropout = partial(self._dropout.function, self._name)
        F.scaled_dot_product_attention = partial(self._dropout.attend, self._name)
        try:
            return self._forward(*args, **kwargs)
        finally:
            F.dropout, F.scaled_dot_product_attention = originals


class _Replay:
    """A reusable context in which a block's dropout calls are counted as in its first run."""

    def __init__(self, dropout: TokenDropout, tokens: Tensor | None, calls: dict[str, int]):
        self._dropout, self._tokens, self._calls = dropout, tokens, calls

    def __enter__(self) -> None:
        self._previous = self._dropout.swap(self._tokens, dict(self._calls))

    def __exit__(self, *_: Any) -> None:
        self._dropout.swap(*self._previous)


def document_lengths(batch: dict[str, Tensor]) -> Tensor:
    """Return the length of each token's row or, in packed rows, document: [..., T], 0 in padding."""
    documents = batch.get("segment_ids", batch["attention_mask"]).long()
    counts = torch.zeros(*documents.shape[:-1], documents.shape[-1] + 1, dtype=torch.long, device=documents.device)
    return counts.scatter_add_(-1, documents, torch.ones_like(documents)).gather(-1, documents) * (documents > 0)


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _is_plain(module: nn.Module) -> bool:
    """True if the code of a module's forward refers to neither attention functions nor dropout."""
    forward = inspect.unwrap(type(module).forward)
    return not {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention", "dropout"} & set(forward.__code__.co_names)


def _attention_site(name: str) -> str:
    """Return the name of the attention module, given its own name or the name of its Dropout."""
    parent, _, last = name.rpartition(".")
    return parent if "drop" in last else name


def has_rates(config: "PreTrainedConfig", word: str = "") -> bool:
    """True if a configuration, or one nested in it, has a dropout rate above 0 whose name contains `word`."""
    nested = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return any(has_rates(subconfig, word) for subconfig in nested) or any(
        "drop" in name and word in name and isinstance(value, int | float) and value > 0
        for name, value in vars(config).items())


# ---------------------------------------------------------------------------------------------------------------------
# The masks of `core.dropout` in torch, and their application.
#
# torch's random generator is serial on CPUs. Here a few passes of 32-bit products, shifts and XORs, in blocks that fit
# the cache, decide two features per word, in a sixth of the time on one core. int32 products wrap like uint32 products;
# right shifts are masked to make them logical.

# Number of words per block on CPUs: with temporaries they fit a core's cache, and torch runs them on one thread. For
# such short passes, synchronising threads costs more than it saves, especially on a busy machine.
CHUNK = 2**15


def feature_mask(seeds: Tensor, site: int, num: int, rate: float) -> Tensor:
    """Return `core.dropout.feature_mask`: mask [N, num] from the seeds [N] of tokens."""
    # The first fold of `finalise` is linear over XOR: fold [N] words and [half] features, not N * half XORs.
    words, half = _fold(finalise(seeds ^ _to_signed(site))), -(-num // 2)
    # Upper halves of the bits decide features 0 to half - 1, lower halves the rest.
    mask = torch.empty(len(seeds), 2, half, dtype=torch.bool, device=seeds.device)
    _decide(words.view(1, -1, 1), _features(half, seeds.device).view(1, 1, -1), mask[None, :, 0], mask[None, :, 1],
            min_kept(rate))
    return mask.view(len(seeds), 2 * half)[:, :num]  # drop the last feature of an odd `num`


def attention_mask(seeds: Tensor, site: int, num_heads: int, rate: float) -> Tensor:
    """Return `core.dropout.attention_mask`: mask [B, num_heads, T, T] from the seeds [B, T] of tokens."""
    (batch, length), half = seeds.shape, -(-num_heads // 2)
    queries = _fold(finalise(seeds ^ _to_signed(site)))
    pairs = torch.from_numpy(feature_seeds(half).view(np.int32)).to(seeds.device)
    mask = torch.empty(batch, 2 * half, length, length, dtype=torch.bool, device=seeds.device)
    # One pair of heads at a time, so that temporaries are [B, T, T].
    for pair in range(half):
        keys = _fold(finalise(seeds ^ pairs[pair]))
        _decide(queries[:, :, None], keys[:, None], mask[:, pair], mask[:, half + pair], min_kept(rate))
    return mask[:, :num_heads]


def feature_noise(seeds: Tensor, site: int, num: int) -> Tensor:
    """Return `core.dropout.feature_noise`: [N, num] float32 from the seeds [N] of tokens."""
    words = _fold(finalise(seeds ^ _to_signed(site)))
    bits = _finalise_folded(words[:, None] ^ _features(num, seeds.device))
    return bits.bitwise_right_shift_(8).float().add_(0.5).mul_(2.0**-23)


def finalise(h: Tensor) -> Tensor:
    """Apply MurmurHash3's finaliser to int32."""
    return _finalise_folded(_fold(h))


def _finalise_folded(h: Tensor) -> Tensor:
    h = h * _to_signed(FINAL_1)
    h = (h ^ ((h >> 13) & 0x7FFFF)) * _to_signed(FINAL_2)
    return _fold(h)


def _fold(h: Tensor) -> Tensor:
    """Apply the first and last step of the finaliser, which is linear over XOR: fold(a ^ b) = fold(a) ^ fold(b)."""
    return h ^ ((h >> 16) & 0xFFFF)


def _to_signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


@lru_cache(16)
def _features(num: int, device: torch.device) -> Tensor:
    return _fold(torch.from_numpy(feature_seeds(num).view(np.int32))).to(device)


def _decide(queries: Tensor, keys: Tensor, upper: Tensor, lower: Tensor, threshold: int) -> None:
    """Finalise the XOR of folded words, and compare the upper and the lower half of each result with `threshold`.

    Args:
        queries: [B, T, 1].
        keys: [B or 1, 1, S].
        upper: [B, T, S] bool, output; `lower` likewise.
    """
    batch, length, width = upper.shape
    # A block has some queries of one row or, if whole rows fit, of several rows. GPUs process everything at once.
    num_queries = min(max(CHUNK // width, 1), length) if queries.device.type == "cpu" else length
    batch_size = max(CHUNK // (length * width), 1) if queries.device.type == "cpu" else batch
    # Buffers shared by all blocks; the last block may be smaller.
    bits = torch.empty(min(batch_size, batch), num_queries, width, dtype=torch.int32, device=queries.device)
    other = torch.empty_like(bits)
    for first in range(0, batch, batch_size):
        batch_slice = slice(first, first + batch_size)
        block_keys = keys if len(keys) == 1 else keys[batch_slice]
        for start in range(0, length, num_queries):
            block_queries = queries[batch_slice, start : start + num_queries]
            x, y = (buffer[: block_queries.shape[0], : block_queries.shape[1]] for buffer in (bits, other))
            # `finalise` from its first product, in place. The lower 16 bits of `threshold` are 0, so both comparisons
            # only use upper halves: of x, and of y, into which the lower half is shifted.
            torch.bitwise_xor(block_queries, block_keys, out=x)
            x.mul_(_to_signed(FINAL_1))
            torch.bitwise_right_shift(x, 13, out=y)
            x.bitwise_xor_(y.bitwise_and_(0x7FFFF)).mul_(_to_signed(FINAL_2))
            torch.bitwise_left_shift(x, 16, out=y)  # lower half of folded x; folding does not change upper halves
            y.bitwise_xor_(x)
            torch.ge(x, threshold, out=upper[batch_slice, start : start + num_queries])
            torch.ge(y, threshold, out=lower[batch_slice, start : start + num_queries])


class Dropped(torch.autograd.Function):
    """Scaled x where the mask is True, otherwise 0. Saves only the mask for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, rate: float) -> Tensor:  # noqa: D102
        ctx.save_for_backward(mask)
        ctx.scale = keep_scale(rate)
        return (x * ctx.scale).mul_(mask)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return (gradient * ctx.scale).mul_(*ctx.saved_tensors), None, None
