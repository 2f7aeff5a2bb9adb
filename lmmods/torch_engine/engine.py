"""Entry point of this engine: the classes that recipes configure."""

from lmmods.recipe import trainer_fields
from lmmods.recipe.engines import EngineTypes, import_all


def load() -> EngineTypes:
    """Return the classes that recipes configure."""
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import ClusterEnvironment
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.strategies import Strategy

    from lmmods.data.base import DataModule
    from lmmods.torch_engine.callbacks.checkpoint import Checkpoint
    from lmmods.torch_engine.callbacks.evaluation import MMLU, Samples
    from lmmods.torch_engine.callbacks.export import Publish
    from lmmods.torch_engine.tasks.base import TaskModule
    from lmmods.torch_engine.trainer import Trainer

    import_all("lmmods.torch_engine.tasks")
    import_all("lmmods.data")
    blocks = {"checkpoint": Checkpoint, "samples": Samples, "mmlu": MMLU, "publish": Publish}
    return EngineTypes(Trainer, TaskModule, DataModule, blocks, {
        trainer_fields.Callback: Callback, trainer_fields.Logger: Logger, trainer_fields.Strategy: Strategy,
        trainer_fields.Profiler: Profiler, trainer_fields.ClusterEnvironment: ClusterEnvironment})
