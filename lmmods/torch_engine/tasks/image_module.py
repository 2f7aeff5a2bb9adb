"""Base class of the tasks on causal LMs that may see images."""

from lmmods.core.image_models import check_image_tokens, image_token
from lmmods.recipe.images import ImageFields
from lmmods.torch_engine.nn.images import ImageInputs, use_all_parts
from lmmods.torch_engine.tasks.causal_task import CausalModule


class ImageModule(ImageFields, CausalModule):
    """Abstract causal LM task whose network sees the images of a batch with `model.images`."""

    def build_model(self, abstract: bool = False) -> None:
        """See `TaskModule`. Raises UserError: the tokenizer does not fit a model with images."""
        super().build_model(abstract)
        if self.images:
            self.model.further_inputs = ImageInputs(self.model)
            use_all_parts(self.model)
            check_image_tokens(self.trainer.datamodule.codec.images.token_ids, image_token(self.model.config))
