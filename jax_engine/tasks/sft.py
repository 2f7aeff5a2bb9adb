"""Supervised fine-tuning on JAX: full or with adapters."""

from typing import Any

import jax

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import Tree
from jax_engine.tasks.causal_task import CausalTask
from jax_engine.tasks.running import Run
from jax_engine.tasks.sampler import JaxSampler
from lmmods.core.errors import UserError
from lmmods.core.hardware import Target
from lmmods.core.image_models import check_image_tokens
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.sft import SFTFields
from lmmods.rollouts.on_policy import make_on_policy


class SFT(SFTFields, CausalTask):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._run: Any = None

    def build(self, precision: str, datamodule: DataModule, seed: int, abstract: bool = False, on: Target | None = None
              ) -> tuple[Tree, Tree]:
        built = super().build(precision, datamodule, seed, abstract, on)
        if self.images:
            check_image_tokens(datamodule.codec.images.token_ids, self.network.arch.images.token)
        return built

    def link(self, datamodule: DataModule) -> None:
        super().link(datamodule)
        # Plans and `inspect` start no run.
        datamodule.take_rows_from(make_on_policy(self, datamodule, lambda: self._run and JaxSampler(self._run)))

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._run = run
        # The shapes of a batch depend on its images, which only the process that reads them knows.
        if self.images and (isinstance(run.parallel, ShardedMesh) or jax.process_count() > 1):
            raise UserError("trainer.strategy: a mesh, fsdp or several processes cannot be combined with model.images "
                            "on JAX. Use ddp in one process, or one device.", "trainer.strategy", "model.images")
