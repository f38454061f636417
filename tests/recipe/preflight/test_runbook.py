"""The codes in docs/operations.md are those that the checks can say."""

import re
from pathlib import Path

from recipe.preflight import problem

REPOSITORY = Path(__file__).parents[3]


def test_every_code_is_in_the_page():
    """Written by `python -m recipe.preflight.problem`."""
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    assert page.split("<!-- codes -->\n")[1].split("\n<!-- end of codes -->")[0] == problem.table()


def test_every_code_is_said_by_a_check():
    text = "\n".join(path.read_text() for path in (REPOSITORY / "recipe").rglob("*.py"))
    said = set(re.findall(r'["[]([a-z_]+\.[a-z_]+)["\]]', text))
    assert set(problem.CODES) - said == set()
