"""Where compiled kernels are cached."""

import shutil
from pathlib import Path

import pytest

from sam import compiled


def test_the_cache_changes_with_any_file_of_the_package(tmp_path, monkeypatch):
    for file in compiled.PACKAGE.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(compiled, "PACKAGE", tmp_path)
    before = compiled._fingerprint()
    assert before == compiled._fingerprint() == Path(compiled.CACHE_FOLDER).name.removeprefix("sam-")
    with (tmp_path / "prediction.py").open("a") as file:
        file.write("# changed")
    assert compiled._fingerprint() != before


def test_a_package_that_cannot_be_written_to_uses_another_folder(tmp_path, monkeypatch):
    (tmp_path / "package").write_text("a file where a folder would be made")
    monkeypatch.setattr(compiled, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    monkeypatch.setattr(compiled.config, "CACHE_DIR", "")
    assert compiled._writable_folder().is_relative_to(tmp_path / "elsewhere")
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path / "package"))
    with pytest.raises(OSError, match="set NUMBA_CACHE_DIR"):
        compiled._writable_folder()
    monkeypatch.setattr(compiled.config, "CACHE_DIR", str(tmp_path / "chosen"))
    assert compiled._writable_folder().is_relative_to(tmp_path / "chosen")


def test_kernels_are_cached_there():
    from sam.blocks import find

    assert (
        Path(find.stats.cache_path) == Path(compiled.CACHE_FOLDER)
        or Path(compiled.CACHE_FOLDER) in Path(find.stats.cache_path).parents
    )
