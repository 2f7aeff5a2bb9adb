"""Supervised fine-tuning: full, LoRA or QLoRA."""

from lmmods.data.base import DataModule
from lmmods.recipe.tasks.sft import SFTFields
from lmmods.rollouts.on_policy import make_on_policy
from lmmods.torch_engine.tasks.image_module import ImageModule
from lmmods.torch_engine.tasks.sampler import TorchSampler


class SFT(SFTFields, ImageModule):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""

    def link(self, datamodule: DataModule) -> None:
        super().link(datamodule)
        datamodule.take_rows_from(make_on_policy(self, datamodule))

    def build_model(self, abstract: bool = False) -> None:
        super().build_model(abstract)
        data = self.trainer.datamodule
        data.take_rows_from(make_on_policy(self, data, lambda: None if abstract else TorchSampler(self)))
