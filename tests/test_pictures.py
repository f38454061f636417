"""Pictures of docs/ are drawn by their script and shown somewhere."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"


def test_no_picture_lies_unused():
    shown = "\n".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert [path.name for path in IMAGES.glob("*.png") if f"images/{path.name}" not in shown] == []


def test_pictures_are_drawn_by_the_script(tmp_path):
    runpy.run_path(str(IMAGES / "draw.py"))["main"](["--output", str(tmp_path)])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"processes.png", "engine_step.png"}
    assert all((IMAGES / name).is_file() for name in drawn)
