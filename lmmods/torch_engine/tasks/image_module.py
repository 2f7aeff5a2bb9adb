"""Base class of the tasks on causal LMs that may see images."""

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lmmods.core.errors import UserError
from lmmods.core.image_models import check_image_tokens, image_token, is_of_language_model
from lmmods.recipe.images import ImageFields
from lmmods.torch_engine.nn.images import ImageInputs
from lmmods.torch_engine.tasks.causal_task import CausalModule


class ImageModule(ImageFields, CausalModule):
    """Abstract causal LM task whose network sees the images of a batch with `model.images`."""

    def build_model(self, abstract: bool = False) -> None:
        """See `TaskModule`. Raises UserError: the strategy or the tokenizer does not fit a model with images."""
        strategy = self.trainer.strategy
        if self.images and not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
            raise UserError(f"trainer.strategy: {type(strategy).__name__} cannot be combined with model.images. Use "
                            "ddp, or one device.", "trainer.strategy", "model.images")
        super().build_model(abstract)
        if not self.images:
            return
        self.model.further_inputs = ImageInputs(self.model)
        check_image_tokens(self.trainer.datamodule.codec.images.token_ids, image_token(self.model.config))
        # A micro-batch without images gives other parts no gradient, for which DDP would wait.
        others = [name for name, param in self.model.named_parameters()
                  if param.requires_grad and not is_of_language_model(name)]
        if others and isinstance(strategy, DDPStrategy):
            raise UserError(f"model.images: {others[0]} trains, but on several devices only the language model can. "
                            "Set trainer.devices to 1, or freeze the other parts.", "trainer.devices")
