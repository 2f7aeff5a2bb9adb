"""Images: a vision transformer whose features replace the embeddings of image tokens.

There is an encoder for each kind of `Images`. It has three methods: `embed`, before the layers of the transformer,
`features`, after them, and `count`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_engine.distributed.mesh import gather
from jax_engine.models import fused
from jax_engine.models.architecture import Architecture, PaddedImages, PatchImages
from jax_engine.models.attention import attend
from jax_engine.models.linear import ACTIVATIONS, Build, Embedding, Linear, Norm, parameter, product
from jax_engine.models.rope import Angles
from lmmods.core.image_models import COUNT
from lmmods.core.labels import PER_ROW

PIXELS, PIXEL_MASK, GRID = (f"{PER_ROW}{name}" for name in ("pixel_values", "pixel_attention_mask", "image_grid_thw"))
NUM_PIXELS = f"{COUNT}pixel_values"
CHUNK = 256  # patches whose scores for all patches of their row are computed at a time
Attend = Callable[[Array, Array, Array], Array]  # (q, k, v) [M, P, heads, head_dim] -> [M, P, heads * head_dim]


class Stream(NamedTuple):
    """What enters the layers of the vision transformer.

    Args:
        x: [M, P, D].
        masks: What patches attend to: a mask [M, 1, P, P], or functions, among which `mask_indices` chooses by layer.
        angles: Rotary positions of the patches.
    """

    x: Array
    masks: list[Array | Attend]
    angles: Angles | None = None


def build_encoder(arch: Architecture, build: Build) -> "PaddedImageEncoder | PatchImageEncoder":
    """Return the encoder for the network's kind of images."""
    return (PaddedImageEncoder if isinstance(arch.images, PaddedImages) else PatchImageEncoder)(arch, build)


class Patches(nnx.Module):
    """Linear map of flat patches. The weight is [out, *shape], a convolution's in torch."""

    def __init__(self, size: int, shape: tuple[int, ...], std: float, build: Build, bias: bool = True):
        self.build = build
        self.weight = parameter((size, *shape), build.normal(std))
        self.bias = parameter((size,), 0.0) if bias else None

    def __call__(self, patches: Array) -> Array:
        """Map patches [..., I], the product of `shape`, to [..., D]."""
        weight = gather("images.patches.weight", self.weight[...])
        x = product(patches, weight.reshape(len(weight), -1), self.build)
        return x if self.bias is None else x + self.bias[...].astype(self.build.dtype)


def gather_positions(positions: Embedding) -> Array:
    """Return the table of positions [num, D]; whole on each device, as it is small and patches need not divide."""
    return gather("images.positions.weight", positions.weight[...])


# ---------------------------------------------------------------------------------------------------------------------
# Images that are padded to one size.


class PaddedImageEncoder(nnx.Module):
    """Encoder of `PaddedImages`: PIXELS [B, N, C, H, W], images of all rows, padded to the same size and number.

    PIXEL_MASK [B, N, H, W] is 0 in padding. Without it, NUM_PIXELS [B] is each row's number of images.
    """

    def __init__(self, arch: Architecture, build: Build):
        self.images, size, tower = arch.images, arch.images.tower.hidden_size, arch.images.tower
        images = self.images
        self.patches = Patches(size, (images.channels, images.patch, images.patch), tower.init_std, build)
        self.positions = Embedding((images.size // images.patch) ** 2, size, std=tower.init_std)
        self.norm = Norm(size, tower.norm, tower.norm_eps)
        if images.projector == "shuffle":
            self.project = Linear(size * images.factor**2, arch.hidden_size, "images.project", build,
                                  std=arch.init_std, bias=False)
        else:
            self.project_norm = Norm(size, "rms_plus_one", tower.norm_eps)
            self.project = Projection(size, arch.hidden_size, build)

    def embed(self, batch: dict[str, Array]) -> Stream:
        """Return the stream [B * N, P, D] that enters the first layer. Pixels beyond whole patches are not read."""
        patch, side = self.images.patch, self.images.size // self.images.patch
        pixels, shape = batch[PIXELS], self._shape(batch)
        height, width = shape
        pixels = pixels[..., :height * patch, :width * patch].reshape(-1, pixels.shape[2], height, patch, width, patch)
        real = self._real(batch).reshape(-1, *shape)
        rows, columns = (np.broadcast_to(np.arange(size), (size + 1, size)) for size in shape)
        if self.images.by_fraction:
            rows, columns = (positions_by_fraction(size, side) for size in shape)
        # [M, h, 1] + [M, 1, w]; padding has position 0.
        positions = (jnp.asarray(rows)[real[:, :, 0].sum(1)][:, :, None] * side
                     + jnp.asarray(columns)[real[:, 0].sum(1)][:, None])
        positions = jnp.where(real, positions, 0).reshape(len(real), -1)
        x = self.patches(pixels.transpose(0, 2, 4, 1, 3, 5).reshape(len(pixels), height * width, -1))
        keys = jnp.broadcast_to(real.reshape(len(real), 1, 1, -1), (len(real), 1, *[x.shape[1]] * 2))
        return Stream(x + jnp.take(gather_positions(self.positions), positions, axis=0), [keys])

    def features(self, batch: dict[str, Array], x: Array) -> Array:
        """Return features [B, S, E] for the stream [B * N, P, D] after the last layer."""
        x, factor, (height, width) = self.norm(x), self.images.factor, self._shape(batch)
        # [M, h / f, f, w / f, f, D]
        x = x.reshape(len(x), height // factor, factor, width // factor, factor, -1)
        if self.images.projector == "shuffle":
            x = self.project(x.swapaxes(2, 3).reshape(*x.shape[:2], x.shape[3], -1))
        else:
            x = x.astype(jnp.float32).mean((2, 4)).astype(x.dtype)
            x = self.project(self.project_norm(x))
        return x.reshape(len(batch[PIXELS]), -1, x.shape[-1])

    def count(self, batch: dict[str, Array]) -> Array:
        """Return the number of features of each row, [B]."""
        height, width = self._shape(batch)
        num = batch[NUM_PIXELS] if NUM_PIXELS in batch else self._real(batch).any((2, 3)).sum(1)
        return num * (height * width // self.images.factor**2)

    def _shape(self, batch: dict[str, Array]) -> tuple[int, int]:
        """Return the number of rows and columns of patches."""
        return batch[PIXELS].shape[3] // self.images.patch, batch[PIXELS].shape[4] // self.images.patch

    def _real(self, batch: dict[str, Array]) -> Array:
        """Return [B, N, rows, columns] bool, False for padding around images."""
        patch, (height, width) = self.images.patch, self._shape(batch)
        if PIXEL_MASK not in batch:
            return jnp.ones((*batch[PIXELS].shape[:2], height, width), bool)
        mask = batch[PIXEL_MASK][..., :height * patch, :width * patch]
        return mask.reshape(*mask.shape[:2], height, patch, width, patch).any((3, 5))


class Projection(nnx.Module):
    """Product with a matrix [in, out], which has its own name in Gemma 3."""

    def __init__(self, in_size: int, out_size: int, build: Build):
        self.build, self.mm_input_projection_weight = build, parameter((in_size, out_size), 0.0)

    def __call__(self, x: Array) -> Array:
        return product(x, self.mm_input_projection_weight[...], self.build, conv1d=True)


def positions_by_fraction(count: int, side: int) -> np.ndarray:
    """Return the index, in a table of `side` positions, of each patch along one edge of an image.

    Args:
        count: Patches along the edge, with padding.

    Returns:
        [count + 1, count] int, by the number of patches that are not padding, and the patch.
    """
    # float32 as in transformers: a product just below a boundary belongs to the position before it.
    steps = np.float32(1) / np.maximum(np.arange(count + 1), 1).astype(np.float32)
    fractions = np.minimum(np.arange(count, dtype=np.float32) * steps[:, None], np.float32(1 - 1e-6))
    boundaries = (np.arange(1, side) * (1 / side)).astype(np.float32)
    return np.searchsorted(boundaries, fractions.ravel(), side="right").reshape(fractions.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Images of any size, as flat patches.


class Layout(NamedTuple):
    """Positions of the patches of images, each [B, N]; N is a multiple of what belongs together.

    Args:
        order: Index among the pixels, which brings the patches of a window together; None if there are no windows.
        images: The patch's image, from 1; 0 is padding.
        windows: The patch's window, likewise; None if there are none.
        row: In the image; `column` likewise.
        height: Rows of the image; `width` columns.
    """

    order: Array | None
    images: Array
    windows: Array | None
    row: Array
    column: Array
    height: Array
    width: Array


class PatchImageEncoder(nnx.Module):
    """Encoder of `PatchImages`: PIXELS [B, N, I], the flat patches of each row's images, and GRID [B, M, 3], the number
    of frames (1), rows and columns of patches of each image. Zeros pad both.
    """

    def __init__(self, arch: Architecture, build: Build):
        self.images, tower = arch.images, arch.images.tower
        shape = (arch.images.channels, arch.images.frames, arch.images.patch, arch.images.patch)
        self.patches = Patches(tower.hidden_size, shape, tower.init_std, build, arch.images.patch_bias)
        self.positions = None if arch.images.side is None else Embedding(
            arch.images.side**2, tower.hidden_size, std=tower.init_std)
        self.merger = Merger(arch, build, "images.merger")
        self.fused = fused.choose(tower, build.dtype, "causal", build.attention, build.on, "Attention of images")

    def embed(self, batch: dict[str, Array]) -> Stream:
        """Return the stream [B, N, D] that enters the first layer."""
        tower, layout, pixels = self.images.tower, self._layout(batch), batch[PIXELS]
        pixels = jnp.pad(pixels, ((0, 0), (0, layout.images.shape[1] - pixels.shape[1]), (0, 0)))
        if layout.order is not None:  # here, because pixels have no gradient
            pixels = jnp.take_along_axis(pixels, layout.order[..., None], 1)
        x = self.patches(pixels)
        if self.positions is not None:
            x = x + self._interpolate(layout).astype(x.dtype)
        scale = tower.attention_scales[0]
        kernel = self.fused and self.fused.for_batch({"input_ids": layout.images, "segment_ids": layout.images})
        masks: list[Array | Attend] = [kernel or partial(attend_to_images, layout.images, scale)]
        if layout.windows is not None:
            masks.append(partial(attend_in_windows, layout.windows, scale, self.images.window**2))
        return Stream(x, masks, tower.ropes[0].angles(jnp.stack([layout.row, layout.column], -1), None))

    def features(self, batch: dict[str, Array], x: Array, merger: "Merger | None" = None) -> Array:
        """Return features [B, S, E], in the order of the pixels, for the stream [B, N, D] after a layer."""
        x, order = (merger or self.merger)(x), self._layout(batch).order
        if order is None:
            return x
        # All patches of a square move together: [B, S].
        return jnp.take_along_axis(x, jnp.argsort(order[:, ::self.images.factor**2], 1)[..., None], 1)

    def count(self, batch: dict[str, Array]) -> Array:
        """Return the number of features of each row, [B]."""
        return count_features(self.images, batch).sum(1)

    def _layout(self, batch: dict[str, Array]) -> Layout:
        grid, factor, window = batch[GRID], self.images.factor, self.images.window
        unit = factor**2 if window is None else window**2
        index = jnp.arange(-(-batch[PIXELS].shape[1] // unit) * unit)
        image, index = locate(jnp.broadcast_to(index, (len(grid), len(index))), grid.prod(-1))
        height, width = sizes_at(grid, image, factor)
        # Index of the square, and of the patch in it.
        square, index = index // factor**2, index % factor**2
        row = square // (width // factor) * factor + index // factor
        column = square % (width // factor) * factor + index % factor
        is_real = image < grid.shape[1]
        layout = Layout(None, jnp.where(is_real, image + 1, 0), None, row, column, height, width)
        if window is None:
            return layout
        windows = row // window * -(-width // window) + column // window
        # Number windows over all images of a row; padding is last.
        windows += image * index.shape[1]
        order = jnp.argsort(windows, 1, stable=True)
        layout = layout._replace(order=order, windows=jnp.where(is_real, windows + 1, 0))
        return Layout(order, *(jnp.take_along_axis(x, order, 1) for x in layout[1:]))

    def _interpolate(self, layout: Layout) -> Array:
        """Return the position [B, N, D] of each patch, between the four nearest ones of the table."""
        side, table = self.images.side, gather_positions(self.positions)

        def neighbours(index: Array, size: Array) -> list[tuple[Array, Array]]:
            # The first and last patch of an edge have the first and last position of the table.
            position = index.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)
            below = jnp.floor(position)
            above, first = position - below, below.astype(jnp.int32)
            return [(first, 1 - above), (jnp.minimum(first + 1, side - 1), above)]

        columns = neighbours(layout.column, layout.width)
        return sum(((row_weight * weight)[..., None] * jnp.take(table, row * side + column, axis=0)
                    for row, row_weight in neighbours(layout.row, layout.height) for column, weight in columns),
                   jnp.zeros(()))


class Merger(nnx.Module):
    """Joins the patches of a square and maps them to a feature of the decoder by an MLP.

    Args:
        path: Our path of this module.
        joins_first: The norm is over the joined patches, not over each.
    """

    def __init__(self, arch: Architecture, build: Build, path: str, joins_first: bool = False):
        tower, self.joins_first = arch.images.tower, joins_first
        self.size = tower.hidden_size * arch.images.factor**2
        self.norm = Norm(self.size if joins_first else tower.hidden_size, tower.norm, tower.norm_eps)
        self.up = Linear(self.size, self.size, f"{path}.up", build, std=tower.init_std)
        self.down = Linear(self.size, arch.hidden_size, f"{path}.down", build, std=tower.init_std)

    def __call__(self, x: Array) -> Array:
        """Map patches [B, N, D] to features [B, S, E]."""
        joined = x.reshape(len(x), -1, self.size)
        x = self.norm(joined) if self.joins_first else self.norm(x).reshape(joined.shape)
        return self.down(ACTIVATIONS["gelu"](self.up(x)))


def attend_to_images(images: Array, scale: float, q: Array, k: Array, v: Array) -> Array:
    """Compute attention within the images of a row: [B, N, heads * head_dim] for q, k and v [B, N, heads, head_dim].

    Args:
        images: [B, N], the patch's image; 0 is padding.
    """
    length = q.shape[1]
    num = -(-length // CHUNK)
    size = -(-length // num)

    def run(chunk: tuple[Array, Array]) -> Array:
        queries, their_images = chunk
        mask = (their_images[:, :, None] == images[:, None]) & (images > 0)[:, None]
        return attend(queries, k, v, mask[:, None], scale)

    def split(x: Array) -> Array:  # [B, N, ...] -> [num, B, size, ...], zeros after the last patch
        padding = [(0, 0), (0, num * size - length), *[(0, 0)] * (x.ndim - 2)]
        return jnp.moveaxis(jnp.pad(x, padding).reshape(len(x), num, size, *x.shape[2:]), 1, 0)

    if num == 1:
        return run((q, images))
    # The backward pass recomputes each chunk, so that the scores of only one exist at a time.
    mixed = jax.lax.map(jax.checkpoint(run, prevent_cse=False), (split(q), split(images)))
    return jnp.moveaxis(mixed, 0, 1).reshape(len(q), num * size, -1)[:, :length]


# Save only the arguments for the backward pass, not the scores of all windows.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(1, 2))
def attend_in_windows(windows: Array, scale: float, size: int, q: Array, k: Array, v: Array) -> Array:
    """Compute attention within windows: [B, N, heads * head_dim] for q, k and v [B, N, heads, head_dim].

    Args:
        windows: [B, N], the patch's window; 0 is padding. Patches of a window are consecutive.
        size: Maximum number of patches of a window; divides N.
    """
    def split(x: Array) -> Array:  # [B, N, ...] -> [B, N / size, size, ...]
        return x.reshape(len(x), -1, size, *x.shape[2:])

    def with_neighbours(x: Array) -> Array:  # a window is in at most two consecutive blocks
        x = jnp.pad(split(x), ((0, 0), (1, 1), *[(0, 0)] * (x.ndim - 1)))
        return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], 2)

    keys = with_neighbours(windows)[:, :, None]
    mask = (split(windows)[..., None] == keys) & (keys > 0)
    # Blocks as rows of a batch.
    blocks = (x.reshape(-1, *x.shape[2:]) for x in (split(q), with_neighbours(k), with_neighbours(v)))
    return attend(*blocks, mask.reshape(-1, 1, *mask.shape[2:]), scale).reshape(*q.shape[:2], -1)


# ---------------------------------------------------------------------------------------------------------------------
# Which image a patch or a token belongs to.


def locate(index: Array, sizes: Array) -> tuple[Array, Array]:
    """Return the image of each index among a row's items, and the index within the image; M and 0 after the last image.

    Args:
        index: [B, S].
        sizes: [B, M] number of items of each image.
    """
    ends = jnp.cumsum(sizes, 1)
    image = (index[..., None] >= ends[:, None]).sum(-1)
    starts = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), image, 1)
    return image, jnp.where(image < sizes.shape[1], index - starts, 0)


def sizes_at(grid: Array, image: Array, factor: int) -> tuple[Array, Array]:
    """Return the number of rows and of columns of patches of images [B, S]; for padding, of one square."""
    grid = jnp.pad(grid[..., 1:], ((0, 0), (0, 1), (0, 0)))
    sizes = jnp.maximum(jnp.take_along_axis(grid, image[..., None], 1), factor)
    return sizes[..., 0], sizes[..., 1]


def count_features(images: PatchImages, batch: dict[str, Array]) -> Array:
    """Return the number of features of each image, [B, M]."""
    return batch[GRID].prod(-1) // images.factor**2


def find_image_tokens(ids: Array, token: int, count: Array) -> tuple[Array, Array]:
    """Return [B, T] bool, True for tokens that stand for an image's feature, and the index [B, T] of the feature.

    Args:
        count: [B] number of features. Further tokens, which the network has generated, have none.
    """
    is_image = ids == token
    index = jnp.cumsum(is_image, 1) - 1
    return is_image & (index < count[:, None]), index


def place_features(features: Array, count: Array, ids: Array, token: int, x: Array) -> Array:
    """Return x [B, T, E] with each row's features [B, S, E] at its image tokens, in order.

    Args:
        ids, token, count: As for `find_image_tokens`.
    """
    is_image, index = find_image_tokens(ids, token, count)
    index = jnp.clip(index, 0, features.shape[1] - 1)
    return jnp.where(is_image[..., None], jnp.take_along_axis(features.astype(x.dtype), index[..., None], 1), x)


def image_positions(images: PatchImages, batch: dict[str, Array], positions: Array) -> Array:
    """Return the positions [B, T, 3] of tokens in time, height and width (M-RoPE).

    An image's tokens start at one position and count its rows and columns; what follows starts after the largest.

    Args:
        positions: [B, T], counts the tokens of each text from 0.
    """
    sizes = count_features(images, batch)
    is_image, index = find_image_tokens(batch["input_ids"], images.token, sizes.sum(1))
    image, offset = locate(index, sizes)
    height, width = (size // images.factor for size in sizes_at(batch[GRID], image, images.factor))
    offset, num = jnp.where(is_image, offset, 0), height * width
    # The last token of an image accounts for the positions that its tokens share.
    shared = jnp.where(is_image & (offset == num - 1), num - jnp.maximum(height, width), 0)
    before = jnp.cumsum(shared, 1) - shared
    before -= jax.lax.cummax(jnp.where(positions == 0, before, 0), axis=1)  # of earlier texts in the row
    first = positions - before - offset
    return jnp.stack([first, first + offset // width, first + offset % width], -1)


def image_blocks(ids: Array, token: int) -> Array:
    """Return [B, T] the number of each token's image in its row, from 1; 0 for other tokens.

    Consecutive image tokens belong to one image.
    """
    is_image = ids == token
    is_first = is_image & ~jnp.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
    return jnp.cumsum(is_first, 1) * is_image
