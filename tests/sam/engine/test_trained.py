"""Drafters with a model in a real engine, synchronous and asynchronous: the same tokens with a draft model or an EAGLE3
head, alone and beside sam, after pauses, with nothing drafted, and whatever goes wrong in it."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from sam.config import SpeculationConfig
from sam.vllm.plugin import check_installed
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.draft_model_runs import (
    FAULTS,
    PROMPTS,
    SETTINGS,
    SMALL,
    TOKENS,
    K,
    again,
    broken,
    drafter_of,
    left_off,
    load_format_of,
    prefer_model,
    recorded,
    runner_of,
    save_draft_model,
)
from tests.sam.engine.eagle_head import ReferenceHead, fit_output_layer, save_head
from tests.sam.engine.tiny_engine import generate, save_model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

# Method, what drafts, and the class of it.
SYNCHRONOUS = {
    "draft_model": ("draft_model", "draft", "TrainedProposer"),
    "eagle3": ("eagle3", "head", "Eagle3Proposer"),
    "draft model and sam": ("hybrid", "draft", "TrainedProposer"),
    "head and sam": ("hybrid", "head", "Eagle3Proposer"),
}
ASYNCHRONOUS = {
    "async draft_model": ("draft_model", "draft", "AsyncTrainedProposer"),
    "async eagle3": ("eagle3", "head", "AsyncEagle3Proposer"),
    "async draft model and sam": ("hybrid", "draft", "AsyncTrainedProposer"),
}
ALL = SYNCHRONOUS | ASYNCHRONOUS
ALONE = ("draft_model", "eagle3")
SOME = (3, 4, 9)  # steps of every ten in which drafts are asked for
LONG = PROMPTS[0] * 10  # whose response ends where the engine's longest sequence does, at 256 tokens
BROKEN = [(name, how) for name in ALL for how in (FAULTS if name in ALONE else ["raises"])]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    target = save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)
    draft, head = save_draft_model(target, tmp_path_factory.mktemp("draft")), tmp_path_factory.mktemp("head")
    save_head(target, head)
    return SimpleNamespace(target=target, draft_model=draft, folders={"draft": draft.path, "head": head})


@pytest.fixture(scope="module")
def off(made):
    return generate(made.target, PROMPTS, SETTINGS, speculation={"method": "off"}, **SMALL)


def ask(made, name, then):
    """The first answers of an engine, to which `then` is done afterwards."""
    method, folder, drafter = ALL[name]
    settings = {"method": method, "draft_model": str(made.folders[folder]), "policy": "always", "cross_prompt": False}
    if name != "async draft model and sam":
        settings["draft_sample_method"] = "greedy"  # a draft is then a function of the text: see test_drawn_drafts.py
    config, is_asynchronous = SpeculationConfig(num_speculative_tokens=K, **settings), name in ASYNCHRONOUS
    asked = config.vllm_arguments(is_asynchronous)["speculative_config"]
    engine = {"async_scheduling": True, "distributed_executor_backend": "uni"} if is_asynchronous else {}
    found = generate(made.target, PROMPTS, SETTINGS, asked, speculation=settings, then=then, **SMALL, **engine)
    check_installed(config, found.installed)
    assert found.installed["drafter"] == drafter and bool(found.installed["asynchronous"]) == is_asynchronous
    return found


def fit(llm, head):
    """Fit the head to the text of one rollout."""
    trained, seen, model = drafter_of(llm).trained, {}, drafter_of(llm).model
    draft, compute = trained.run_passes, model.compute_logits

    def recording_draft(batch, missing, count):
        fresh = []
        model.compute_logits = lambda hidden: (fresh.append(hidden.clone()), compute(hidden))[1]
        found = draft(batch, missing, count)
        for row, length, state in zip(batch.rows, batch.lengths, fresh[0], strict=True):
            seen[tuple(batch.texts[row, :length].tolist())] = state
        return found

    trained.run_passes = recording_draft
    try:
        tokens = again(llm)
    finally:
        trained.run_passes = draft
        del model.compute_logits
    after = {}
    for prompt, response in zip(PROMPTS, tokens, strict=True):
        for length, token in enumerate(response):
            after[tuple(prompt + list(response[:length]))] = token
    known = [text for text in seen if text in after]
    fit_output_layer(head, torch.stack([seen[text] for text in known]), torch.tensor([after[text] for text in known]))


def kept_weights(llm):
    """Names of the weights kept for a sleep, and of those that a sleep would have lost for good."""
    drafter, passes = drafter_of(llm), drafter_of(llm).trained.passes
    passes.keep_weights(runner_of(llm).model)
    before = {name: value.clone() for name, value in drafter.model.state_dict().items()}
    for name in passes._kept_weights:
        drafter.model.state_dict()[name].zero_()
    drafter.weights_updated()
    lost = [name for name, value in drafter.model.state_dict().items() if not torch.equal(value, before[name])]
    kept, passes._kept_weights = set(passes._kept_weights), {}
    return SimpleNamespace(kept=kept, lost=lost)


def counting(function, during: list, calls: list):
    """`function`, each of whose calls adds an entry to `calls` while `during` has one."""

    def call(*arguments, **keywords):
        calls.extend(during)
        return function(*arguments, **keywords)

    return call


def waits_of(llm, pattern):
    """As `recorded`, with the waits for the device in each step and, of those, in its sampling and drafting; and how
    often the host read a tensor of the device after it had ordered passes.

    Before it prepares a step's inputs vLLM waits for those of the step before, speculation or not.
    """
    runner, steps, reads = runner_of(llm), [], []
    trained, in_passes = runner.drafter.trained, []

    def counted(name):
        function = getattr(runner, name)

        def call(*arguments, **keywords):
            before = Event.waits
            result = function(*arguments, **keywords)
            if name == "execute_model":
                steps.append(Counter())
            steps[-1][name] += Event.waits - before
            return result

        return call

    run = trained._draft

    def marked(*arguments):
        in_passes.append(True)
        try:
            return run(*arguments)
        finally:
            in_passes.pop()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute_model", "sample_tokens"):
            patch.setattr(runner, name, counted(name))
        patch.setattr(trained, "_draft", marked)
        for name in ("cpu", "item", "tolist"):
            patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name), in_passes, reads))
        found = recorded(llm, pattern)
    found.reads = len(reads)
    found.waits = sum(step["sample_tokens"] for step in steps)
    found.most_waits = max(step.total() for step in steps)
    return found


def acceptance_of(llm):
    """The draft model's tokens of a rollout by a step recorder, again without one, and by the drafter's counters."""
    drafter = drafter_of(llm)
    drafter.weights_updated()  # no draft waits to be compared
    recorder = StepRecorder.attach(runner_of(llm))
    recorder.take()
    before = dict(drafter.counters)
    prefer_model(drafter)
    again(llm)
    del drafter.trained.acceptance.expected
    counters = {name: value - before.get(name, 0) for name, value in drafter.counters.items()}
    return SimpleNamespace(steps=recorder.take(), counters=counters, no_steps=recorder.take())


@pytest.fixture(scope="module")
def results(made, off):
    ask(made, "eagle3", lambda llm: fit(llm, made.folders["head"]))

    def run(name):
        found, is_asynchronous = SimpleNamespace(), name in ASYNCHRONOUS

        def then(llm):
            play = waits_of if is_asynchronous else recorded
            found.load_format = load_format_of(llm)
            if name == "async draft model and sam":
                prefer_model(drafter_of(llm))
            found.always, found.paused, found.never = (play(llm, steps) for steps in (range(10), SOME, ()))
            if name == "eagle3":
                found.beside_a_long_one = recorded(llm, SOME, [LONG, *PROMPTS[1:]])
            if name == "head and sam":
                prefer_model(drafter_of(llm))  # for all, after the steps it missed
                found.for_all = recorded(llm, SOME)
                del drafter_of(llm).trained.acceptance.expected
            if not is_asynchronous:
                found.acceptance, found.left_off = acceptance_of(llm), left_off(llm)
            found.broken = {how: broken(llm, how) for own, how in BROKEN if own == name}
            found.after = again(llm)
            if name == "eagle3":
                found.weights = kept_weights(llm)

        found.first = ask(made, name, then)
        return found

    return {name: run(name) for name in ALL}


@pytest.mark.parametrize("name", ALL)
def test_identical_tokens_greedy_and_drawn(results, off, name):
    found = results[name]
    assert found.first.tokens == found.after == off.tokens and found.first.logprobs == off.logprobs
    assert found.first.preemptions > 0 and found.first.accepted > 100
    for one in (found.always, found.paused, found.never):
        assert one.tokens == off.tokens
        assert one.counters["draft_errors"] == one.counters["draft_model_errors"] == 0
        assert one.counters["draft_model_invalid_drafts"] == 0
    assert found.always.counters["draft_model_passes"] > 0


@pytest.mark.parametrize("name", ALL)
def test_no_pass_in_the_off_phase(results, name):
    never = results[name].never
    assert never.counters["draft_model_steps"] == never.counters["draft_model_passes"] == 0 and not never.drafts
    if name in ASYNCHRONOUS:
        assert never.waits == never.counters["waited_steps"] <= 1, "drafts were asked for before the first step"


@pytest.mark.parametrize("name", ALONE)
def test_drafts_are_a_function_of_the_text_whatever_the_steps_were_in_which_they_were_made(results, name):
    """After a pause those of a drafter that never paused, and asynchronously those of the synchronous engine."""
    always, paused = results[name].always, results[name].paused
    assert max(paused.missed) > 5
    for other in (paused, results[f"async {name}"].always, results[f"async {name}"].paused):
        common = always.drafts.keys() & other.drafts.keys()
        assert len(common) > 40 and all(always.drafts[text] == other.drafts[text] for text in common)


def test_drafts_are_those_of_the_draft_model(results, made):
    paused = results["draft_model"].paused
    for text in list(paused.drafts)[::5]:
        ids = torch.tensor([text])
        for token in paused.drafts[text]:
            assert made.draft_model.network(ids).logits[0, -1].argmax() == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_drafts_are_those_of_the_published_head(results, made):
    reference = ReferenceHead(made.target, made.folders["head"])
    alone, beside = results["eagle3"], results["head and sam"]
    assert max(beside.for_all.missed) > 5
    for one in (alone.always, alone.paused, alone.beside_a_long_one, beside.for_all):
        texts = list(one.drafts)[::5]
        assert len(texts) > 20
        with torch.no_grad():
            assert [one.drafts[text] for text in texts] == [reference.draft(list(text), K) for text in texts]


def test_beside_sam_the_model_drafts_for_the_others(results):
    assert 0 < len(results["head and sam"].always.drafts) < len(results["eagle3"].always.drafts)


def test_siblings_share_what_the_draft_model_has_read(results):
    prompts = sum(map(len, PROMPTS))
    paused = results["draft_model"].paused
    # Blocks of shared prompts are read once, by whichever request comes first, but for those that start together.
    assert min(paused.missed) >= 1 and paused.counters["draft_model_read_tokens"] < prompts + 12 * TOKENS


def test_states_are_kept_beside_a_request_without_room_for_a_draft(results, off):
    found = results["eagle3"].beside_a_long_one
    assert len(found.tokens[0]) == 256 - len(LONG)
    assert found.tokens[1:] == off.tokens[1:]
    assert found.counters["draft_model_errors"] == found.counters["draft_model_invalid_drafts"] == 0


def test_its_own_weights_are_loaded_and_outlive_a_sleep(results):
    assert {one.load_format for one in results.values()} == {"auto"}
    weights = results["eagle3"].weights
    # The target's embeddings, which the head shares, come with the weight sync.
    assert not weights.lost
    assert "model.fc.weight" in weights.kept and "model.embed_tokens.weight" not in weights.kept


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_model_that_rests_for_a_whole_rollout_is_said_once(results, name):
    found = results[name].left_off
    assert [one["draft_model_steps"] for one in found.counters] == [0, 0]
    assert all(one["draft_model_rests"] > 2 for one in found.counters)
    (said,) = [line for line in found.said if "left off" in line]
    assert "0%, 0%, 0% are accepted by position" in said


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_its_acceptance_is_that_of_the_rollout(results, name):
    one = results[name].acceptance
    assert one.counters["draft_model_drafted_tokens"] >= one.counters["draft_model_accepted_tokens"] > 0


@pytest.mark.parametrize(("name", "how"), BROKEN)
def test_a_broken_model_changes_no_token_and_is_said_once(results, off, name, how):
    found = results[name].broken[how]
    assert found.tokens == off.tokens
    assert found.counters[FAULTS[how]] > 0 and found.counters["draft_errors"] == 0
    assert found.counters["draft_model_accepted_tokens"] == 0
    assert len([line for line in found.said if "draft model failed" in line or "gave no token" in line]) == 1


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_host_waits_for_each_steps_tokens_once(results, name):
    """No other wait: a head's hidden states have come when their step's tokens have."""
    for one in (results[name].always, results[name].paused):
        assert 0 < one.waits == one.counters["waited_steps"]
        assert one.most_waits <= 2
        assert one.reads == 0, "the next step is prepared while passes run"


def test_states_that_do_not_come_fail_nothing(made, results, off, monkeypatch):
    from sam.vllm.trained.passes import EaglePasses

    def fail(*_unused):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(EaglePasses, "keep_states", fail)
    counters = {}
    found = ask(made, "async eagle3", lambda llm: counters.update(drafter_of(llm).counters))
    assert found.tokens == off.tokens and counters["draft_model_errors"] > 0 and counters["draft_errors"] == 0
