"""Supervised fine-tuning: full, LoRA or QLoRA."""

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lmmods.core.errors import UserError
from lmmods.core.image_models import check_image_tokens, image_token, is_of_language_model
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.sft import SFTFields
from lmmods.rollouts.on_policy import make_on_policy
from lmmods.torch_engine.nn.images import ImageInputs
from lmmods.torch_engine.tasks.causal_task import CausalModule
from lmmods.torch_engine.tasks.sampler import TorchSampler


class SFT(SFTFields, CausalModule):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""

    def link(self, datamodule: DataModule) -> None:
        super().link(datamodule)
        datamodule.take_rows_from(make_on_policy(self, datamodule))

    def build_model(self, abstract: bool = False) -> None:
        data, strategy = self.trainer.datamodule, self.trainer.strategy
        if self.images and not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
            raise UserError(f"trainer.strategy: {type(strategy).__name__} cannot be combined with model.images. Use "
                            "ddp, or one device.", "trainer.strategy", "model.images")
        super().build_model(abstract)
        data.take_rows_from(make_on_policy(self, data, lambda: None if abstract else TorchSampler(self)))
        if self.images:
            self._add_images(data)

    def _add_images(self, data: DataModule) -> None:
        """Let the network see images. Raises UserError: the tokenizer or the strategy does not fit it."""
        self.model.further_inputs = ImageInputs(self.model)
        check_image_tokens(data.codec.images.token_ids, image_token(self.model.config))
        # A micro-batch without images gives other parts no gradient, for which DDP would wait.
        others = [name for name, param in self.model.named_parameters()
                  if param.requires_grad and not is_of_language_model(name)]
        if others and isinstance(self.trainer.strategy, DDPStrategy):
            raise UserError(f"model.images: {others[0]} trains, but on several devices only the language model can. "
                            "Set trainer.devices to 1, or freeze the other parts.", "trainer.devices")
