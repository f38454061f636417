"""What a built folder depends on; tests/recipe/tiny/test_assets.py builds one."""

from dataclasses import replace

from recipe.record import Contents


def test_settings_sources_and_versions_decide(tmp_path):
    (source := tmp_path / "source.py").write_text("a")
    contents = Contents("things", {"seed": 0}, [source], ["numpy"])
    digests = [
        contents.digest(),
        replace(contents, settings={"seed": 1}).digest(),
        replace(contents, packages=()).digest(),
    ]
    source.write_text("b")
    digests.append(contents.digest())
    assert len(set(digests)) == 4
