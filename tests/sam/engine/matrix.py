"""Requests to which everything happens that can, run by engines that must agree on every token.

200 requests of up to 60 tokens: greedy and drawn, penalised and constrained, ended by length, by stop tokens and by
stop strings, some aborted, some preempted by force; a KV cache so small that others are preempted, and steps so small
that prompts come in pieces beside drafts.
"""

import multiprocessing
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tests.sam.engine.tiny_engine import VOCABULARY, Engine, save_model

REQUESTS = 200
# Engine steps and the requests that are aborted after them.
ABORTED = {6: [6, 14], 9: [8, 15, 22], 14: [24, 32]}
GONE = {row for rows in ABORTED.values() for row in rows}
FORCED_PREEMPTIONS = (11, 12, 26)
PRELOADED = [
    "tests.sam.engine.matrix",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "sam.vllm.async_proposer",
    "sam.vllm.exact_sampler",
]
MOST_CUTS = 4  # of a response
SQUEEZED = {"batch": 40, "block_size": 32, "num_gpu_blocks_override": 56, "max_num_batched_tokens": 112}


@dataclass
class Answer:
    """What a request returned: tokens, their log-probabilities, text where it may end by a stop string."""

    tokens: list[int]
    logprobs: list[float]
    text: str


def save(path):
    """A model whose text repeats."""
    return save_model(path, sharpness=12.0)


def prompts() -> list[list[int]]:
    """Groups of four that share one, 6 to 60 tokens."""
    generator = np.random.default_rng(0)
    each = [generator.integers(0, VOCABULARY, 3 + row % 28).tolist() * 2 for row in range(REQUESTS // 4)]
    return [each[row // 4] for row in range(REQUESTS)]


def settings(row: int) -> dict:
    chosen = {"seed": row, "temperature": 0.0 if row % 5 == 0 else 1.0, "max_tokens": 4 + 7 * row % 57}
    if row % 6 == 1:
        chosen["stop_token_ids"] = list(range(0, VOCABULARY, 25))
    if has_stop_string(row):
        # One: of several that one step completes vLLM takes the first of its list, not of the text.
        chosen |= {"stop": ["7 w1" if row % 2 else "3 w2"], "detokenize": True}
    constraints = {3: {"repetition_penalty": 1.1}, 4: {"top_k": 9}, 6: {"top_p": 0.9}}
    return chosen | constraints.get(row % 8, {})


def has_stop_string(row: int) -> bool:
    return row % 7 == 2


def engine(model, method: str, asynchronous: bool, ranks: int = 1, drafter: dict | None = None) -> Engine:
    """An engine of the matrix; `drafter` has further settings of `method`."""
    extension = {"worker_extension_cls": "tests.sam.engine.ranks.SamRanks"} if ranks > 1 else {}
    options = {"speculation": drafter, "logprobs_mode": "processed_logprobs", **SQUEEZED, **extension}
    return Engine(model, method, asynchronous=asynchronous, ranks=ranks, **options)


def cuts() -> dict[int, list[int]]:
    """Lengths at which responses are cut, 0 to 4, anywhere, by request; none whose end no cut may hide.

    A new request's prompt is the prompt and the tokens so far, its seed the same, and nothing else tells the engine: as
    the recipe's chunks, verl's clients that resume aborted responses, and a replica that takes over from a dead one.
    """
    chance, found = np.random.default_rng(1), {}
    for row in set(range(REQUESTS)) - GONE:
        if not has_stop_string(row):
            longest = settings(row)["max_tokens"]
            count = min(longest - 1, chance.integers(0, MOST_CUTS + 1))
            found[row] = sorted(chance.choice(np.arange(1, longest), count, replace=False).tolist())
    return found


def run(engine: Engine, rows: Iterable[int] = range(REQUESTS), cuts: Mapping[int, list[int]] = MappingProxyType({})):
    """The answers of requests; of others they are empty. Of what is cut a part of an even row ends by its length, of an
    odd one it is aborted once it has so many tokens or more."""
    from vllm import SamplingParams

    core, texts, step = engine.llm.llm_engine, prompts(), 0
    answers = [Answer([], [], "") for _ in range(REQUESTS)]

    def ask(row: int) -> None:
        given, end = len(answers[row].tokens), settings(row)["max_tokens"]
        if row % 2 == 0:
            end = next((cut for cut in cuts.get(row, ()) if cut > given), end)
        common = {"logprobs": 0, "ignore_eos": True, "detokenize": False}
        own = SamplingParams(**common | settings(row) | {"max_tokens": end - given})
        core.add_request(f"{row} {given}", {"prompt_token_ids": texts[row] + answers[row].tokens}, own)

    for row in rows:
        ask(row)
    while core.has_unfinished_requests():
        step += 1
        for output in core.step():
            row, given = map(int, output.request_id.split())
            part, answer = output.outputs[0], answers[row]
            answer.tokens[given:], answer.text = part.token_ids, part.text
            entries = zip(part.logprobs, part.token_ids, strict=True)
            answer.logprobs[given:] = [entry[token].logprob for entry, token in entries]
            is_cut = row % 2 and any(given < cut <= len(answer.tokens) for cut in cuts.get(row, ()))
            if is_cut and not output.finished:
                core.abort_request([output.request_id])
            has_more = len(answer.tokens) < settings(row)["max_tokens"]
            if has_more and (part.finish_reason == "length" or (is_cut and not output.finished)):
                ask(row)
        core.abort_request([f"{row} 0" for row in ABORTED.get(step, [])])
        if step in FORCED_PREEMPTIONS:
            assert core.reset_prefix_cache(reset_running_requests=True)
    return answers


def assert_same(found: list[Answer], expected: list[Answer], rows: Iterable[int] = range(REQUESTS), by=0.0) -> None:
    """Every token, and log-probability to `by`. Aborted requests got as far as they got; after a stop string vLLM
    returns the tokens that the same step brought, of which a step with drafts has more."""
    for row in rows:
        one, other, length = found[row], expected[row], None
        if row in GONE or has_stop_string(row):
            length = min(len(one.tokens), len(other.tokens))
            assert row in GONE or one.text == other.text, (row, one, other)
        assert one.tokens[:length] == other.tokens[:length], (row, one, other)
        for a, b in zip(one.logprobs[:length], other.logprobs[:length], strict=True):
            assert abs(a - b) <= by, row


def environment(monkeypatch) -> None:
    """Of a process that starts engines with ranks: their processes are forked from one that has imported vLLM."""
    from vllm.v1.executor import multiproc_executor

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(multiproc_executor, "get_mp_context", lambda: context)
