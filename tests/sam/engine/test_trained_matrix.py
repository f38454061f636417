"""The matrix's requests under drafters with a model: aborted, preempted, penalised, stopped, with prompts in pieces."""

import pytest

from tests.sam.engine import matrix
from tests.sam.engine.draft_model_runs import drafter_of, save_draft_model
from tests.sam.engine.eagle_head import save_head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous", "ranks_environment")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    draft, head = (tmp_path_factory.mktemp(name) for name in ("draft", "head"))
    save_draft_model(model, draft)
    save_head(model, head)
    return {"draft model": str(draft), "head": str(head)}


@pytest.fixture(scope="module")
def off(model):
    with matrix.engine(model, "off", False) as llm:
        return matrix.run(llm)


@pytest.mark.parametrize(
    ("method", "folder", "is_asynchronous", "accepted"),
    [
        ("draft_model", "draft model", False, 100),
        ("eagle3", "head", False, 10),  # the head's output layer is fitted, the rest of it is random
        ("hybrid", "head", False, 100),
        ("hybrid", "draft model", True, 100),
        ("hybrid", "head", True, 100),
    ],
)
def test_same_tokens_and_log_probabilities(model, folders, off, method, folder, is_asynchronous, accepted):
    drafter = {"draft_model": folders[folder], "cross_prompt": False}
    with matrix.engine(model, method, is_asynchronous, drafter=drafter) as llm:
        matrix.assert_same(matrix.run(llm), off)
        assert matrix.counted(llm, "vllm:num_preemptions") > 10
        assert matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > accepted
        counters = drafter_of(llm).counters
        assert counters["draft_model_passes"] > 50 and counters["draft_model_invalid_drafts"] == 0
        assert counters["draft_errors"] == counters["draft_model_errors"] == 0
