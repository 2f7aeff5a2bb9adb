"""Supervised fine-tuning on JAX: full or with adapters."""

from typing import Any

from jax_engine.tasks.image_task import ImageTask
from jax_engine.tasks.running import Run
from jax_engine.tasks.sampler import JaxSampler
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.sft import SFTFields
from lmmods.rollouts.on_policy import make_on_policy


class SFT(SFTFields, ImageTask):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._run: Any = None

    def link(self, datamodule: DataModule) -> None:
        super().link(datamodule)
        # Plans and `inspect` start no run.
        datamodule.take_rows_from(make_on_policy(self, datamodule, lambda: self._run and JaxSampler(self._run)))

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._run = run
