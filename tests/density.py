"""A line says one thing: five shapes of code that say several, found by the syntax tree.

`python -m tests.density` takes from tests/dense_places.json what was mended; it adds nothing.
"""

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("dense_places.json")


def shapes(tree: ast.AST) -> Iterator[str]:
    """Name every dense shape in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if any(isinstance(target, ast.Tuple) for target in node.targets):
                yield "several values in one assignment"
        elif isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(argument, ast.NamedExpr) for argument in arguments):
                yield "an assignment inside a call"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if any(map(_is_text, (node.left, node.right))) and any(map(_is_truth, (node.left, node.right))):
                yield "a text times a truth value"
        elif isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.List | ast.Tuple):
                yield "a list made to be taken apart"
        elif isinstance(node, ast.IfExp):
            if any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)):
                yield "a conditional inside a conditional"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_truth(node: ast.AST) -> bool:
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    is_bool = isinstance(node, ast.Call) and ast.unparse(node.func) == "bool"
    return is_negation or is_bool or isinstance(node, ast.Compare | ast.BoolOp)


def dense_places() -> dict[str, dict[str, int]]:
    """Count the dense shapes of each file of sam/ and recipe/ that has any."""
    places = {}
    for folder in ("sam", "recipe"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            counts = Counter(shapes(ast.parse(path.read_text())))
            if counts:
                places[str(path.relative_to(ROOT))] = dict(sorted(counts.items()))
    return places


def listed_places() -> dict[str, dict[str, int]]:
    """Those that stand in the list."""
    return json.loads(LIST.read_text())


def added(places: dict[str, dict[str, int]], listed: dict[str, dict[str, int]]) -> list[str]:
    """Say in which files there are more than listed."""
    lines = []
    for path, counts in places.items():
        for shape, count in counts.items():
            known = listed.get(path, {}).get(shape, 0)
            if count > known:
                lines.append(f"{path}: {shape}: {count}, listed {known}")
    return lines


def main() -> None:
    places = dense_places()
    more = added(places, listed_places())
    if more:
        raise SystemExit("\n".join(more))
    LIST.write_text(json.dumps(places, indent=1) + "\n")
    print(sum(sum(counts.values()) for counts in places.values()), "dense places are left")


if __name__ == "__main__":
    main()
