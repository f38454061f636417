"""The matrix of docs/lossless.md: {synchronous, asynchronous} x {sam, off} x {one, two tensor-parallel ranks}."""

import pytest

from tests.sam.engine import matrix

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous", "ranks_environment")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def off(model):
    """Answers of the synchronous engine without speculation."""
    with matrix.engine(model, "off", False) as llm:
        return matrix.run(llm)


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


@pytest.mark.parametrize(
    ("method", "is_asynchronous"), [("sam", False), ("off", True), ("sam", True)], ids=["sam", "async off", "async sam"]
)
def test_one_rank(model, off, method, is_asynchronous):
    with matrix.engine(model, method, is_asynchronous) as llm:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        over = tokens_beyond_the_last(runner)
        answers = matrix.run(llm)
        matrix.assert_same(answers, off)
        assert matrix.counted(llm, "vllm:num_preemptions") > 10
        if method == "sam":
            assert type(runner.drafter).__name__ == ("AsyncSamProposer" if is_asynchronous else "SamProposer")
            assert matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > 200
            assert runner.drafter.counters["draft_errors"] == 0
            assert sum(more > 0 for more in over) > 3, "requests whose longest length lies within a draft"
            check_logprobs(answers, matrix.second_pass(llm, answers))


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


def test_two_ranks_scheduled_asynchronously(model, off_with_two_ranks):
    """One rank drafts, the other is given its drafts: in no other step is there a message, and none waits twice."""
    with matrix.engine(model, "sam", True, ranks=2) as llm:
        llm.collective_rpc("prepare")
        for when, slow_rank in (("always", 1), ("at times", 0)):
            llm.collective_rpc("draft", args=(when, slow_rank))
            before = matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens")
            answers = matrix.run(llm)
            matrix.assert_same(answers, off_with_two_ranks)
            assert matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > before + 100
            for counters, steps, drafter in llm.collective_rpc("take"):
                assert drafter == "AsyncSamProposer" and counters["draft_errors"] == 0
                check_steps(steps, most_waits=1)
        check_logprobs(answers, matrix.second_pass(llm, answers))
        (first, *_), (second, *_) = llm.collective_rpc("take")
        assert first["tracked_requests"] > 100 and second["tracked_requests"] == 0

        llm.collective_rpc("draft", args=("never", 1))
        for few in ("until the scheduler knows", "then"):
            matrix.assert_same(matrix.run(llm), off_with_two_ranks)
            for _, steps, _ in llm.collective_rpc("take"):
                check_steps(steps, most_waits=0 if few == "then" else 1)
                assert few != "then" or sum(step["room"] for step in steps) == 0

        llm.collective_rpc("break_drafting")
        llm.collective_rpc("draft", args=("always", 0))
        matrix.assert_same(matrix.run(llm), off_with_two_ranks)
        (first, steps, _), (second, other_steps, _) = llm.collective_rpc("take")
        assert first["draft_errors"] > 100 and second["draft_errors"] == 0
        check_steps(steps, most_waits=1)
        check_steps(other_steps, most_waits=0)  # it was given empty drafts


def check_steps(steps, most_waits: int) -> None:
    assert len(steps) > 50
    for step in steps:
        assert step.get("messages", 0) == step["room"]
        assert step.get("waits", 0) <= most_waits
