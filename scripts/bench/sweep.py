"""The results table; the code is titan_mi100/workshop/sweep/, the command `titan-mi100 sweep`."""

import sys

from titan_mi100.workshop.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
