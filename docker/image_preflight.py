"""`python docker/image_preflight.py CONFIG [overrides]`: preflight as the last layer of an image.

An image is built on another machine than it runs on, without an NPU and without data. So the subjects that an image
consists of are checked, among them the installed packages, which preflight itself would skip without an NPU; the
others (data, memory, shared memory) are what preflight finds out where the image runs.
"""

import contextlib
import json
import sys

from sam_recipe import preflight
from sam_recipe.launch.config import compose_config


def main(config_name: str, *overrides: str) -> int:
    """0: nothing is wrong with the image. 2: something is. Imports verl and vLLM."""
    config = compose_config(config_name, list(overrides))
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
        found = {name: list(find(config)) for name, find in preflight.select("image").items()}
    print(json.dumps(found, indent=1))
    return 2 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
