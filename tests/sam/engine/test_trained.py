"""A draft model or an EAGLE3 head in a real engine, synchronous and asynchronous: the same tokens and the model's own
drafts after pauses, with nothing drafted, and whatever goes wrong in it. Beside sam they are in test_matrix.py."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.config import SpeculationConfig
from sam.switch.policy import Plan
from sam.vllm.plugin import check_installed
from sam.vllm.step_recorder import StepRecorder
from sam.vllm.trained import drafter as trained
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.tiny_engine import Engine, generate, save_model
from tests.sam.engine.trained_models import ReferenceHead, fit_output_layer, save_draft_model, save_head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

# The class of each method's drafter.
SYNCHRONOUS = {"draft_model": "TrainedProposer", "eagle3": "Eagle3Proposer"}
ASYNCHRONOUS = {f"async {method}": f"Async{drafter}" for method, drafter in SYNCHRONOUS.items()}
ALL = SYNCHRONOUS | ASYNCHRONOUS
K, TOKENS = 3, 60
PROMPTS = [[1 + q, 7, 30 + 3 * q, 2, 9 + q, 40] * 4 for q in range(4) for _ in range(3)]
SETTINGS = [{"temperature": 0.0 if i % 3 == 0 else 0.3, "max_tokens": TOKENS, "seed": i} for i in range(12)]
SMALL = {"block_size": 16, "num_gpu_blocks_override": 48}  # of about 64 blocks that all requests need
SOME = (3, 4, 9)  # steps of every ten in which drafts are asked for
LONG = PROMPTS[0] * 10  # whose response ends where the engine's longest sequence does, at 256 tokens
FAULTS = {
    "raises": "draft_model_errors",
    "gives NaN": "draft_model_invalid_drafts",
    "gives ids out of range": "draft_model_invalid_drafts",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, what it answers, and what drafts for it."""
    target = save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)
    draft, head = save_draft_model(target, tmp_path_factory.mktemp("draft")), tmp_path_factory.mktemp("head")
    off = generate(target, PROMPTS, SETTINGS, speculation={"method": "off"}, **SMALL)
    save_head(target, head)
    fit_output_layer(target, head, [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, off.tokens, strict=True)])
    folders = {"draft_model": draft.path, "eagle3": head}
    return SimpleNamespace(target=target, off=off, draft_model=draft.network, folders=folders)


def started(made, name) -> tuple[SpeculationConfig, Engine]:
    """Drafts are greedy, so that each is a function of the text; drawn ones are in test_drawn_drafts.py."""
    method = name.removeprefix("async ")
    speculation = {"method": method, "draft_model": str(made.folders[method]), "policy": "always"}
    config = SpeculationConfig(num_speculative_tokens=K, draft_sample_method="greedy", **speculation)
    engine = {"async_scheduling": True, "distributed_executor_backend": "uni"} if name in ASYNCHRONOUS else {}
    asked = config.vllm_arguments(name in ASYNCHRONOUS)["speculative_config"]
    speculation["draft_sample_method"] = "greedy"
    return config, Engine(made.target, asked, speculation=speculation, **SMALL, **engine)


class Sometimes:
    """A policy that asks for drafts in the steps that `pattern` names, of every ten."""

    def __init__(self, pattern):
        self.pattern, self.steps, self.counters = pattern, 0, {}

    def plan(self, state):
        self.steps += 1
        return Plan(K if self.steps % 10 in self.pattern else 0)

    def choose(self, state, acceptance, offsets):
        return np.diff(offsets)

    def observe(self, *_unused):
        pass


def counted(drafter, ask):
    """What comes out, and what is counted meanwhile."""
    before = dict(drafter.counters)
    tokens = ask().tokens
    counters = {name: value - before.get(name, 0) for name, value in drafter.counters.items()}
    return SimpleNamespace(tokens=tokens, counters=counters)


def recorded(engine, pattern, prompts=PROMPTS):
    """With drafts in some steps: every draft by the text before it, and tokens that the model had missed; waits for the
    device in each step and, of those, in its sampling and drafting; and how often the host read a tensor of the device
    while it ordered passes.

    Before it prepares a step's inputs vLLM waits for those of the step before, speculation or not.
    """
    runner, drafter, drafts, missed, steps, reads, in_passes = (
        engine.runner, engine.runner.drafter, {}, [], [], [], []
    )  # fmt: skip
    passes, order = drafter.trained.passes, drafter.trained._draft
    draft = passes.draft

    def noted(batch, missing, count):
        found = draft(batch, missing, count)
        for row, length, tokens in zip(batch.rows, batch.lengths, found.tokens, strict=True):
            drafts[tuple(batch.texts[row, :length].tolist())] = tokens  # of the device, read at the end
        missed.extend(missing.tolist())
        return found

    def marked(*arguments):
        in_passes.append(True)
        try:
            return order(*arguments)
        finally:
            in_passes.pop()

    def waiting(name):
        function = getattr(runner, name)

        def call(*arguments, **keywords):
            before = Event.waits
            result = function(*arguments, **keywords)
            if name == "execute_model":
                steps.append(Counter())
            steps[-1][name] += Event.waits - before
            return result

        return call

    def reading(function):
        def call(*arguments, **keywords):
            reads.extend(in_passes)
            return function(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute_model", "sample_tokens"):
            patch.setattr(runner, name, waiting(name))
        for name in ("cpu", "item", "tolist") if drafter.trained.reads_later else ():
            patch.setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: None)  # prompts are in it
        patch.setattr(passes, "draft", noted)
        patch.setattr(drafter.trained, "_draft", marked)
        patch.setattr(drafter, "policy", Sometimes(pattern))
        found = counted(drafter, lambda: engine.generate(prompts, SETTINGS))
    found.drafts = {text: draft.tolist() for text, draft in drafts.items()}
    found.missed, found.reads, found.waits = missed, len(reads), sum(step["sample_tokens"] for step in steps)
    found.most_waits = max(step.total() for step in steps)
    return found


def broken(engine, how):
    """What is counted and said while the draft model does `how` in every pass."""
    drafter, said = engine.runner.drafter, []
    drafter.counters |= dict.fromkeys(FAULTS.values(), 0)  # so that it is said here
    model = drafter.model
    compute = model.compute_logits

    def compute_logits(hidden):
        if how == "raises":
            raise RuntimeError("broken on purpose")
        logits = compute(hidden)
        if how == "gives NaN":
            return logits * torch.nan
        return torch.nn.functional.pad(logits, (0, 5), value=1e9)  # ids beyond the vocabulary

    model.compute_logits = compute_logits
    try:
        with pytest.MonkeyPatch.context() as patch:  # other tests may have changed the level of the real one
            patch.setattr(trained, "logger", SimpleNamespace(warning=said.append, exception=said.append))
            found = counted(drafter, lambda: engine.generate(PROMPTS, SETTINGS))
    finally:
        del model.compute_logits
        drafter.weights_updated()
    found.said = said
    return found


def acceptance_of(engine):
    """The draft model's tokens of a rollout by a step recorder, and by the drafter's counters."""
    engine.runner.drafter.weights_updated()  # no draft waits to be compared
    recorder = StepRecorder.attach(engine.runner)
    recorder.take()
    found = counted(engine.runner.drafter, lambda: engine.generate(PROMPTS, SETTINGS))
    found.steps = recorder.take()
    return found


def weights_of(drafter, target):
    """How they are loaded where verl asks the target to be filled with random numbers; names of those kept for a sleep,
    and of those that a sleep would have lost for good."""
    passes = drafter.trained.passes
    passes.keep_weights(target)
    before = {name: value.clone() for name, value in drafter.model.state_dict().items()}
    for name in passes._kept_weights:
        drafter.model.state_dict()[name].zero_()
    drafter.weights_updated()
    lost = [name for name, value in drafter.model.state_dict().items() if not torch.equal(value, before[name])]
    kept, passes._kept_weights = set(passes._kept_weights), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.vllm_config.load_config, "load_format", "dummy")
        load_format = drafter._create_draft_vllm_config().load_config.load_format
    return SimpleNamespace(kept=kept, lost=lost, load_format=load_format)


@pytest.fixture(scope="module")
def results(made):
    def run(name):
        config, starting = started(made, name)
        with starting as engine:
            found = SimpleNamespace(first=engine.generate(PROMPTS, SETTINGS))
            check_installed(config, installed := found.first.installed)
            assert (installed["drafter"], bool(installed["asynchronous"])) == (ALL[name], name in ASYNCHRONOUS)
            found.always, found.paused, found.never = (recorded(engine, steps) for steps in (range(10), SOME, ()))
            if name == "eagle3":
                found.beside_a_long_one = recorded(engine, SOME, [LONG, *PROMPTS[1:]])
                found.weights = weights_of(engine.runner.drafter, engine.runner.model)
            if name in SYNCHRONOUS:
                found.acceptance = acceptance_of(engine)
            found.broken = {how: broken(engine, how) for how in FAULTS}
            found.after = engine.generate(PROMPTS, SETTINGS)
            return found

    return {name: run(name) for name in ALL}


@pytest.mark.parametrize("name", ALL)
def test_identical_tokens_whenever_drafts_are_made(results, made, name):
    found, off = results[name], made.off
    assert found.first.tokens == found.after.tokens == off.tokens and found.first.logprobs == off.logprobs
    assert found.first.preemptions > 0 and found.first.accepted > 100
    for one in (found.always, found.paused, found.never):
        assert one.tokens == off.tokens
        assert one.counters["draft_errors"] == one.counters["draft_model_errors"] == 0
        assert one.counters["draft_model_invalid_drafts"] == 0
    assert found.always.counters["draft_model_passes"] > 0 == found.never.counters["draft_model_passes"]
    if name in ASYNCHRONOUS:
        waits = found.never.counters["waited_steps"]
        assert found.never.waits == waits <= 1, "drafts were asked for before the first step"


@pytest.mark.parametrize("method", SYNCHRONOUS)
def test_drafts_are_those_of_the_model_whatever_the_steps_were_in_which_they_were_made(results, made, method):
    """By transformers; after a pause, and asynchronously."""
    reference = ReferenceHead(made.target, made.folders["eagle3"])

    def draft(text):
        if method == "eagle3":
            return reference.draft(list(text), K)
        ids = list(text)
        for _ in range(K):
            ids.append(int(made.draft_model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[-K:]

    one, other = results[method], results[f"async {method}"]
    assert max(one.paused.missed) > 5
    with torch.no_grad():
        for drafts in (one.paused.drafts, getattr(one, "beside_a_long_one", one.always).drafts):
            texts = list(drafts)[::5]
            assert len(texts) > 20 and [drafts[text] for text in texts] == [draft(text) for text in texts]
    for beside in (one.paused, other.always, other.paused):
        common = one.always.drafts.keys() & beside.drafts.keys()
        assert len(common) > 40 and all(one.always.drafts[text] == beside.drafts[text] for text in common)


def test_siblings_share_what_the_draft_model_has_read(results):
    paused = results["draft_model"].paused
    # Blocks of shared prompts are read once, by whichever request comes first, but for those that start together.
    most = sum(map(len, PROMPTS)) + 12 * TOKENS
    assert min(paused.missed) >= 1 and paused.counters["draft_model_read_tokens"] < most


def test_states_are_kept_beside_a_request_without_room_for_a_draft(results, made):
    found = results["eagle3"].beside_a_long_one
    assert len(found.tokens[0]) == 256 - len(LONG) and found.tokens[1:] == made.off.tokens[1:]
    assert found.counters["draft_model_errors"] == found.counters["draft_model_invalid_drafts"] == 0


def test_its_own_weights_are_loaded_and_outlive_a_sleep(results):
    weights = results["eagle3"].weights
    assert weights.load_format == "auto" and not weights.lost
    # The target's embeddings, which the head shares, come with the weight sync.
    assert "model.fc.weight" in weights.kept and "model.embed_tokens.weight" not in weights.kept


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_its_acceptance_is_that_of_the_rollout(results, name):
    one = results[name].acceptance
    assert one.counters["draft_model_drafted_tokens"] >= one.counters["draft_model_accepted_tokens"] > 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("how", FAULTS)
def test_a_broken_model_changes_no_token_and_is_said_once(results, made, name, how):
    found = results[name].broken[how]
    assert found.tokens == made.off.tokens
    assert found.counters[FAULTS[how]] > 0 == found.counters["draft_errors"]
    assert found.counters["draft_model_accepted_tokens"] == 0
    assert len([line for line in found.said if "draft model failed" in line or "gave no token" in line]) == 1


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_host_waits_for_each_steps_tokens_once(results, name):
    """No other wait: a head's hidden states have come when their step's tokens have."""
    for one in (results[name].always, results[name].paused):
        assert 0 < one.waits == one.counters["waited_steps"] and one.most_waits <= 2
        assert one.reads == 0, "the next step is prepared while passes run"


def test_states_that_do_not_come_fail_nothing(made, results, monkeypatch):
    monkeypatch.setattr("sam.vllm.trained.passes.EaglePasses.keep_states", None)
    with started(made, "async eagle3")[1] as engine:
        found = counted(engine.runner.drafter, lambda: engine.generate(PROMPTS, SETTINGS))
    assert found.tokens == made.off.tokens
    assert found.counters["draft_model_errors"] > 0 == found.counters["draft_errors"]
