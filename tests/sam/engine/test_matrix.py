"""The matrix of docs/lossless.md: {synchronous, asynchronous} x {sam, off} x {one, two tensor-parallel ranks}.

And the same requests with further paths as rows of the batch, with drafters that have a model, with rejection sampling,
and cut anywhere into requests of their own.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.switch.policy import Plan
from tests.sam.engine import matrix
from tests.sam.engine.trained_models import save_draft_model, save_head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous", "ranks_environment")]
# Method, whether it is scheduled asynchronously, further settings, and tokens accepted at least. Trained drafters alone
# are in test_trained.py.
ENGINES = {
    "async off": ("off", True, {}, 0),
    "sam": ("sam", False, {}, 200),
    "async sam": ("sam", True, {}, 200),
    "paths": ("sam", False, {"paths": 3}, 200),
    "async paths": ("sam", True, {"paths": 3}, 200),
    "rejection": ("sam", True, {"verification": "rejection"}, 200),
    "async draft model and sam": ("hybrid", True, {"draft_model": "draft"}, 100),
    "async head and sam": ("hybrid", True, {"draft_model": "head"}, 100),
}
SOME = range(80)  # requests that are enough for further runs of an engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("draft", "head")}
    save_draft_model(model, found["draft"])
    save_head(model, found["head"])
    return found


@pytest.fixture(scope="module")
def stock(model):
    """The synchronous engine without speculation: answers, and responses that are undivided and in parts."""
    with matrix.engine(model, "off", False) as llm:
        cuts = [[]] * matrix.RESPONSES, matrix.cuts()
        return SimpleNamespace(answers=matrix.run(llm), responses=[matrix.respond(llm, one) for one in cuts])


@pytest.fixture(scope="module")
def off(stock):
    return stock.answers


@pytest.fixture(scope="module")
def off_with_two_ranks(model):
    with matrix.engine(model, "off", False, ranks=2) as llm:
        return matrix.run(llm)


def test_the_requests_end_in_every_way(off):
    ends = {"length": 0, "token": 0, "string": 0}
    for row, answer in enumerate(off):
        longest = matrix.settings(row)["max_tokens"]
        if row not in matrix.GONE and answer.tokens:
            end = "length" if len(answer.tokens) == longest else "string" if matrix.has_stop_string(row) else "token"
            ends[end] += 1
    assert min(ends.values()) > 3 and sum(ends.values()) == matrix.REQUESTS - len(matrix.GONE), ends
    assert all(len(off[row].tokens) < matrix.settings(row)["max_tokens"] for row in matrix.GONE)


def test_responses_are_of_all_kinds_and_their_parts_are_those_of_the_whole(stock):
    whole, parts = stock.responses
    lengths = [len(tokens) for tokens, _ in whole]
    assert lengths.count(matrix.TOKENS) > 80 and min(lengths) < matrix.TOKENS
    assert {len(one) for one in matrix.cuts()} == set(range(matrix.MOST_PARTS))
    texts = {(tuple(matrix.prompts()[row]), *tokens) for row, (tokens, _) in enumerate(whole) if row % 7}
    assert len(texts) == sum(row % 7 > 0 for row in range(matrix.RESPONSES)), "samples of a prompt are drawn"
    check_parts(parts, whole)


def check_parts(parts, whole) -> None:
    for row, (tokens, logprobs) in enumerate(whole):
        assert parts[row][0] == tokens, row
        assert parts[row][1] == pytest.approx(logprobs, abs=1e-4), row


@pytest.mark.parametrize("name", ENGINES)
def test_one_rank(model, folders, stock, name):
    method, is_asynchronous, drafter, accepted = ENGINES[name]
    if "draft_model" in drafter:
        drafter = {"draft_model": str(folders[drafter["draft_model"]]), "cross_prompt": False}
    with matrix.engine(model, method, is_asynchronous, drafter=drafter) as llm:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        over = tokens_beyond_the_last(runner)
        answers = matrix.run(llm)
        if name == "rejection":  # draws other tokens, and computes other log-probabilities: greedy tokens are the same
            rows = [row for row in range(0, matrix.REQUESTS, 5) if row not in matrix.GONE]
            assert [answers[row].text or answers[row].tokens for row in rows] == [
                stock.answers[row].text or stock.answers[row].tokens for row in rows
            ]
        else:
            matrix.assert_same(answers, stock.answers)
        assert matrix.counted(llm, "vllm:num_preemptions") > 10
        before = matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens")
        if name in ("async off", "sam", "async sam"):
            check_parts(matrix.respond(llm, matrix.cuts()), stock.responses[0])
            assert method == "off" or matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > before + 50
        if method == "off":
            return
        assert before > accepted
        counters = runner.drafter.counters
        assert not any(value for counter, value in counters.items() if counter.endswith("_errors"))
        if "paths" in name:
            assert counters["path_rows"] > 300 and counters["path_wins"] > 5
        elif method == "sam":
            assert type(runner.drafter).__name__ == ("AsyncSamProposer" if is_asynchronous else "SamProposer")
            assert sum(more > 0 for more in over) > 3, "requests whose longest length lies within a draft"
        else:
            assert counters["draft_model_passes"] > 50 and counters["draft_model_invalid_drafts"] == 0
        if name == "async sam":
            check_logprobs(answers, matrix.second_pass(llm, answers))
            check_switching(llm, runner.drafter, stock.answers)


def tokens_beyond_the_last(runner) -> list[int]:
    """A list to which each request that ends adds how many tokens came out beyond its longest length."""
    beyond, update = [], runner._update_states

    def before(scheduler_output):
        for request_id in scheduler_output.finished_req_ids:
            if (state := runner.requests.get(request_id)) is not None:
                beyond.append(len(state.output_token_ids) - state.sampling_params.max_tokens)
        return update(scheduler_output)

    runner._update_states = before
    return beyond


def check_logprobs(answers, second_pass) -> None:
    """Those returned belong to the tokens: as a forward pass over the whole text has them."""
    assert len(second_pass) > 100
    for row, expected in second_pass.items():
        assert answers[row].logprobs == pytest.approx(expected, abs=2e-4), row


def check_switching(llm, proposer, off) -> None:
    """Drafts in some steps and not in others; and of requests that have ended or were aborted nothing is left."""
    generator = np.random.default_rng(0)
    proposer.policy.plan = lambda state: Plan(budget=3 if generator.random() < 0.6 else 0)
    before = matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens")
    matrix.assert_same(matrix.run(llm), off)
    assert matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > before + 20
    matrix.run(llm, [0])  # requests that have ended are released by the next step
    assert proposer.counters["draft_errors"] == 0 and len(proposer.tracked.states) <= 1


def test_two_ranks_scheduled_synchronously(model, off_with_two_ranks):
    with matrix.engine(model, "sam", False, ranks=2) as llm:
        llm.collective_rpc("prepare")
        llm.collective_rpc("draft", args=("at times", 1))
        matrix.assert_same(matrix.run(llm), off_with_two_ranks)
        assert matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > 100
        (first, *_), (second, *_) = llm.collective_rpc("take")
    assert first["tracked_requests"] > 100 and first["draft_errors"] == second["draft_errors"] == 0
    assert second["tracked_requests"] == 0


def test_two_ranks_without_speculation_scheduled_asynchronously(model, off_with_two_ranks):
    with matrix.engine(model, "off", True, ranks=2) as llm:
        matrix.assert_same(matrix.run(llm), off_with_two_ranks)


def test_two_ranks_with_further_paths_scheduled_asynchronously(model, off_with_two_ranks):
    with matrix.engine(model, "sam", True, ranks=2, drafter={"paths": 3}) as llm:
        matrix.assert_same(matrix.run(llm), off_with_two_ranks)
        llm.collective_rpc("prepare")
        counters = llm.collective_rpc("take")[0][0]
    assert counters["path_rows"] > 300 and counters["path_wins"] > 5
    assert counters["draft_errors"] == counters["path_errors"] == 0


def test_two_ranks_scheduled_asynchronously(model, off_with_two_ranks):
    """One rank drafts, the other is given its drafts: in no other step is there a message, and none waits twice."""
    with matrix.engine(model, "sam", True, ranks=2) as llm:
        llm.collective_rpc("prepare")
        for when, slow_rank, rows in (("at times", 0, range(matrix.REQUESTS)), ("always", 1, SOME)):
            llm.collective_rpc("draft", args=(when, slow_rank))
            before = matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens")
            matrix.assert_same(matrix.run(llm, rows), off_with_two_ranks, rows)
            assert matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > before + len(rows) // 2
            (first, *_), (second, *_) = found = llm.collective_rpc("take")
            for counters, steps, drafter in found:
                assert drafter == "AsyncSamProposer" and counters["draft_errors"] == 0
                check_steps(steps, most_waits=1)
        assert first["tracked_requests"] > 100 and second["tracked_requests"] == 0

        llm.collective_rpc("draft", args=("never", 1))
        for few in ("until the scheduler knows", "then"):
            matrix.assert_same(matrix.run(llm, SOME), off_with_two_ranks, SOME)
            for _, steps, _ in llm.collective_rpc("take"):
                check_steps(steps, most_waits=0 if few == "then" else 1)
                assert few != "then" or sum(step["room"] for step in steps) == 0

        llm.collective_rpc("break_drafting")
        llm.collective_rpc("draft", args=("always", 0))
        matrix.assert_same(matrix.run(llm, SOME), off_with_two_ranks, SOME)
        (first, steps, _), (second, other_steps, _) = llm.collective_rpc("take")
        assert first["draft_errors"] > 50 and second["draft_errors"] == 0
        check_steps(steps, most_waits=1)
        check_steps(other_steps, most_waits=0)  # it was given empty drafts


def check_steps(steps, most_waits: int) -> None:
    assert len(steps) > 50
    for step in steps:
        assert step.get("messages", 0) == step["room"]
        assert step.get("waits", 0) <= most_waits
