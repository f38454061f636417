"""DAPO on SmolLM2 in all of verl: the same responses with and without speculation. Needs the extra `smollm2`."""

import json
import subprocess
import sys

import pytest

from recipe.smollm2 import assets

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MINUTES = 60.0


def train(folder, method):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", "dapo_smollm2_cpu", f"speculation={method}"),
        *(f"assets={folder}/assets", f"run_dir={folder}/{method}", "trainer.save_freq=-1"),
    ]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=30 * MINUTES)
    assert run.returncode == 0, (run.stderr[-1000:], (folder / method / "train.log").read_text()[-3000:])
    responses = []
    for step in (1, 2):
        lines = (folder / method / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        responses.append([json.loads(line)["response_tokens"] for line in lines])
    metrics = [json.loads(line) for line in (folder / method / "metrics.jsonl").read_text().splitlines()]
    return responses, metrics


def test_two_steps_are_the_same_with_and_without_speculation(tmp_path):
    assets.prepare_assets(tmp_path / "assets", assets.AssetSettings())
    (sam, sam_metrics), (off, off_metrics) = (train(tmp_path, method) for method in ("sam", "off"))
    assert sam == off and len(sam[0]) >= 32
    for with_sam, without in zip(sam_metrics, off_metrics, strict=True):
        assert with_sam["actor/grad_norm"] == without["actor/grad_norm"] > 0
        assert 0.1 < with_sam["rollout/acc_all/mean"] < 0.6
        assert with_sam["rollout/spec_accepted_tokens"] > 0 == without["rollout/spec_drafted_tokens"]
