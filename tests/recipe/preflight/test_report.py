"""preflight's table, its JSON and its dry run, on a node that is good, on one that is not, and on a laptop."""

import json

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import checks, report
from tests.recipe.preflight.preflight_node import good_node


@pytest.fixture
def node(tmp_path, monkeypatch):
    return good_node(tmp_path, monkeypatch)


def said_of(capsys, *arguments):
    code = report.main(["--config-name", "dapo_qwen3_32b", *arguments])
    return code, capsys.readouterr().out


def test_a_good_node_is_all_green(node, capsys):
    code, said = said_of(capsys)
    assert code == 0 and "red" not in said and "skip" not in said and "0 problems" in said
    assert "2 nodes x 16 npu devices; rollout: 4 replicas of 8, up to 128 requests each; training: megatron" in said
    assert "\nrouting: verl's balancer (" in said and "\nsharing: 4 replicas see each" in said
    assert "longest responses" in said and "optimizer" in said and "a checkpoint has 427 GiB" in said
    assert "drafter: sam.vllm.ascend.async_proposer.AscendAsyncSamProposer, in place of vllm-ascend" in said
    assert "sampler: sam.vllm.exact_sampler.ExactSampler, put there by the plugin after vllm_ascend" in said


def test_slots_are_those_of_a_data_parallel_rank():
    said = report.topology(compose_config("dapo_qwen3_235b", []))
    assert "rollout: 1 replica of 128, up to 64 requests on each of 32 data-parallel ranks; training" in said


def test_a_problem_is_red_below_its_subject_with_its_mend(node, capsys):
    (node.folder / "data" / "aime_2024.parquet").unlink()
    code, said = said_of(capsys)
    assert code == 2 and "red   data\n        data.val_files=" in said and "1 problem\n" in said
    assert "green batches" in said


def test_a_laptop_skips_what_needs_the_device(node, monkeypatch, capsys):
    monkeypatch.setattr(report, "has_device", lambda device: False)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.delenv("ASCEND_HOME_PATH")
    code, said = said_of(capsys)
    assert code == 0 and "0 problems" in said
    skipped = [check.name for check in checks.CHECKS if "device" in check.scopes]
    assert len(skipped) >= 5
    for name in skipped:
        assert f"skip  {name}: no device of this config in this machine" in said


def test_json_and_dry_run(node, capsys):
    code, said = said_of(capsys, "--json", "--dry-run", "speculation=off")
    said = json.loads(said)
    assert code == 0 and said["command"] == "python -m recipe.main_dapo --config-name dapo_qwen3_32b speculation=off"
    assert said["vllm"][said["vllm"].index("--max_num_seqs") + 1] == "128"
    assert said["speculation"]["drafter"] == "none"
    code, said = said_of(capsys, "--json", "speculation=x")
    assert code == 2 and "error" in json.loads(said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("speculation.num_speculative_tokens=abc", "speculation.num_speculative_tokens='abc': expected an integer"),
        ("trainer.nnodes=two", "trainer.nnodes=two: expected an integer of at least 1"),
        ("data.train_batch_size=-1", "data.train_batch_size=-1: expected an integer of at least 1"),
        ("trainer=3", "trainer=3: expected keys below it"),
        ("custom_reward_function=mine.py", "custom_reward_function=mine.py: expected keys below it"),
        ("actor_rollout_ref.rollout.engine_kwargs=null", "engine_kwargs=None: expected keys below it"),
        ("data.custom_cls=null", "data.custom_cls=None: a value is of another type or range than expected"),
        ("trainer.v1.sampler=null", "trainer.v1.sampler=None: a value is of another type"),
        ("actor_rollout_ref.model.path=null", "actor_rollout_ref.model.path=None: expected text"),
        ("run_dir=", "run_dir=: expected text"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config='{bad'", "={bad: expected a dictionary"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config=3", "=3: expected a dictionary"),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=0", "=0: expected an integer of at"),
        ("speculation.corpus=[3]", "speculation.corpus=[3]: expected a path, or null"),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=no way", "enable=no way: expected true or false"),
        ("actor_rollout_ref.rollout.response_length=abc", "response_length=abc: expected an integer of at least 1"),
        ("~data.train_files", "data.train_files is not there: "),
        ("data.train_files='???'", "data.train_files=???: "),
        ("~actor_rollout_ref", "Key 'actor_rollout_ref' is not in struct"),
    ],
)
def test_a_value_of_another_kind_is_one_line_and_nothing_is_calculated_with_it(capsys, override, said):
    assert report.main(["--config-name", "dapo_tiny_cpu", override]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("error: ") and said in line


def test_preflight_looks_at_the_cluster_that_a_run_would_join(node, monkeypatch, tmp_path):
    """As scripts/ascend_environment.sh does, by the address that `ray start` wrote down."""
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert report.main(["--config-name", "dapo_qwen3_32b", "--json"]) == 2  # no Ray
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")
    assert report.main(["--config-name", "dapo_qwen3_32b", "--json"]) == 0
