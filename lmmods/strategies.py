"""The strategies that a recipe may name: `lmmods.strategies.FSDP2` and `lmmods.strategies.DeepSpeed`."""

from lmmods.torch_engine.strategies.deepspeed import DeepSpeed
from lmmods.torch_engine.strategies.fsdp2 import FSDP2

for strategy in (FSDP2, DeepSpeed):
    strategy.__module__ = __name__  # the path that help lists and that config.yaml keeps
