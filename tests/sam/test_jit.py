"""Where compiled kernels are cached."""

import shutil
from pathlib import Path

import pytest

from sam import jit


def test_the_cache_changes_with_any_file_of_any_folder(tmp_path, monkeypatch):
    copy = tmp_path / "sam"
    shutil.copytree(jit.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "PACKAGE", copy)
    before = jit._fingerprint()
    assert before == jit._fingerprint() == Path(jit.CACHE_FOLDER).name.removeprefix("sam-")
    edited = [copy / "jit.py", copy / "automaton" / "store.py", copy / "drafting" / "context_mixing.py"]
    seen = {before}
    for file in edited:
        with file.open("a") as opened:
            opened.write("# changed")
        seen.add(jit._fingerprint())
    assert len(seen) == 1 + len(edited)


def test_a_package_that_cannot_be_written_to_uses_another_folder(tmp_path, monkeypatch):
    (tmp_path / "package").write_text("a file where a folder would be made")
    monkeypatch.setattr(jit, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    monkeypatch.setattr(jit.config, "CACHE_DIR", "")
    assert jit._writable_folder().is_relative_to(tmp_path / "elsewhere")
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "package"))
    with pytest.raises(OSError, match="set NUMBA_CACHE_DIR"):
        jit._writable_folder()
    monkeypatch.setattr(jit.config, "CACHE_DIR", str(tmp_path / "chosen"))
    assert jit._writable_folder().is_relative_to(tmp_path / "chosen")


def half(value):
    return value / 2


def test_two_processes_that_compile_at_once_never_name_each_others_code(tmp_path, monkeypatch):
    """Both have read an empty index; the second saves while the first is in the middle of it."""
    monkeypatch.setattr(jit, "CACHE_FOLDER", str(tmp_path))
    first, second = jit.compiled(half), jit.compiled(half)
    file, write = first._cache._cache_file, first._cache._cache_file._save_data

    def save_data(name, data):
        monkeypatch.setattr(second._cache._cache_file, "_load_index", dict)
        second(1.0)
        write(name, data)

    monkeypatch.setattr(file, "_save_data", save_data)
    monkeypatch.setattr(file, "_load_index", dict)
    assert first(3) == 1.5
    monkeypatch.undo()
    index = file._load_index()
    assert index
    for key, name in index.items():
        (signature,) = [part for part in file._load_data(name) if type(part).__name__ == "Signature"]
        assert tuple(signature.args) == tuple(key[0])


def test_a_process_loads_what_another_has_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "CACHE_FOLDER", str(tmp_path))
    first, second = jit.compiled(half), jit.compiled(half)
    assert first(3) == second(3) == 1.5 and first(2.0) == second(2.0) == 1.0
    assert len(list(tmp_path.rglob("*.nbc"))) == 2
    assert sum(second.stats.cache_hits.values()) == 2 and not sum(second.stats.cache_misses.values())
