"""Requests emit given responses, whatever the logits say, while all else of a step does its full work.

Forward pass, sampling, verification and drafter cost what they cost with text of the model's own, so that a model of
any shape with random weights can be measured on real text: drafts are accepted where they equal the given response.
"""

import inspect
from typing import Any

import numpy as np
import torch

from sam.vllm import patches
from sam.vllm.exact_sampler import requests_of_rows

ARGUMENT = "forced_text"  # of SamplingParams.extra_args: number of the request's response
FREE = -1  # of `ForcedText.lookup`: the sampled token stays
COUNTS = ("drafted", "accepted", "verify_steps", "verified_tokens", "draft_errors")
ERRORS = ("draft_errors", "draft_model_errors", "draft_model_invalid_drafts")


def sampling_arguments(number: int, response: list[int]) -> dict[str, Any]:
    """Keywords of SamplingParams with which a request emits response `number`, and ends with it."""
    return {"extra_args": {ARGUMENT: number}, "max_tokens": len(response), "ignore_eos": True}


class ForcedText:
    """Replaces the sampled tokens of one model runner by those of given responses.

    Tokens are replaced where they are drawn: of ExactSampler at all positions of a draft, before it is compared with
    them; of stock vLLM, which does not draft here, after its own sampler; of the second model runner in its sampler,
    which exact verification asks too. A request's position is the number of its response's tokens so far: no step
    waits for it.
    """

    def __init__(self, runner):
        self._runner = runner
        self.set_responses([])

    @classmethod
    def attach(cls, runner) -> "ForcedText":
        """Hook into a runner; attaching twice gives the same object. To be done before a StepRecorder is attached."""
        if (existing := getattr(runner, "_sam_forced_text", None)) is not None:
            return existing
        forced = runner._sam_forced_text = cls(runner)
        if (sample := getattr(runner, "_sample", None)) is None:
            patches.put(runner, "add_requests", "force_text", forced._around_add_requests(runner.add_requests))
            patches.put(runner.sampler, "sample", "force_text", forced._around_second_sample(runner.sampler.sample))
        elif hasattr(sample, "draw"):
            patches.put(sample, "draw", "force_text", forced._around_draw(sample.draw))
        else:
            patches.put(runner, "_sample", "force_text", forced._around_sample(sample))
        return forced

    def set_responses(self, responses: list[list[int]]) -> None:
        """Token ids of the responses by number; those given before are forgotten."""
        longest = max(map(len, responses), default=0)
        # The last column and the last row are free: what follows a response, and requests without one.
        self._table = np.full((len(responses) + 1, longest + 1), FREE)
        for row, response in zip(self._table, responses, strict=False):
            row[: len(response)] = response
        if hasattr(self._runner, "req_states"):  # the second model runner
            device = self._runner.device
            self._on_device = torch.from_numpy(self._table).to(device)
            # Of each slot of its requests, of which it keeps no sampling parameters.
            self._numbers = torch.full((self._runner.max_num_reqs,), -1, device=device)

    def lookup(self, numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Tokens of responses (int [n], -1 for none) at positions (int [n], from 0), FREE where there is none."""
        return self._table[numbers, np.minimum(positions, self._table.shape[1] - 1)]

    def _requests(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of the response and next position of each request in the batch, int64 [requests] each."""
        requests = [self._runner.requests[name] for name in requests_of_rows(self._runner)]
        numbers = [_number(request.sampling_params) for request in requests]
        # Under asynchronous scheduling the text holds a placeholder for every token under way.
        positions = [request.num_tokens - request.num_prompt_tokens for request in requests]
        return np.array(numbers), np.array(positions)

    def _around_draw(self, function):
        def draw(processed, rows, metadata):
            tokens = function(processed, rows, metadata)
            numbers, positions = self._requests()
            return _replaced(tokens, self.lookup(numbers[rows.request], positions[rows.request] + rows.offset))

        return draw

    def _around_sample(self, function):
        def _sample(*arguments):
            output = function(*arguments)
            output.sampled_token_ids = _replaced(output.sampled_token_ids, self.lookup(*self._requests())[:, None])
            return output

        return _sample

    def _around_add_requests(self, function):
        def add_requests(scheduled):
            function(scheduled)
            if new := scheduled.scheduled_new_reqs:
                slots = [self._runner.req_states.req_id_to_index[request.req_id] for request in new]
                of_slots = np.array([slots, [_number(request.sampling_params) for request in new]])
                slots, numbers = _sent(of_slots, self._numbers.device)
                self._numbers[slots] = numbers

        return add_requests

    def _around_second_sample(self, function):
        """The second model runner's sampler, by the places of tokens as the device knows them: the host's are too far
        ahead while it does not know which drafts were accepted."""
        signature = inspect.signature(function)

        def sample(*arguments, **keywords):
            sampled, *others = function(*arguments, **keywords)
            given = signature.bind(*arguments, **keywords).arguments
            slots = given["expanded_idx_mapping"].long()
            # Negative while a prompt comes in pieces; that step's token is dropped.
            positions = given["pos"] + 1 - self._runner.req_states.prompt_len.gpu[slots]
            places = positions.long().clamp_(0, self._on_device.shape[1] - 1)
            forced = self._on_device[self._numbers[slots], places]
            return torch.where(forced == FREE, sampled, forced), *others

        return sample


class ForcedTextExtension:
    """Mixed into vLLM's worker; its method is called through `collective_rpc`."""

    def sam_force_text(self, responses: list[list[int]]) -> None:
        """Let requests emit these responses."""
        ForcedText.attach(self.model_runner).set_responses(responses)


class BenchExtension(ForcedTextExtension):
    """The same for all variants but stock, with what sam.tools.bench reads from their workers."""

    def sam_bench_attach(self, forces_text: bool) -> dict[str, Any]:
        """What drafts and verifies; from now on steps are recorded."""
        from sam.vllm import plugin
        from sam.vllm.step_recorder import StepRecorder

        status = plugin.installed(self.model_runner)
        if forces_text:
            self.sam_force_text([])  # before the recorder, which is to time it too
        StepRecorder.attach(self.model_runner)
        return {"drafter": status["drafter"], "verification": status["verification"]}

    def sam_bench_take(self) -> dict[str, int]:
        """COUNTS of the steps since the last call, and the drafters' errors since the engine started."""
        from sam.vllm.step_recorder import StepRecorder

        steps = StepRecorder.attach(self.model_runner).take()
        counted = (steps.drafted, steps.accepted, steps.turn_steps, steps.turn_emitted)
        errors = sum(steps.counters.get(name, 0) for name in ERRORS)
        return dict(zip(COUNTS, [*(int(column.sum()) for column in counted), int(errors)], strict=True))


def _number(sampling_params) -> int:
    return ((sampling_params and sampling_params.extra_args) or {}).get(ARGUMENT, -1)


def _replaced(sampled: torch.Tensor, forced: np.ndarray) -> torch.Tensor:
    tokens = _sent(forced, sampled.device).to(sampled.dtype)
    return torch.where(tokens == FREE, sampled, tokens)


def _sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a device, without waiting for the step under way."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
