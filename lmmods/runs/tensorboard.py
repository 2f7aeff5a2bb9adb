"""Lightning's TensorBoardLogger, whose event files have the time in their names."""

from lmmods.runs.loggers import VersionedFolder

SUPPORT = VersionedFolder("hparams.yaml")
