"""Entry point: `python train.py COMMAND ...`; `python train.py --help` lists the commands."""

from lmmods.core.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()  # before anything that takes time is imported
    from lmmods.cli import program

    program()
