"""`python docker/image_preflight.py CONFIG [overrides]`: preflight as the last layer of an image.

An image is built on another machine than it runs on, without an NPU and without data. So what it consists of is
checked, and whether verl and vLLM take the config; data and memory are what preflight finds out where the image runs.
"""

import contextlib
import sys

from recipe.sam_dapo import preflight
from recipe.sam_dapo.launch.config import compose_config


def main(config_name: str, *overrides: str) -> int:
    """0: nothing is wrong with the image. 2: something is. Imports verl and vLLM."""
    config = compose_config(config_name, list(overrides))
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
        found = [line for find in preflight.IMAGE_CHECKS for line in find(config)]
    print(*found, f"{len(found)} problems", sep="\n")
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
