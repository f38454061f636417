"""The pages: links, commands, paths, pictures exist, generated ones are up to date, both READMEs say the same."""

import ast
import functools
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from sam_recipe.command_line import COMMANDS as COMMANDS_OF_SAM
from sam_recipe.record import ON_DISK_ONLY

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
# Its commands are those of the commits that it names.
OF_TODAY = {page: text for page, text in PAGES.items() if page != "docs/results.md"}
FOLDERS = "sam|sam_recipe|configs|scripts|tests|docs|patches|docker|requirements"


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path.read_text()), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    lines = without_blocks(PAGES[page]).splitlines()
    assert [line for line in lines if line.count("`") % 2] == [], "code over two lines is looked at by no test"
    for code in inline_code(PAGES[page]):
        for path in re.findall(rf"(?<![\w/.:-])(?:{FOLDERS})/[\w./*-]*\w(?:/|\b)", code):
            assert list(ROOT.glob(path.rstrip("/"))), path


def commands_of(text: str) -> set[tuple[str, ...]]:
    """Commands of code blocks and inline code that start a program of ours, as words."""
    lines = inline_code(text)
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, flags=re.M | re.S):
        lines += block.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in re.split(r"\s&&\s", line)]
    found = [re.sub(r"^\s*([A-Z_]+=\S*\s+)*", "", part) for part in parts]
    of_ours = r"sam [a-z]|python (-m (sam|sam_recipe|tests)\.|docs/|scripts/)|bash scripts/"
    ours = [part for part in found if re.match(of_ours, part)]
    return {tuple(shlex.split(part, comments=True)) for part in ours}


COMMANDS = sorted({(page, *words) for page, text in OF_TODAY.items() for words in commands_of(text)})


def program_of(words: tuple[str, ...]) -> Path:
    if words[0] != "sam" and words[1] != "-m":
        return ROOT / words[1]
    name = COMMANDS_OF_SAM[words[1]][0] if words[0] == "sam" else words[2]
    return (ROOT / name.replace(".", "/")).with_suffix(".py")


@functools.cache
def options_of(program: Path) -> set[str]:
    """Options of a program's parser, from its own source, and that of what it imports to parse."""
    files = [program]
    for module, names in re.findall(r"^from ((?:sam|sam_recipe)[\w.]*) import (.+)", program.read_text(), flags=re.M):
        path = ROOT / module.replace(".", "/")
        places = [path.with_suffix(".py"), *(path / f"{name}.py" for name in ("__init__", *names.split(", ")))]
        files += [file for file in places if file.is_file()]
    known = {"--help"}
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            known |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return known


def test_commands_exist_and_know_their_options():
    assert len(COMMANDS) > 30
    for page, *words in COMMANDS:
        program = program_of(tuple(words))
        assert program.is_file(), f"{page}: {' '.join(words)}: no {program.relative_to(ROOT)}"
        for option in (word for word in words[2:] if word.startswith("--") and words[0] != "bash"):
            handed_on = words[:2] == ["sam", "bench"]  # to vLLM's engine, whatever sam bench does not know
            assert handed_on or option in options_of(program), f"{page}: {' '.join(words[:3])} does not know {option}"


def test_overrides_compose():
    """Those of one config together, as far as no key comes twice: composing takes seconds."""
    from sam_recipe.launch.config import compose_config

    by_config: dict[str, dict[str, str]] = {}
    for _, *words in COMMANDS:
        if "--config-dir" in words:
            continue
        script = re.match(r"scripts/run_(\w+)\.sh", words[1])
        name = words[words.index("--config-name") + 1] if "--config-name" in words else script and script[1]
        pairs = [word.split("=", 1) for word in words[2:] if re.match(r"[a-z_.]+=", word)]
        known = by_config.setdefault(name, {}) if name else {}
        known.update({key: value for key, value in pairs if key not in ("run_dir", "speculation")})
    for name, overrides in by_config.items():
        compose_config(name, [f"{key}={value}" for key, value in overrides.items()])


def test_knobs_page_is_up_to_date():
    assert PAGES["docs/knobs.md"] == runpy.run_path(str(ROOT / "docs" / "knobs.py"))["page"](), "python docs/knobs.py"


def test_metrics_page_names_what_the_code_counts():
    """Names of counters and of what begins with rollout/, in the page and in the code."""
    rows = set(re.findall(r"^\| `(rollout/[\w/]+)`", PAGES["docs/metrics.md"], flags=re.M))
    code = "\n".join(path.read_text() for folder in ("sam", "sam_recipe") for path in (ROOT / folder).rglob("*.py"))
    for row in rows:
        last = re.sub(r"^position_\d+$|^\d+$|_ms_per_step$", "", row.rpartition("/")[2])
        assert last in code or f"{last.rpartition('_')[0]}_{{" in code, f"{row}: nothing counts it"
    logged = set(re.findall(r'"(rollout/[\w/]*\w)"', code))
    for names in re.findall(r"\bCOUNTERS\b[^=\n]*= [({]([^)}]*)", code):
        logged |= {f"rollout/drafter/{name}" for name in re.findall(r'"(\w+)"', names)}
    on_disk_only = {f"rollout/drafter/{name}" for name in ON_DISK_ONLY}
    assert logged - rows - on_disk_only == set() and not rows & on_disk_only


def test_every_picture_is_shown_and_drawn_by_the_script(tmp_path):
    images = ROOT / "docs" / "images"
    shown = "\n".join(PAGES.values())
    assert [path.name for path in images.glob("*.png") if f"images/{path.name}" not in shown] == []
    runpy.run_path(str(images / "draw.py"))["main"](["--output", str(tmp_path)])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"processes.png", "engine_step.png"} and all((images / name).is_file() for name in drawn)


def test_the_chinese_readme_has_the_same_commands_figures_and_links():
    def said(page: str) -> tuple[list[str], list[str], list[str]]:
        text = PAGES[page]
        blocks = [re.sub(r" +#.*", "", block) for block in re.findall(r"```.*?```", text, flags=re.S)]
        links = re.findall(r"\]\(([^)]+)\)", text)
        figures = re.findall(r"\d+(?:\.\d+)*", re.sub(r"\]\([^)]+\)", "]", text))
        return blocks, sorted(figures), sorted({*links} - {"README.md", "README.zh.md"})

    assert said("README.md") == said("README.zh.md")
    assert len(PAGES["README.md"].split()) <= 900


@pytest.mark.network
def test_the_site_is_built_of_all_pages_and_needs_no_network(tmp_path):
    """Into outputs/site, with mkdocs' warnings as errors: links and anchors that it does not find, pages left out."""
    uv, python = Path(sys.executable).with_name("uv"), tmp_path / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path], check=True)
    pins = ["--require-hashes", "--no-deps", "-r", "requirements/docs.txt"]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *pins], cwd=ROOT, check=True)
    built = subprocess.run([python, "-m", "mkdocs", "build", "--strict"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    site = ROOT / "outputs" / "site"
    names = {Path(page).stem.replace("README", "index") if page != "README.zh.md" else "README.zh" for page in PAGES}
    assert {path.stem for path in site.glob("*.html")} == {*names, "404"}
    searched = {row["location"] for row in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    for name in names:
        html = (site / f"{name}.html").read_text()
        assert f"{name}.html" in searched
        assert re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="?(?:https?:)?//', html) == []
        # What Python's Markdown takes otherwise than GitHub does.
        assert re.findall(r"<p>[^<]*(?:```|\n(?:[-*]|\d+\.) )", html) == []


def test_public_ci_runs_the_commands_of_the_projects_own():
    own = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("bash ")]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert own == workflow["jobs"]["tests"]["strategy"]["matrix"]["command"]


def test_the_version_stands_everywhere_alike():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (.+)", PAGES["CHANGELOG.md"], flags=re.M)[0] == version
