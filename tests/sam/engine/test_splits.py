"""Responses that are cut anywhere and go on as new requests: the tokens and log-probabilities of the undivided ones.

A new request's prompt is the prompt and the tokens so far, its seed the same, and nothing else tells the engine: as the
recipe's chunks, verl's clients that resume aborted responses, and a replica that takes over from a dead one. In the
engine of the matrix, whose steps are so small that prompts come in pieces.
"""

import numpy as np
import pytest

from tests.sam.engine import matrix

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous", "ranks_environment")]

RESPONSES, MOST_PARTS = 100, 5
TOKENS = 40


def settings(row: int) -> dict:
    """Drawn and greedy, plain and with every constraint that does not read the response's own tokens alone."""
    constraints = [{"temperature": 0.0}, {"repetition_penalty": 1.2}, {"top_k": 9}, {"top_p": 0.9}, {}, {}, {}]
    stops = {"stop_token_ids": list(range(0, matrix.VOCABULARY, 50))} if row % 6 == 1 else {}
    return {"seed": row, "temperature": 1.0, "max_tokens": TOKENS, **stops, **constraints[row % len(constraints)]}


def cuts() -> list[list[int]]:
    """Lengths at which each response is cut, 0 to 4, anywhere."""
    chance = np.random.default_rng(1)
    parts = chance.integers(1, MOST_PARTS + 1, RESPONSES)
    return [sorted(chance.choice(np.arange(1, TOKENS), count - 1, replace=False).tolist()) for count in parts]


def respond(llm, all_cuts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities. A part of an even row ends by its length, of an odd one it is aborted once it has
    so many tokens or more."""
    from vllm import SamplingParams

    engine, prompts = llm.llm_engine, matrix.prompts()
    done: list[tuple[list[int], list[float]]] = [([], []) for _ in range(RESPONSES)]

    def ask(row: int) -> None:
        given = done[row][0]
        end = TOKENS if row % 2 else next((cut for cut in all_cuts[row] if cut > len(given)), TOKENS)
        own = {"logprobs": 0, "ignore_eos": True, "detokenize": False, **settings(row), "max_tokens": end - len(given)}
        engine.add_request(f"{row} {len(given)}", {"prompt_token_ids": prompts[row] + given}, SamplingParams(**own))

    for row in range(RESPONSES):
        ask(row)
    while engine.has_unfinished_requests():
        for output in engine.step():
            row, given = map(int, output.request_id.split())
            part, (tokens, logprobs) = output.outputs[0], done[row]
            new = list(part.token_ids)
            is_cut = row % 2 and any(given < cut <= given + len(new) for cut in all_cuts[row])
            if not (output.finished or is_cut):
                continue
            tokens += new
            logprobs += [entry[token].logprob for entry, token in zip(part.logprobs, new, strict=True)]
            if not output.finished:
                engine.abort_request([output.request_id])
            if len(tokens) < TOKENS and part.finish_reason in (None, "length"):
                ask(row)
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model):
    """Undivided, of the synchronous engine without speculation."""
    with matrix.engine(model, "off", False) as llm:
        return respond(llm, [[]] * RESPONSES)


def test_responses_are_of_all_kinds(whole):
    lengths = [len(tokens) for tokens, _ in whole]
    assert lengths.count(TOKENS) > 80 and min(lengths) < TOKENS
    assert {len(one) for one in cuts()} == set(range(MOST_PARTS))
    texts = {(tuple(matrix.prompts()[row]), *tokens) for row, (tokens, _) in enumerate(whole) if row % 7}
    assert len(texts) == sum(row % 7 > 0 for row in range(RESPONSES)), "samples of a prompt are drawn"


@pytest.mark.parametrize("method", ["off", "sam"])
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_parts_have_the_tokens_and_log_probabilities_of_the_whole(model, whole, method, is_asynchronous):
    with matrix.engine(model, method, is_asynchronous) as llm:
        parts = respond(llm, cuts())
        for row, (tokens, logprobs) in enumerate(whole):
            assert parts[row][0] == tokens, row
            assert parts[row][1] == pytest.approx(logprobs, abs=1e-4), row
        if method == "sam":
            assert matrix.counted(llm, "vllm:spec_decode_num_accepted_tokens") > 50
            runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            assert runner.drafter.counters["draft_errors"] == 0
