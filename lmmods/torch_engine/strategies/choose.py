"""Which strategies `trainer.strategy` may name."""

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lmmods.core.errors import UserError
from lmmods.torch_engine.strategies.deepspeed import DeepSpeed
from lmmods.torch_engine.strategies.fsdp2 import FSDP2


def choose_strategy(strategy: str | Strategy) -> str | Strategy:
    """What Lightning's trainer is given for `trainer.strategy`.

    Raises:
        UserError: DeepSpeed without its package, or a strategy under which gradients or checkpoints may be wrong.
    """
    if strategy == "fsdp":
        return FSDP2()
    if isinstance(strategy, DeepSpeed):
        strategy.check()
    if isinstance(strategy, (str, FSDP2, DeepSpeed)) or type(strategy) in (DDPStrategy, SingleDeviceStrategy):
        return strategy
    name = type(strategy).__name__
    instead = {"ModelParallelStrategy": "fsdp or lmmods.strategies.FSDP2", "FSDPStrategy": "fsdp",
               "DeepSpeedStrategy": "lmmods.strategies.DeepSpeed"}
    raise UserError(f"trainer.strategy: {name} is not supported: gradients or checkpoints could be wrong. Use "
                    f"{instead.get(name, 'ddp, fsdp or lmmods.strategies.DeepSpeed')} instead.")
