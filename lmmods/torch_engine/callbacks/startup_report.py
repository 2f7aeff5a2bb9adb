"""The start of a run: what is trained is told, the run folder is taken, the loggers are attached."""

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmmods.core.console import say, warn
from lmmods.core.errors import UserError
from lmmods.runs.wandb import log_recipe
from lmmods.torch_engine.nn.summary import available_bytes


class StartReport(L.Callback):
    """Say what will happen, then make the run folder ready.

    Nothing is written before data, model and checkpoint have all loaded: a failed start leaves no trace.
    """

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Where the first process may not have the run folder, all end alike; others wait for it since their start."""
        problem = trainer.strategy.broadcast(str(trainer.run_folder.problem or ""))
        if problem:
            raise UserError(problem)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.interruption.listen()
        if trainer.is_global_zero:
            trainer.run_folder.begin(trainer.resumed_from)
            trainer.run_folder.write_start(trainer.recipe, trainer.datamodule.report)
            if trainer.resumed_from:
                trainer.identity.note_resume(trainer.run_folder, trainer.resumed_from, trainer.global_step)
        trainer.strategy.barrier("run folder")
        trainer.loggers = trainer.run_loggers
        if trainer.resumed_from:
            trainer.loggers[0].rewind(trainer.global_step)
        log_recipe(trainer.loggers[1:], trainer.recipe, trainer.datamodule.report)
        self._tell(trainer, module)

    @rank_zero_only
    def _tell(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        print(trainer.datamodule.report_table())
        print(module.describe())
        needed, available = module.memory_estimate(), available_bytes(module.device)
        text = f"Memory: about {needed / 2**30:.2f} GiB for a step, {available / 2**30:.1f} GiB on this device."
        if needed > available:
            warn(f"{text} It will probably not fit: lower data.batch_size or data.max_length, or set "
                 "model.gradient_checkpointing to true.")
        else:
            say(text)
        if trainer.resumed_from:
            say(f"Resumed at step {trainer.global_step} from {trainer.resumed_from}.")
