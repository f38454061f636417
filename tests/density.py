"""A line says one thing: five shapes of code that say several, found by the syntax tree."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]


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


VAGUE = {"found", "its", "of", "one"}  # names that say nothing of what they stand for


def vague_names() -> list[str]:
    """Say where sam/ and recipe/ have a variable, an argument or an attribute with one of these names."""
    places = []
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.id if isinstance(node, ast.Name) else node.attr
            else:
                continue
            if name in VAGUE:
                places.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    return places


def broad_catches() -> list[str]:
    """Say where sam/ and recipe/ catch or suppress whatever there is without a comment beside it."""
    places = []
    for path in _sources():
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = [node.type]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                caught = node.args
            else:
                continue
            is_broad = any(kind is None or re.search(r"\b(Base)?Exception\b", ast.unparse(kind)) for kind in caught)
            if is_broad and "  # " not in lines[node.lineno - 1]:
                places.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


def _sources() -> Iterator[Path]:
    return chain.from_iterable(sorted((ROOT / folder).rglob("*.py")) for folder in ("sam", "recipe"))


def dense_places() -> list[str]:
    """Say where sam/ and recipe/ have dense shapes, and of each file how many."""
    places = []
    for path in _sources():
        counts = Counter(shapes(ast.parse(path.read_text())))
        places += [f"{path.relative_to(ROOT)}: {shape}: {count}" for shape, count in counts.items()]
    return places
