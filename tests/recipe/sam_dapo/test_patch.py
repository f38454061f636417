"""Source patches: all or nothing, to the byte, and clear about what is refused. The published package is patched by
`bash scripts/test.sh --ascend`."""

import pytest

from recipe.sam_dapo.patch import PATCHES, Patches, main

VERSION = PATCHES.name


@pytest.fixture
def root(tmp_path):
    """A folder with vllm-ascend as far as the patches know it: metadata, and in its files what they replace."""
    (root := tmp_path / "site-packages").mkdir()
    install(root, VERSION)
    for hunk in Patches(root).hunks:
        hunk.path.parent.mkdir(parents=True, exist_ok=True)
        with hunk.path.open("a") as file:
            file.write(f"# before\n{hunk.published}# behind\n")
    return root


def install(root, version):
    (information := root / f"vllm_ascend-{version}.dist-info").mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-ascend\nVersion: {version}\n")


@pytest.fixture
def tool(capsys):
    """Runs a command; returns its exit code and what it says."""

    def tool(root, command):
        code = main([command, "--root", str(root)])
        return code, "".join(capsys.readouterr())

    return tool


def content(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_apply_break_apply_revert(root, tool):
    published = content(root)
    assert ": published (" in tool(root, "status")[1]
    code, said = tool(root, "apply")
    assert code == 0 and said.endswith(": patched (0001-custom-class-proposers.patch, 0002-rejection-sampler.patch)\n")
    patched = content(root)
    changed = [path for path in patched if patched[path] != published[path]]
    assert len(changed) == 3
    changed[0].write_bytes(published[changed[0]])  # as after an interrupted copy
    assert ": half patched (" in tool(root, "status")[1]
    for command, wanted in (("apply", patched), ("apply", patched), ("revert", published), ("revert", published)):
        assert tool(root, command)[0] == 0 and content(root) == wanted


def test_an_edit_another_version_or_none_is_refused_and_left_alone(root, tool, tmp_path):
    hunk = Patches(root).hunks[-1]
    hunk.path.write_text(hunk.path.read_text().replace(hunk.published, "edited\n"))
    before = content(root)
    code, said = tool(root, "apply")
    assert code == 2 and f"{hunk.path.relative_to(root)} is neither as published nor as patched" in said
    assert content(root) == before
    install(tmp_path, "0.18.0")
    for place, found in ((tmp_path, "0.18.0"), (tmp_path / "nothing", None)):
        code, said = tool(place, "apply")
        assert code == 2 and f"vllm-ascend=={VERSION} is not installed here, but {found}: " in said
