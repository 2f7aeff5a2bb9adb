"""What commands change in LightningCLI that it does not offer to change. Read in lightning 2.6."""

from collections.abc import Mapping

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI


class CLI(LightningCLI):
    """LightningCLI over a parser made elsewhere, for checkpoints that are folders."""

    def use_parser(self, parser: ArgumentParser, commands: Mapping[str, ArgumentParser],
                   options: Mapping[str, list[str]]) -> None:
        """Take a parser in place of the one that `setup_parser` would make.

        Args:
            commands: The parsers of commands by name; `callback_keys` of each are blocks that are callbacks.
            options: Of each command, what its method takes.
        """
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = parser, commands, options

    def _parse_ckpt_path(self) -> None:
        """Read nothing: Lightning would unpickle a file that --ckpt_path names, and take classes from it.

        Called by LightningCLI's constructor whatever `load_from_checkpoint_support` says. What --ckpt_path names is
        checked by `lmmods.runs.folder.RunFolder.resolve`.
        """

    def _run_subcommand(self, subcommand: str) -> None:
        """Perform a command that is a method of this class; Lightning's asks the trainer alone."""
        if not hasattr(self, subcommand):
            return super()._run_subcommand(subcommand)
        getattr(self, subcommand)(**self._prepare_subcommand_kwargs(subcommand))
