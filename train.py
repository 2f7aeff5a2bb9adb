"""Entry point: `python train.py COMMAND ...`; `python train.py --help` lists the commands."""

from lmmods.cli import program

if __name__ == "__main__":
    program()
