"""What users bring is used where it is set, and what is missing of it is one line before Ray starts."""

import pytest
from omegaconf import OmegaConf

from sam_recipe import preflight
from sam_recipe.launch.config import ConfigError, compose_config
from sam_recipe.preflight import compatibility, settings, vllm_command
from tests.recipe.preflight.preflight_node import MESSAGES, tiny, write_model, write_rows

AGENT = "actor_rollout_ref.rollout.agent"
REWARD = "reward.custom_reward_function"
TURNS = "actor_rollout_ref.rollout.multi_turn"
SAMPLER = "trainer.v1.sampler.custom_sampler"


FILES = {
    "mine.py": "import os\nfrom torch.utils.data import Dataset\nif os.name:\n    def score(**_): return 0.0\n"
               "class Loop: pass\nclass Data(Dataset): pass\nstart = Loop\n",
    "loops.yaml": "- {name: mine, _target_: mine.Loop}\n",
    "broken.py": "x = 1\ndef compute_score(:\n",
    "needs.py": "import no_such_package\n",
    "latin.py": "# coding: latin-1\nA = 'ä'\nclass Score:\n    def __call__(self): return A\nscore = Score()\n",
    "wrong.yaml": "- {name: a, _target_: mine.Loop}\n- {name: b, _target_: mine.Lop}\n",
    "tools.yaml": "tools:\n- {class_name: mine.Tool, config: {}}\n",
}  # fmt: skip


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """A user's folder, in which a run starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    three = {"prompt": [MESSAGES] * 3, "reward_model": [{"ground_truth": "2"}] * 3, "data_source": ["math_dapo"] * 3}
    others = {"data_source": ["aime24", "chess", "chess"], "agent_name": ["mine"] * 3}
    for name in ("train", "val"):
        write_rows(tmp_path / f"{name}.parquet")
    write_rows(tmp_path / "agents.parquet", **three, agent_name=["tool_agent", "researcher", "researcher"])
    write_rows(tmp_path / "others.parquet", **three | others)
    write_model(tmp_path / "model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    return tmp_path


def problems(folder, *overrides):
    config = tiny(folder, *overrides)
    found = [*settings.agent_loops_and_rewards_of_the_data(config), *vllm_command.users_code(config)]
    assert all("\n" not in one for one in found)
    return found


def test_what_is_not_set_is_the_recipes(brought):
    config = tiny(brought)
    assert problems(brought) == [] and list(compatibility.warnings(config)) == []
    assert problems(brought, f"{REWARD}.path=null", f"{SAMPLER}.path=null") == []  # verl's own
    # Data of another source, and files in other encodings, are fine with another reward.
    own = [f"{REWARD}.path=latin.py", f"{REWARD}.name=score", f"{AGENT}.agent_loop_config_path=loops.yaml"]
    assert problems(brought, "data.train_files=others.parquet", *own) == []


def test_what_is_set_is_used_from_wherever_the_run_starts(brought):
    path = "file://mine.py"
    overrides = [
        *(f"{REWARD}.path=mine.py", f"{REWARD}.name=score", f"+{REWARD}.reward_kwargs.scale=2"),
        *(f"{SAMPLER}.path={path}", f"{SAMPLER}.name=Loop", "+trainer.v1.sampler.sampler_kwargs.mine=1"),
        *(f"data.custom_cls.path={path}", "data.custom_cls.name=Data"),
        *(f"{AGENT}.agent_loop_config_path=loops.yaml", f"{AGENT}.default_agent_loop=mine"),
        *("reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={path}"),
        *("reward.reward_manager.name=Loop", f"{AGENT}.agent_loop_manager_class=mine.Loop"),
    ]
    config = compose_config("dapo_tiny_cpu", [f"assets={brought}", *overrides])
    assert list(vllm_command.users_code(config)) == []
    assert list(settings.agent_loops_and_rewards_of_the_data(config)) == []
    assert not [one for one in preflight.find_problems(config) if "[config." in one]
    for key in (f"{REWARD}.path", f"{SAMPLER}.path", "data.custom_cls.path", "reward.reward_manager.module.path"):
        assert OmegaConf.select(config, key) == str(brought / "mine.py")
    assert OmegaConf.select(config, f"{AGENT}.agent_loop_config_path") == str(brought / "loops.yaml")
    said = "\n".join(compatibility.warnings(config))
    assert f"{SAMPLER}.path={brought}/mine.py" in said and "manager_class=mine.Loop (without the recipe's" in said


def test_verls_legacy_keys_are_its_present_ones_or_refused(brought):
    legacy = {
        "custom_reward_function.path=mine.py": ("custom_reward_function.path", str(brought / "mine.py")),
        "+custom_reward_function.reward_kwargs.scale=2": ("custom_reward_function.reward_kwargs.scale", 2),
        "reward_model.reward_manager=naive": ("reward_manager.name", "naive"),
        "reward_model.reward_loop_source=importlib": ("reward_manager.source", "importlib"),
        "reward_model.reward_loop_module_path=mine.py": ("reward_manager.module.path", str(brought / "mine.py")),
        "reward_model.num_workers=3": ("num_workers", 3),
        "reward_model.model.path=model": ("reward_model.model_path", "model"),
    }
    config = compose_config("dapo_tiny_cpu", list(legacy))
    for override, (key, value) in legacy.items():
        assert OmegaConf.select(config, f"reward.{key}") == value, override
    for overrides, said in (
        (["custom_reward_function.path=a.py", f"{REWARD}.path=b.py"], f"{REWARD}.path is given too"),
        (["reward_model.model.external_lib=x"], "reward_model.model.external_lib=x: verl 0.9.1 has no such key"),
    ):
        with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
            compose_config("dapo_tiny_cpu", overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{REWARD}.path=gone.py"], f"gone.py, {REWARD}.name=compute_score: FileNotFoundError"),
        ([f"{REWARD}.path=mine.py"], "AttributeError: Object not found in module: object_name='compute_score'"),
        ([f"{REWARD}.path=broken.py"], "SyntaxError: invalid syntax (broken.py, line 2): verl would not find it"),
        ([f"{REWARD}.path=mine.py", f"{REWARD}.name=__file__"], "expected a function or class"),
        ([f"{REWARD}.path=needs.py"], "No module named 'no_such_package'"),
        (["data.custom_cls.path=/nope.py", "data.custom_cls.name=Data"], "data.custom_cls.path=/nope.py"),
        (["data.custom_cls.path=mine.py", "data.custom_cls.name=Loop"], "must inherit from torch.utils.data.Dataset"),
        ([f"{SAMPLER}.path=mine.py"], "object_name='DapoRounds'"),
        (["actor_rollout_ref.model.external_lib=[mine,gone]"], "external_lib=['mine', 'gone']: ModuleNotFoundError"),
        ([f"{AGENT}.agent_loop_config_path=wrong.yaml"], "No module named 'mine.Lop'"),
        ([f"{AGENT}.default_agent_loop=single_turn"], "did you mean single_turn_agent?"),
        ([f"{AGENT}.agent_loop_manager_class=mine.Manager"], "manager_class=mine.Manager: AttributeError"),
        ([f"{TURNS}.tool_config_path=gone.yaml"], "gone.yaml: FileNotFoundError"),
        ([f"{TURNS}.tool_config_path=tools.yaml"], "No module named 'mine.Tool'"),
        ([f"{TURNS}.tool_config_path=loops.yaml"], "expected tools, a list of entries with class_name"),
        ([f"{TURNS}.function_tool_path=gone.py"], "function_tool_path does not exist: gone.py"),
        (["data.train_files=agents.parquet"], "agents.parquet: agent_name=researcher: verl would not find it"),
        (["data.val_files=others.parquet"], "data.val_files=others.parquet: data_source=chess: the recipe's reward"),
    ],
)
def test_what_is_missing_is_one_line_with_its_key(brought, overrides, said):
    found = problems(brought, *overrides)
    assert [one for one in found if said in one], found
