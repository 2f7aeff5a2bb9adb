"""Entry point of this engine: the classes that recipes configure."""

from lmmods.core.errors import UserError
from lmmods.recipe import trainer_fields
from lmmods.recipe.engines import EngineTypes, import_all


def load() -> EngineTypes:
    """Return the classes that recipes configure.

    Raises:
        UserError: jax or flax is not installed, or their versions are incompatible.
    """
    try:
        import flax
        import jax
    except ImportError as error:
        raise UserError(f"engine jax: {error}. Install jax and flax with this project: pip install -e . (with [cuda] "
                        "for NVIDIA GPUs), or use --engine torch.") from error
    except AttributeError as error:  # an older flax on a newer jax
        raise UserError(f"engine jax: this flax is incompatible with this jax ({error}). Reinstall both: "
                        "pip install -e .") from error
    del flax, jax
    from jax_engine.callbacks import EarlyStopping
    from jax_engine.distributed.devices import MeshSharding
    from jax_engine.tasks.base import Task
    from jax_engine.trainer import Trainer
    from lmmods.data.base import DataModule
    from lmmods.evaluation.mmlu import MMLUEvaluator
    from lmmods.evaluation.samples import SampleWriter
    from lmmods.runs.checkpoint_policy import CheckpointPolicy
    from lmmods.runs.csv_logger import Logger
    from lmmods.runs.hub_upload import Publisher

    import_all("jax_engine.tasks")
    import_all("lmmods.data")
    blocks = {"checkpoint": CheckpointPolicy, "samples": SampleWriter, "mmlu": MMLUEvaluator, "publish": Publisher}
    return EngineTypes(Trainer, Task, DataModule, blocks, {
        trainer_fields.Callback: EarlyStopping, trainer_fields.Logger: Logger, trainer_fields.Strategy: MeshSharding})
