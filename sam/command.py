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
