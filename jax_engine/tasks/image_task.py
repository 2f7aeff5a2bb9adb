"""Base class of the causal LM tasks on JAX that may see images."""

import jax

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.tasks.causal_task import CausalTask
from jax_engine.tasks.running import Run
from lmmods.core.errors import UserError
from lmmods.core.image_models import check_image_tokens
from lmmods.recipe.images import ImageFields


class ImageTask(ImageFields, CausalTask):
    """Abstract causal LM task whose network sees the images of a batch with `model.images`."""

    def begin(self, run: Run) -> None:
        """See `Task`. Raises UserError: the devices or the tokenizer do not fit a model with images."""
        super().begin(run)
        if not self.images:
            return
        check_image_tokens(run.data.codec.images.token_ids, self.network.arch.images.token)
        # The shapes of a batch depend on its images, which only the process that reads them knows.
        if isinstance(run.parallel, ShardedMesh) or jax.process_count() > 1:
            raise UserError("trainer.strategy: a mesh, fsdp or several processes cannot be combined with model.images "
                            "on JAX. Use ddp in one process, or one device.", "trainer.strategy", "model.images")
