"""Images: a vision transformer whose features replace the embeddings of image tokens."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_engine.distributed.mesh import gather
from jax_engine.models.architecture import Architecture
from jax_engine.models.linear import Build, Embedding, Linear, Norm, parameter, product
from lmmods.core.labels import PER_ROW

PIXELS, PIXEL_MASK = f"{PER_ROW}pixel_values", f"{PER_ROW}pixel_attention_mask"


class ImageEncoder(nnx.Module):
    """What is before and after the layers of the vision transformer."""

    def __init__(self, arch: Architecture, build: Build):
        images, tower = arch.images, arch.images.tower
        self.images, self.build, size = images, build, tower.hidden_size
        self.patches = Patches(size, images.channels, images.patch, tower.init_std, build)
        self.positions = Embedding((images.size // images.patch) ** 2, size, std=tower.init_std)
        self.norm = Norm(size, tower.norm, tower.norm_eps)
        if images.projector == "shuffle":
            self.project = Linear(size * images.factor**2, arch.hidden_size, "images.project", build,
                                  std=arch.init_std, bias=False)
        else:
            self.project_norm = Norm(size, "rms_plus_one", tower.norm_eps)
            self.project = Projection(size, arch.hidden_size, build)

    def embed(self, pixels: Array, real: Array) -> Array:
        """Return the stream [M, P, D] that enters the first layer, for pixels [M, C, H, W].

        Args:
            real: [M, H / patch, W / patch] bool, False for padding around the image.
        """
        side = self.images.size // self.images.patch
        rows, columns = (np.broadcast_to(np.arange(size), (size + 1, size)) for size in real.shape[1:])
        if self.images.by_fraction:
            rows, columns = (positions_by_fraction(size, side) for size in real.shape[1:])
        # [M, h, 1] + [M, 1, w]; padding has position 0.
        positions = (jnp.asarray(rows)[real[:, :, 0].sum(1)][:, :, None] * side
                     + jnp.asarray(columns)[real[:, 0].sum(1)][:, None])
        positions = jnp.where(real, positions, 0).reshape(len(real), -1)
        # Gathered, as it is small and patches need not divide among devices.
        table = gather("images.positions.weight", self.positions.weight[...])
        return self.patches(pixels) + jnp.take(table, positions, axis=0)

    def features(self, x: Array, shape: tuple[int, int]) -> Array:
        """Return features [M, S, E] for the stream [M, P, D] after the last layer.

        Args:
            shape: Number of rows and columns of patches.
        """
        x, factor, (height, width) = self.norm(x), self.images.factor, shape
        # [M, h / f, f, w / f, f, D]
        x = x.reshape(len(x), height // factor, factor, width // factor, factor, -1)
        if self.images.projector == "shuffle":
            x = x.swapaxes(2, 3).reshape(len(x), -1, factor * factor * x.shape[-1])
            return self.project(x)
        x = x.astype(jnp.float32).mean((2, 4)).astype(x.dtype)
        return self.project(self.project_norm(x.reshape(len(x), -1, x.shape[-1])))


class Patches(nnx.Module):
    """Linear map of each patch of pixels. The weight is [out, channels, patch, patch], a convolution's in torch."""

    def __init__(self, size: int, channels: int, patch: int, std: float, build: Build):
        self.patch, self.build = patch, build
        self.weight = parameter((size, channels, patch, patch), build.normal(std))
        self.bias = parameter((size,), 0.0)

    def __call__(self, pixels: Array) -> Array:
        """Map pixels [M, C, H, W] to patches [M, P, D]; pixels beyond whole patches are not read."""
        (num, channels, *shape), patch = pixels.shape, self.patch
        height, width = (size // patch for size in shape)
        pixels = pixels[:, :, :height * patch, :width * patch].reshape(num, channels, height, patch, width, patch)
        pixels = pixels.transpose(0, 2, 4, 1, 3, 5).reshape(num, height * width, -1)
        weight = gather("images.patches.weight", self.weight[...])
        return (product(pixels, weight.reshape(len(weight), -1), self.build)
                + self.bias[...].astype(self.build.dtype))


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


def place_images(encoder: ImageEncoder, run_layers: Callable[[Array, Array], Array], batch: dict[str, Array], x: Array
                 ) -> Array:
    """Return embeddings [B, T, E] with each row's image features instead of its image tokens, in order.

    Args:
        run_layers: (stream [M, P, D], mask [M, 1, P, P]) -> the stream after the layers.
        batch: `input_ids` [B, T] and, if there are images, PIXELS [B, N, C, H, W]: images of all rows, padded to the
            same size and number. PIXEL_MASK [B, N, H, W] is 0 in padding.
        x: Embeddings of the tokens.
    """
    if PIXELS not in batch:
        return x
    pixels, patch = batch[PIXELS], encoder.images.patch
    pixels = pixels.reshape(-1, *pixels.shape[2:])
    shape = tuple(size // patch for size in pixels.shape[2:])
    real = jnp.ones((len(pixels), *shape), bool)
    if PIXEL_MASK in batch:
        mask = batch[PIXEL_MASK].reshape(-1, *pixels.shape[2:])[:, :shape[0] * patch, :shape[1] * patch]
        real = mask.reshape(-1, shape[0], patch, shape[1], patch).any((2, 4))
    stream = encoder.embed(pixels, real)
    keys = jnp.broadcast_to(real.reshape(len(real), 1, 1, -1), (len(real), 1, *[stream.shape[1]] * 2))
    features = encoder.features(run_layers(stream, keys), shape).astype(x.dtype)
    features = features.reshape(len(x), -1, x.shape[-1])
    is_image = batch["input_ids"] == encoder.images.token
    index = jnp.cumsum(is_image, 1) - 1
    # A token that the network has generated has no feature.
    is_image &= index < features.shape[1]
    taken = jnp.take_along_axis(features, jnp.clip(index, 0, features.shape[1] - 1)[..., None], axis=1)
    return jnp.where(is_image[..., None], taken, x)


def image_blocks(ids: Array, token: int) -> Array:
    """Return [B, T] the number of each token's image in its row, from 1; 0 for other tokens.

    Consecutive image tokens belong to one image.
    """
    is_image = ids == token
    is_first = is_image & ~jnp.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
    return jnp.cumsum(is_first, 1) * is_image
