"""Requests to which everything happens that can, run by engines that must agree on every token.

200 requests of up to 60 tokens: greedy and drawn, penalised, ended by length, by stop tokens and by stop strings, some
aborted, some preempted by force; a KV cache so small that others are preempted, and steps so small that prompts come in
pieces beside drafts.
"""

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from sam.config import SpeculationConfig
from tests.sam.engine.tiny_engine import VOCABULARY, save_model

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
RESPONSES, MOST_PARTS, TOKENS = 100, 5, 40  # of what is cut
SQUEEZED = {"max_num_seqs": 40, "block_size": 32, "num_gpu_blocks_override": 56, "max_num_batched_tokens": 112}


@dataclass
class Answer:
    """What a request returned: tokens, their log-probabilities, text where it may end by a stop string."""

    tokens: list[int]
    logprobs: list[float]
    text: str


def save(path):
    """A model whose text repeats, with a tokenizer of one word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = save_model(path, sharpness=12.0)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return model


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
    if row % 8 == 3:
        chosen["repetition_penalty"] = 1.1
    return chosen


def has_stop_string(row: int) -> bool:
    return row % 7 == 2


def is_plain(row: int) -> bool:
    """Whether its tokens are drawn from the model's own distribution."""
    return row not in GONE and row % 5 != 0 and row % 8 != 3


def _contexts() -> set[zmq.Context]:
    return {one for one in gc.get_objects() if isinstance(one, zmq.Context)}


@contextlib.contextmanager
def engine(model, method: str, is_asynchronous: bool, ranks: int = 1, drafter: dict | None = None, **arguments):
    """An engine of the matrix, as vLLM's LLM; `drafter` has further settings of `method`."""
    speculation = SpeculationConfig(method=method, policy="threshold", batch_size_threshold=1000, **drafter or {})
    if ranks > 1:
        arguments["worker_extension_cls"] = "tests.sam.engine.ranks.SamRanks"
    with started(
        model=model.path, max_model_len=256, dtype="float32", enforce_eager=True, seed=0, tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else "uni", kv_cache_memory_bytes=64 << 20,
        async_scheduling=is_asynchronous, logprobs_mode="processed_logprobs", disable_log_stats=False,
        **SQUEEZED, **speculation.vllm_arguments(is_asynchronous), **arguments,
    ) as llm:  # fmt: skip
        yield llm


@contextlib.contextmanager
def started(**arguments):
    """vLLM's LLM with these arguments, of whose ranks nothing is left afterwards."""
    from vllm import LLM

    from sam.vllm import plugin

    plugin.register()
    shared_before, contexts_before = set(Path("/dev/shm").glob("*-cpushm_*")), _contexts()
    llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        # vLLM's queues between ranks leave theirs open. Garbage collection may come to a context before its sockets,
        # and then waits for these forever, in whichever test it happens.
        for context in _contexts() - contexts_before:
            context.destroy(linger=0)
        del llm
        gc.collect()
        # vLLM's ranks on a CPU leave the memory through which they speak (csrc/cpu/shm.cpp).
        for memory in set(Path("/dev/shm").glob("*-cpushm_*")) - shared_before:
            memory.unlink()


def run(llm, rows: Iterable[int] = range(REQUESTS)) -> list[Answer]:
    """The answers of requests; of others they are empty."""
    from vllm import SamplingParams

    common = {"logprobs": 0, "ignore_eos": True, "detokenize": False}
    texts = prompts()
    for row in rows:
        llm.llm_engine.add_request(str(row), {"prompt_token_ids": texts[row]}, SamplingParams(**common | settings(row)))
    outputs, step = {}, 0
    while llm.llm_engine.has_unfinished_requests():
        step += 1
        outputs |= {int(output.request_id): output.outputs[0] for output in llm.llm_engine.step()}
        llm.llm_engine.abort_request([str(row) for row in ABORTED.get(step, [])])
        if step in FORCED_PREEMPTIONS:
            assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    answers = [Answer([], [], "")] * REQUESTS
    for row, one in outputs.items():
        tokens = list(one.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(one.logprobs, tokens, strict=True)]
        answers[row] = Answer(tokens, logprobs, one.text)
    return answers


def assert_same(found: list[Answer], expected: list[Answer], rows: Iterable[int] = range(REQUESTS)) -> None:
    """Every token and log-probability. Aborted requests got as far as they got; after a stop string vLLM returns the
    tokens that the same step brought, of which a step with drafts has more."""
    for row in rows:
        one, other, length = found[row], expected[row], None
        if row in GONE or has_stop_string(row):
            length = min(len(one.tokens), len(other.tokens))
            assert row in GONE or one.text == other.text, (row, one, other)
        assert one.tokens[:length] == other.tokens[:length], (row, one, other)
        assert one.logprobs[:length] == other.logprobs[:length], row


def second_pass(llm, answers: list[Answer]) -> dict[int, list[float]]:
    """Log-probabilities that a forward pass over the whole text gives the tokens of plain requests, by request."""
    from vllm import SamplingParams

    rows = [row for row in range(REQUESTS) if is_plain(row)]
    texts = [{"prompt_token_ids": prompts()[row] + answers[row].tokens} for row in rows]
    asked = SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False)
    found = {}
    for row, output in zip(rows, llm.generate(texts, asked, use_tqdm=False), strict=True):
        start = len(prompts()[row])
        entries = zip(output.prompt_logprobs[start:], answers[row].tokens, strict=True)
        found[row] = [entry[token].logprob for entry, token in entries]
    return found


def settings_of_parts(row: int) -> dict:
    """Drawn and greedy, plain and with every constraint that does not read the response's own tokens alone."""
    constraints = [{"temperature": 0.0}, {"repetition_penalty": 1.2}, {"top_k": 9}, {"top_p": 0.9}, {}, {}, {}]
    stops = {"stop_token_ids": list(range(0, VOCABULARY, 50))} if row % 6 == 1 else {}
    return {"seed": row, "temperature": 1.0, "max_tokens": TOKENS, **stops, **constraints[row % len(constraints)]}


def cuts() -> list[list[int]]:
    """Lengths at which each response is cut, 0 to 4, anywhere.

    A new request's prompt is the prompt and the tokens so far, its seed the same, and nothing else tells the engine: as
    the recipe's chunks, verl's clients that resume aborted responses, and a replica that takes over from a dead one.
    """
    chance = np.random.default_rng(1)
    parts = chance.integers(1, MOST_PARTS + 1, RESPONSES)
    return [sorted(chance.choice(np.arange(1, TOKENS), count - 1, replace=False).tolist()) for count in parts]


def respond(llm, all_cuts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities. A part of an even row ends by its length, of an odd one it is aborted once it has
    so many tokens or more."""
    from vllm import SamplingParams

    engine, texts = llm.llm_engine, prompts()
    done: list[tuple[list[int], list[float]]] = [([], []) for _ in range(RESPONSES)]

    def ask(row: int) -> None:
        given = done[row][0]
        end = TOKENS if row % 2 else next((cut for cut in all_cuts[row] if cut > len(given)), TOKENS)
        own = {
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
            **settings_of_parts(row),
            "max_tokens": end - len(given),
        }
        engine.add_request(f"{row} {len(given)}", {"prompt_token_ids": texts[row] + given}, SamplingParams(**own))

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


def counted(llm, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


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
