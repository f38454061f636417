"""preflight's table and its dry run, on a node that is good, on one that is not, and on a laptop."""

import json
import re

import pytest

from sam_recipe import preflight
from sam_recipe.launch.versions import installed
from sam_recipe.preflight import __main__ as report
from sam_recipe.preflight import machine, vllm_command
from sam_recipe.preflight.npu_selftest import recommend, verifications
from tests.recipe.preflight.preflight_node import config_of

SLOW, FAST, BROKEN = {"median_ms": 50.0}, {"median_ms": 5.0}, {"error": "RuntimeError: no kernel"}


@pytest.fixture
def said(capsys, monkeypatch, node):
    monkeypatch.setattr(report, "compose_config", lambda name, overrides: node.config(*overrides, name=name))

    def run(*arguments):
        code = report.main(["--config-name", "dapo_qwen3_32b", *arguments])
        return code, capsys.readouterr().out

    return run


def test_a_good_node_is_all_green(said, node):
    """And preflight looks at the cluster that a run would join, by the address that `ray start` wrote down."""
    node.monkeypatch.delenv("RAY_ADDRESS")
    node.set(machine, "cluster_of_this_node", lambda: "127.0.0.1:6379")
    code, printed = said()
    assert code == 0 and "red" not in printed and "skip" not in printed and "0 problems" in printed
    assert "2 nodes x 16 npu devices; rollout: 4 replicas of 8, up to 128 requests each; training: megatron" in printed
    for line in ("routing: ", "speculation: sam, up to 3 draft tokens, exact verification\n", "sharing: "):
        assert f"\n{line}" in printed
    assert "longest responses" in printed and "optimizer" in printed and "a checkpoint has 427 GiB" in printed


def test_slots_are_those_of_a_data_parallel_rank():
    printed = "\n".join(report.describe(config_of("dapo_qwen3_235b", "speculation=off")))
    assert "rollout: 1 replica of 128, up to 64 requests on each of 32 data-parallel ranks; training" in printed
    assert "\nspeculation: off, exact verification\n" in printed


def test_a_problem_is_red_below_its_subject_with_its_mend_and_a_laptop_skips_what_needs_the_device(said, node):
    node.set(report, "has_device", lambda device: False)
    node.monkeypatch.delenv("RAY_ADDRESS")
    node.monkeypatch.delenv("ASCEND_HOME_PATH")
    kept = {find: scopes for find, scopes in preflight.CHECKS.items() if find != vllm_command.what_verl_and_vllm_say}
    node.set(preflight, "CHECKS", kept)
    (node.folder / "data" / "aime_2024.parquet").unlink()
    (node.folder / "model" / "tokenizer.json").write_text('{"model": {')
    code, printed = said()
    assert code == 2 and "red   data\n        data.val_files=" in printed and printed.endswith("\n2 problems\n")
    assert "red   tokenizer\n" in printed and "[model.tokenizer]" in printed
    _, green, rest = re.split("green |skip, without the config's device: ", " ".join(printed.split()))
    assert "batches" in green.split(", ") and "tokenizer" not in green
    assert len(skipped := preflight.select("device")) >= 4 and rest.startswith(", ".join(skipped))


def test_without_a_config_it_says_what_the_environment_has(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert report.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and "tested    vLLM: 0.23.0" in lines
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert report.main(["--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cpu" and found["vllm"] == installed("vllm") and found["commit"]
    assert found["checked"]["vLLM's model runner"] == ["1", "refused"]
    assert found["checked"]["torch, CPU"] == [installed("torch"), "tested"] and "CANN" not in found["checked"]


def test_the_self_test_times_both_verifications_and_recommends_the_faster_one_that_runs():
    assert all(row["median_ms"] > 0 for row in verifications("cpu", batch=1).values())
    for exact, rejection, wanted in (
        (SLOW, FAST, "is faster, but its tokens differ"),
        (FAST, SLOW, "keep speculation.verification=exact"),
        (SLOW, BROKEN, "keep speculation.verification=exact"),
        (BROKEN, FAST, "set speculation.verification=rejection"),
    ):
        assert wanted in recommend({"exact": exact, "rejection": rejection})
