"""What is tested, taken with a warning or refused, and what a user names that is not there: before anything starts."""

import copy
import functools
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe import values
from recipe.launch import versions
from recipe.launch.config import CONFIGS, compose_config
from recipe.main_dapo import main
from recipe.preflight import checks, compatibility
from tests.recipe.preflight.preflight_node import write_rows

ROOT = Path(__file__).parents[3]
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))


composed = functools.cache(lambda name: compose_config(name, []))


def changed(assets, *overrides):
    """The tiny config with assets and overrides: to compose it anew takes a second each time."""
    config = copy.deepcopy(composed("dapo_tiny_cpu"))
    OmegaConf.set_struct(config, False)
    config.assets, config.actor_rollout_ref.model.path = str(assets), f"{assets}/model"
    config.data.train_files, config.data.val_files = f"{assets}/train.parquet", f"{assets}/val.parquet"
    config.merge_with_dotlist(list(overrides))
    return config


def problems(assets, *overrides):
    return list(checks.find_problems(changed(assets, *overrides)))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.total_training_steps=-5", "an integer of at least 1, or null"),
        ("trainer.total_training_steps=2.5", "an integer of at least 1, or null"),
        ("trainer.save_freq=-2", "an integer of at least 1, or -1 for none"),
        ("trainer.total_epochs=0", "an integer of at least 1"),
        (f"{ROLLOUT}.temperature=0", "a number above 0"),
        (f"{ROLLOUT}.temperature=.nan", "a number above 0"),
        (f"{ROLLOUT}.val_kwargs.temperature=-0.1", "a number of at least 0"),
        (f"{ROLLOUT}.top_p=1.5", "a number above 0 and at most 1"),
        (f"{ROLLOUT}.val_kwargs.top_k=0", "an integer of at least 1, or -1 for none"),
        (f"{ACTOR}.optim.lr=-1e-06", "a number of at least 0"),
        (f"{ACTOR}.ppo_epochs=true", "an integer of at least 1"),
        ("data.val_max_samples=all", "an integer of at least 1, or -1 for none"),
    ],
)
def test_a_number_out_of_range_is_one_line(tmp_path, override, expected):
    values.check(changed(tmp_path))
    with pytest.raises(ValueError, match=f"{override.split('=')[0]}=.*: expected {expected}: change it$"):
        values.check(changed(tmp_path, override))


def test_the_page_is_the_table():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page == compatibility.page(), "python -m recipe.preflight.compatibility > docs/compatibility.md"


def test_pins_are_the_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {pin for extra in project.values() for pin in extra if "==" in pin}
    for row in compatibility.ROWS:
        name = row.key.removeprefix("package ")
        if row.is_package and any(pin.startswith(f"{name}==") for pin in pinned):
            assert f"{name}=={(row.tested + row.untested)[0]}" in pinned, row.feature


def test_choices_are_those_that_verl_has():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils.tracking import Tracking

    known = {row.feature: {*row.tested, *row.untested} for row in compatibility.ROWS}
    assert known["advantage"] == set(ADV_ESTIMATOR_REGISTRY)
    assert known["policy loss"] == set(POLICY_LOSS_REGISTRY)
    assert known["logger"] == set(Tracking.supported_backend)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("dapo_*.yaml")))
def test_no_config_of_the_recipes_is_refused(name):
    assert list(compatibility.setting_problems(composed(name))) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.use_v1=false", "trainer.use_v1=false: "),
        (f"{ROLLOUT}.mode=sync", "set it to async"),
        ("trainer.v1.trainer_mode=separate_async", "set it to sync"),
        ("trainer.v1.trainer_mode=colocate_async", "set it to sync"),
        ("trainer.logger=[console,tensorbord]", "trainer.logger=tensorbord: "),
        ("trainer.logger=wnadb", "did you mean wandb?"),
        ("trainer.resume_mode=atuo", "did you mean auto?"),
        ("algorithm.adv_estimator=grop", "did you mean grpo?"),
        ("data.truncation=lft", "did you mean left?"),
        (f"{ROLLOUT}.name=sglang", "set it to vllm"),
        (f"{ROLLOUT}.disaggregation.enabled=true", "set it to false"),
        (f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded", "set it to naive or "),
        (f"{ROLLOUT}.agent.custom_async_server.path=a.py", "verl does not read it"),
        (f"{ROLLOUT}.do_sample=false", "verl does not read it, temperature decides"),
        ("data.reward_fn_key=source", "set it to data_source"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false: "),
        (f"{MODEL}.mtp.enable_rollout=true", "speculation=... chooses the drafter"),
        # Of another type than verl's own.
        (f"{ACTOR}.use_kl_loss=ture", "expected true or false"),
        ("trainer.val_before_train=maybe", "trainer.val_before_train=maybe: "),
        (f"{ROLLOUT}.free_cache_engine=yess", "expected true or false"),
        ("trainer.experiment_name=32", "expected text"),
        (f"{ACTOR}.entropy_coeff=abc", "expected a number"),
        (f"{ROLLOUT}.expert_parallel_size=all", "expected a number"),
    ],
)
def test_what_the_recipe_does_not_run_with_is_refused(assets, override, said):
    found = problems(assets, override)
    assert any(said in one and override.split("=")[0] in one for one in found), found
    assert all("\n" not in one for one in found)


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.strategy=fsdp",
        "algorithm.rollout_correction.bypass_mode=true",
        f"{MODEL}.lora_rank=8",
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.quantization=fp8",
        f"{ROLLOUT}.checkpoint_engine.backend=nccl",
        "algorithm.rollout_correction.rollout_is=token",
        "global_profiler.tool=torch",
        "trainer.logger=tensorboard",
    ],
)
def test_what_nobody_has_tried_is_warned_of_in_one_line(assets, override):
    assert problems(assets, override) == []
    config = changed(assets, override)
    assert list(compatibility.find_warnings(config)) == [
        f"not tested with this recipe: {override} (docs/compatibility.md)"
    ]
    assert list(compatibility.find_warnings(changed(assets))) == []


def test_a_model_that_sees_and_another_version_are_warned_of(assets, monkeypatch):
    (assets / "model" / "config.json").write_text('{"vision_config": {}}')
    known = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "2.99.0" if name == "ray" else known(name))
    (said,) = compatibility.find_warnings(changed(assets))
    assert "vision_config=there, ray 2.99.0" in said


MESSAGES = [{"role": "user", "content": "1 + 1"}]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": ["1 + 1"]}, "column prompt holds "),
        ({"prompt": [["1 + 1"]]}, "expected a list of messages with role and content"),
        ({"prompt": [[{"content": "1 + 1"}]]}, "expected a list of messages with role and content"),
        ({"prompt": [1]}, "column prompt holds int64"),
        ({"prompt": None}, "no column prompt"),
        ({"data_source": [3]}, "column data_source holds int64, expected text"),
        ({"responses": ["one"]}, "column responses has the name of one that verl writes, rename it"),
        ({"validate": [True]}, "column validate has the name of one"),
        ({"reward_model": ["2"]}, "expected a dictionary with ground_truth"),
        (
            {"prompt": [MESSAGES, None, []], "data_source": ["math"] * 3, "reward_model": [{"ground_truth": "2"}] * 3},
            "2 of 3 rows have no message in prompt",
        ),
        ({"prompt": [], "data_source": [], "reward_model": []}, "column"),
    ],
)
def test_columns_that_verl_would_misread_are_one_line(assets, columns, said):
    write_rows(assets / "train.parquet", **columns)
    (found,) = problems(assets)
    assert f"data.train_files={assets}/train.parquet: " in found and said in found and "[data.wrong_file]" in found


def test_the_prompt_column_is_the_one_that_the_config_names(assets):
    for name in ("train", "val"):
        write_rows(assets / f"{name}.parquet", prompt=None, question=[MESSAGES])
    assert "no column prompt" in problems(assets)[0]
    assert problems(assets, "data.prompt_key=question") == []


def test_a_metric_that_the_reward_does_not_give_is_named_with_those_it_gives(assets):
    key = "algorithm.filter_groups.metric"
    (found,) = problems(assets, f"{key}=accuracy")
    assert f"{key}=accuracy: " in found and found.endswith("set it to one of reward, acc, score [batch.metric]")
    for good in ("acc", "score", "reward"):
        assert problems(assets, f"{key}={good}") == []
    assert problems(assets, f"{key}=accuracy", "algorithm.filter_groups.enable=false", "data.gen_batch_size=8") == []


def test_advice_fits_what_was_given(assets, monkeypatch):
    assert "data.val_files=None: no such file: correct data.val_files" in problems(assets, "data.val_files=null")[0]
    missing = problems(assets, "data.train_files=/nope", f"{MODEL}.path=Qwen/Qwen3-0.6B")
    assert "data.train_files=/nope: no such file: correct data.train_files" in missing[0]
    assert "bash scripts/prepare_model.sh Qwen/Qwen3-0.6B fetches it to models/Qwen3-0.6B" in missing[1]
    assert not any("assets" in one for one in missing)
    (prepared,) = problems(assets, "data.train_files=data/aime_2024.parquet")
    assert "bash scripts/prepare_data.sh" in prepared
    (folder,) = problems(assets, f"{MODEL}.path={assets}")
    assert "point actor_rollout_ref.model.path at the folder of a model" in folder
    monkeypatch.setenv("MODEL_PATH", "Qwen/Qwen3-0.6B")
    (said,) = checks.find_warnings(changed(assets))
    assert said.startswith("MODEL_PATH=Qwen/Qwen3-0.6B has no effect on dapo_tiny_cpu")


def test_other_models_of_a_run_are_looked_for(assets):
    (found,) = problems(assets, "algorithm.adv_estimator=gae", "critic.model.path=/nope")
    assert "critic.model.path=/nope: no config.json" in found
    for name in ("lora_adapter", "tokenizer"):
        (found,) = problems(assets, f"{MODEL}.{name}_path=/nope")
        assert f"{MODEL}.{name}_path=/nope: no such folder" in found
    assert "data.val_files=None: no such file" in problems(assets, "data.val_files=[]")[0]


def test_check_says_all_of_it(assets, capsys):
    arguments = ["--config-name", "dapo_tiny_cpu", "--check", f"assets={assets}", f"run_dir={assets}/run"]
    assert main([*arguments, "trainer.v1.trainer_mode=separate_async"]) == 2
    assert "trainer.v1.trainer_mode=separate_async" in capsys.readouterr().err
    assert main([*arguments, f"{ACTOR}.use_kl_loss=true"]) == 0
    assert f"warning: not tested with this recipe: {ACTOR}.use_kl_loss=true" in capsys.readouterr().err
