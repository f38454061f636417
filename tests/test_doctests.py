"""The examples in the docstrings run and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SOURCES = [path.relative_to(REPOSITORY) for folder in ("sam", "recipe") for path in (REPOSITORY / folder).rglob("*.py")]
WITH_EXAMPLES = sorted(".".join(path.with_suffix("").parts) for path in SOURCES if ">>> " in path.read_text())


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0 and result.failed == 0
