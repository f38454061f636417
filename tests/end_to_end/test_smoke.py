"""The cluster's configs at scale=smoke: the same keys and code for one step of training on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sam.simulate

pytestmark = pytest.mark.e2e

MINUTES = 60.0
# Step costs of another engine, which goodput cannot use: a worker of the engine says so.
FOREIGN_TABLE = Path(sam.simulate.__file__).parent / "step_costs" / "qwen3_32b.json"


def start(assets, folder, name, *overrides):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", name),
        *(f"run_dir={folder / name}", f"assets={assets}", "scale=smoke", *overrides),
        *("algorithm.filter_groups.enable=false", "data.gen_batch_size=4"),  # the model is hardly ever right
        "speculation.batch_size_threshold=16",  # nor do its responses end one by one: they all run to the last token
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def end(process, folder, name):
    _, screen = process.communicate(timeout=14 * MINUTES)
    log = (folder / name / "train.log").read_text()
    assert process.returncode == 0, (screen[-1000:], log[-3000:])
    (row,) = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1 and row["actor/grad_norm"] >= 0
    return row, log, screen


def test_every_cluster_config_trains_a_step(assets, tmp_path):
    """Two at a time: each takes 8 GiB."""
    names = ("dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b")
    foreign = ("speculation.policy=goodput", f"speculation.step_cost={FOREIGN_TABLE}")
    first, second = start(assets, tmp_path, names[0], *foreign), start(assets, tmp_path, names[1])
    ended = [end(first, tmp_path, names[0]), end(second, tmp_path, names[1])]
    ended.append(end(start(assets, tmp_path, names[2]), tmp_path, names[2]))
    for row, _, _ in ended:
        assert row["rollout/spec_drafted_tokens"] > 0
    _, log, screen = ended[0]
    warned = "speculation.policy=threshold instead of goodput"
    assert log.count(warned) == screen.count(warned) == 1, "in a process that has imported vLLM's API server"
