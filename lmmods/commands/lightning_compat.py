"""What commands change in LightningCLI that it does not offer to change. Read in lightning 2.6."""

from lightning.pytorch.cli import LightningCLI


class CLI(LightningCLI):
    """LightningCLI for checkpoints that are folders."""

    def _parse_ckpt_path(self) -> None:
        """Read nothing: Lightning would unpickle a file that --ckpt_path names, and take classes from it.

        Called by LightningCLI's constructor whatever `load_from_checkpoint_support` says. What --ckpt_path names is
        checked by `lmmods.runs.folder.RunFolder.resolve`.
        """
