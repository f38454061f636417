"""One engine with a draft model, asked for the same requests in every way that the tests compare."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.switch.policy import Plan
from sam.vllm.trained import drafter as trained

K, TOKENS = 3, 60
TEXTS = [[1 + q, 7, 30 + 3 * q, 2, 9 + q, 40] * 4 for q in range(4)]
PROMPTS = [text for text in TEXTS for _ in range(3)]
SETTINGS = [{"temperature": 0.0 if i % 3 == 0 else 0.3, "max_tokens": TOKENS, "seed": i} for i in range(12)]
SMALL = {"block_size": 16, "num_gpu_blocks_override": 48}  # of about 64 blocks that all requests need


def save_draft_model(target, path):
    """The target's first layer."""
    config = copy.deepcopy(target.network.config)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    network = type(target.network)(config)
    network.load_state_dict(target.network.state_dict(), strict=False)
    network.save_pretrained(path)
    return SimpleNamespace(path=str(path), network=network.eval())


def runner_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def drafter_of(llm):
    return runner_of(llm).drafter


def prefer_model(drafter):
    """Let hybrid draft with the model for every request that has room."""
    drafter.trained.acceptance.expected = lambda names: np.ones((len(names), K))


def again(llm, prompts=PROMPTS):
    """The tokens of all requests once more."""
    from vllm import SamplingParams

    parameters = [SamplingParams(ignore_eos=True, detokenize=False, logprobs=2, **own) for own in SETTINGS]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


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


def recorded(llm, pattern, prompts=PROMPTS):
    """Tokens; every draft by the text before it; and counters, with drafts in some steps."""
    drafter, drafts, missed = drafter_of(llm), {}, []
    before = dict(drafter.counters)
    make = drafter.trained.passes.draft

    def draft(batch, missing, count):
        found = make(batch, missing, count)
        for row, length, tokens in zip(batch.rows, batch.lengths, found.tokens, strict=True):
            drafts[tuple(batch.texts[row, :length].tolist())] = tokens  # of the device, read at the end
        missed.extend(missing.tolist())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.trained.passes, "draft", draft)
        patch.setattr(drafter, "policy", Sometimes(pattern))
        tokens = again(llm, prompts)
    drafts = {text: draft.tolist() for text, draft in drafts.items()}
    counters = {name: value - before[name] for name, value in drafter.counters.items()}
    return SimpleNamespace(tokens=tokens, drafts=drafts, missed=missed, counters=counters)


def broken(llm, how):
    """Tokens, counters and what is said while the draft model does `how` in every pass."""
    drafter, said = drafter_of(llm), []
    prefer_model(drafter)
    drafter.counters |= dict.fromkeys(FAULTS.values(), 0)  # so that it is said here
    before, model = dict(drafter.counters), drafter.model
    compute = model.compute_logits

    def compute_logits(hidden):
        if how == "raises":
            raise RuntimeError("broken on purpose")
        logits = compute(hidden)
        if how == "gives NaN":
            return logits * torch.nan
        return torch.nn.functional.pad(logits, (0, 5), value=1e9)  # ids beyond the vocabulary

    logger = SimpleNamespace(warning=said.append, exception=said.append)
    model.compute_logits = compute_logits
    try:
        with pytest.MonkeyPatch.context() as patch:  # other tests may have changed the level of the real one
            patch.setattr(trained, "logger", logger)
            tokens = again(llm)
    finally:
        del model.compute_logits, drafter.trained.acceptance.expected
        drafter.weights_updated()
    counters = {name: value - before[name] for name, value in drafter.counters.items()}
    return SimpleNamespace(tokens=tokens, counters=counters, said=said)


FAULTS = {
    "raises": "draft_model_errors",
    "gives NaN": "draft_model_invalid_drafts",
    "gives ids out of range": "draft_model_invalid_drafts",
}


def load_format_of(llm):
    """How the drafter's weights are loaded where verl asks the target to be filled with random numbers."""
    drafter = drafter_of(llm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.vllm_config.load_config, "load_format", "dummy")
        return drafter._create_draft_vllm_config().load_config.load_format
