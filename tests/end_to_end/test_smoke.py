"""The cluster's configs at scale=smoke: the same keys and code for one step of training on a CPU."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

MINUTES = 60.0


def start(assets, folder, name, *overrides):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", name),
        *(f"run_dir={folder / name}", f"assets={assets}", "scale=smoke", *overrides),
        *("algorithm.filter_groups.enable=false", "data.gen_batch_size=4"),  # the model is hardly ever right
        "speculation.batch_size_threshold=16",  # nor do its responses end one by one: they all run to the last token
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def end(process, folder, name):
    _, errors = process.communicate(timeout=14 * MINUTES)
    assert process.returncode == 0, (errors[-1000:], (folder / name / "train.log").read_text()[-3000:])
    (row,) = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1 and row["actor/grad_norm"] >= 0
    return row


def test_every_cluster_config_trains_a_step(assets, tmp_path):
    """Two at a time: each takes 8 GiB."""
    names = ("dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b")
    first, second = (start(assets, tmp_path, name) for name in names[:2])
    rows = [end(first, tmp_path, names[0]), end(second, tmp_path, names[1])]
    rows.append(end(start(assets, tmp_path, names[2]), tmp_path, names[2]))
    for row in rows:
        assert row["rollout/spec_drafted_tokens"] > 0
