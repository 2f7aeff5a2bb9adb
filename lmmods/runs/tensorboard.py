"""Lightning's TensorBoardLogger."""

from lmmods.runs.loggers import VersionedFolder


class TensorBoardSupport(VersionedFolder):
    """Its event files have the time in their names."""

    overwrites = ("hparams.yaml",)


SUPPORT = TensorBoardSupport()
