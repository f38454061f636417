"""Two tensor-parallel ranks, and experts, also spread over them: the tokens of one rank that drafts nothing."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.ascend.engines import ROWS, engine
from tests.sam.engine import matrix

pytestmark = pytest.mark.engine

TWO = {"ranks": 2}
# Model, whether it is scheduled asynchronously, and further settings. Two ranks are forked from this process: first, as
# long as no engine has been in it.
ENGINES = {
    "dense, two ranks": ("dense", False, TWO),
    "dense, two ranks, FULL": ("dense", True, TWO | {"graph": "FULL"}),
    "dense, two ranks, paths": ("dense", True, TWO | {"speculation": {"paths": 3}}),
    "experts, two ranks": ("experts", False, TWO | {"enable_expert_parallel": True}),
    "experts, FULL": ("experts", False, {"graph": "FULL"}),
}


@pytest.fixture(scope="module")
def experts(model, tmp_path_factory):
    """Four, of which a token takes two."""
    path, like = tmp_path_factory.mktemp("experts") / "model", model.network.config
    config = like.to_dict() | {"model_type": "qwen3_moe", "architectures": None, "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(3)
    network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).float()
    with torch.no_grad():
        network.lm_head.weight.mul_(12)
    shutil.copytree(model.path, path)
    network.save_pretrained(path)
    return SimpleNamespace(path=str(path))


@pytest.fixture(scope="module")
def answers(model, experts):
    models, found = {"dense": model, "experts": experts}, {}
    for name, (which, asynchronous, further) in ENGINES.items():
        with engine(models[which], "sam", asynchronous, **further) as own:
            found[name] = matrix.run(own, ROWS)
            assert own.count()["accepted"] > 30, name
    for name, one in models.items():
        with engine(one) as own:
            found[name] = matrix.run(own, ROWS)
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_one_rank_without_drafts(answers, name):
    """Two ranks add their halves up in another order than one rank its whole."""
    matrix.assert_same(answers[name], answers[ENGINES[name][0]], ROWS, by=1e-4 if "ranks" in name else 0.0)
