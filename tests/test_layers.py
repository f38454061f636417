"""The house: who may import whom. Read off the imports of every file.

A room may import rooms above it in its list, and its own. `sam` imports neither verl nor sam_recipe, and of `sam` only
`sam.vllm` imports vLLM.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lowest first. A room is a folder, or a file that lies beside the folders.
SAM = (
    ("jit", "reading"),
    ("trained_drafter",),
    ("config", "configs", "command", "page", "log"),
    ("automaton", "verify", "record", "routing"),
    ("drafting",),
    ("switch", "history", "sharing"),
    ("vllm",),
    ("replay",),
    ("simulate",),
    ("profile", "bench", "tune"),
)
RECIPE = (
    ("arguments", "patch"),
    ("tiny.task", "tiny.tokenizer", "tiny.platform", "smollm2.task", "smollm2.model"),
    ("record", "tiny.model"),
    ("launch",),
    ("tiny.warm_start", "data"),
    ("tiny.assets", "smollm2.assets", "draft_model"),
    ("rollout",),
    ("verl_plugin",),
    ("preflight",),
    ("trainer",),
    ("report",),
    ("main_dapo",),
    ("bench",),
    ("command_line",),
)
OUTSIDE = {"verl", "sam_recipe", "vllm", "vllm_ascend"}


def files(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "__pycache__" not in path.parts]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                place = ROOT / inner.replace(".", "/")
                found.add(inner if place.with_suffix(".py").is_file() or place.is_dir() else node.module)
    return found


def edges(package: str) -> dict[str, set[str]]:
    return {module_of(path): imports_of(path) for path in files(package)}


def room_of(module: str, floors: dict[str, int]) -> str | None:
    return max((room for room in floors if module == room or module.startswith(room + ".")), key=len, default=None)


@pytest.mark.parametrize(("package", "order"), [("sam", SAM), ("sam_recipe", RECIPE)])
def test_no_import_runs_upwards_nor_in_a_circle(package, order):
    floors = {f"{package}.{room}": floor for floor, rooms in enumerate(order) for room in rooms}
    graph = edges(package)
    for module, imported in graph.items():
        if here := room_of(module, floors):
            for there in {room_of(name, floors) for name in imported} - {None, here}:
                assert floors[there] < floors[here], f"{module} imports {there}, which is not below it"
        else:
            assert "." not in module or module.endswith((".tiny", ".smollm2")), f"{module} has no floor: give it one"
    graphlib.TopologicalSorter({one: (graph[one] & graph.keys()) - {one} for one in graph}).prepare()


def test_sam_knows_nothing_of_verl_and_only_its_vllm_part_knows_vllm():
    for module, imported in edges("sam").items():
        outside = {name.split(".")[0] for name in imported} & OUTSIDE
        allowed = {"vllm", "vllm_ascend"} if module.startswith("sam.vllm.") else set()
        assert outside <= allowed, (module, outside)


MOST_LINES = {"file": 500, "function": 60}
MOST = {"parameters": 6, "attributes": 12}
# Kernels are called with arrays alone, and records have a field for each column: neither is bound by MOST.
LARGER = {
    "sam/history/client.py: HistoryClient: 13 attributes": "the queues to and from its threads are among them",
    "sam/simulate/rollout.py: Replica: 14 attributes": "a replica's whole state",
    "sam/verify/rejection.py: rejection_sample: 8 parameters": "vLLM's signature",
    "sam/vllm/ascend/__init__.py: expand_triton: 7 parameters": "vllm-ascend's signature",
}


def is_record(node: ast.ClassDef) -> bool:
    """Whether it is a dataclass or a named tuple: fields, and nothing that it goes through."""
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list) or "NamedTuple" in map(
        ast.unparse, node.bases
    )


def sizes(path: Path) -> Iterator[str]:
    """What of a file is larger than a reader should meet."""
    tree = ast.parse(path.read_text())
    if (lines := len(path.read_text().splitlines())) > MOST_LINES["file"]:
        yield f"{lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = len([name for name in given if name not in ("self", "cls")])
            is_kernel = any(name in ast.unparse(one) for one in node.decorator_list for name in ("compiled", "kernel"))
            if parameters > MOST["parameters"] and not is_kernel:
                yield f"{node.name}: {parameters} parameters"
            if (lines := node.end_lineno - node.lineno + 1) > MOST_LINES["function"]:
                yield f"{node.name}: {lines} lines"
        elif isinstance(node, ast.ClassDef) and not is_record(node):
            stored = {
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and ast.unparse(one.value) == "self"
            }
            if len(stored) > MOST["attributes"]:
                yield f"{node.name}: {len(stored)} attributes"


@pytest.mark.parametrize("package", ["sam", "sam_recipe"])
def test_nothing_is_larger_than_a_reader_should_meet(package):
    found = {f"{path.relative_to(ROOT)}: {size}" for path in files(package) for size in sizes(path)}
    assert found == {name for name in LARGER if name.startswith(f"{package}/")}


# What replaces something of vLLM beside the list, and why. Files of sam/vllm/bench follow an engine that is measured.
BESIDE_THE_LIST = {
    "sam/vllm/hooks.py: setattr": "of a step's output",
}


def replaced_beside_the_list(path: Path, attributes: set[str]) -> set[str]:
    """Assignments to attributes that the list has, on anything but `self`, and what else replaces functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and one.attr in attributes and ast.unparse(one.value) != "self":
                    found.add(ast.unparse(one))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "functools.wraps"):
            found.add(ast.unparse(node.func))
    return {f"{path.relative_to(ROOT)}: {one}" for one in found}


def test_what_is_replaced_of_vllm_stands_in_one_list():
    from sam.vllm.patches import PATCHES

    attributes = {name for patch in PATCHES.values() for name in patch.targets.split()}
    attributes |= {"init_device", "get_scheduler_cls"}
    paths = [path for path in files("sam") if "sam/vllm/" in str(path) and path.name != "patches.py"]
    found = set().union(*(replaced_beside_the_list(path, attributes) for path in paths if "/bench/" not in str(path)))
    assert found == BESIDE_THE_LIST.keys()
