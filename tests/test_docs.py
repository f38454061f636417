"""The pages: links, commands, paths, pictures exist, generated ones are up to date, both READMEs say the same."""

import contextlib
import importlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from recipe.sam_dapo.record.metrics import ON_DISK_ONLY
from sam import command_line

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
FOLDERS = "sam|recipe|configs|scripts|tests|docs|patches|docker|requirements|examples"


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_exist(page):
    """mkdocs, below, looks for the headings that links name."""
    for target in re.findall(r"\]\(([^)\s#]+)", PAGES[page]):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target
    for code in inline_code(PAGES[page]):
        for path in re.findall(rf"(?<![\w/.:-])(?:{FOLDERS})/[\w./*-]*\w(?:/|\b)", code):
            assert list(ROOT.glob(path.rstrip("/"))), path


def commands_of(text: str) -> set[tuple[str, ...]]:
    """Commands of code blocks and inline code that start a program of ours, as words."""
    lines = inline_code(text)
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, flags=re.M | re.S):
        lines += block.replace("\\\n", " ").splitlines()
    parts = [re.sub(r"^\s*([A-Z_]+=\S*\s+)*", "", part) for line in lines for part in re.split(r"\s&&\s", line)]
    of_ours = r"sam [a-z]|python (-m (sam|recipe|tests)\.|docs/|examples/)|bash (scripts|examples)/"
    return {tuple(shlex.split(part, comments=True)) for part in parts if re.match(of_ours, part)}


COMMANDS = sorted((page, *words) for page in PAGES for words in commands_of(PAGES[page]))


def help_of(words: list[str]) -> str:
    """What a command says with --help behind its words."""
    main = command_line.main if words[0] == "sam" else importlib.import_module(words[2]).main
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([*words[1 if words[0] == "sam" else 3 :], "--help"])
    return said.getvalue()


def test_commands_exist_and_know_their_options():
    assert len(COMMANDS) > 30
    for page, *words in COMMANDS:
        place, options = f"{page}: {' '.join(words)}", {word for word in words if word.startswith("--")}
        if words[0] == "sam":
            assert words[1] in command_line.COMMANDS, place
        else:
            file = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
            assert (ROOT / file).is_file(), place
        if (
            options and words[0] != "bash" and words[1] != "bench"
        ):  # which hands on to vLLM's engine what it does not know
            assert options <= set(re.findall(r"--[\w-]+", help_of(words))), place


def test_overrides_compose():
    """Those of one config together, as far as no key comes twice: composing takes seconds."""
    from recipe.sam_dapo.launch.config import compose_config

    by_config = defaultdict(dict)
    for _, *words in COMMANDS:
        script = re.match(r"scripts/run_(\w+)\.sh", words[1])
        name = words[words.index("--config-name") + 1] if "--config-name" in words else script and script[1]
        if name and "--config-dir" not in words:
            pairs = [word.split("=", 1) for word in words[2:] if re.match(r"(?!run_dir=|speculation=)[a-z_.]+=", word)]
            by_config[name].update(pairs)
    for name, overrides in by_config.items():
        compose_config(name, [f"{key}={value}" for key, value in overrides.items()])


def test_knobs_page_is_up_to_date():
    assert PAGES["docs/knobs.md"] == runpy.run_path(str(ROOT / "docs" / "knobs.py"))["page"](), "python docs/knobs.py"


def test_metrics_page_names_what_the_code_counts():
    """Names of counters and of what begins with rollout/, in the page and in the code."""
    rows = set(re.findall(r"^\| `(rollout/[\w/]+)`", PAGES["docs/metrics.md"], flags=re.M))
    code = "\n".join(path.read_text() for folder in ("sam", "recipe") for path in (ROOT / folder).rglob("*.py"))
    for row in rows:
        last = re.sub(r"^position_\d+$|^\d+$|_ms_per_step$", "", row.rpartition("/")[2])
        assert last in code or f"{last.rpartition('_')[0]}_{{" in code, f"{row}: nothing counts it"
    logged = set(re.findall(r'"(rollout/[\w/]*\w)"', code))
    for names in re.findall(r"\bCOUNTERS\b[^=\n]*= [({]([^)}]*)", code):
        logged |= {f"rollout/drafter/{name}" for name in re.findall(r'"(\w+)"', names)}
    on_disk_only = {f"rollout/drafter/{name}" for name in ON_DISK_ONLY}
    assert logged - rows - on_disk_only == set() and not rows & on_disk_only


def test_every_picture_is_shown_and_drawn_by_the_script(tmp_path):
    folder, shown = ROOT / "docs" / "images", "\n".join(PAGES.values())
    images = {path.name for path in folder.glob("*.png")}
    assert {name for name in images if f"images/{name}" not in shown} == set()
    runpy.run_path(str(folder / "draw.py"))["main"](["--output", str(tmp_path)])
    assert set() < {path.name for path in tmp_path.iterdir()} <= images


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".zh.md")])
def test_a_chinese_page_has_the_same_headings_commands_figures_and_links(page):
    def said(page: str) -> tuple[list[str], list[str], list[str], list[str], list[str]]:
        text = PAGES[page]
        blocks = [re.sub(r" +#.*", "", block) for block in re.findall(r"```.*?```", text, flags=re.S)]
        headings = re.findall(r"^#+(?= )", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
        links = [re.sub(r"\.zh(?=\.md)|#.*", "", link) for link in re.findall(r"\]\(([^)]+)\)", text)]
        figures = re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\]\([^)]+\)", "]", text))
        return blocks, headings, sorted(inline_code(text)), sorted(links), sorted(figures)

    assert said(page) == said(page.replace(".zh.md", ".md"))


def test_the_front_page_is_short():
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
    searched = {row["location"] for row in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    for page in PAGES:
        name = re.sub(r"README(?=\.md)", "index", Path(page).name).replace(".md", ".html")
        html = (site / name).read_text()
        assert name in searched
        assert re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="?(?:https?:)?//', html) == []
        # What Python's Markdown takes otherwise than GitHub does.
        assert re.findall(r"<p>[^<]*(?:```|\n(?:[-*]|\d+\.) )", html) == []


def test_the_version_stands_everywhere_alike():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (.+)", PAGES["CHANGELOG.md"], flags=re.M)[0] == version
