"""DAPO on SmolLM2 in all of verl: the same responses with and without speculation. Needs the extra `smollm2`."""

import pytest

from sam_recipe.smollm2 import assets
from tests.end_to_end.runs import end, metrics, responses, start

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def train(folder, method):
    run_directory = folder / method
    overrides = (f"speculation={method}", "trainer.save_freq=-1")
    end(start(folder / "assets", run_directory, *overrides, config="dapo_smollm2_cpu"), run_directory)
    return [responses(run_directory, step) for step in (1, 2)], metrics(run_directory)


def test_two_steps_are_the_same_with_and_without_speculation(tmp_path):
    assets.prepare_assets(tmp_path / "assets", assets.AssetSettings())
    (sam, sam_metrics), (off, off_metrics) = (train(tmp_path, method) for method in ("sam", "off"))
    assert sam == off and len(sam[0]) >= 32
    for with_sam, without in zip(sam_metrics, off_metrics, strict=True):
        assert with_sam["actor/grad_norm"] == without["actor/grad_norm"] > 0
        assert 0.1 < with_sam["rollout/acc_all/mean"] < 0.6
        assert with_sam["rollout/spec_accepted_tokens"] > 0 == without["rollout/spec_drafted_tokens"]
