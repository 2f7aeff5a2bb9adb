"""The start of a run: the run folder is made ready, the loggers are attached, and what is trained is reported."""

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmmods.core.console import say, warn
from lmmods.core.errors import UserError
from lmmods.runs.start import RunStart
from lmmods.torch_engine.nn.summary import available_bytes


class StartReport(L.Callback):
    """Make the run folder ready and say what will happen."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Where the first process may not have the run folder, all end alike; others wait for it since their start."""
        problem = trainer.strategy.broadcast(str(trainer.run_folder.problem or ""))
        if problem:
            raise UserError(problem)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.interruption.listen()
        start = RunStart(trainer.run_folder, trainer.identity, trainer.recipe, trainer.datamodule.report,
                         trainer.resumed_from, trainer.global_step)
        if trainer.is_global_zero:
            start.make_folder_ready()
        trainer.strategy.barrier("run folder")
        trainer.loggers = trainer.run_loggers
        start.begin_logging(trainer.loggers)
        self._report(trainer, module, start)

    @rank_zero_only
    def _report(self, trainer: L.Trainer, module: L.LightningModule, start: RunStart) -> None:
        print(trainer.datamodule.report_table())
        print(module.describe())
        needed, available = module.memory_estimate(), available_bytes(module.device)
        text = f"Memory: about {needed / 2**30:.2f} GiB for a step, {available / 2**30:.1f} GiB on this device."
        if needed > available:
            warn(f"{text} It will probably not fit: lower data.batch_size or data.max_length, or set "
                 "model.gradient_checkpointing to true.")
        else:
            say(text)
        start.say_resumed()
