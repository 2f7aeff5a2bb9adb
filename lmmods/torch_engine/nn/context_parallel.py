"""Rows cut along the sequence over processes that compute every micro-batch together (context parallelism).

Each process has the queries of its places and sees all keys, which are gathered (section 3.3.2 of Dubey et al. 2024);
their gradients are summed and cut again. A row is cut into twice as many pieces as there are processes, and the first
and the last, the second and the last but one, and so on go together: under a causal mask all have as much to do.
Attention is computed for a block of queries at a time, and again in the backward pass, which gathers keys anew: what is
kept grows with the places of a process alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from lmmods.core.errors import UserError
from lmmods.torch_engine.compat.torch import has_values, with_values
from lmmods.torch_engine.nn.attention import compute_dtype
from lmmods.torch_engine.nn.dropout import TokenDropout, has_rates
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, shift_labels, shift_weights

NAME = "context_parallel"  # of the attention function
# Attention of these goes through the functions that transformers lets one register, and nothing else mixes tokens.
FAMILIES = ("cohere2", "gemma", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2",
            "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
BLOCK = 1024  # queries at a time, or fewer: the float32 mask of a block takes at most about this many bytes
MASK_BYTES, MASK_BYTES_GPU = 64 * 2**20, 512 * 2**20


@contextmanager
def blocks_of_gpus() -> Iterator[None]:
    """While tensors on this processor stand in for those of a GPU."""
    global MASK_BYTES
    before, MASK_BYTES = MASK_BYTES, MASK_BYTES_GPU
    try:
        yield
    finally:
        MASK_BYTES = before


def check_network(model: nn.Module, num_processes: int) -> None:
    """UserError for a network that cannot compute its rows in pieces.

    Args:
        num_processes: That each row is cut over.
    """
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise UserError(f"trainer.strategy: context_parallel_size {num_processes} is not known to be right for "
                        f"{config.model_type}, only for {', '.join(FAMILIES)}. Set it to 1, and shorten long rows by "
                        "data.max_length.")
    if has_rates(config, "att"):
        raise UserError(f"trainer.strategy: context_parallel_size {num_processes} does not go with dropout of "
                        "attention, whose masks are those of whole rows: set its rate to 0 in model.config_overrides, "
                        "or the size to 1.")
    if moving := _rope_types(config) & {"dynamic", "longrope"}:
        raise UserError(f"trainer.strategy: context_parallel_size {num_processes} does not go with rope type "
                        f"{', '.join(moving)}, whose angles depend on how long a row is: name another in "
                        "model.config_overrides, or set the size to 1.")


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    return {part["rope_type"] for part in (parameters, *by_layer) if "rope_type" in part}


class ContextParallel:
    """How rows are cut over this process and those with it, and attention over them.

    Args:
        group: They, of torch.distributed.
    """

    def __init__(self, group: Any):
        self._group = group
        self.size, self.rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        self._last: tuple[Tensor | None, list[int]] = None, []

    @classmethod
    def over(cls, model: nn.Module, mesh: DeviceMesh, size: int) -> "ContextParallel":
        """Let a network take rows that are cut over `size` processes of Lightning's mesh; whole ones it takes as ever.

        Raises:
            UserError: As `check_network`.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        check_network(model, size)
        matrices = mesh["tensor_parallel"].size()
        with with_values():  # of ranks, also where the network has none
            every = init_device_mesh(mesh.device_type, (mesh.size() // (size * matrices), size, matrices),
                                     mesh_dim_names=("data", "context", "tensor"))
        rows = cls(every["context"].get_group())
        AttentionInterface.register(NAME, rows.attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
        TokenDropout.of(model).own = rows.own
        return rows

    # Places ----------------------------------------------------------------------------------------------------------

    def _length(self, length: int) -> int:
        """Of rows of so many tokens, once they are padded to be cut."""
        return -(-length // (2 * self.size)) * 2 * self.size

    def _pieces(self, length: int) -> list[range]:
        """The places in padded rows that each process has, one process after the other, in two pieces."""
        each = length // (2 * self.size)
        return [range(piece * each, (piece + 1) * each)
                for rank in range(self.size) for piece in (rank, 2 * self.size - 1 - rank)]

    def _own(self, length: int) -> list[range]:
        return self._pieces(length)[2 * self.rank : 2 * self.rank + 2]

    def own(self, x: Tensor, padding: int = 0) -> Tensor:
        """This process's places of x [..., T], which is padded with this value to be cut."""
        x = F.pad(x, (0, self._length(x.shape[-1]) - x.shape[-1]), value=padding)
        return torch.cat([x[..., piece.start : piece.stop] for piece in self._own(x.shape[-1])], dim=-1)

    def cut(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's part of a batch of `causal_loss`.

        Returns:
            `input_ids` and `position_ids` [B, t]; `targets`, and `target_weights` if any, which are shifted already;
            `row_segments` [B, 1, 1, T] int32, see `attend`.
        """
        ids = batch["input_ids"]
        positions = batch.get("position_ids")
        if positions is None:  # those that transformers counts, padding on the left included
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        segments = batch["segment_ids"] if "segment_ids" in batch else batch["attention_mask"]
        segments = F.pad(segments, (0, self._length(ids.shape[1]) - ids.shape[1])).int()
        weights = shift_weights(batch.get("loss_weights"))
        return {"input_ids": self.own(ids), "position_ids": self.own(positions),
                "row_segments": segments[:, None, None], "targets": self.own(shift_labels(batch["labels"]), IGNORED),
                **({} if weights is None else {"target_weights": self.own(weights)})}

    # Collectives -----------------------------------------------------------------------------------------------------

    def whole(self, x: Tensor) -> Tensor:
        """All places of x [t, ...], of which each process gives its own: [T, ...]."""
        found = x.new_empty(self.size * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(found, x.contiguous(), group=self._group)
        return found.index_select(0, self._order(len(found), x.device).argsort())

    def summed(self, x: Tensor) -> Tensor:
        """This process's places of the sum over all of x [T, ...]: [t, ...]."""
        found = x.new_empty(len(x) // self.size, *x.shape[1:])
        torch.distributed.reduce_scatter_tensor(found, x.index_select(0, self._order(len(x), x.device)),
                                                group=self._group)
        return found

    def total(self, x: Tensor) -> Tensor:
        """Sum of what each of the processes has; so are gradients."""
        return _Total.apply(x, self._group)

    def share(self, sums: LossSums) -> LossSums:
        """This process's share of sums that each of them has in whole."""
        return LossSums(*(None if part is None else part / self.size for part in sums))

    def _order(self, length: int, device: torch.device) -> Tensor:
        """[T]: the places of the first process, then of the second, and so on."""
        return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in self._pieces(length)])

    # Attention -------------------------------------------------------------------------------------------------------

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               dropout: float = 0.0, scaling: float | None = None, **options: Any) -> tuple[Tensor, None]:
        """An attention function of transformers, for rows that are whole (through sdpa) or cut.

        Args:
            attention_mask: Of rows that are cut, [B, 1, 1, T] int32: the documents 1, 2, ... of the whole row, or 1 for
                its real tokens; 0 is padding, whose places see some padding.
        """
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if attention_mask is None or attention_mask.dtype != torch.int32:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        dtype = compute_dtype(value)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        blocks = list(self._blocks(query, key, attention_mask, options.get("sliding_window")))
        mixed = _CutAttention.apply(*(x.to(dtype) for x in (query, key, value)), self, blocks, scale)
        return mixed.transpose(1, 2), None

    def _blocks(self, query: Tensor, key: Tensor, row_segments: Tensor, window: int | None) -> Iterator["_Block"]:
        segments, begins = row_segments[:, 0, 0], self._begins(row_segments)
        length = segments.shape[1]
        sharers = query.shape[1] // key.shape[1]
        most = (MASK_BYTES if query.device.type == "cpu" else MASK_BYTES_GPU) // (4 * len(query) * sharers)
        window, before = length if window is None else window, 0
        for piece in self._own(length):
            size = max(min(BLOCK, most // (piece.stop - begins[piece.start])), 1)
            for start in range(piece.start, piece.stop, size):
                queries = range(start, min(start + size, piece.stop))
                keys = range(max(begins[start], start - window + 1), queries.stop)
                yield _Block(slice(before, before + len(queries)), queries, keys, segments, window)
                before += len(queries)

    def _begins(self, row_segments: Tensor) -> list[int]:
        """Of each place where its document begins, in that of the rows where it began first.

        Kept for the other layers of a forward pass, as it waits for the device.
        """
        if not has_values(row_segments):  # then a row is one document
            return [0] * row_segments.shape[-1]
        if self._last[0] is not row_segments:
            segments = row_segments[:, 0, 0]
            places = torch.arange(segments.shape[1], device=segments.device)
            is_new = F.pad(segments.diff(dim=1) != 0, (1, 0))
            self._last = row_segments, (is_new * places).cummax(1).values.amin(0).tolist()
        return self._last[1]


class _Total(torch.autograd.Function):
    """Sum over the processes of a group."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grad, ctx.group), None


class _Block(NamedTuple):
    """Some queries of a process, and the keys that they may see.

    Args:
        own: Where they are among the process's queries.
        queries: Their places in the row; `keys` likewise.
        segments: [B, T] of the row.
        window: How many tokens back a query sees, itself included.
    """

    own: slice
    queries: range
    keys: range
    segments: Tensor
    window: int

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of x [B, heads, T, size]."""
        return x[:, :, self.keys.start : self.keys.stop]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, heads, queries, size] of the block's [B, heads, queries or keys, size]."""
        sharers = query.shape[1] // key.shape[1]
        # Queries that share a head of keys lie behind each other: no kernel takes both a mask and fewer heads of keys.
        mask = self._mask().repeat(1, 1, sharers, 1)
        mixed = F.scaled_dot_product_attention(query.unflatten(1, (-1, sharers)).flatten(2, 3), key, value, mask,
                                               scale=scale)
        return mixed.unflatten(2, (sharers, -1)).flatten(1, 2)

    def _mask(self) -> Tensor:
        queries, keys = (torch.arange(places.start, places.stop, device=self.segments.device)
                         for places in (self.queries, self.keys))
        back = queries[:, None] - keys
        seen = (back >= 0) & (back < self.window)
        return (seen & (self.segments[:, queries, None] == self.segments[:, None, keys]))[:, None]


class _CutAttention(torch.autograd.Function):
    """Attention of a process's queries [B, heads, t, size] over the keys and values of all; keeps its own alone."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, rows: ContextParallel, blocks: list[_Block],
                scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.rows, ctx.blocks, ctx.scale = rows, blocks, scale
        keys, values = _gathered(rows, key, value)
        return torch.cat([block.attend(query[:, :, block.own], block.of_keys(keys), block.of_keys(values), scale)
                          for block in blocks], dim=2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        keys, values = _gathered(ctx.rows, key, value)
        of_query, sums = torch.empty_like(query), torch.zeros(2, *keys.shape, device=keys.device)
        for block in ctx.blocks:
            with torch.enable_grad():
                parts = [part.detach().requires_grad_()
                         for part in (query[:, :, block.own], block.of_keys(keys), block.of_keys(values))]
                mixed = block.attend(*parts, ctx.scale)
            of_query[:, :, block.own], *others = torch.autograd.grad(mixed, parts, grad[:, :, block.own])
            for total, part in zip(sums, others, strict=True):
                block.of_keys(total).add_(part)
        of_key, of_value = ctx.rows.summed(sums.movedim(3, 0)).movedim(0, 3).to(key.dtype)
        return of_query, of_key, of_value, None, None, None


def _gathered(rows: ContextParallel, key: Tensor, value: Tensor) -> Tensor:
    """[2, B, heads, T, size]: keys, then values, of all places."""
    return rows.whole(torch.stack([key, value]).movedim(3, 0)).movedim(0, 3)
