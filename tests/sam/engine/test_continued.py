"""Responses in chunks: the same tokens and log-probabilities as undivided, with and without drafts."""

import pytest

from sam.vllm.runner_hooks import GENERATED
from tests.sam.engine.async_cpu import ASYNC_SAM
from tests.sam.engine.tiny_engine import SAM, save_model

pytestmark = pytest.mark.engine

LENGTH = 96
ASYNC = {"async_scheduling": True, "distributed_executor_backend": "uni"}
PROMPTS = [[1 + group, 7, 11 + group, 5, 3, 2 + group, 9, 9] for group in range(4) for _ in range(4)]
PLAIN = [{"seed": 100 + i} for i in range(len(PROMPTS))]
# Each of these reads the tokens of the response so far.
COUNTING = [
    {"seed": 100 + i, **extra}
    for i, extra in enumerate(
        [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.4}, {"presence_penalty": -0.5}]
        * 4
    )
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


class Engine:
    """An engine that generates whole responses, or the same in chunks."""

    def __init__(self, model, speculative_config, **engine):
        from vllm import LLM

        from sam.vllm import plugin

        plugin.register()
        self.settings = (speculative_config, engine)
        self.llm = LLM(
            model=model.path, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, dtype="float32",
            enforce_eager=True, speculative_config=speculative_config and dict(speculative_config),
            additional_config={"speculation": {"policy": "always"}}, disable_log_stats=False, **engine,
        )  # fmt: skip
        self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def generate(self, settings, chunk: int | None, length: int = LENGTH, **common):
        """Per prompt the tokens and their log-probabilities; all unfinished requests take a chunk, then the next."""
        from vllm import SamplingParams

        tokens, logprobs = [[] for _ in PROMPTS], [[] for _ in PROMPTS]
        open_ = list(range(len(PROMPTS)))
        while open_:
            prompts, parameters = [], []
            for i in open_:
                own = {"temperature": 1.0, "logprobs": 0, "detokenize": False, **common, **settings[i]}
                given = len(tokens[i])
                own["max_tokens"] = min(chunk or length, length - given)
                prompts.append({"prompt_token_ids": PROMPTS[i] + tokens[i]})
                parameters.append(SamplingParams(**own, extra_args={GENERATED: given}))
            left = []
            for i, output in zip(open_, self.llm.generate(prompts, parameters, use_tqdm=False), strict=True):
                new = output.outputs[0]
                tokens[i] += new.token_ids
                logprobs[i] += [step[t].logprob for step, t in zip(new.logprobs, new.token_ids, strict=True)]
                if new.finish_reason == "length" and len(tokens[i]) < length:
                    left.append(i)
            open_ = left
        return tokens, logprobs

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module", params=["off", "sam", "asynchronous sam"])
def engine(request, model):
    if request.param == "asynchronous sam":
        request.getfixturevalue("asynchronous")
        made = Engine(model, ASYNC_SAM, **ASYNC)
    else:
        made = Engine(model, SAM if request.param == "sam" else None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(engine):
    return engine.generate(PLAIN, None, ignore_eos=True)


@pytest.mark.parametrize("chunk", [64, 16, 1])
def test_chunks_have_the_tokens_and_log_probabilities_of_the_whole(engine, whole, chunk):
    assert engine.generate(PLAIN, chunk, ignore_eos=True) == whole


def test_without_the_count_of_tokens_so_far_they_have_not(engine, whole, monkeypatch):
    """The control: the hook is what makes them equal."""
    from sam.vllm import runner_hooks

    monkeypatch.setattr(runner_hooks, "generated_tokens", lambda _: 0)
    tokens, _ = engine.generate(PLAIN, 16, ignore_eos=True)
    assert tokens != whole[0]
    assert [t[:16] for t in tokens] == [t[:16] for t in whole[0]]


def test_penalties_count_from_the_first_token(engine):
    stop = {"stop_token_ids": list(range(0, 300, 3))}
    assert engine.generate(COUNTING, 16, **stop) == engine.generate(COUNTING, None, **stop)


def test_the_drafter_knows_the_group_of_a_chunk(engine):
    if not hasattr(engine.runner, "drafter"):
        pytest.skip("nothing drafts")
    drafter = engine.runner.drafter
    before, groups = dict(drafter.counters), len(drafter.drafter.groups)
    engine.generate([{"seed": 500 + i} for i in range(len(PROMPTS))], 24, ignore_eos=True)
    engine.generate(PLAIN[:1] * len(PROMPTS), 1, length=2, ignore_eos=True)  # lets go of what has finished
    assert drafter.counters["draft_errors"] == 0
    assert drafter.counters["tracked_requests"] - before["tracked_requests"] >= 4 * len(PROMPTS)
    assert len(drafter.drafter.groups) <= groups + len({tuple(prompt) for prompt in PROMPTS})


def test_a_preempted_chunk_goes_on(model, engine, whole):
    speculative_config, settings = engine.settings
    made = Engine(model, speculative_config, block_size=32, num_gpu_blocks_override=20, **settings)
    try:
        assert made.generate(PLAIN, 40, ignore_eos=True) == whole
        counters = {metric.name: getattr(metric, "value", None) for metric in made.llm.get_metrics()}
        assert counters["vllm:num_preemptions"] > 0
    finally:
        made.close()
