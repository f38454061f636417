"""Every code of what preflight can find wrong is one that a check says."""

import re
from pathlib import Path

from recipe.preflight import problem

REPOSITORY = Path(__file__).parents[3]


def test_every_code_is_said_by_a_check():
    text = "\n".join(path.read_text() for path in (REPOSITORY / "recipe").rglob("*.py"))
    said = set(re.findall(r'["[]([a-z_]+\.[a-z_]+)["\]]', text))
    assert set(problem.CODES) - said == set()
