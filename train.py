"""The one door: `python train.py fit|validate|test|predict|inspect|merge|evaluate|report|dashboard ...`."""

import sys

from lmmods.cli import main

if __name__ == "__main__":
    sys.exit(main())
