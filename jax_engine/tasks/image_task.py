"""Base class of the causal LM tasks on JAX that may see images."""

from jax_engine.tasks.causal_task import CausalTask
from jax_engine.tasks.running import Run
from lmmods.core.image_models import check_image_tokens
from lmmods.recipe.images import ImageFields


class ImageTask(ImageFields, CausalTask):
    """Abstract causal LM task whose network sees the images of a batch with `model.images`."""

    def begin(self, run: Run) -> None:
        """See `Task`. Raises UserError: the tokenizer does not fit a model with images."""
        super().begin(run)
        if self.images:
            check_image_tokens(run.data.codec.images.token_ids, self.network.arch.images.token)
