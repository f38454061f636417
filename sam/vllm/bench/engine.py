"""An engine that is measured. `python -m sam.vllm.bench.engine PIPE` is one variant's, which sam.tools.bench starts and
tells what to run: it reads a message of JSON, does what it says and answers with one, until the pipe is closed: first
the arguments of BenchEngine, then those of `run` any number of times. For stock vLLM nothing of this project is in the
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


class BenchEngine:
    """A vLLM engine that runs loads.

    Args:
        model: folder.
        engine: vLLM's engine arguments, as words of a command line.
        speculation: keys of SpeculationConfig; None for stock, vLLM without this project's plugin.
        forces_text: whether runs give responses that requests are to emit.

    Raises:
        ValueError: vLLM does not know an argument. RuntimeError: not what the variant asks for was installed.
    """

    def __init__(self, model: str, engine: list[str], speculation: dict[str, Any] | None, forces_text: bool):
        arguments = _engine_arguments(["--model", model, *engine])
        from vllm import LLM
        from vllm.platforms import current_platform

        self._is_stock = speculation is None
        self._forces_text = forces_text
        self._runs = 0
        if self._is_stock and forces_text:
            arguments.worker_extension_cls = "sam.vllm.bench.forced_text.ForcedTextExtension"
        if not self._is_stock:
            wanted = SpeculationConfig.from_dict(speculation)
            of_engine = arguments.pipeline_parallel_size, arguments.async_scheduling
            asynchronous = wanted.schedules_asynchronously(current_platform.device_type, *of_engine)
            for name, value in wanted.vllm_arguments(asynchronous).items():
                setattr(arguments, name, value)
            arguments.worker_extension_cls = "sam.vllm.bench.forced_text.BenchExtension"
        arguments.disable_log_stats = True  # as vLLM's LLM has it by default
        self._llm = LLM.from_engine_args(arguments)
        if not self._is_stock:
            from sam.vllm.plugin import check_installed

            status = self._llm.collective_rpc("sam_bench_attach", args=(forces_text,))[0]
            check_installed(wanted, status)
            if wanted.draft_on == "auto" and status["drafter"] != "SamDeviceSpeculator":
                raise RuntimeError("sam-device: the host drafts in this engine, and its log says why: take sam")
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
            `tokens`; `responses`: a digest of each one's tokens; and COUNTS: tokens `drafted` and `accepted`,
            `verify_steps` in which a request verified drafts and `verified_tokens` that these emitted, `draft_errors`;
            None for stock.

        Raises:
            ValueError: a text is longer than the engine takes. RuntimeError: a response is not the given one.
        """
        if multiprocessing.active_children():
            time.sleep(REST_SECONDS)
        before = self._take()
        runs = [self._run_batch(batch, sampling) for batch in batches]
        responses = [response for _, _, texts in runs for response in texts]
        counts = dict.fromkeys(COUNTS) if self._is_stock else self._take()
        if not self._is_stock:  # steps are counted since they were last taken, errors since the engine started
            counts["draft_errors"] -= before["draft_errors"]
        return {
            "seconds": round(sum(seconds for seconds, _, _ in runs), 6),
            "steps": sum(steps for _, steps, _ in runs),
            "tokens": sum(map(len, responses)),
            "responses": [hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16] for tokens in responses],
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
        longest = self._llm.model_config.max_model_len
        for number, request in enumerate(batch):
            own = sampling_arguments(number, given[number]) if self._forces_text else {}
            parameters = SamplingParams(**common | {"seed": request["seed"]} | own)
            prompt = request["prompt_token_ids"]
            if (needed := len(prompt) + parameters.max_tokens) > longest:
                what = f"a prompt and its response have up to {needed} tokens, more than the {longest} that the engine"
                raise ValueError(f"{what} takes: set --max-tokens or --max-model-len")
            self._runs += 1
            requests.append((str(self._runs), {"prompt_token_ids": prompt}, parameters))
        self._llm.reset_prefix_cache()
        gc.collect()
        engine = self._llm.llm_engine
        responses = {}
        steps = 0
        started = time.perf_counter()
        for request in requests:
            engine.add_request(*request)
        while engine.has_unfinished_requests():
            for output in engine.step():
                responses[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
        seconds = time.perf_counter() - started
        texts = [responses[name] for name, *_ in requests]
        wrong = sum(text != recorded for text, recorded in zip(texts, given, strict=True))
        if self._forces_text and wrong:
            raise RuntimeError(f"{wrong} of {len(given)} responses are not the recording's")
        return seconds, steps, texts

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
    except Exception as error:  # of any kind: the benchmark says it in a line, the log in full
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
