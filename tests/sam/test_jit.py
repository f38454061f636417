"""Where compiled kernels are cached."""

import shutil
from pathlib import Path

import pytest

from sam import jit


def test_the_cache_changes_with_any_file_and_lies_where_it_can(tmp_path, monkeypatch):
    copy = tmp_path / "sam"
    shutil.copytree(jit.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit.config, "CACHE_DIR", str(tmp_path / "chosen"))
    monkeypatch.setattr(jit, "PACKAGE", copy)
    before = Path(jit._cache_folder())
    assert before.name == Path(jit.CACHE_FOLDER).name and before.is_relative_to(tmp_path / "chosen")
    with (copy / "automaton" / "store.py").open("a") as opened:
        opened.write("# changed")
    assert Path(jit._cache_folder()).name != before.name
    (tmp_path / "package").write_text("a file where a folder would be made")
    monkeypatch.setattr(jit, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(jit.config, "CACHE_DIR", "")
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    assert Path(jit._cache_folder()).is_relative_to(tmp_path / "elsewhere")
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "package"))
    with pytest.raises(OSError, match="set NUMBA_CACHE_DIR"):
        jit._cache_folder()


def test_processes_that_compile_at_once_never_name_each_others_code(tmp_path, monkeypatch):
    """Both have read an empty index, so that Numba would give both of them the same file."""
    monkeypatch.setattr(jit, "CACHE_FOLDER", str(tmp_path))

    def half(value):
        return value / 2

    half = jit.compiled(half)
    monkeypatch.setattr(half._cache._cache_file, "_load_index", dict)
    assert half(3) == half(3.0) == 1.5
    assert len([*tmp_path.rglob("*.nbc")]) == 2
