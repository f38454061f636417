"""The table of preflight: 25 seeded mistakes, each found with its mend; JSON; a dry run; a laptop without an NPU."""

import json

import pandas
import pytest
import ray

from recipe import preflight_report, source_patches, versions
from recipe.configuration import ConfigError, compose_config

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
SIZES = {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "intermediate_size": 25600, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A node on which dapo_qwen3_32b would start: data, model, packages, patches and CANN in place."""
    from recipe import preflight_ascend

    data = pandas.DataFrame({"data_source": ["math_dapo"], "prompt": ["x"], "reward_model": ["y"]})
    (tmp_path / "data").mkdir()
    for name in ("dapo_math_17k", "aime_2024"):
        data.to_parquet(tmp_path / "data" / f"{name}.parquet")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SIZES))
    (model / "tokenizer_config.json").write_text("{}")
    toolkit = tmp_path / "cann" / "aarch64-linux"
    toolkit.mkdir(parents=True)
    (toolkit / "ascend_toolkit_install.info").write_text("version=9.0.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("MODEL_PATH", str(model))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    original = versions.installed
    wanted = {**preflight_ascend.REQUIRED, "torch": versions.TORCH["npu"]}
    monkeypatch.setattr(versions, "installed", lambda name: wanted.get(name) or original(name))
    monkeypatch.setattr(preflight_report, "has_npu", lambda: True)
    return tmp_path


def problems(*overrides, name="dapo_qwen3_32b"):
    found = preflight_report.report(compose_config(name, list(overrides)), dry_run=False)["problems"]
    return [problem for lines in found.values() for problem in lines]


def test_a_good_node_is_all_green(cluster, capsys):
    assert preflight_report.main(["--config-name", "dapo_qwen3_32b"]) == 0
    said = capsys.readouterr().out
    assert "red" not in said and "0 problems" in said
    assert "2 nodes x 16 npu devices; rollout: 4 replicas of 8, up to 128 requests each; training: megatron" in said
    assert "longest responses" in said and "optimizer" in said


# What a user may get wrong in the config, and a part of what is said. Refused when it is composed: (error).
REFUSED = [
    ("speculation.num_speculative_tokens=16", "expected an integer from 1 to 15"),
    ("speculation.policy=sometimes", "expected one of threshold, always, never"),
    ("speculation.num_speculative_token=3", "num_speculative_token"),
    ("speculation=eagle", "eagle"),
    ("actor_rollout_ref.rollout.max_num_seq=8", "max_num_seq"),
    ("+trainer.nodes=2", "trainer.nodes is unknown to dapo_qwen3_32b and would be ignored"),
    ("training=megatron", "megatron"),
]
FOUND = [
    ("data.train_files=nowhere.parquet", "data.train_files=nowhere.parquet: no such file"),
    ("actor_rollout_ref.model.path=nowhere", "no config.json there"),
    ("data.train_batch_size=31", "31 is not a multiple of actor.ppo_mini_batch_size=32"),
    ("data.gen_batch_size=16", "data.gen_batch_size=16 is below data.train_batch_size=32"),
    ("actor_rollout_ref.rollout.n=1", "dynamic sampling compares the samples of a prompt"),
    ("actor_rollout_ref.rollout.max_model_len=20000", "rollout.max_model_len=20000 is below"),
    ("reward.reward_kwargs.overlong_buffer_cfg.len=99999", "overlong_buffer_cfg.len=99999"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=6", "does not divide the 32 devices"),
    ("actor_rollout_ref.rollout.expert_parallel_size=4", "spreads experts over 1 or all 8 devices"),
    ("actor_rollout_ref.actor.megatron.context_parallel_size=3", "= 48 does not divide the 32 devices"),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9216", "= 18432 is below the longest sequence, 36864"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=1", "less than one longest response"),
    ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "GiB on each die of 64"),
    (f"+{VLLM}.additional_config.rejection_sampler_config.enable_block_verify=true", "changes what is sampled"),
    (f"+{VLLM}.async_scheduling=true", "drafters on the host need the step's tokens first"),
    (f"+{VLLM}.max_number_of_seqs=3", "vLLM refuses the command line: __main__.py: error: unrecognized arguments"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_a_mistake_that_cannot_be_composed(cluster, override, message):
    with pytest.raises(ConfigError, match="(?s).*" + message.replace("+", r"\+")):
        compose_config("dapo_qwen3_32b", [override])


@pytest.mark.parametrize(("override", "message"), FOUND)
def test_a_mistake_in_the_config(cluster, override, message):
    found = problems(override)
    assert any(message in problem for problem in found), found


def test_a_data_file_without_a_column_and_one_that_is_no_parquet(cluster):
    pandas.DataFrame({"prompt": ["x"]}).to_parquet(cluster / "data" / "dapo_math_17k.parquet")
    (cluster / "data" / "aime_2024.parquet").write_text("html")
    first, second = problems()
    assert "column data_source is missing" in first and "no parquet file" in second


def test_a_model_without_its_tokenizer(cluster):
    (cluster / "model" / "tokenizer_config.json").unlink()
    assert ["no tokenizer_config.json there; fetch the whole model" in problem for problem in problems()] == [True]


def test_a_misspelt_variable(cluster, monkeypatch):
    monkeypatch.setenv("HCCL_CONECT_TIMEOUT", "1800")
    assert problems() == [
        "the variable HCCL_CONECT_TIMEOUT is set, which nothing reads: did you mean HCCL_CONNECT_TIMEOUT?"
    ]


def test_unpatched_packages(cluster, monkeypatch):
    (series,) = source_patches.load()
    series.installed, series.states = series.version, dict.fromkeys(series.hashes, "published")
    monkeypatch.setattr(source_patches, "load", lambda: [series])
    assert problems() == [series.problem()]


def test_a_cluster_with_too_few_nodes(cluster, monkeypatch):
    node = {"Alive": True, "Resources": {"NPU": 16}}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [node, {**node, "Alive": False}])
    (problem,) = problems()
    assert problem.startswith("1 of 2 nodes are in the Ray cluster with 16 NPU each (found: [16])")


def test_a_cluster_that_does_not_answer(cluster, monkeypatch):
    def refuse(**_):
        raise ConnectionError("refused")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "init", refuse)
    (problem,) = problems()
    assert "no cluster answers (refused): start it with bash scripts/start_ray_cluster.sh" in problem


def test_a_laptop_checks_the_config_and_skips_the_device(cluster, monkeypatch, capsys):
    monkeypatch.setattr(preflight_report, "has_npu", lambda: False)
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    assert preflight_report.main(["--config-name", "dapo_qwen3_32b"]) == 0
    said = capsys.readouterr().out
    assert "skip  Ascend: pairing and patches: no NPU in this machine" in said and "0 problems" in said


def test_json_and_dry_run(cluster, capsys):
    arguments = ["--config-name", "dapo_qwen3_32b", "--json", "--dry-run", "speculation=off"]
    assert preflight_report.main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["command"] == "python -m recipe.main_dapo --config-name dapo_qwen3_32b speculation=off"
    assert said["vllm"][said["vllm"].index("--max_num_seqs") + 1] == "128"
    assert said["sampler"] == {"drafter": "off", "verification": "exact", "proposer": None}
    assert preflight_report.main(["--config-name", "dapo_qwen3_32b", "--json", "speculation=x"]) == 2
    assert "error" in json.loads(capsys.readouterr().out)
