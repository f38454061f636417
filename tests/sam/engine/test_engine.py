"""A real vLLM engine on CPU: the same tokens and log-probs with and without speculation, at any batch size."""

from types import SimpleNamespace

import pytest

from sam.switch.policies import make_policy
from sam.vllm import plugin
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.tiny_engine import NGRAM, SAM, generate, save_model

pytestmark = pytest.mark.engine

PROMPTS = [[1 + prompt, 7, 30 + 3 * prompt, 2] for prompt in range(5)]
SAMPLES, DRAFT_LENGTH, THRESHOLD = 8, 3, 16
UNSEEDED = 6  # the sample without a seed: its key comes from vLLM's request id, which is random
LONGEST = 256  # of tiny_engine's engines, which the first of these reaches
NEAR_THE_END = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]] * 2


def settings(prompt, sample):
    return {
        "temperature": 0.0 if sample == 0 else 0.2 + 0.1 * (sample % 3),
        "top_p": 0.9 if sample == 7 else 1.0,
        "max_tokens": 200 - 10 * sample,
        "seed": None if sample == UNSEEDED else 100 * prompt + sample,
    }


def ask(llm, lengths):
    """Tokens of the requests near the longest length."""
    from vllm import SamplingParams

    asked = [
        SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, detokenize=False)
        for seed, tokens in enumerate(lengths)
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in NEAR_THE_END], asked, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def drafted_near_the_end(llm, runner):
    """What the scheduler hears of steps without drafts, then with: longest length and requests drafted for, of each
    step; tokens."""
    seen, proposer = SimpleNamespace(drafted_for=[], plain=[], told=[]), runner.drafter
    propose, take = proposer.propose, runner.take_draft_token_ids
    told = seen.plain

    def recorded(sampled, lengths, *rest, **keywords):
        drafts = propose(sampled, lengths, *rest, **keywords)
        seen.drafted_for.append((int(lengths[: len(sampled)].max()), sum(map(bool, drafts))))
        return drafts

    proposer.propose, runner.take_draft_token_ids = recorded, lambda: told.append(take()) or told[-1]
    proposer.policy = make_policy("never", DRAFT_LENGTH, 0)
    ask(llm, [20] * 4)
    told, proposer.policy = seen.told, make_policy("always", DRAFT_LENGTH, 0)
    seen.tokens = ask(llm, [249, 240, 240, 240])
    return seen


def run(model, speculative_config, batch):
    """Tokens, log-probs and what was recorded of 8 samples of each prompt."""
    seen = SimpleNamespace()

    def observe(runner):
        seen.installed = plugin.installed(runner)  # the recorder stands before what it looks for
        seen.runner, seen.recorder = runner, StepRecorder.attach(runner)

    def then(llm):
        from vllm import SamplingParams

        seen.record = seen.recorder.take()
        # Finished requests are released by the next step: one more request releases them all and stays itself.
        llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
        drafter = getattr(seen.runner, "drafter", None)
        for _ in range(2):  # pieces of new weights
            seen.runner.get_model().load_weights(iter(()))
        seen.versions = drafter.counters["policy_version"] if hasattr(drafter, "tracked") else 0
        seen.tracked = len(drafter.tracked.states) if hasattr(drafter, "tracked") else 0
        if speculative_config == SAM:
            seen.near_the_end = drafted_near_the_end(llm, seen.runner)
        else:
            seen.near_the_end = SimpleNamespace(tokens=ask(llm, [249, 240, 240, 240]))

    result = generate(
        model,
        [prompt for prompt in PROMPTS for _ in range(SAMPLES)],
        [settings(prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(SAMPLES)],
        speculative_config, batch, observe=observe, then=then, threshold=THRESHOLD,
        logprobs=0, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    seen.tokens, seen.logprobs = result.tokens, result.logprobs
    return seen


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)
    return {"off": run(model, None, 40), "sam": run(model, SAM, 40), "ngram": run(model, NGRAM, 12)}


@pytest.mark.parametrize("name", ["sam", "ngram"])
def test_same_tokens_and_log_probs(results, name):
    off, on = results["off"], results[name]
    seeded = [index for index in range(len(off.tokens)) if index % SAMPLES != UNSEEDED]
    assert on.record.accepted.sum() > 100
    assert len(seeded) == 35
    for index in seeded:
        assert on.tokens[index] == off.tokens[index] and on.logprobs[index] == off.logprobs[index]


@pytest.mark.parametrize("name, drafter", [("off", None), ("sam", "SamProposer"), ("ngram", "NgramProposer")])
def test_what_is_installed_says_so(results, name, drafter):
    installed = results[name].installed
    assert (installed["drafter"], installed["verification"]) == (drafter, "exact")


def test_every_token_is_counted_once(results):
    for result in (results[name] for name in ("off", "sam", "ngram")):
        assert result.record.replays() is None, "a CPU has no graphs"
        kept = sum(map(len, result.tokens))
        # Accepted drafts beyond a response's last token are sampled and then cut off by the scheduler.
        assert kept <= result.record.emitted.sum() <= kept + DRAFT_LENGTH * len(result.tokens)
    assert results["off"].record.emitted.sum() == sum(map(len, results["off"].tokens))


def test_switch_and_lifecycle(results):
    record, counters = results["sam"].record, results["sam"].record.counters
    assert not (record.drafting & (record.running > THRESHOLD + 1)).any()
    assert counters["skipped_steps"] > 0
    assert counters["draft_errors"] == 0
    assert counters["tracked_requests"] == len(results["sam"].tokens)
    assert results["sam"].tracked == 1  # only the request after all of these


def test_new_weights_in_pieces_are_one_version_whoever_loads_them(results):
    assert results["sam"].versions == 1


def test_requests_are_drafted_for_while_another_is_near_the_longest_length_and_plain_steps_tell_nothing(results):
    on = results["sam"].near_the_end
    assert on.tokens == results["off"].near_the_end.tokens and len(on.tokens[0]) == 249 == LONGEST - 7
    assert on.plain and not any(on.plain), "the scheduler hears nothing of steps without drafts"
    # So near that a whole draft does not fit, while the others go on.
    last = [rows for longest, rows in on.drafted_for if longest + DRAFT_LENGTH > LONGEST]
    assert last and max(last) >= 1
    assert any(on.told) and all(any(drafts.draft_token_ids) for drafts in filter(None, on.told))
