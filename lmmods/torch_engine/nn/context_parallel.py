"""Context parallelism: each row is split along the sequence over processes that compute a micro-batch together.

Each process has the queries of its own positions and gathers all keys and values (section 3.3.2 of Dubey et al. 2024);
their gradients are reduce-scattered. A row is split into 2 n chunks for n processes, and process i has chunks i and
2 n - 1 - i, which balances the work under a causal mask. Attention is computed in blocks of queries and recomputed in
the backward pass, which gathers keys and values again: saved tensors only grow with a process's own positions.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from lmmods.core.errors import UserError
from lmmods.core.hf_config import ropes_by_length
from lmmods.torch_engine.nn.attention import compute_dtype
from lmmods.torch_engine.nn.dropout import TokenDropout, has_rates
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, shift_labels, shift_weights

NAME = "context_parallel"  # name of the attention function
# Architectures that mix tokens only in attention, by transformers' registered functions.
FAMILIES = ("cohere2", "gemma", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2",
            "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
BLOCK = 1024  # maximum number of queries of a block; its float32 mask takes at most about MASK_BYTES
MASK_BYTES, MASK_BYTES_GPU = 64 * 2**20, 512 * 2**20


def check_network(model: nn.Module, num_processes: int) -> None:
    """Raise UserError if a network does not support context parallelism.

    Args:
        num_processes: Number of processes that each row is split over.
    """
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise UserError(f"trainer.strategy: context_parallel_size {num_processes} is not supported for "
                        f"{config.model_type}, only for {', '.join(FAMILIES)}. Set it to 1, and limit the row length "
                        "with data.max_length.")
    if has_rates(config, "att"):
        raise UserError(f"trainer.strategy: context_parallel_size {num_processes} cannot be combined with attention "
                        "dropout, whose masks need whole rows. Set its rate to 0 in model.config_overrides, or the "
                        "size to 1.")
    if rope_types := ropes_by_length(config):
        raise UserError(f"trainer.strategy: context_parallel_size {num_processes} cannot be combined with rope type "
                        f"{', '.join(rope_types)}, whose angles depend on the row length. Set another type in "
                        "model.config_overrides, or set the size to 1.")


class ContextParallel:
    """The split of rows over the processes of a group, and attention over split rows.

    Shapes: T is the length of a row, padded to a multiple of 2 `size`; a process has t = T / `size` positions.

    Args:
        group: Process group of torch.distributed.
        device: Device whose block sizes are used. Default: the queries' device.
        one_document: Treat each row as one document, without reading the batch's segments.
    """

    def __init__(self, group: Any, device: torch.device | None = None, one_document: bool = False):
        self._group, self._device, self._one_document = group, device, one_document
        self.size, self.rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        self._last: tuple[Tensor | None, list[int]] = None, []

    @classmethod
    def over(cls, model: nn.Module, mesh: DeviceMesh, size: int, device: torch.device | None = None,
             one_document: bool = False) -> "ContextParallel":
        """Make a network accept rows split over `size` processes of Lightning's mesh; it still accepts whole rows.

        The remaining arguments are as for the class.

        Raises:
            UserError: See `check_network`.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        check_network(model, size)
        # Lightning's mesh is (data, tensor); processes that share a row are neighbours in its data dimension.
        tensor_size = mesh["tensor_parallel"].size()
        full_mesh = init_device_mesh(mesh.device_type, (mesh.size() // (size * tensor_size), size, tensor_size),
                                     mesh_dim_names=("data", "context", "tensor"))
        rows = cls(full_mesh["context"].get_group(), device, one_document)
        # transformers looks up the attention function and its mask by name, so only the last network is supported.
        AttentionInterface.register(NAME, rows.attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
        # A process's dropout masks are for its own tokens.
        TokenDropout.from_model(model).take_local = rows.take_local
        return rows

    # Positions -------------------------------------------------------------------------------------------------------

    def _length(self, length: int) -> int:
        """Return the padded length of rows of `length` tokens."""
        return -(-length // (2 * self.size)) * 2 * self.size  # rounded up

    def _chunks(self, length: int) -> list[range]:
        """Return the positions of the first process's two chunks, then of the second process's, and so on."""
        size = length // (2 * self.size)
        # Under a causal mask early chunks have few keys and late ones many: each process gets one of each.
        return [range(chunk * size, (chunk + 1) * size)
                for rank in range(self.size) for chunk in (rank, 2 * self.size - 1 - rank)]

    def _local_chunks(self, length: int) -> list[range]:
        return self._chunks(length)[2 * self.rank : 2 * self.rank + 2]

    def take_local(self, x: Tensor, padding: int = 0) -> Tensor:
        """Return this process's positions of x [..., T], padded with `padding`: [..., t]."""
        x = F.pad(x, (0, self._length(x.shape[-1]) - x.shape[-1]), value=padding)
        return torch.cat([x[..., chunk.start : chunk.stop] for chunk in self._local_chunks(x.shape[-1])], dim=-1)

    def split(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's part of a batch of `causal_loss`.

        Labels are shifted first, as the target of a chunk's last position is in another chunk.

        Returns:
            `input_ids`, `position_ids`, `targets` and, if the batch has weights, `target_weights` [B, t];
            `row_segments` [B, 1, 1, T] int32, see `attend`.
        """
        ids = batch["input_ids"]
        positions = batch.get("position_ids")
        if positions is None:  # transformers' default, which also counts padding on the left
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        segments = batch["segment_ids"] if "segment_ids" in batch else batch["attention_mask"]
        segments = F.pad(segments, (0, self._length(ids.shape[1]) - ids.shape[1])).int()
        weights = shift_weights(batch.get("loss_weights"))
        # Padding has segment 0, no target and no weight, so it changes neither loss nor attention of real tokens.
        return {"input_ids": self.take_local(ids), "position_ids": self.take_local(positions),
                "row_segments": segments[:, None, None],
                "targets": self.take_local(shift_labels(batch["labels"]), IGNORED),
                **({} if weights is None else {"target_weights": self.take_local(weights)})}

    # Collectives -----------------------------------------------------------------------------------------------------

    def gather(self, x: Tensor) -> Tensor:
        """Gather x [t, ...] from all processes, in the order of the row: [T, ...]."""
        # [T, ...], in the order of the processes
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=self._group)
        # Back to the order of the row.
        return gathered.index_select(0, self._order(len(gathered), x.device).argsort())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter x [T, ...]: this process's positions of the sum over processes, [t, ...]."""
        result = x.new_empty(len(x) // self.size, *x.shape[1:])
        # The scatter distributes equal consecutive parts, so sort positions by process first.
        torch.distributed.reduce_scatter_tensor(result, x.index_select(0, self._order(len(x), x.device)),
                                                group=self._group)
        return result

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the processes; its gradient is also summed."""
        return _Total.apply(x, self._group)

    def divide(self, sums: LossSums) -> LossSums:
        """Divide sums that every process has in full by `size`, so that their sum over processes is correct."""
        return LossSums(*(None if value is None else value / self.size for value in sums))

    def _order(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the first process, then of the second, and so on, [T]."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self._chunks(length)])

    # Attention -------------------------------------------------------------------------------------------------------

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               dropout: float = 0.0, scaling: float | None = None, **options: Any) -> tuple[Tensor, None]:
        """Attention function for transformers, for whole rows (through sdpa) and split rows.

        Args:
            attention_mask: For split rows `row_segments` [B, 1, 1, T] int32, by which they are recognised: documents
                1, 2, ... of the whole row, or 1 for real tokens; 0 is padding, which attends only to padding.
        """
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # Whole rows, as in generation, have a bool mask or none.
        if attention_mask is None or attention_mask.dtype != torch.int32:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        # Rotary embeddings return float32 under autocast, so queries and keys are cast back.
        dtype = compute_dtype(value)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        blocks = list(self._blocks(query, key, attention_mask, options.get("sliding_window")))
        mixed = _SplitAttention.apply(*(x.to(dtype) for x in (query, key, value)), self, blocks, scale)
        return mixed.transpose(1, 2), None  # [B, heads, t, D] -> [B, t, heads, D]

    def _blocks(self, query: Tensor, key: Tensor, row_segments: Tensor, window: int | None) -> Iterator["_Block"]:
        segments, starts = row_segments[:, 0, 0], self._document_starts(row_segments)
        length = segments.shape[1]
        heads_per_key = query.shape[1] // key.shape[1]
        on_cpu = (self._device or query.device).type == "cpu"
        # Queries times keys of a block whose float32 mask stays within the limit, for all rows and sharing heads.
        max_scores = (MASK_BYTES if on_cpu else MASK_BYTES_GPU) // (4 * len(query) * heads_per_key)
        window, offset = length if window is None else window, 0
        for chunk in self._local_chunks(length):
            # `starts` never decreases, so the first query of a chunk attends furthest back.
            size = max(min(BLOCK, max_scores // (chunk.stop - starts[chunk.start])), 1)
            for start in range(chunk.start, chunk.stop, size):
                queries = range(start, min(start + size, chunk.stop))
                # Causal, and no further back than the document or window.
                keys = range(max(starts[start], start - window + 1), queries.stop)
                yield _Block(slice(offset, offset + len(queries)), queries, keys, segments, window)
                offset += len(queries)

    def _document_starts(self, row_segments: Tensor) -> list[int]:
        """Return the start of each position's document, the earliest over the rows.

        The result is cached for the other layers of a forward pass, as it synchronises with the device.
        """
        if self._one_document:
            return [0] * row_segments.shape[-1]
        if self._last[0] is not row_segments:
            segments = row_segments[:, 0, 0]
            positions = torch.arange(segments.shape[1], device=segments.device)
            is_start = F.pad(segments.diff(dim=1) != 0, (1, 0))
            # The latest start up to each position, then the earliest over rows: keys that any row needs, [T].
            self._last = row_segments, (is_start * positions).cummax(1).values.amin(0).tolist()
        return self._last[1]


class _Total(torch.autograd.Function):
    """Sum over the processes of a group; gradients are also summed."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        # Every process's loss depends on the total, so gradients are summed over processes.
        return _Total.apply(grad, ctx.group), None


class _Block(NamedTuple):
    """A block of a process's queries, and the keys that they attend to.

    Args:
        local: Slice of the process's queries.
        queries: Positions of the queries in the row; `keys` likewise.
        segments: Segments of the row, [B, T].
        window: Maximum number of tokens that a query attends to, including itself.
    """

    local: slice
    queries: range
    keys: range
    segments: Tensor
    window: int

    def select_keys(self, x: Tensor) -> Tensor:
        """Return the block's keys of x [B, heads, T, size]."""
        return x[:, :, self.keys.start : self.keys.stop]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute attention of the block: [B, heads, queries, size] from [B, heads, queries or keys, size]."""
        heads_per_key = query.shape[1] // key.shape[1]  # query heads per key head
        # Concatenate query heads that share a key head: no kernel supports both a mask and fewer key heads.
        mask = self._mask().repeat(1, 1, heads_per_key, 1)
        # [B, heads, q, D] -> [B, key heads, heads_per_key * q, D], concatenated queries of these heads.
        mixed = F.scaled_dot_product_attention(query.unflatten(1, (-1, heads_per_key)).flatten(2, 3), key, value, mask,
                                               scale=scale)
        return mixed.unflatten(2, (heads_per_key, -1)).flatten(1, 2)  # back to [B, heads, q, D]

    def _mask(self) -> Tensor:
        queries, keys = (torch.arange(positions.start, positions.stop, device=self.segments.device)
                         for positions in (self.queries, self.keys))
        distance = queries[:, None] - keys  # [q, k]
        may_attend = (distance >= 0) & (distance < self.window)
        # [B, 1, q, k], True where attended.
        return (may_attend & (self.segments[:, queries, None] == self.segments[:, None, keys]))[:, None]


class _SplitAttention(torch.autograd.Function):
    """Attention of a process's queries [B, heads, t, size] to gathered keys and values; saves only local tensors."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, rows: ContextParallel, blocks: list[_Block],
                scale: float) -> Tensor:
        # Keys and values of the whole row are gathered again in `backward` instead of being saved.
        ctx.save_for_backward(query, key, value)
        ctx.rows, ctx.blocks, ctx.scale = rows, blocks, scale
        keys, values = _gather(rows, key, value)
        return torch.cat([
            block.attend(query[:, :, block.local], block.select_keys(keys), block.select_keys(values), scale)
            for block in blocks], dim=2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        keys, values = _gather(ctx.rows, key, value)
        # Gradients of keys and values are summed over many blocks and processes, in float32: [2, B, heads, T, D].
        grad_query, grads = torch.empty_like(query), torch.zeros(2, *keys.shape, device=keys.device)
        for block in ctx.blocks:
            # Recompute the block's attention, with a graph that exists only for this block.
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_()
                          for x in (query[:, :, block.local], block.select_keys(keys), block.select_keys(values))]
                mixed = block.attend(*inputs, ctx.scale)
            grad_query[:, :, block.local], *block_grads = torch.autograd.grad(mixed, inputs, grad[:, :, block.local])
            for total, x in zip(grads, block_grads, strict=True):
                block.select_keys(total).add_(x)
        # Each process has the gradient of all keys from its own queries: sum over processes, keep local positions.
        grad_key, grad_value = ctx.rows.reduce_scatter(grads.movedim(3, 0)).movedim(0, 3).to(key.dtype)
        return grad_query, grad_key, grad_value, None, None, None


def _gather(rows: ContextParallel, key: Tensor, value: Tensor) -> Tensor:
    """Gather keys and values of all positions, [2, B, heads, T, size]."""
    return rows.gather(torch.stack([key, value]).movedim(3, 0)).movedim(0, 3)
