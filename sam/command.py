"""What the commands of this package share."""

import sys
from collections.abc import Callable


def run_command(command: Callable[[], str], errors: tuple[type[Exception], ...] = (ValueError, OSError)) -> int:
    """Print what `command` returns; returns the exit code.

    Errors of the kinds `errors` are the user's to mend: one line, and exit code 2.
    """
    try:
        print(command())
    except errors as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def new_figure(width: float, height: float):
    """An empty matplotlib figure for `--plot`, in inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: install requirements/cpu.txt, or leave it out") from error
    return Figure(figsize=(width, height), layout="constrained")
