"""`python -m sam.bench`: as `python -m sam.tools.bench`."""

import sys

from sam.command import run_command
from sam.tools.bench.__main__ import measure_engines

if __name__ == "__main__":
    sys.exit(run_command(lambda: measure_engines(sys.argv[1:])))
