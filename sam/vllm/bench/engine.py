"""`python -m sam.vllm.bench.engine`: one variant's engine for sam.bench, which starts it and tells it what to run.

It reads a line of JSON, does what it says and answers with a line: first the arguments of BenchEngine, then
`{"run", "sampling", "record", "forget"}` any number of times. When the pipe is closed it shuts the engine down. For
stock vLLM nothing of this project is in the engine: no plugin, no recorder, and a worker extension only where text is
forced.
"""

import contextlib
import gc
import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

from sam.config import SpeculationConfig
from sam.vllm.bench.forced_text import sampling_arguments

KILLED_AFTER_SECONDS = 15.0  # an engine that does not shut down
LONGEST_LINE = 400  # characters of an error
COUNTS = ("drafted", "accepted", "verify_steps", "verified_tokens", "draft_errors")
COUNTS += ("forward_ms", "verify_ms", "draft_ms", "replays")


class BenchEngine:
    """A vLLM engine that runs loads.

    Args:
        variant: its name, for the log; stock has `speculation` None.
        model: folder.
        engine: vLLM's engine arguments, as words of a command line.
        speculation: keys of SpeculationConfig.
        stock_speculation: vLLM's `speculative_config` of stock with one of its own drafters.
        forces_text: whether runs give responses that requests are to emit.

    Raises:
        ValueError: vLLM does not know an argument. RuntimeError: not what the variant asks for was installed.
    """

    def __init__(
        self,
        variant: str,
        model: str,
        engine: list[str],
        speculation: dict[str, Any] | None,
        stock_speculation: dict[str, Any] | None,
        forces_text: bool,
    ):
        arguments = _engine_arguments(["--model", model, *engine])
        from vllm import LLM

        wanted = None if speculation is None else SpeculationConfig.from_dict(speculation)
        if wanted is not None:
            of_engine = arguments.pipeline_parallel_size, arguments.async_scheduling, arguments.tensor_parallel_size
            asynchronous = wanted.schedules_asynchronously(_device(), *of_engine)
            for name, value in wanted.vllm_arguments(asynchronous).items():
                setattr(arguments, name, value)
            arguments.worker_extension_cls = "sam.vllm.bench.extension.BenchExtension"
        else:
            arguments.speculative_config = stock_speculation
        if wanted is None and forces_text:
            arguments.worker_extension_cls = "sam.vllm.bench.forced_text.ForcedTextExtension"
        # As vLLM's LLM has it by default: no statistics.
        arguments.disable_log_stats = True
        self._llm = LLM.from_engine_args(arguments)
        self._is_stock, self._forces_text, self._runs = wanted is None, forces_text, 0
        self._check_installed(wanted)
        print(f"{variant}: the engine is ready", flush=True)

    @property
    def longest_text(self) -> int:
        """Tokens of prompt and response together."""
        return self._llm.model_config.max_model_len

    def run(
        self, requests: list[dict[str, Any]], sampling: dict[str, Any], record: bool, forget: bool = False
    ) -> dict[str, Any]:
        """Run requests that start together.

        Args:
            requests: `prompt_token_ids`, `seed` and `response` (to be emitted, or None) of each.
            sampling: keywords of SamplingParams that they share.
            record: whether to add `recorded`: what happened step by step, for pictures.
            forget: whether drafters forget responses that have ended, since these requests may have the same ones.

        Returns:
            seconds: from the first request's arrival to the last one's end.
            steps: engine steps. tokens: of all responses. responses: a digest of each one's tokens.
            as_recorded: responses that are the given ones; None where none were given.
            asynchronous: whether the engine schedules a step before the one before it has ended.
            memory_mib: proportional set size of all the engine's processes.
            drafted, accepted: draft tokens. verify_steps, verified_tokens: steps in which a request verified drafts,
                and tokens that these emitted. draft_errors. forward_ms, verify_ms, draft_ms: of all steps, on the host.
                replays: steps that replayed a graph and all steps, by phase; None without graphs. All None for stock.
            recorded: `ends`, when each engine step ended, in seconds from the start, and `unfinished`, requests then;
                and for all but stock `columns` and `followed` of BenchExtension, of the first request.

        Raises:
            RuntimeError: a response is not the given one.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._runs += 1
        common = {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY, **sampling}
        given = [request["response"] for request in requests] if self._forces_text else []
        if given:
            self._llm.collective_rpc("sam_force_text", args=(given,))
        forced = [sampling_arguments(*one) for one in enumerate(given)] or [{}] * len(requests)
        parameters = [
            SamplingParams(**common | {"seed": request["seed"]} | own)
            for request, own in zip(requests, forced, strict=True)
        ]
        names = [f"{self._runs}-{number}" for number in range(len(requests))]
        before = self._take()
        if forget and (self._forces_text or not self._is_stock):
            self._llm.collective_rpc("sam_bench_forget")
        if record and not self._is_stock:
            self._llm.collective_rpc("sam_bench_follow", args=(names[0],))
        self._llm.reset_prefix_cache()
        gc.collect()
        engine, responses, ends, unfinished = self._llm.llm_engine, {}, [], []
        started = time.perf_counter()
        for name, request, one in zip(names, requests, parameters, strict=True):
            engine.add_request(name, {"prompt_token_ids": request["prompt_token_ids"]}, one)
        while engine.has_unfinished_requests():
            for output in engine.step():
                responses[output.request_id] = output.outputs[0].token_ids
            ends.append(time.perf_counter() - started)
            unfinished.append(len(names) - len(responses))
        recorded = {"ends": [round(end, 5) for end in ends], "unfinished": unfinished}
        drafting = self._drafting(before, record, recorded)
        return {
            "seconds": round(ends[-1], 6),
            "steps": len(ends),
            "tokens": sum(map(len, responses.values())),
            "responses": [digest(responses[name]) for name in names],
            "as_recorded": _check_as_recorded([responses[name] for name in names], given),
            "asynchronous": bool(engine.vllm_config.scheduler_config.async_scheduling),
            "memory_mib": round(memory_mib(), 1),
            **drafting,
            **({"recorded": recorded} if record else {}),
        }

    def shut_down(self) -> None:
        """End the engine's own processes."""
        self._llm.llm_engine.engine_core.shutdown()

    def _drafting(self, before: dict[str, Any] | None, record: bool, recorded: dict[str, Any]) -> dict[str, Any]:
        """The workers' counts; what they recorded step by step goes into `recorded`."""
        taken = self._take(record)
        if taken is None or before is None:
            return dict.fromkeys(COUNTS)
        recorded |= {name: value for name, value in taken.items() if name not in COUNTS}
        # The steps' counts are since they were last taken, the drafter's since the engine started.
        errors = taken["draft_errors"] - before["draft_errors"]
        return {name: taken[name] for name in COUNTS} | {"draft_errors": errors}

    def _take(self, record: bool = False) -> dict[str, Any] | None:
        return None if self._is_stock else self._llm.collective_rpc("sam_bench_take", args=(record,))[0]

    def _check_installed(self, wanted: SpeculationConfig | None) -> None:
        if wanted is None:
            if "sam.vllm.plugin" in sys.modules:
                raise RuntimeError("this project's plugin was loaded into stock vLLM")
            return
        from sam.vllm.plugin import check_installed

        check_installed(wanted, self._llm.collective_rpc("sam_bench_attach", args=(self._forces_text,))[0])


def _engine_arguments(words: list[str]):
    """vLLM's EngineArgs of a command line's words; ValueError, not an exit, for one that it does not know."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str):
            raise ValueError(message)

    return EngineArgs.from_cli_args(EngineArgs.add_cli_args(Parser()).parse_args(words))


def _device() -> str:
    """cuda, npu or cpu, as vLLM finds it."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def _check_as_recorded(responses: list[list[int]], given: list[list[int]]) -> int | None:
    if not given:
        return None
    as_recorded = sum(list(found) == expected for found, expected in zip(responses, given, strict=True))
    if as_recorded < len(given):
        raise RuntimeError(f"{len(given) - as_recorded} of {len(given)} responses are not the recording's")
    return as_recorded


def digest(tokens: list[int]) -> str:
    """A name of a response's tokens."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def memory_mib() -> float:
    """MiB of this process and all that it started: shared pages count once, divided among those that share them."""
    import psutil

    own, total = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / 2**20


def one_line(error: BaseException) -> str:
    """An error's text in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_LINE else text[:LONGEST_LINE] + " ..."


def answer(reply, command: dict[str, Any], engine: BenchEngine | None) -> BenchEngine:
    """Do what one command says, and reply."""
    if engine is None:
        engine = BenchEngine(**command)
        reply({"longest_text": engine.longest_text})
    else:
        reply(engine.run(command["run"], command["sampling"], command["record"], command["forget"]))
    return engine


def main(arguments: list[str] | None = None) -> int:
    commands, replies = map(int, sys.argv[1:] if arguments is None else arguments)
    for descriptor in (commands, replies):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, lines), daemon=True).start()

    def reply(content: dict[str, Any]) -> None:
        os.write(replies, (json.dumps(content) + "\n").encode())

    engine = None
    try:
        while True:
            engine = answer(reply, json.loads(lines.get()), engine)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            reply({"error": one_line(error)})
        raise
    finally:
        if engine is not None:
            engine.shut_down()


def _read(descriptor: int, lines: queue.SimpleQueue) -> None:
    """Hand the lines on; when the pipe is closed, interrupt the main thread, and kill all if that does not end it."""
    with os.fdopen(descriptor) as file:
        for line in file:
            lines.put(line)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(KILLED_AFTER_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
