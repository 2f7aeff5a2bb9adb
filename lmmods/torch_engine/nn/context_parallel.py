"""Context parallelism: rows are cut along the sequence over processes that compute each micro-batch together.

Each process has the queries of its own positions and gathers all keys and values (section 3.3.2 of Dubey et al. 2024),
whose gradients are reduce-scattered. A row is cut into 2 n pieces for n processes, and process i has pieces i and
2 n - 1 - i, which balances the work under a causal mask. Attention is computed in blocks of queries and recomputed in
the backward pass, which gathers keys and values again: saved tensors only grow with a process's own positions.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from lmmods.core.errors import UserError
from lmmods.torch_engine.nn.attention import compute_dtype
from lmmods.torch_engine.nn.dropout import TokenDropout, has_rates
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, shift_labels, shift_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "context_parallel"  # of the attention function
# Architectures whose attention uses transformers' registered functions and in which nothing else mixes tokens.
FAMILIES = ("cohere2", "gemma", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2",
            "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
BLOCK = 1024  # most queries of a block; its float32 mask takes at most about MASK_BYTES
MASK_BYTES, MASK_BYTES_GPU = 64 * 2**20, 512 * 2**20


def check_network(model: nn.Module, num_processes: int) -> None:
    """Raise UserError if a network does not support context parallelism.

    Args:
        num_processes: Processes that each row is cut over.
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


def _rope_types(config: "PreTrainedConfig") -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    return {part["rope_type"] for part in (parameters, *by_layer) if "rope_type" in part}


class ContextParallel:
    """Cuts rows over the processes of a group, and computes attention over the cut rows.

    Shapes: T is the length of a row, padded to a multiple of 2 `size`; t = T / `size` the positions of a process.

    Args:
        group: Process group of torch.distributed.
        device: Device whose block sizes are used; None for that of the queries.
        one_document: Take each row as one document, without reading the segments of the batch.
    """

    def __init__(self, group: Any, device: torch.device | None = None, one_document: bool = False):
        self._group, self._device, self._one_document = group, device, one_document
        self.size, self.rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        self._last: tuple[Tensor | None, list[int]] = None, []

    @classmethod
    def over(cls, model: nn.Module, mesh: DeviceMesh, size: int, device: torch.device | None = None,
             one_document: bool = False) -> "ContextParallel":
        """Make a network accept rows cut over `size` processes of Lightning's mesh; it still accepts whole ones.

        The remaining arguments are those of the class.

        Raises:
            UserError: As `check_network`.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        check_network(model, size)
        # Lightning's mesh is (data, tensor); the processes that share a row are neighbours in its data dimension.
        matrices = mesh["tensor_parallel"].size()
        every = init_device_mesh(mesh.device_type, (mesh.size() // (size * matrices), size, matrices),
                                 mesh_dim_names=("data", "context", "tensor"))
        rows = cls(every["context"].get_group(), device, one_document)
        # transformers finds the attention function and its mask by name, so the last registered network is served.
        AttentionInterface.register(NAME, rows.attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
        # Masks of a process are those of its own tokens.
        TokenDropout.from_model(model).own = rows.own
        return rows

    # Positions -------------------------------------------------------------------------------------------------------

    def _length(self, length: int) -> int:
        """Return the padded length of rows of `length` tokens."""
        return -(-length // (2 * self.size)) * 2 * self.size  # rounded up

    def _pieces(self, length: int) -> list[range]:
        """Return the positions of the two pieces of the first process, of the second one, and so on."""
        each = length // (2 * self.size)
        # Under a causal mask early pieces have few keys and late ones many: each process has one of both.
        return [range(piece * each, (piece + 1) * each)
                for rank in range(self.size) for piece in (rank, 2 * self.size - 1 - rank)]

    def _own(self, length: int) -> list[range]:
        return self._pieces(length)[2 * self.rank : 2 * self.rank + 2]

    def own(self, x: Tensor, padding: int = 0) -> Tensor:
        """Return this process's positions of x [..., T], padded with `padding`: [..., t]."""
        x = F.pad(x, (0, self._length(x.shape[-1]) - x.shape[-1]), value=padding)
        return torch.cat([x[..., piece.start : piece.stop] for piece in self._own(x.shape[-1])], dim=-1)

    def cut(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's part of a batch of `causal_loss`.

        Labels are shifted before the cut, as the target of a piece's last position is in another piece.

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
        return {"input_ids": self.own(ids), "position_ids": self.own(positions),
                "row_segments": segments[:, None, None], "targets": self.own(shift_labels(batch["labels"]), IGNORED),
                **({} if weights is None else {"target_weights": self.own(weights)})}

    # Collectives -----------------------------------------------------------------------------------------------------

    def whole(self, x: Tensor) -> Tensor:
        """Gather x [t, ...] from all processes, in the order of the row: [T, ...]."""
        # [T, ...], process after process
        found = x.new_empty(self.size * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(found, x.contiguous(), group=self._group)
        return found.index_select(0, self._order(len(found), x.device).argsort())  # undo the order of the processes

    def summed(self, x: Tensor) -> Tensor:
        """Reduce-scatter x [T, ...]: this process's positions of the sum over processes, [t, ...]."""
        found = x.new_empty(len(x) // self.size, *x.shape[1:])
        # The scatter hands out equal consecutive parts, so positions are put in the order of the processes first.
        torch.distributed.reduce_scatter_tensor(found, x.index_select(0, self._order(len(x), x.device)),
                                                group=self._group)
        return found

    def total(self, x: Tensor) -> Tensor:
        """Sum x over the processes; its gradient is summed likewise."""
        return _Total.apply(x, self._group)

    def share(self, sums: LossSums) -> LossSums:
        """Divide sums that every process has in full by `size`, so that they add up over the processes."""
        return LossSums(*(None if part is None else part / self.size for part in sums))

    def _order(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the first process, then of the second, and so on: [T]."""
        return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in self._pieces(length)])

    # Attention -------------------------------------------------------------------------------------------------------

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               dropout: float = 0.0, scaling: float | None = None, **options: Any) -> tuple[Tensor, None]:
        """Attention function of transformers, for whole rows (through sdpa) and cut ones.

        Args:
            attention_mask: For cut rows `row_segments` [B, 1, 1, T] int32, by which they are recognised: documents
                1, 2, ... of the whole row, or 1 for real tokens; 0 is padding, which attends to padding only.
        """
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # Whole rows, as in generation, have a bool mask or none.
        if attention_mask is None or attention_mask.dtype != torch.int32:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        # Rotary embeddings return float32 under autocast, so queries and keys are cast back.
        dtype = compute_dtype(value)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        blocks = list(self._blocks(query, key, attention_mask, options.get("sliding_window")))
        mixed = _CutAttention.apply(*(x.to(dtype) for x in (query, key, value)), self, blocks, scale)
        return mixed.transpose(1, 2), None  # [B, heads, t, D] -> [B, t, heads, D]

    def _blocks(self, query: Tensor, key: Tensor, row_segments: Tensor, window: int | None) -> Iterator["_Block"]:
        segments, begins = row_segments[:, 0, 0], self._begins(row_segments)
        length = segments.shape[1]
        sharers = query.shape[1] // key.shape[1]
        on_cpu = (self._device or query.device).type == "cpu"
        # Queries times keys of a block whose float32 mask stays within the limit, for all rows and sharing heads.
        most = (MASK_BYTES if on_cpu else MASK_BYTES_GPU) // (4 * len(query) * sharers)
        window, before = length if window is None else window, 0
        for piece in self._own(length):
            # `begins` never decreases, so the first query of a piece looks back furthest.
            size = max(min(BLOCK, most // (piece.stop - begins[piece.start])), 1)
            for start in range(piece.start, piece.stop, size):
                queries = range(start, min(start + size, piece.stop))
                # Causal, and no further back than document or window.
                keys = range(max(begins[start], start - window + 1), queries.stop)
                yield _Block(slice(before, before + len(queries)), queries, keys, segments, window)
                before += len(queries)

    def _begins(self, row_segments: Tensor) -> list[int]:
        """Return where the document of each position begins, taking the earliest over the rows.

        Cached for the other layers of a forward pass, as it synchronises with the device.
        """
        if self._one_document:
            return [0] * row_segments.shape[-1]
        if self._last[0] is not row_segments:
            segments = row_segments[:, 0, 0]
            places = torch.arange(segments.shape[1], device=segments.device)
            is_new = F.pad(segments.diff(dim=1) != 0, (1, 0))
            # The latest start up to each position, then the earliest over rows: keys that any row needs, [T].
            self._last = row_segments, (is_new * places).cummax(1).values.amin(0).tolist()
        return self._last[1]


class _Total(torch.autograd.Function):
    """Sum over the processes of a group, with the same sum of the gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        # Every process's loss depends on the total, so the gradient of x is the sum of theirs.
        return _Total.apply(grad, ctx.group), None


class _Block(NamedTuple):
    """A block of a process's queries, and the keys that they may attend to.

    Args:
        own: Their slice of the process's queries.
        queries: Their positions in the row; `keys` likewise.
        segments: Segments of the row, [B, T].
        window: Most recent tokens that a query attends to, itself included.
    """

    own: slice
    queries: range
    keys: range
    segments: Tensor
    window: int

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the block's keys of x [B, heads, T, size]."""
        return x[:, :, self.keys.start : self.keys.stop]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute attention of the block: [B, heads, queries, size] from [B, heads, queries or keys, size]."""
        sharers = query.shape[1] // key.shape[1]  # query heads per key head
        # Query heads that share a key head are concatenated: no kernel supports both a mask and fewer key heads.
        mask = self._mask().repeat(1, 1, sharers, 1)
        # [B, heads, q, D] -> [B, key heads, sharers * q, D]: the queries of sharing heads follow each other.
        mixed = F.scaled_dot_product_attention(query.unflatten(1, (-1, sharers)).flatten(2, 3), key, value, mask,
                                               scale=scale)
        return mixed.unflatten(2, (sharers, -1)).flatten(1, 2)  # back to [B, heads, q, D]

    def _mask(self) -> Tensor:
        queries, keys = (torch.arange(places.start, places.stop, device=self.segments.device)
                         for places in (self.queries, self.keys))
        back = queries[:, None] - keys  # [q, k]
        seen = (back >= 0) & (back < self.window)
        # [B, 1, q, k], True where attended.
        return (seen & (self.segments[:, queries, None] == self.segments[:, None, keys]))[:, None]


class _CutAttention(torch.autograd.Function):
    """Attention of a process's queries [B, heads, t, size] over the gathered keys and values; saves only its own."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, rows: ContextParallel, blocks: list[_Block],
                scale: float) -> Tensor:
        # Keys and values of the whole row are gathered again in `backward` instead of being saved.
        ctx.save_for_backward(query, key, value)
        ctx.rows, ctx.blocks, ctx.scale = rows, blocks, scale
        keys, values = _gather(rows, key, value)
        return torch.cat([block.attend(query[:, :, block.own], block.of_keys(keys), block.of_keys(values), scale)
                          for block in blocks], dim=2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        keys, values = _gather(ctx.rows, key, value)
        # Gradients of keys and values are float32, as each sums over many blocks and processes: [2, B, heads, T, D].
        of_query, sums = torch.empty_like(query), torch.zeros(2, *keys.shape, device=keys.device)
        for block in ctx.blocks:
            # Each block's attention is recomputed, with a graph that lives for this block only.
            with torch.enable_grad():
                parts = [part.detach().requires_grad_()
                         for part in (query[:, :, block.own], block.of_keys(keys), block.of_keys(values))]
                mixed = block.attend(*parts, ctx.scale)
            of_query[:, :, block.own], *others = torch.autograd.grad(mixed, parts, grad[:, :, block.own])
            for total, part in zip(sums, others, strict=True):
                block.of_keys(total).add_(part)
        # Each process has the gradient of all keys due to its own queries: sum over processes, keep the own positions.
        of_key, of_value = ctx.rows.summed(sums.movedim(3, 0)).movedim(0, 3).to(key.dtype)
        return of_query, of_key, of_value, None, None, None


def _gather(rows: ContextParallel, key: Tensor, value: Tensor) -> Tensor:
    """Gather keys and values of all positions, [2, B, heads, T, size]."""
    return rows.whole(torch.stack([key, value]).movedim(3, 0)).movedim(0, 3)
