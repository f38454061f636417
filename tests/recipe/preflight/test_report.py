"""preflight's table and its dry run, on a node that is good, on one that is not, and on a laptop."""

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import checks, report
from tests.recipe.preflight.preflight_node import good_node


@pytest.fixture
def node(tmp_path, monkeypatch):
    return good_node(tmp_path, monkeypatch)


@pytest.fixture
def said(capsys):
    def run(*arguments):
        code = report.main(["--config-name", "dapo_qwen3_32b", *arguments])
        return code, capsys.readouterr().out

    return run


def test_a_good_node_is_all_green_and_the_dry_run_has_the_commands(node, said):
    code, printed = said("--dry-run")
    assert code == 0 and "red" not in printed and "skip" not in printed and "0 problems" in printed
    assert "2 nodes x 16 npu devices; rollout: 4 replicas of 8, up to 128 requests each; training: megatron" in printed
    for line in ("routing: ", "speculation: sam, up to 3 draft tokens, exact verification\n", "sharing: "):
        assert f"\n{line}" in printed
    assert "longest responses" in printed and "optimizer" in printed and "a checkpoint has 427 GiB" in printed
    assert "\npython -m recipe.main_dapo --config-name dapo_qwen3_32b\nvllm serve " in printed
    assert " --max_num_seqs 128 " in printed


def test_slots_are_those_of_a_data_parallel_rank():
    printed = "\n".join(report.describe(compose_config("dapo_qwen3_235b", ["speculation=off"])))
    assert "rollout: 1 replica of 128, up to 64 requests on each of 32 data-parallel ranks; training" in printed
    assert "\nspeculation: off, exact verification\n" in printed


def test_a_problem_is_red_below_its_subject_with_its_mend(node, said):
    (node.folder / "data" / "aime_2024.parquet").unlink()
    code, printed = said()
    assert code == 2 and "red   data\n        data.val_files=" in printed and printed.endswith("\n1 problem\n")
    assert "green batches, lengths" in printed


def test_a_laptop_skips_what_needs_the_device(node, monkeypatch, said):
    monkeypatch.setattr(report, "has_device", lambda device: False)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.delenv("ASCEND_HOME_PATH")
    code, printed = said()
    assert code == 0 and "0 problems" in printed
    skipped = [check.name for check in checks.CHECKS if "device" in check.scopes]
    assert len(skipped) >= 5
    for name in skipped:
        assert f"skip  {name}: no device of this config in this machine" in printed


def test_preflight_looks_at_the_cluster_that_a_run_would_join(node, monkeypatch, said):
    """As scripts/ascend_environment.sh does, by the address that `ray start` wrote down."""
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(report.cluster, "cluster_of_this_node", lambda: "127.0.0.1:6379")
    assert said()[0] == 0
