"""A draft model or an EAGLE3 head in a real engine, synchronous and asynchronous: the same tokens and the model's own
drafts after pauses, with nothing drafted, and whatever goes wrong in it. Beside sam they are in test_matrix.py."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sam.config import SpeculationConfig
from sam.switch.policies import Plan
from sam.vllm.plugin import check_installed, installed
from sam.vllm.trained import drafter as trained
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.tiny_engine import PROMPTS, Engine, assert_same
from tests.sam.engine.trained_models import fit_output_layer, load_head, save_draft_model, save_head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

# Method, whether it is scheduled asynchronously, and the class of the drafter.
ENGINES = {
    "draft model": ("draft_model", False, "TrainedProposer"),
    "head": ("eagle3", False, "Eagle3Proposer"),
    "async head": ("eagle3", True, "AsyncEagle3Proposer"),
}
K = 3
SMALL = {"block_size": 16, "num_gpu_blocks_override": 48}  # of about 70 blocks that all requests need
PATTERNS = {"always": range(10), "some": (3, 4, 9), "never": ()}  # steps of every ten in which drafts are asked for
# What a model gives in place of its logits, and what is counted then; without one the target's states do not come.
FAULTS = {
    "raises": (lambda logits: 1 / 0, "draft_model_errors"),
    "gives NaN": (lambda logits: logits * torch.nan, "draft_model_invalid_drafts"),
    "gives ids out of range": (partial(torch.nn.functional.pad, pad=(0, 5), value=1e9), "draft_model_invalid_drafts"),
    "states do not come": (None, "draft_model_errors"),
}


@pytest.fixture(scope="module")
def made(model, off, tmp_path_factory):
    """What drafts for the model: folders by method, and a function that gives their draft after a text."""
    draft, head = save_draft_model(model, tmp_path_factory.mktemp("draft")), tmp_path_factory.mktemp("head")
    save_head(model, head)
    fit_output_layer(model, head, [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, off.tokens, strict=True)])

    def by_model(text):
        return draft.network.generate(torch.tensor([text]), max_new_tokens=K, do_sample=False)[0, -K:].tolist()

    by_head = partial(load_head(model, head).draft, count=K)
    return {"draft_model": (draft.path, by_model), "eagle3": (str(head), by_head)}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, model, made, off):
    """Started as verl starts it, its target's weights random numbers until the first sync; and then it sleeps once,
    which loses all but the target's."""
    method, is_asynchronous, drafter = ENGINES[request.param]
    # Drafts are greedy, so that each is a function of the text; drawn ones are in test_distribution.py.
    own = {"draft_model": made[method][0], "policy": "always", "draft_sample_method": "greedy"}
    with Engine(model, method, 64, is_asynchronous, speculation=own, load_format="dummy", **SMALL) as engine:
        found = installed(engine.runner)
        check_installed(SpeculationConfig(method, **own), found)
        assert (found["drafter"], found["asynchronous"]) == (drafter, is_asynchronous)
        target, drafter = engine.runner.get_model(), engine.runner.drafter
        target.load_weights(model.network.state_dict().items())
        drafter.trained.passes.keep_weights(target)
        of_target = {value.data_ptr() for value in target.state_dict().values()}
        for value in drafter.model.state_dict().values():
            if value.data_ptr() not in of_target:
                value.zero_()
        drafter.weights_updated()
        engine.expected = made[method][1]
        yield engine


def recorded(engine, pattern):
    """What came out; with every draft by the text before it, tokens that the model had missed, and how often the host
    waited for the device while it sampled and drafted."""
    drafter, sample_tokens, steps = engine.runner.drafter, engine.runner.sample_tokens, itertools.count(1)
    drafts, missed, waits, draft = {}, [], [], drafter.trained.passes.draft

    def noted(batch, missing, count):
        found = draft(batch, missing, count)
        for row, length, tokens in zip(batch.rows, batch.lengths, found.tokens, strict=True):
            drafts[tuple(batch.texts[row, :length].tolist())] = tokens  # of the device, read at the end
        missed.extend(missing.tolist())
        return found

    def sample(*arguments):
        before = Event.waits
        output = sample_tokens(*arguments)
        waits.append(Event.waits - before)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "sample_tokens", sample)
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: None)  # prompts are in it
        patch.setattr(drafter.trained.passes, "draft", noted)
        patch.setattr(drafter.policy, "plan", lambda state: Plan(K if next(steps) % 10 in pattern else 0))
        found = engine.generate()
    found.drafts = {text: draft.tolist() for text, draft in drafts.items()}
    found.missed, found.waits = missed, sum(waits)
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_are_the_same_and_drafts_the_models_own_whenever_they_are_made(engine, off, pattern):
    """Drafts as transformers have them; beside a request that has no room for a draft, too."""
    found = recorded(engine, PATTERNS[pattern])
    assert_same(found, off)
    counted = {name.removeprefix("draft_model_"): value for name, value in found.counters.items()}
    assert found.preemptions > 0 == counted["draft_errors"] == counted["errors"] == counted["invalid_drafts"]
    texts = list(found.drafts)[::5]
    assert [found.drafts[text] for text in texts] == [engine.expected(text) for text in texts]
    if pattern == "never":
        assert counted["passes"] == 0
    else:
        assert counted["drafted_tokens"] > counted["accepted_tokens"] > 20 and len(texts) > 15
        assert pattern == "always" or max(found.missed) > 5
    if "waited_steps" in counted:  # for each step's tokens: a head's hidden states have come when these have
        assert found.waits == counted["waited_steps"] and (found.waits > 1) == (pattern != "never")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_model_changes_no_token_and_is_said_once(engine, off, fault, monkeypatch):
    drafter, said, (wrong, counter) = engine.runner.drafter, [], FAULTS[fault]
    # Other tests may have changed the level of the real logger.
    monkeypatch.setattr(trained, "logger", SimpleNamespace(warning=said.append, exception=said.append))
    if wrong is None:
        monkeypatch.setattr(drafter.trained.passes, "keep_states", None)
    else:
        compute = drafter.model.compute_logits
        monkeypatch.setattr(drafter.model, "compute_logits", lambda hidden: wrong(compute(hidden)))
    drafter.counters[counter] = 0  # so that it is said here
    found = engine.generate()
    drafter.weights_updated()  # it is tried again
    assert_same(found, off)
    assert found.counters[counter] > 0 == found.counters["draft_errors"]
    assert len([line for line in said if "draft model failed" in line or "gave no token" in line]) == 1
    assert found.counters["draft_model_accepted_tokens"] == 0 or wrong is None
