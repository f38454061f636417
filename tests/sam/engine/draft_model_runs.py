"""One engine with a draft model, asked for the same requests in every way that the tests compare."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.drafting.position_acceptance import PositionAcceptance
from sam.switch.policies import Goodput
from sam.switch.policy import Plan
from sam.vllm.step_recorder import StepRecorder
from sam.vllm.trained import proposer
from tests.sam.engine.tiny_engine import generate

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


def forget(drafter):
    """Let sam, of hybrid, know no response: it leaves the draft model the more to do."""
    text = drafter.drafter
    if hasattr(text, "groups"):
        text.groups.kept_tokens = 0
        while text.groups.evict():
            pass
        text.memory.entries.view(np.uint8)[:] = 0


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
    original, kept, before = drafter.draft, drafter.policy, dict(drafter.counters)

    def draft(names, rows, lengths, missing, texts, count):
        found = original(names, rows, lengths, missing, texts, count)
        for row, length, tokens in zip(rows, lengths, found[0], strict=True):
            drafts[tuple(texts[row, :length].tolist())] = tokens  # of the device, read at the end
        missed.extend(missing.tolist())
        return found

    drafter.draft, drafter.policy = draft, Sometimes(pattern)
    try:
        tokens = again(llm, prompts)
    finally:
        drafter.policy = kept
        del drafter.draft
    drafts = {text: draft.tolist() for text, draft in drafts.items()}
    counters = {name: value - before[name] for name, value in drafter.counters.items()}
    return SimpleNamespace(tokens=tokens, drafts=drafts, missed=missed, counters=counters)


def resting(llm):
    """Tokens, counters, and calls of what a plan of passes needs, while they rest after a trial in every step."""
    drafter, calls = drafter_of(llm), []
    before, kept = dict(drafter.counters), drafter.policy
    drafter.policy = Goodput(K)
    drafter.policy.counters = drafter.counters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.pass_cost.trials, "are_needed", True)
        patch.setattr(drafter.pass_cost.trials, "step", lambda *_unused: False)
        for owner, name in (
            (drafter, "missing"),
            (drafter.acceptance, "expected"),
            (drafter.acceptance, "keep_only"),
            (drafter.written, "written"),
            (drafter.written, "keep_only"),
            (proposer, "plan_passes"),
        ):
            patch.setattr(owner, name, lambda *_unused, name=name: calls.append(name))
        tokens = again(llm)
    drafter.policy = kept
    counters = {name: value - before.get(name, 0) for name, value in drafter.counters.items()}
    return SimpleNamespace(tokens=tokens, counters=counters, calls=calls)


def rested(llm, pattern):
    """As `recorded` with drafts in every step, of which passes may only be made in those of `pattern`, of every ten."""
    steps = iter(range(1 << 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer, "may_pay", lambda *_unused: next(steps) % 10 in pattern)
        return recorded(llm, range(10))


def broken(llm, how):
    """Tokens and counters while the draft model does `how` in every pass."""
    drafter, said = drafter_of(llm), []
    forget(drafter)
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
            patch.setattr(proposer, "logger", logger)
            tokens = again(llm)
    finally:
        del model.compute_logits
        drafter.weights_updated()
    counters = {name: value - before[name] for name, value in drafter.counters.items()}
    return SimpleNamespace(tokens=tokens, counters=counters, said=said)


def left_off(llm):
    """Counters and what is said while goodput knows that none of the draft model's tokens is accepted, in two rollouts,
    each with a weight sync behind it; the first has weights of which nothing is known yet."""
    drafter, said, kept = drafter_of(llm), [], (drafter_of(llm).policy, drafter_of(llm).acceptance)
    counters = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer, "logger", SimpleNamespace(warning=lambda text, *given: said.append(text % given)))
        patch.setattr(proposer._warn_left_off, "said", False, raising=False)
        drafter.weights_updated()
        for _ in range(2):
            drafter.policy, drafter.acceptance = Goodput(K), PositionAcceptance(K)
            drafter.policy.counters = drafter.counters
            drafter.acceptance._all[0] = 1e6  # observed, none of it accepted
            before = dict(drafter.counters)
            again(llm)
            counters.append({name: value - before.get(name, 0) for name, value in drafter.counters.items()})
            drafter.weights_updated()
    drafter.policy, drafter.acceptance = kept
    return SimpleNamespace(counters=counters, said=said)


FAULTS = {
    "raises": "draft_model_errors",
    "gives NaN": "draft_model_invalid_drafts",
    "gives ids out of range": "draft_model_invalid_drafts",
}


def run(target, draft, method, **engine_arguments):
    seen = SimpleNamespace()

    def then(llm):
        drafter = drafter_of(llm)
        seen.invalid_at_first = drafter.counters["draft_model_invalid_drafts"]
        with pytest.MonkeyPatch.context() as patch:  # as verl asks the target to be loaded
            patch.setattr(drafter.vllm_config.load_config, "load_format", "dummy")
            seen.load_format = drafter._create_draft_vllm_config().load_config.load_format
        seen.always = recorded(llm, range(10))
        seen.paused = recorded(llm, (3, 4, 9))
        seen.never = recorded(llm, ())
        seen.rested = rested(llm, (3, 4, 9))
        drafter.weights_updated()  # no draft waits to be compared
        seen.resting = resting(llm)
        recorder = StepRecorder.attach(runner_of(llm))
        recorder.take()
        totals = dict(drafter.counters)
        forget(drafter)
        again(llm)
        seen.steps = recorder.take()
        seen.more = {name: value - totals.get(name, 0) for name, value in drafter.counters.items()}
        seen.no_steps = recorder.take()
        seen.left_off = left_off(llm)
        seen.broken = {how: broken(llm, how) for how in FAULTS}

    settings = {"method": method, "draft_model": draft.path, "policy": "always", "cross_prompt": False}
    settings["draft_sample_method"] = "greedy"  # a draft is then a function of the text: see test_drawn_drafts.py
    engine = {"method": "draft_model", "model": draft.path, "num_speculative_tokens": K}
    engine |= {"disable_padded_drafter_batch": not engine_arguments.get("async_scheduling")}
    arguments = SMALL | engine_arguments
    seen.first = generate(target, PROMPTS, SETTINGS, engine, speculation=settings, then=then, **arguments)
    return seen
