"""Engines that are measured. `python -m sam.vllm.bench.engine PIPE` is one variant's, which sam.bench starts and tells
what to run: it reads a message of JSON, does what it says and answers with one, until the pipe is closed: first the
arguments of BenchEngine, then those of `run` any number of times. For stock vLLM nothing of this project is in the
engine: no plugin, no recorder, and a worker extension only where text is forced.
"""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from sam.config import SpeculationConfig
from sam.vllm.bench.forced_text import COUNTS, sampling_arguments

LONGEST_LINE = 400  # characters of an error
# A worker process of vLLM's goes on polling for a second after its last step, and would take a core from the next.
REST_SECONDS = 1.5
# Of ProfiledEngine. Each time that the draft length changes, the first step still verifies drafts of the length before.
WARM_UP_STEPS, MEASURED_STEPS = 3, 6
LONGEST_START = 10_000  # steps until all requests decode
FIRST_TOKEN = 10  # of prompts and drafts; any ordinary tokens do


def prompt_lookup():
    """vLLM's function that drafts by prompt lookup: (text, shortest match, longest match, longest text, budget)."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    return _find_longest_matched_ngram_and_propose_tokens


class BenchEngine:
    """A vLLM engine that runs loads.

    Args:
        model: folder.
        engine: vLLM's engine arguments, as words of a command line.
        is_stock: whether it is vLLM without this project's plugin.
        speculation: of stock vLLM's own `speculative_config`, or None; else keys of SpeculationConfig.
        forces_text: whether runs give responses that requests are to emit.

    Raises:
        ValueError: vLLM does not know an argument. RuntimeError: not what the variant asks for was installed.
    """

    def __init__(
        self, model: str, engine: list[str], is_stock: bool, speculation: dict[str, Any] | None, forces_text: bool
    ):
        arguments = _engine_arguments(["--model", model, *engine])
        from vllm import LLM
        from vllm.platforms import current_platform

        self._is_stock, self._forces_text, self._runs = is_stock, forces_text, 0
        if is_stock:
            arguments.speculative_config = speculation
            if forces_text:
                arguments.worker_extension_cls = "sam.vllm.bench.forced_text.ForcedTextExtension"
        else:
            wanted = SpeculationConfig.from_dict(speculation)
            of_engine = arguments.pipeline_parallel_size, arguments.async_scheduling
            asynchronous = wanted.schedules_asynchronously(current_platform.device_type, *of_engine)
            for name, value in wanted.vllm_arguments(asynchronous).items():
                setattr(arguments, name, value)
            arguments.worker_extension_cls = "sam.vllm.bench.forced_text.BenchExtension"
        arguments.disable_log_stats = True  # as vLLM's LLM has it by default
        self._llm = LLM.from_engine_args(arguments)
        if not is_stock:
            from sam.vllm.plugin import check_installed

            check_installed(wanted, self._llm.collective_rpc("sam_bench_attach", args=(forces_text,))[0])
        elif "sam.vllm.plugin" in sys.modules:
            raise RuntimeError("this project's plugin was loaded into stock vLLM")
        print("the engine is ready", flush=True)

    def run(self, batches: list[list[dict[str, Any]]], sampling: dict[str, Any]) -> dict[str, Any]:
        """Run batches one after another; the requests of a batch start together.

        Args:
            batches: `prompt_token_ids`, `seed` and `response` (to be emitted, or None) of each request.
            sampling: keywords of SamplingParams that all share.

        Returns:
            `seconds` from a batch's first request's arrival to its last one's end, of all batches; engine `steps`;
            `tokens`; `responses`: a digest of each one's tokens; `as_recorded`: how many are the given ones, or None;
            `asynchronous`: whether a step is scheduled before the one before it has ended; and COUNTS: tokens
            `drafted` and `accepted`, `verify_steps` in which a request verified drafts and `verified_tokens` that these
            emitted, `draft_errors`; None for stock.

        Raises:
            ValueError: a text is longer than the engine takes. RuntimeError: a response is not the given one.
        """
        if multiprocessing.active_children():
            time.sleep(REST_SECONDS)
        before = self._take()
        runs = [self._run_batch(batch, sampling) for batch in batches]
        responses = [response for _, _, its in runs for response in its]
        counts = dict.fromkeys(COUNTS) if self._is_stock else self._take()
        if not self._is_stock:  # steps are counted since they were last taken, errors since the engine started
            counts["draft_errors"] -= before["draft_errors"]
        return {
            "seconds": round(sum(seconds for seconds, _, _ in runs), 6),
            "steps": sum(steps for _, steps, _ in runs),
            "tokens": sum(map(len, responses)),
            "responses": [hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16] for tokens in responses],
            "as_recorded": len(responses) if self._forces_text else None,
            "asynchronous": bool(self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling),
            **counts,
        }

    def _run_batch(self, batch: list[dict[str, Any]], sampling: dict[str, Any]) -> tuple[float, int, list[list[int]]]:
        """Seconds, engine steps, and the responses' tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        given = [request["response"] for request in batch]
        if self._forces_text:
            self._llm.collective_rpc("sam_force_text", args=(given,))
        common = {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY, **sampling}
        requests = []
        for number, request in enumerate(batch):
            own = sampling_arguments(number, given[number]) if self._forces_text else {}
            parameters = SamplingParams(**common | {"seed": request["seed"]} | own)
            check_length(len(request["prompt_token_ids"]), parameters.max_tokens, self._llm.model_config.max_model_len)
            self._runs += 1
            requests.append((str(self._runs), {"prompt_token_ids": request["prompt_token_ids"]}, parameters))
        self._llm.reset_prefix_cache()
        gc.collect()
        engine, responses, steps = self._llm.llm_engine, {}, 0
        started = time.perf_counter()
        for request in requests:
            engine.add_request(*request)
        while engine.has_unfinished_requests():
            for output in engine.step():
                responses[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
        seconds = time.perf_counter() - started
        found = [responses[name] for name, *_ in requests]
        if self._forces_text and (wrong := sum(one != other for one, other in zip(found, given, strict=True))):
            raise RuntimeError(f"{wrong} of {len(given)} responses are not the recording's")
        return seconds, steps, found

    def shut_down(self) -> None:
        """End the engine's own processes."""
        self._llm.llm_engine.engine_core.shutdown()

    def _take(self) -> dict[str, Any] | None:
        return None if self._is_stock else self._llm.collective_rpc("sam_bench_take")[0]


def _engine_arguments(words: list[str]):
    """vLLM's EngineArgs of a command line's words; ValueError, not an exit, for one that it does not know."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str):
            raise ValueError(message)

    return EngineArgs.from_cli_args(EngineArgs.add_cli_args(Parser()).parse_args(words))


def check_length(prompt: int, response: int, longest: int) -> None:
    """Raise ValueError if a prompt with its response is longer than the engine takes, in tokens."""
    if prompt + response > longest:
        raise ValueError(
            f"a prompt has {prompt} tokens and a response of up to {response}, more than the {longest} that the engine "
            "takes: set --max-tokens or --max-model-len"
        )


class FixedDrafts:
    """A drafter for vLLM's `custom_class` that drafts `length` tokens for every request, right or wrong: those that
    follow its last one by number."""

    length = 0

    def __init__(self, vllm_config):
        self.vocabulary = vllm_config.model_config.get_vocab_size()

    def load_model(self, *_args, **_kwargs) -> None: ...

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        return [
            [(tokens[-1] + 1 + i) % self.vocabulary for i in range(FixedDrafts.length)] if tokens else []
            for tokens in sampled_token_ids
        ]


class ProfilingExtension:
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`."""

    def sam_fingerprint(self) -> dict[str, str | int]:
        from sam.vllm.warmup_cost import fingerprint

        return fingerprint(self.model_runner.vllm_config)

    def sam_draft(self, length: int) -> None:
        FixedDrafts.length = length

    def sam_take_steps(self) -> list[tuple[int, int, float]]:
        """(running, drafted, milliseconds) of the decode steps since the last call."""
        from sam.vllm.step_recorder import StepRecorder

        steps = StepRecorder.attach(self.model_runner).take()
        keep = steps.prefilling == 0
        columns = (column[keep].tolist() for column in (steps.running, steps.drafted, steps.step_ms))
        return list(zip(*columns, strict=True))


class ProfiledEngine:
    """Steps of a fixed size, for sam.profile, on an engine with exact verification.

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
        self._context = self._starts = 0

    def fingerprint(self) -> dict[str, str | int]:
        """sam.vllm.warmup_cost.fingerprint of this engine."""
        return self._worker("sam_fingerprint")

    def start(self, requests: int, context: int) -> None:
        """Requests of one prompt, run until all of them decode.

        Raises:
            RuntimeError: they never run together.
        """
        from vllm import SamplingParams

        self._starts, self._context = self._starts + 1, context
        self._names = [f"profile-{self._starts}-{i}" for i in range(requests)]
        self._worker("sam_draft", 0)
        for i, name in enumerate(self._names):
            sampling = SamplingParams(temperature=1.0, seed=i, ignore_eos=True, max_tokens=1 << 20, detokenize=False)
            prompt = {"prompt_token_ids": [FIRST_TOKEN + j % 7 for j in range(context)]}
            self._llm.llm_engine.add_request(name, prompt, sampling)
        self._worker("sam_take_steps")
        for _ in range(LONGEST_START):
            if (steps := self._step(1)) and steps[-1][0] == requests:
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
        wanted = len(self._names), len(self._names) * drafts
        whole = [ms for running, drafted, ms in self._step(MEASURED_STEPS) if (running, drafted) == wanted]
        if not whole:
            raise RuntimeError(
                f"no step had {len(self._names)} requests with {drafts} drafts each at {self._context} tokens: the KV "
                "cache or max_num_batched_tokens is too small; profile fewer requests"
            )
        return whole

    def stop(self) -> None:
        """End the requests."""
        self._llm.llm_engine.abort_request(self._names)
        self._step(2)

    def _worker(self, method: str, *arguments):
        return self._llm.collective_rpc(method, args=arguments)[0]

    def _step(self, count: int) -> list[tuple[int, int, float]]:
        """Make steps; returns what ProfilingExtension.sam_take_steps has of them."""
        for _ in range(count):
            self._llm.llm_engine.step()
        return self._worker("sam_take_steps")


def main(arguments: list[str] | None = None) -> int:
    pipe = Connection(int((sys.argv[1:] if arguments is None else arguments)[0]))
    os.set_inheritable(pipe.fileno(), False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    engine = None
    try:
        engine = BenchEngine(**json.loads(pipe.recv_bytes()))
        pipe.send_bytes(b"{}")
        while True:
            reply = engine.run(**json.loads(pipe.recv_bytes()))
            pipe.send_bytes(json.dumps(reply).encode())
    except (KeyboardInterrupt, EOFError, ConnectionError):
        return 0
    except Exception as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends by itself, and its log says of what
        line = " ".join(str(error).split()) or type(error).__name__
        with contextlib.suppress(OSError):
            pipe.send_bytes(json.dumps({"error": line[:LONGEST_LINE]}).encode())
        raise
    finally:
        if engine is not None:
            engine.shut_down()


if __name__ == "__main__":
    sys.exit(main())
