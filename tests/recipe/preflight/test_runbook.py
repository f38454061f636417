"""docs/operations.md quotes messages that the code can say, and names metrics that a run logs."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from recipe.preflight import problem

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "operations.md").read_text()
VERL = Path(importlib.util.find_spec("verl").submodule_search_locations[0])


def messages_of(folders) -> list[list[str]]:
    """The constant parts of every text in the code: what stands between the values of an f-string."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            else:
                continue
            found.append([part.strip() for part in parts if len(part.strip()) >= 9])
    return found


def quoted() -> list[str]:
    """First cells of the tables of failures, but those that CANN and torch say."""
    rows = re.findall(
        r"^\| (.+?) \| .+ \|$",
        re.sub("<!-- codes.*codes -->", "", PAGE[PAGE.index("## The commonest failures") :], flags=re.S),
        flags=re.M,
    )
    return [row for row in rows if "`" in row and not row.startswith(("CANN", "torch"))]


@pytest.fixture(scope="module")
def ours():
    return messages_of([REPOSITORY / "recipe", REPOSITORY / "sam"])


@pytest.mark.parametrize("row", quoted())
def test_a_quoted_message_is_one_that_is_said(ours, row):
    text = re.search("`(.+?)`", row)[1]
    known = messages_of([VERL / "workers" / "rollout" / "vllm_rollout"]) if row.startswith("verl") else ours
    pieces = [piece.strip() for piece in text.split("...") if len(piece) >= 9]
    assert any(_overlap(piece, part) for parts in known for part in parts for piece in pieces), text


def _overlap(quoted_piece: str, part: str) -> bool:
    """One holds the other, or the quotation ends within the part."""
    ends_within = any(quoted_piece.endswith(part[:size]) for size in range(15, len(part)))
    return part in quoted_piece or quoted_piece in part or ends_within


def test_the_metrics_to_watch_are_logged():
    """By name in the code that logs them: this recipe's and verl's."""
    table = PAGE[PAGE.index("## What to watch") : PAGE.index("## Two runs compared")]
    named = set(re.findall(r"`((?:rollout|training)/[a-z_/0-9]+)`", table))
    code = "\n".join(path.read_text() for folder in ("recipe", "sam") for path in (REPOSITORY / folder).rglob("*.py"))
    code += (VERL / "utils" / "debug" / "metrics.py").read_text()
    assert len(named) >= 5
    for name in named:
        pieces = [piece for piece in re.split(r"/|_ms_per_step|\d+", name) if len(piece) > 2]
        assert all(piece.removeprefix("at_") in code for piece in pieces), name


def test_every_code_is_in_the_page():
    """Written by `python -m recipe.preflight.problem`."""
    assert PAGE.split("<!-- codes -->\n")[1].split("\n<!-- end of codes -->")[0] == problem.table()


def test_every_code_is_said_by_a_check():
    text = "\n".join(path.read_text() for path in (REPOSITORY / "recipe").rglob("*.py"))
    said = set(re.findall(r'["[]([a-z_]+\.[a-z_]+)["\]]', text))
    assert set(problem.CODES) - said == set()
