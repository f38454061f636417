"""What the commands of this package share."""

import sys
from collections.abc import Callable, Iterable


def run_command(
    command: Callable[[], str | Iterable[str]], errors: tuple = (ValueError, OSError), code: int = 2
) -> int:
    """Print the text that `command` returns, or its texts one by one; returns the exit code.

    Errors of the kinds `errors` are the user's to mend: one line, and exit code `code`.
    """
    try:
        said = command()
        for text in [said] if isinstance(said, str) else said:
            print(text, flush=True)
    except errors as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return code
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
