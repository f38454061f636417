"""The cluster's configs at scale=smoke: the same keys and code on a CPU. One trains for all, and its server dies."""

import pytest
from omegaconf import OmegaConf

from sam_recipe.launch.config import compose_config
from sam_recipe.record import differences
from tests.end_to_end.runs import MINUTES, kill, leaves_nothing, log_of, metrics, outside, start, wait_for_step

CONFIGS = ("dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b")
NUMBERS = {"num_speculative_tokens", "batch_size_threshold", "max_num_seqs"}  # in which they differ
NAMES = {"config_name", "run_dir", "experiment_name", "default_local_dir"}


def test_what_one_config_does_at_this_scale_the_others_do_too():
    first, *others = (OmegaConf.to_container(compose_config(name, ["scale=smoke"])) for name in CONFIGS)
    for other in others:
        assert {key.rpartition(".")[2] for key in differences(first, other)} <= NUMBERS | NAMES


@pytest.mark.e2e
def test_a_cluster_config_trains_and_the_death_of_its_server_ends_it(assets, tmp_path):
    run_directory, before = tmp_path / "run", outside(tmp_path)
    run = start(
        assets,
        run_directory,
        *("scale=smoke", "trainer.total_training_steps=2", "algorithm.filter_groups.enable=false"),
        *("data.gen_batch_size=4", "speculation.batch_size_threshold=16"),  # its responses all run to the last token
        config=CONFIGS[0],
    )
    wait_for_step(run, run_directory, 1)
    kill(run, "ray::SpeculationServer")
    _, screen = run.communicate(timeout=2 * MINUTES)
    assert run.returncode == 1, (screen, log_of(run_directory)[-3000:])
    last = screen.splitlines()[-1]
    assert last.startswith("error: a rollout server (process ") and ", in step 2; " in last
    assert last.endswith("the same command starts from the beginning (no checkpoint to go on from)")
    assert leaves_nothing(run_directory, before), outside(run_directory) - before
    (row,) = metrics(run_directory)
    assert row["step"] == 1 and row["actor/grad_norm"] >= 0 and row["rollout/spec_drafted_tokens"] > 0
