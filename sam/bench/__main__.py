"""`python -m sam.bench`: as `sam bench --model DIR`, also where nothing of the recipe is installed."""

import json
import sys

from sam.bench.settings import parse
from sam.command import run_command


def measure_engines(words: list[str]) -> int:
    """`--model DIR`: engines, each in a process of its own; returns the exit code."""
    settings = parse(words)
    if settings.check:
        return 0
    from sam.bench.result import as_text, measure  # not before the words are known to be right: it takes a second

    result, code = measure(settings)
    print(json.dumps(result) if settings.json else as_text(result))
    return code


if __name__ == "__main__":
    sys.exit(run_command(lambda: measure_engines(sys.argv[1:])))
