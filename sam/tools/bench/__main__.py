"""`python -m sam.tools.bench`: as `sam bench --model DIR`, also where nothing of the recipe is installed."""

import json
import sys

from sam.command import run_command
from sam.tools.bench.settings import parse


def measure_engines(words: list[str]) -> int:
    """`--model DIR`: engines, each in a process of its own; returns the exit code."""
    settings = parse(words)
    if settings.check:
        return 0
    from sam.tools.bench.result import as_text, measure  # not before the words are known to be right: it takes a second

    result, code = measure(settings)
    print(json.dumps(result) if settings.json else as_text(result))
    return code


if __name__ == "__main__":
    sys.exit(run_command(lambda: measure_engines(sys.argv[1:])))
