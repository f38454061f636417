"""What engine steps cost, measured on a vLLM engine of the user's own: requests x tokens per request x context."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sam.step_cost import StepCost
from sam.vllm.metrics import StepRecorder
from sam.vllm.step_cost import fingerprint

WARM_UP_STEPS, MEASURED_STEPS = 3, 12
FIRST_TOKEN = 10  # of prompts and drafts; any ordinary tokens do


class FixedDrafts:
    """A drafter for vLLM's `custom_class` that gives every request as many tokens as it was told, right or wrong."""

    length = 0

    def __init__(self, vllm_config):
        self.vocabulary = vllm_config.model_config.get_vocab_size()

    def load_model(self, *_args, **_kwargs) -> None:
        pass

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        return [
            [(tokens[-1] + 1 + i) % self.vocabulary for i in range(FixedDrafts.length)] if tokens else []
            for tokens in sampled_token_ids
        ]


class ProfilingExtension:
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`."""

    def sam_fingerprint(self) -> dict:
        return fingerprint(self.model_runner.vllm_config)

    def sam_draft(self, length: int) -> None:
        FixedDrafts.length = length

    def sam_take_steps(self) -> list[tuple[int, int, float]]:
        """(running, drafted, milliseconds) of the decode steps since the last call."""
        steps = StepRecorder.attach(self.model_runner).take()
        keep = steps["prefilling"] == 0
        columns = (steps[name][keep].tolist() for name in ("running", "drafted", "step_ms"))
        return list(zip(*columns, strict=True))


def make_engine(model: str, longest_draft: int, **arguments):
    """An engine that verifies fixed drafts with exact verification, as a rollout's would."""
    from vllm import LLM

    return LLM(
        model,
        speculative_config={"model": "sam.vllm.profile.FixedDrafts", "num_speculative_tokens": longest_draft},
        additional_config={"speculation": {"verification": "exact"}},
        worker_extension_cls="sam.vllm.profile.ProfilingExtension",
        # All requests share one prompt, so that a long context is prefilled once and its cache held once.
        enable_prefix_caching=True,
        disable_cascade_attn=True,
        **arguments,
    )


def grid(llm, requests: list[int], drafts: list[int], context: list[int]) -> Iterator[tuple[int, int, int, float]]:
    """(requests, tokens per request, context, milliseconds) of every point, as they are measured: those of the fastest
    step, since whatever else the machine does only ever adds to one."""
    draft = lambda length: llm.collective_rpc("sam_draft", args=(length,))  # noqa: E731
    for tokens in context:
        for count in requests:
            draft(0)
            names = _start(llm, count, tokens)
            for length in drafts:
                draft(length)
                _steps(llm, WARM_UP_STEPS)
                llm.collective_rpc("sam_take_steps")
                _steps(llm, MEASURED_STEPS)
                steps = llm.collective_rpc("sam_take_steps")[0]
                whole = [ms for running, drafted, ms in steps if running == count and drafted == count * length]
                if not whole:
                    raise RuntimeError(
                        f"no step had {count} requests with {length} drafts each at {tokens} tokens: the KV cache or "
                        "max_num_batched_tokens is too small; profile fewer requests"
                    )
                yield count, length + 1, tokens, min(whole)
            llm.llm_engine.abort_request(names)
            _steps(llm, 2)


def _start(llm, count: int, tokens: int) -> list[str]:
    """Requests of one prompt, run until all of them decode."""
    from vllm import SamplingParams

    names = [f"profile-{tokens}-{count}-{i}" for i in range(count)]
    for i, name in enumerate(names):
        sampling = SamplingParams(temperature=1.0, seed=i, ignore_eos=True, max_tokens=1 << 20, detokenize=False)
        prompt = {"prompt_token_ids": [FIRST_TOKEN + j % 7 for j in range(tokens)]}
        llm.llm_engine.add_request(name, prompt, sampling)
    llm.collective_rpc("sam_take_steps")
    for _ in range(10_000):
        _steps(llm, 1)
        steps = llm.collective_rpc("sam_take_steps")[0]
        if steps and steps[-1][0] == count:
            return names
    raise RuntimeError(f"{count} requests of {tokens} tokens never ran together: the KV cache is too small for them")


def _steps(llm, count: int) -> None:
    for _ in range(count):
        llm.llm_engine.step()


def as_table(points: list[tuple[int, int, int, float]], identity: dict, source: str) -> StepCost:
    """The table of a whole grid."""
    axes = [sorted({point[i] for point in points}) for i in range(3)]
    cells = np.empty([len(axis) for axis in axes])
    for *place, milliseconds in points:
        cells[tuple(axis.index(value) for axis, value in zip(axes, place, strict=True))] = milliseconds
    return StepCost(*map(np.array, axes), cells, identity, source)
