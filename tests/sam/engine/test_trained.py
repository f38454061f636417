"""A draft model or an EAGLE3 head in a real engine, synchronous and asynchronous: the same tokens and the model's own
drafts after pauses, with nothing drafted, and whatever goes wrong in it. Beside sam they are in test_matrix.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.config import SpeculationConfig
from sam.switch.policy import Plan
from sam.vllm.plugin import check_installed
from sam.vllm.trained import drafter as trained
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.tiny_engine import PROMPTS, Engine, assert_same
from tests.sam.engine.trained_models import ReferenceHead, fit_output_layer, save_draft_model, save_head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

# Method, whether it is scheduled asynchronously, and the class of the drafter.
ENGINES = {
    "draft model": ("draft_model", False, "TrainedProposer"),
    "head": ("eagle3", False, "Eagle3Proposer"),
    "async head": ("eagle3", True, "AsyncEagle3Proposer"),
}
K = 3
SMALL = {"block_size": 16, "num_gpu_blocks_override": 48}  # of about 70 blocks that all requests need
ALWAYS, SOME, NEVER = range(10), (3, 4, 9), ()  # steps of every ten in which drafts are asked for
FAULTS = {
    "raises": "draft_model_errors",
    "gives NaN": "draft_model_invalid_drafts",
    "gives ids out of range": "draft_model_invalid_drafts",
    "states do not come": "draft_model_errors",
}


@pytest.fixture(scope="module")
def made(model, off, tmp_path_factory):
    """What drafts for the model: folders by method, and a function that gives their draft after a text."""
    draft, head = save_draft_model(model, tmp_path_factory.mktemp("draft")), tmp_path_factory.mktemp("head")
    save_head(model, head)
    fit_output_layer(model, head, [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, off.tokens, strict=True)])
    reference = ReferenceHead(model, head)

    @torch.no_grad()
    def by_model(text):
        ids = list(text)
        for _ in range(K):
            ids.append(int(draft.network(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[-K:]

    @torch.no_grad()
    def by_head(text):
        return reference.draft(list(text), K)

    return {"draft_model": (draft.path, by_model), "eagle3": (str(head), by_head)}


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


def recorded(engine, pattern):
    """With drafts in some steps: every draft by the text before it, and tokens that the model had missed; how often the
    host waited for the device while it sampled and drafted, and read a tensor of the device while it ordered passes."""
    drafter, drafts, missed, in_passes, reads, waits = engine.runner.drafter, {}, [], [], [], []
    passes, order, sample_tokens = drafter.trained.passes, drafter.trained._draft, engine.runner.sample_tokens
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

    def reading(function):
        def call(*arguments, **keywords):
            reads.extend(in_passes)
            return function(*arguments, **keywords)

        return call

    def sample(*arguments):
        before = Event.waits
        output = sample_tokens(*arguments)
        waits.append(Event.waits - before)
        return output

    with pytest.MonkeyPatch.context() as patch:
        for name in ("cpu", "item", "tolist") if drafter.trained.reads_later else ():
            patch.setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
        patch.setattr(engine.runner, "sample_tokens", sample)
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: None)  # prompts are in it
        patch.setattr(passes, "draft", noted)
        patch.setattr(drafter.trained, "_draft", marked)
        patch.setattr(drafter, "policy", Sometimes(pattern))
        found = engine.generate()
    found.drafts = {text: draft.tolist() for text, draft in drafts.items()}
    found.missed, found.reads, found.waits = missed, len(reads), sum(waits)
    return found


def broken(engine, how):
    """What is counted and said while the draft model does `how` in every pass."""
    drafter, said = engine.runner.drafter, []
    drafter.counters |= dict.fromkeys(FAULTS.values(), 0)  # so that it is said here
    compute = drafter.model.compute_logits

    def compute_logits(hidden):
        if how == "raises":
            raise RuntimeError("broken on purpose")
        logits = compute(hidden)
        if how == "gives NaN":
            return logits * torch.nan
        return torch.nn.functional.pad(logits, (0, 5), value=1e9)  # ids beyond the vocabulary

    with pytest.MonkeyPatch.context() as patch:  # other tests may have changed the level of the real logger
        patch.setattr(trained, "logger", SimpleNamespace(warning=said.append, exception=said.append))
        if how == "states do not come":
            patch.setattr(drafter.trained.passes, "keep_states", None)
        else:
            patch.setattr(drafter.model, "compute_logits", compute_logits)
        found = engine.generate()
    drafter.weights_updated()
    found.said = [line for line in said if "draft model failed" in line or "gave no token" in line]
    return found


def load_format(engine):
    """How its weights are loaded where verl has the target's filled with random numbers."""
    drafter = engine.runner.drafter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.vllm_config.load_config, "load_format", "dummy")
        return drafter._create_draft_vllm_config().load_config.load_format


def lost_in_a_sleep(engine):
    """Names of weights that are not what they were after a sleep that loses all but the target's."""
    drafter, target = engine.runner.drafter, engine.runner.model
    drafter.trained.passes.keep_weights(target)
    before = {name: value.clone() for name, value in drafter.model.state_dict().items()}
    of_target = {value.data_ptr() for value in target.state_dict().values()}
    for value in drafter.model.state_dict().values():
        if value.data_ptr() not in of_target:
            value.zero_()
    drafter.weights_updated()
    return [name for name, value in drafter.model.state_dict().items() if not torch.equal(value, before[name])]


@pytest.fixture(scope="module", params=ENGINES)
def results(request, model, made, off):
    """What came out of one engine: with its own policy, in `recorded`, while broken, and afterwards."""
    method, is_asynchronous, drafter = ENGINES[request.param]
    # Drafts are greedy, so that each is a function of the text; drawn ones are in test_distribution.py.
    own = {"draft_model": made[method][0], "policy": "always", "draft_sample_method": "greedy"}
    with Engine(model, method, asynchronous=is_asynchronous, speculation=own, **SMALL) as engine:
        first = engine.generate()
        check_installed(SpeculationConfig(method, **own), first.installed)
        assert (first.installed["drafter"], bool(first.installed["asynchronous"])) == (drafter, is_asynchronous)
        always, some, never = (recorded(engine, steps) for steps in (ALWAYS, SOME, NEVER))
        loaded = lost_in_a_sleep(engine), load_format(engine)
        faults = {how: broken(engine, how) for how in FAULTS if method == "eagle3" or how != "states do not come"}
        return SimpleNamespace(
            first=first, always=always, some=some, never=never, loaded=loaded, broken=faults, after=engine.generate(),
            draft=made[method][1], is_asynchronous=is_asynchronous,
        )  # fmt: skip


def test_identical_tokens_whenever_drafts_are_made(results, off):
    first, never = results.first, results.never
    assert first.preemptions > 0 and first.accepted > 100
    assert first.counters["draft_model_drafted_tokens"] >= first.counters["draft_model_accepted_tokens"] > 0
    for one in (first, results.always, results.some, never, results.after):
        assert_same(one, off)
        for fault in ("draft_errors", "draft_model_errors", "draft_model_invalid_drafts"):
            assert one.counters[fault] == 0
    assert results.always.counters["draft_model_passes"] > 0 == never.counters["draft_model_passes"]


def test_drafts_are_those_of_the_model_whatever_the_steps_were_in_which_they_were_made(results):
    """By transformers; after a pause, and beside a request that has no room for a draft."""
    assert max(results.some.missed) > 5
    for one in (results.always, results.some):
        texts = list(one.drafts)[::5]
        assert len(texts) > 15 and [one.drafts[text] for text in texts] == [results.draft(text) for text in texts]
    common = results.always.drafts.keys() & results.some.drafts.keys()
    assert len(common) > 40 and all(results.always.drafts[text] == results.some.drafts[text] for text in common)


def test_its_own_weights_are_loaded_and_outlive_a_sleep(results):
    assert results.loaded == ([], "auto")


def test_a_broken_model_changes_no_token_and_is_said_once(results, off):
    for how, found in results.broken.items():
        assert_same(found, off)
        assert found.counters[FAULTS[how]] > 0 == found.counters["draft_errors"], how
        assert len(found.said) == 1, how
        assert found.counters["draft_model_accepted_tokens"] == 0 or how == "states do not come", how


def test_the_host_waits_for_each_steps_tokens_once(results):
    """No other wait: a head's hidden states have come when their step's tokens have."""
    if results.is_asynchronous:
        for one in (results.always, results.some):
            assert 0 < one.waits == one.counters["waited_steps"]
            assert one.reads == 0, "the next step is prepared while passes run"
        assert results.never.waits == results.never.counters["waited_steps"] <= 1
