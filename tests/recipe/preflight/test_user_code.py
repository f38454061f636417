"""What users bring is used where it is set, and what is missing of it is one line before Ray starts."""

import pandas
import pytest
from omegaconf import OmegaConf

from recipe.launch.config import ConfigError, compose_config
from recipe.preflight import checks, user_code
from tests.recipe.preflight.preflight_node import write_model

AGENT = "actor_rollout_ref.rollout.agent"
REWARD = "reward.custom_reward_function"
TURNS = "actor_rollout_ref.rollout.multi_turn"
SAMPLER = "trainer.v1.sampler.custom_sampler"


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """A user's folder, in which a run starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    row = {"data_source": "tiny_additive_sequence", "prompt": [{"role": "user", "content": "1"}]}
    row["reward_model"] = {"ground_truth": "1"}
    for name in ("train", "val"):
        pandas.DataFrame([row] * 3).to_parquet(tmp_path / f"{name}.parquet")
    write_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "import os\nif os.name:\n    def score(**_): return 0.0\nclass Loop: pass\nclass Data: pass\nstart = Loop\n"
    )
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: mine.Loop}\n")
    return tmp_path


def compose(folder, *overrides):
    return compose_config("dapo_tiny_cpu", [f"assets={folder}", *overrides])


def problems(folder, *overrides):
    return list(user_code.find_problems(compose(folder, *overrides)))


def test_what_is_not_set_is_the_recipes(brought):
    config = compose(brought)
    assert problems(brought) == [] and list(user_code.find_warnings(config)) == []
    assert OmegaConf.select(config, f"{REWARD}.path") == user_code.OWN_REWARD
    assert OmegaConf.select(config, f"{SAMPLER}.path") == user_code.OWN_SAMPLER
    assert OmegaConf.select(config, f"{AGENT}.agent_loop_manager_class") == user_code.OWN_MANAGER
    assert OmegaConf.select(config, f"{AGENT}.default_agent_loop") == "single_turn_agent"
    config = compose(brought, f"{REWARD}.path=null", f"{SAMPLER}.path=null")  # verl's own
    assert OmegaConf.select(config, f"{REWARD}.path") is None and list(user_code.find_problems(config)) == []


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_what_is_set_is_used_from_wherever_the_run_starts(brought, prefix):
    path = f"{prefix}mine.py"
    overrides = [
        *(f"{REWARD}.path={path}", f"{REWARD}.name=score", f"+{REWARD}.reward_kwargs.scale=2"),
        *(f"{SAMPLER}.path={path}", f"{SAMPLER}.name=Loop", "+trainer.v1.sampler.sampler_kwargs.mine=1"),
        *(f"data.custom_cls.path={path}", "data.custom_cls.name=Data"),
        *(f"{AGENT}.agent_loop_config_path=loops.yaml", f"{AGENT}.default_agent_loop=mine"),
        *("reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={path}"),
        *("reward.reward_manager.name=Loop", f"{AGENT}.agent_loop_manager_class=mine.Loop"),
    ]
    config = compose(brought, *overrides)
    assert list(user_code.find_problems(config)) == []
    assert not [one for one in checks.find_problems(config) if one.code == "config.unknown_key"]
    for key in (f"{REWARD}.path", f"{SAMPLER}.path", "data.custom_cls.path", "reward.reward_manager.module.path"):
        assert OmegaConf.select(config, key) == str(brought / "mine.py")
    assert OmegaConf.select(config, f"{AGENT}.agent_loop_config_path") == str(brought / "loops.yaml")
    said = "\n".join(user_code.find_warnings(config))
    assert f"{SAMPLER}.path={brought}/mine.py" in said and "manager_class=mine.Loop: without the recipe's" in said


LEGACY = {
    "custom_reward_function.path=mine.py": ("custom_reward_function.path", "mine.py"),
    "+custom_reward_function.reward_kwargs.scale=2": ("custom_reward_function.reward_kwargs.scale", 2),
    "reward_model.reward_manager=naive": ("reward_manager.name", "naive"),
    "reward_model.reward_loop_source=importlib": ("reward_manager.source", "importlib"),
    "reward_model.reward_loop_module_path=mine.py": ("reward_manager.module.path", "mine.py"),
    "reward_model.num_workers=3": ("num_workers", 3),
    "reward_model.model.path=model": ("reward_model.model_path", "model"),
}


@pytest.mark.parametrize("override", LEGACY)
def test_verls_legacy_keys_are_its_present_ones(brought, override):
    key, value = LEGACY[override]
    found = OmegaConf.select(compose(brought, override), f"reward.{key}")
    assert found == (str(brought / value) if value == "mine.py" else value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["custom_reward_function.path=a.py", f"{REWARD}.path=b.py"], f"{REWARD}.path is given too"),
        (["reward_model.model.external_lib=x"], "reward_model.model.external_lib=x: verl 0.9.1 has no such key"),
    ],
)
def test_a_legacy_key_that_cannot_be_used_is_refused(brought, overrides, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        compose(brought, *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{REWARD}.path=gone.py"], f"gone.py, {REWARD}.name=compute_score: verl would not find it"),
        ([f"{REWARD}.path=mine.py"], "mine.py defines no compute_score: "),
        ([f"{REWARD}.path=mine.py", f"{REWARD}.name=scores"], "did you mean score?"),
        ([f"{REWARD}.name=scores"], "reward.py defines no scores"),
        ([f"{REWARD}.path=broken.py"], "broken.py:2: "),
        (["data.custom_cls.path=/nope.py", "data.custom_cls.name=Data"], "data.custom_cls.path=/nope.py"),
        (["data.custom_cls.name=Data"], "data.custom_cls.path=None, data.custom_cls.name=Data: "),
        (["reward.reward_manager.source=importlib"], "reward.reward_manager.module.path=None, "),
        (["actor_rollout_ref.model.external_lib=[mine,gone]"], "external_lib=gone: "),
        (["reward.reward_manager.module.path=mine.py"], "reward.reward_manager.source=importlib only"),
        ([f"{AGENT}.agent_loop_config_path=gone.yaml"], "gone.yaml: verl would not find it: no such file"),
        ([f"{AGENT}.agent_loop_config_path=wrong.yaml"], "wrong.yaml: mine.Lop: verl would not find it: "),
        ([f"{AGENT}.agent_loop_config_path=wrong.yaml"], "no module elsewhere here"),
        ([f"{AGENT}.default_agent_loop=single_turn"], "did you mean single_turn_agent?"),
        ([f"{AGENT}.agent_loop_manager_class=mine.Manager"], "mine.py defines no Manager"),
        ([f"{TURNS}.tool_config_path=gone.yaml"], "gone.yaml: verl would not find it"),
        ([f"{TURNS}.tool_config_path=tools.yaml"], "tools.yaml: mine.Tool: "),
        ([f"{TURNS}.tool_config_path=loops.yaml"], "expected tools, a list of entries with"),
        ([f"{TURNS}.function_tool_path=gone.py"], "gone.py: verl would not find it"),
        (["data.train_files=agents.parquet"], "agents.parquet: agent_name=researcher: verl knows no such agent loop"),
        (["data.val_files=others.parquet"], "data.val_files=others.parquet: data_source=chess: the recipe's reward"),
    ],
)
def test_what_is_missing_is_one_line_with_its_key(brought, overrides, said):
    (brought / "broken.py").write_text("x = 1\ndef compute_score(:\n")
    (brought / "wrong.yaml").write_text(
        "- {name: a, _target_: mine.Lop}\n- {name: b, _target_: mine.Loop}\n- {name: c, _target_: elsewhere.Loop}\n"
    )
    (brought / "tools.yaml").write_text("tools:\n- {class_name: mine.Tool, config: {}}\n")
    rows = pandas.read_parquet("train.parquet")
    rows.assign(agent_name=["tool_agent", "researcher", "researcher"]).to_parquet("agents.parquet")
    rows.assign(data_source=["aime24", "chess", "chess"]).to_parquet("others.parquet")
    found = problems(brought, *overrides)
    assert [one for one in found if said in one], found
    assert all(one.count("\n") == 0 for one in found)


def test_data_of_another_source_are_fine_with_another_reward(brought):
    rows = pandas.read_parquet("train.parquet")
    rows.assign(data_source="chess", agent_name="mine").to_parquet("own.parquet")
    reward = [f"{REWARD}.path=mine.py", f"{REWARD}.name=score"]
    loops = [f"{AGENT}.agent_loop_config_path=loops.yaml"]
    assert problems(brought, "data.train_files=own.parquet", *reward, *loops) == []


@pytest.mark.parametrize("begin", [b"\xef\xbb\xbf", b"# coding: latin-1\nA = '\xe4'\n"], ids=["bom", "latin-1"])
def test_a_file_in_another_encoding_is_read_as_python_reads_it(brought, begin):
    text = b"class Score:\n    async def __call__(self, **_): return 0.0\nscore = Score()"
    (brought / "mine.py").write_bytes(begin + text)
    assert problems(brought, f"{REWARD}.path=mine.py", f"{REWARD}.name=score") == []


def test_a_file_that_only_running_tells_of_is_left_to_verl(brought):
    (brought / "mine.py").write_text("from os.path import *\n")
    assert problems(brought, f"{REWARD}.path=mine.py", f"{REWARD}.name=join") == []
