"""What two settings make of a config of verl's own; a whole run is in tests/end_to_end/test_verl_script.py."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipe.sam_dapo import patches_of_verl, verl_plugin  # noqa: F401 - follows the import of verl's trainers
from recipe.sam_dapo.launch import sharing, speculation
from recipe.sam_dapo.launch.config import verl_configs
from sam.config import METHODS, WITH_DRAFT_MODEL, SpeculationConfig

GIVEN = ["hydra.searchpath=[pkg://sam.configs]", "actor_rollout_ref.rollout.name=vllm"]


def composed(*overrides):
    """verl's ppo_trainer, as main_ppo composes it."""
    with initialize_config_dir(verl_configs().removeprefix("file://"), version_base=None):
        config = compose("ppo_trainer", [*GIVEN, *overrides])
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize(("device", "method"), [*(("cuda", one) for one in METHODS), ("npu", "sam"), ("cpu", "sam")])
def test_engines_are_given_what_the_recipe_gives_them(device, method):
    """Engines with these arguments are tested in tests/sam/engine and tests/ascend."""
    drafter = ["speculation.draft_model=/none"] if method in WITH_DRAFT_MODEL else []
    config = composed(
        f"+speculation={method}", "speculation.num_speculative_tokens=5", f"trainer.device={device}", *drafter
    )
    vllm = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm)
    assert vllm["additional_config"] == {"speculation": speculation.resolved(config).to_dict()}
    wanted = SpeculationConfig.from_dict(vllm["additional_config"]["speculation"])
    assert (wanted.method, wanted.num_speculative_tokens) == (method, 5)
    ahead = method in ("sam", *WITH_DRAFT_MODEL) and device != "cpu"  # there vLLM schedules ahead
    assert vllm["speculative_config"] == wanted.vllm_arguments(ahead).get("speculative_config")


def test_replicas_share_text_in_a_log_that_has_room():
    """verl's own numbers: 8 devices that train, two to an engine; with 8 more that do not, those are replicas too."""
    config = composed("+speculation=sam")
    assert config.speculation.sharing == "auto" and speculation.resolved(config).sharing == "replicas"
    assert config.data.gen_batch_size is None and (mib := sharing.needed_mib(config)) > 0
    ahead = composed("+speculation=sam", "trainer.v1.trainer_mode=colocate_async", "data.gen_batch_size=1")
    assert 2 * mib - 1 <= sharing.needed_mib(ahead) <= 2 * mib  # a batch for the next step, too
    apart = ["+speculation=sam", "trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1"]
    assert sharing.replicas(ahead) == 4 and sharing.replicas(composed(*apart)) == 8
    assert sharing.replicas(composed(*apart, "actor_rollout_ref.hybrid_engine=false")) == 4


def test_verls_trainers_are_joined_when_they_are_imported_and_are_verls_own_where_nothing_asks():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    for name in patches_of_verl.PATCHES["join_trainers"].targets.split():
        assert getattr(PPOTrainer, name)._sam == {"join_trainers"}
    manager = SimpleNamespace(get_client=lambda **chosen: chosen)
    for overrides, is_routed in (
        ([], False),
        (["+speculation=sam"], False),
        (["+speculation=sam", "+routing=context"], True),
    ):
        trainer = SimpleNamespace(config=composed(*overrides), llm_server_manager=manager)
        assert ("client_cls" in PPOTrainer.get_llm_client(trainer)) == is_routed
    plain = SimpleNamespace(config=composed(), _setup=list, on_init_end=list)
    PPOTrainer.init(plain)
    assert not hasattr(plain, "sam_steps")


START = """
import hydra
from recipe.sam_dapo import verl_plugin
from recipe.sam_dapo.launch.config import verl_configs

@hydra.main(config_path=verl_configs().removeprefix("file://"), config_name="ppo_trainer", version_base=None)
def main(config):
    print("Ray starts")

main()
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("speculation.polcy=always", "error: speculation.polcy is unknown: did you mean policy?\n"),
        ("+speculation.polcy=always", "error: speculation.polcy is unknown: did you mean policy?\n"),
        (
            "speculation.num_speculative_tokens=99",
            "error: speculation.num_speculative_tokens=99: expected an integer fr",
        ),
        ("speculation.step_cost=/nowhere", "error: /nowhere: no such file; measure it again with sam profile"),
        ("speculation.policy=always", ""),
    ],
)
def test_a_wrong_key_is_one_line_before_ray_starts(tmp_path, override, said):
    """In a process that starts as verl's main_ppo does: the plugin, then Hydra, then Ray."""
    (script := tmp_path / "main.py").write_text(START)
    words = [*GIVEN, "+speculation=sam", override, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((2, "") if said else (0, "Ray starts\n"))
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said), done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("+speculation=sam speculation.policy=treshold", "speculation.policy='treshold': expected one of threshold"),
        ("+speculation=sam actor_rollout_ref.rollout.name=sglang", "speculation drafts in vllm: set it to vllm"),
        ("+speculation=sam +routing=context trainer.v1.trainer_mode=separate_async", "routing=context is for sync"),
        ("+speculation=sam trainer.use_v1=false", "speculation needs verl's V1 trainers: set it to true"),
        ("+routing=context", "without speculation: add +speculation=sam, or +speculation=off"),
    ],
)
def test_what_it_is_not_for_is_refused(overrides, said):
    with pytest.raises(Exception, match=re.escape(said)):
        composed(*overrides.split())
