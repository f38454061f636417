"""Steps of a fixed size on a vLLM engine of the user's own, as sam.profile.grid asks for them."""

import os

from sam.vllm.step_recorder import StepRecorder
from sam.vllm.warmup_cost import fingerprint

# Each time that the draft length changes: the first step still verifies drafts of the length before.
WARM_UP_STEPS, MEASURED_STEPS = 3, 6
LONGEST_START = 10_000  # steps until all requests decode
FIRST_TOKEN = 10  # of prompts and drafts; any ordinary tokens do


class FixedDrafts:
    """A drafter for vLLM's `custom_class` that drafts `length` tokens for every request, right or wrong."""

    length = 0

    def __init__(self, vllm_config):
        self.vocabulary = vllm_config.model_config.get_vocab_size()

    def load_model(self, *_args, **_kwargs) -> None:
        """Nothing to load; vLLM calls it."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """Draft tokens that follow each request's last one by number."""
        return [
            [(tokens[-1] + 1 + i) % self.vocabulary for i in range(FixedDrafts.length)] if tokens else []
            for tokens in sampled_token_ids
        ]


class ProfilingExtension:
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`."""

    def sam_fingerprint(self) -> dict[str, str | int]:
        """sam.vllm.warmup_cost.fingerprint of the worker's engine."""
        return fingerprint(self.model_runner.vllm_config)

    def sam_draft(self, length: int) -> None:
        """Draft `length` tokens for every request from now on."""
        FixedDrafts.length = length

    def sam_take_steps(self) -> list[tuple[int, int, float]]:
        """(running, drafted, milliseconds) of the decode steps since the last call."""
        steps = StepRecorder.attach(self.model_runner).take()
        keep = steps.prefilling == 0
        columns = (column[keep].tolist() for column in (steps.running, steps.drafted, steps.step_ms))
        return list(zip(*columns, strict=True))


class ProfiledEngine:
    """An engine that verifies fixed drafts with exact verification, as a rollout's would.

    Args:
        longest_draft: tokens of the longest draft that `steps` will be asked for.
        arguments: vLLM's engine arguments.
    """

    def __init__(self, model: str, longest_draft: int, **arguments):
        # An engine process would not wait to be stepped, and `stop` would wait for steps that never come.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self._llm = LLM(
            model,
            speculative_config={"model": f"{__name__}.FixedDrafts", "num_speculative_tokens": longest_draft},
            additional_config={"speculation": {"verification": "exact"}},
            worker_extension_cls=f"{__name__}.ProfilingExtension",
            # All requests share one prompt, so that a long context is prefilled once and its cache held once.
            enable_prefix_caching=True,
            disable_cascade_attn=True,
            **arguments,
        )
        self._names: list[str] = []
        self._requests = self._context = self._starts = 0

    def fingerprint(self) -> dict[str, str | int]:
        """sam.vllm.warmup_cost.fingerprint of this engine."""
        return self._worker("sam_fingerprint")

    def start(self, requests: int, context: int) -> None:
        """Requests of one prompt, run until all of them decode.

        Raises:
            RuntimeError: they never run together.
        """
        from vllm import SamplingParams

        self._starts += 1
        self._requests, self._context = requests, context
        self._names = [f"profile-{self._starts}-{i}" for i in range(requests)]
        self._worker("sam_draft", 0)
        for i, name in enumerate(self._names):
            sampling = SamplingParams(temperature=1.0, seed=i, ignore_eos=True, max_tokens=1 << 20, detokenize=False)
            prompt = {"prompt_token_ids": [FIRST_TOKEN + j % 7 for j in range(context)]}
            self._llm.llm_engine.add_request(name, prompt, sampling)
        self._worker("sam_take_steps")
        for _ in range(LONGEST_START):
            self._step(1)
            steps = self._worker("sam_take_steps")
            if steps and steps[-1][0] == requests:
                return
        raise RuntimeError(
            f"{requests} requests of {context} tokens never ran together: the KV cache is too small for them"
        )

    def steps(self, drafts: int) -> list[float]:
        """Milliseconds of MEASURED_STEPS steps or fewer in which each request verifies `drafts` tokens.

        Raises:
            RuntimeError: no step did.
        """
        self._worker("sam_draft", drafts)
        self._step(WARM_UP_STEPS)
        self._worker("sam_take_steps")
        self._step(MEASURED_STEPS)
        wanted = self._requests, self._requests * drafts
        whole = [ms for running, drafted, ms in self._worker("sam_take_steps") if (running, drafted) == wanted]
        if not whole:
            raise RuntimeError(
                f"no step had {self._requests} requests with {drafts} drafts each at {self._context} tokens: the KV "
                "cache or max_num_batched_tokens is too small; profile fewer requests"
            )
        return whole

    def stop(self) -> None:
        """End the requests."""
        self._llm.llm_engine.abort_request(self._names)
        self._step(2)

    def _worker(self, method: str, *arguments):
        return self._llm.collective_rpc(method, args=arguments)[0]

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._llm.llm_engine.step()
