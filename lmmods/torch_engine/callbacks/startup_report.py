"""The start of a run: the run folder is made ready, the loggers are attached, and what is trained is reported."""

import lightning as L

from lmmods.core.errors import UserError
from lmmods.core.peers import Peers
from lmmods.runs.start import RunStart


class StartReport(L.Callback):
    """Make the run folder ready and say what will happen."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Where the first process may not have the run folder, all end alike; others wait for it since their start."""
        Peers.current().meet(trainer.global_rank, trainer.world_size, trainer.strategy.broadcast,
                             trainer.heartbeat_timeout)
        problem = trainer.strategy.broadcast(str(trainer.run_folder.problem or ""))
        if problem:
            raise UserError(problem)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.interruption.listen()
        start = RunStart(trainer.run_folder, trainer.identity, trainer.recipe, trainer.datamodule,
                         trainer.machine(), trainer.resumed_from, trainer.global_step)
        if trainer.is_global_zero:
            start.make_folder_ready()
        trainer.strategy.barrier("run folder")
        trainer.loggers = trainer.run_loggers
        start.begin_logging(trainer.loggers)
        if trainer.is_global_zero:
            start.say(trainer.outlook())
