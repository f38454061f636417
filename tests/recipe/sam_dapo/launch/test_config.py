"""Configs compose on verl's own, and every mistake is one line before anything starts; which router a run has, and
whether its replicas share text."""

from importlib.resources import files

import pytest
from omegaconf import OmegaConf

from recipe.sam_dapo.launch import routing, sharing
from recipe.sam_dapo.launch.config import ConfigError, compose_config
from recipe.sam_dapo.main_dapo import main
from recipe.sam_dapo.preflight import settings
from recipe.sam_dapo.record.settings import differences
from sam.config import SpeculationConfig

ROLLOUT = "actor_rollout_ref.rollout"
ROUTER, VLLM = f"{ROLLOUT}.router_config_path", f"{ROLLOUT}.engine_kwargs.vllm"


def test_the_toggle_changes_nothing_but_speculation_whose_yaml_has_the_defaults_of_the_code():
    on, off = (OmegaConf.to_container(compose_config("dapo_tiny_cpu", words)) for words in ([], ["speculation=off"]))
    named = ("run_dir", "trainer.experiment_name", "trainer.default_local_dir", f"{ROLLOUT}.trace.experiment_name")
    others = (key for key in differences(on, off) if key not in named)
    assert {key.removeprefix(f"{VLLM}.") for key in others if not key.startswith("speculation.")} == {
        *("speculative_config.model", "speculative_config.num_speculative_tokens"),
        "additional_config.speculation.method",
    }
    engine = on["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]
    assert engine["stream_interval"] > on["data"]["max_response_length"]  # handed on when complete
    knobs = OmegaConf.to_container(OmegaConf.load(files("sam.configs") / "speculation" / "knobs.yaml"))
    assert knobs == SpeculationConfig().to_dict()


# Overrides, and what the line about them says.
CHOICES = "draft_model, eagle3, hybrid, ngram, off, sam, suffix"
BAD = [
    ("speculation=foo", f"speculation=foo is unknown: expected one of {CHOICES} [config.override]"),
    ("speculation.num_speculative_tokens=0", "num_speculative_tokens=0: expected an integer from 1 to 15"),
    ("routing=context routing.chunk_tokens=0", "chunk_tokens=0: expected an integer of at least 1, or null"),
    ("routing.chunk_tokens=16", "chunk_tokens=16: without routing=context responses are generated whole"),
    ("routing=context routing.chunk_tokens=16 speculation.verification=rejection", "each chunk of a response begins"),
    (f"routing=context {ROUTER}=mine.yaml", "mine.yaml: routing=context brings a router of its own"),
    (f"{ROUTER}=mine.yaml", "router_config_path=mine.yaml: no such file"),
    ("speculation.step_cost=missing.json", "missing.json: no such file; "),
    ("speculation.nonsense=1", "speculation.nonsense does not exist in this config: check its spelling"),
    ("trainer.tset_freq=5", "trainer.tset_freq does not exist in this config: did you mean trainer.test_freq?"),
    ("+trainer.gamma=1", "+trainer.gamma=1: dapo_tiny_cpu has all keys of a run: leave it out [config.value]"),
    (f"{VLLM}.block_size=16", "To append to your config use +actor_rollout_ref"),  # where a `+` is what helps
    (f"{VLLM}.additional_config=3", "engine_kwargs.vllm.additional_config=3: expected a dictionary"),
    ("data=null", "data=null: expected keys below it"),
    ("not_an_override", "not_an_override: expected KEY=VALUE"),
    ("seed=-5", "seed=-5: expected an integer from 0 to 4294967295"),
    ("reward.custom_reward_function.path=mine.py", "function.path=mine.py: no such file: correct it"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD)
def test_mistakes_are_one_line(overrides, message):
    with pytest.raises(ConfigError) as caught:
        compose_config("dapo_tiny_cpu", overrides.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_micro_batches_fit_the_devices():
    for override, update, log_prob in (("trainer.n_gpus_per_node=4", 8, 16), (f"{ROLLOUT}.n=10", 20, 20)):
        config = compose_config("dapo_tiny_cpu", [override])
        assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == update
        assert config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == log_prob


@pytest.fixture
def own(tmp_path):
    """Writes a user's own config, with a choice of speculation of their own beside it."""
    (tmp_path / "speculation").mkdir()
    (tmp_path / "speculation" / "mine.yaml").write_text("defaults: [sam]\nscope: request\n")

    def write(text):
        path = tmp_path / f"{tmp_path.name}.yaml"  # no other test's: configs are composed once
        path.write_text(f"defaults: [dapo_tiny_cpu, override speculation: mine, _self_]\n{text}\n")
        return str(path.with_suffix(""))

    return write


def test_a_config_of_the_users_own_composes_this_projects(own, tmp_path, monkeypatch):
    """A section of their own may be referred to; what they bring lies where the run starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    reward = "reward: {custom_reward_function: {path: mine.py}}"
    config = compose_config(own(f"my_folder: /data\nrun_dir: ${{my_folder}}/run\n{reward}"), [f"{ROLLOUT}.n=4"])
    assert (config.run_dir, config.actor_rollout_ref.rollout.n, config.data.train_batch_size) == ("/data/run", 4, 8)
    assert (config.speculation.method, config.speculation.scope) == ("sam", "request")
    assert config.reward.custom_reward_function.path == str(tmp_path / "mine.py")
    assert list(settings.keys(config)) == []
    with pytest.raises(ConfigError, match=r"/other' is unknown: expected one of test_a_config"):
        compose_config(str(tmp_path / "other"), [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speculation: {max_drafts: 3}", "max_drafts"),
        ("actor_rollout_ref: {rollout: {n: none}}", "rollout.n=none: expected an integer of at least 1"),
        ("trainer: {total_epoch: 3}", "neither verl 0.9.1 nor this project reads the key: did you"),
    ],
)
def test_a_mistake_in_a_users_own_config_is_one_line(own, tmp_path, capsys, text, said):
    own(text)
    assert main(["--config-dir", str(tmp_path), "--config-name", tmp_path.name, "--check"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_a_users_router_is_not_replaced(tmp_path):
    """tests/end_to_end/test_replicas.py has the recipe's."""
    (own := tmp_path / "own.yaml").write_text("router_class: recipe.sam_dapo.rollout.router.ContextRouterActor\n")
    config = compose_config("dapo_tiny_cpu", [f"{ROUTER}={own}"])
    assert config.actor_rollout_ref.rollout.router_config_path == str(own)
    assert routing.describe(config) == f"the router that {own} names"


TWO, SHARED = "trainer.n_gpus_per_node=2", "speculation.sharing=replicas"


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("tiny_cpu", [], "none, drafters see the text of their own replica (1 replica)"),
        ("tiny_cpu", [TWO], "2 replicas see each other's text, in "),
        ("tiny_cpu", [TWO, "speculation.sharing=none"], "none"),
        ("tiny_cpu", [SHARED], "1 replica has no other to share with, in "),
        ("tiny_cpu", [TWO, SHARED, "speculation=off"], "none"),
        ("qwen3_32b", [], "4 replicas see each other's text, in 1148 MiB at most (speculation.sharing=none: without)"),
        ("qwen3_235b", [], "none, drafters see the text of their own data-parallel rank (1 replica of 32 data-"),
    ],
)
def test_auto_shares_where_several_replicas_draft_from_text_and_the_log_says_so(name, overrides, said):
    config = compose_config(f"dapo_{name}", overrides)
    engine = config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.speculation
    assert sharing.describe(config).startswith(said)
    assert config.speculation.sharing == engine.sharing == ("none" if said.startswith("none") else "replicas")
