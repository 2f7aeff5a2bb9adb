"""Lightning's TensorBoardLogger. Its event files are not overwritten, as their names contain the time."""

from lmmods.runs.loggers import VersionedFolder

SUPPORT = VersionedFolder("hparams.yaml")
