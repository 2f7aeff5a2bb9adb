"""Entry point: `python train.py fit|validate|test|predict|inspect|merge|evaluate|report|dashboard ...`."""

import gc
import sys

from lmmods.cli import main

if __name__ == "__main__":
    gc.disable()  # main enables it when the libraries are imported: they leave no garbage, and the search takes long
    sys.exit(main())
