"""Generates with the real vllm-ascend on the simulated NPU: one engine after another, one JSON line for each scenario.

python generate.py < scenarios.json, an object of objects with the fields of `Scenario`. Scenarios that differ in what
is asked alone (ASKED) have one engine, in their order.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_WORKER_MULTIPROC_METHOD="fork",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
)

import simulator

simulator.install()

from simulator import launches, platform  # noqa: E402
from vllm_ascend.compilation import acl_graph  # noqa: E402

from sam.config import SpeculationConfig  # noqa: E402
from sam.switch.policies import Threshold  # noqa: E402
from sam.vllm import proposer  # noqa: E402
from sam.vllm.plugin import installed  # noqa: E402
from sam.vllm.step_recorder import StepRecorder  # noqa: E402
from tests.ascend.engines import prompts_and_lengths  # noqa: E402
from tests.sam.engine.faults import FAULTS, mend  # noqa: E402

K = 3
METRICS = {"drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}
METRICS["preemptions"] = "num_preemptions"
ASKED = ("workload", "temperature", "stop", "abort", "threshold", "fault", "responses", "parts")
SPECULATIVE = {
    "off": None,
    "sam": {"model": "sam.SamProposer"},
    "sam async": {"method": "ngram_gpu"},
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "eagle3": {"method": "eagle3"},  # vllm-ascend's own
}


@dataclass
class Scenario:
    """model: a folder. method: a key of SPECULATIVE; `sam async` is through vllm-ascend's asynchronous door. policy: of
    the switch; threshold: None leaves it, a number replaces it by that of the policy `threshold`. refused: the engine
    does not start, and what it says is the result.

    workload: mixed, long. temperature: 0 is greedy. graph: None (eager) or vLLM's cudagraph_mode. stop: tokens that end
    a response. abort: abort every fourth request after some steps. blocks: of the KV cache; few mean preemption.
    async_scheduling: None leaves it to vLLM. fault:
    one of tests.sam.engine.faults. draft_model: folder of a head. paths: of a request. parts: each response is cut
    anywhere into so many at most, each a request of its own.
    """

    model: str
    method: str = "off"
    verification: str = "exact"
    policy: str = "always"
    threshold: int | None = None
    workload: str = "mixed"
    temperature: float = 0.0
    graph: str | None = None
    tensor_parallel: int = 1
    expert_parallel: bool = False
    batch: int = 8
    blocks: int = 64
    stop: list[int] | None = None
    abort: bool = False
    async_scheduling: bool | None = None
    fault: str | None = None
    draft_model: str | None = None
    paths: int = 1
    responses: int = 14
    parts: int = 1
    refused: bool = False


@dataclass
class Answer:
    """A response, joined of its parts; `reason` is None of one that was aborted."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None


def requests(scenario: Scenario) -> tuple[list[list[int]], list[dict]]:
    asked = prompts_and_lengths(scenario.workload, scenario.responses)
    own = {"temperature": scenario.temperature, "stop_token_ids": scenario.stop}
    own |= {"ignore_eos": True, "detokenize": False, "logprobs": 1}
    settings = [
        own | {"max_tokens": tokens, "seed": row if scenario.temperature > 0 else None}
        for row, (_, tokens) in enumerate(asked)
    ]
    return [prompt for prompt, _ in asked], settings


def engine(scenario: Scenario):
    from vllm import LLM

    options = {}
    if speculative := SPECULATIVE[scenario.method]:
        options["speculative_config"] = {**speculative, "num_speculative_tokens": K}
        if scenario.draft_model:
            options["speculative_config"]["model"] = scenario.draft_model
    if scenario.graph:
        mode = 3 if "PIECEWISE" in scenario.graph else 0  # vLLM's compilation cuts the model in pieces
        options["compilation_config"] = {"mode": mode, "cudagraph_mode": scenario.graph}
    else:
        options["enforce_eager"] = True
    if scenario.tensor_parallel > 1:
        options |= {"tensor_parallel_size": scenario.tensor_parallel, "distributed_executor_backend": "mp"}
    if scenario.expert_parallel:
        options["enable_expert_parallel"] = True
    return LLM(
        scenario.model,
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=512,
        max_num_seqs=scenario.batch,
        max_num_batched_tokens=64,
        async_scheduling=scenario.async_scheduling,
        num_gpu_blocks_override=scenario.blocks,
        gpu_memory_utilization=0.5,
        disable_log_stats=False,
        additional_config={
            "speculation": {
                "verification": scenario.verification,
                "policy": scenario.policy,
                "paths": scenario.paths,
            },
        },
        **options,
    )


def run(llm, scenario: Scenario) -> list[Answer]:
    from vllm import SamplingParams

    prompts, settings = requests(scenario)
    limits = [own["max_tokens"] for own in settings]
    chance, core, steps = random.Random(1), llm.llm_engine, 0
    cuts = [sorted(chance.sample(range(1, most), chance.randrange(scenario.parts))) for most in limits]
    answers = [Answer() for _ in prompts]

    def ask(row: int) -> None:
        given = answers[row].tokens
        end = next((cut for cut in cuts[row] if cut > len(given)), limits[row])
        own = SamplingParams(**settings[row] | {"max_tokens": end - len(given)})
        core.add_request(str(row), {"prompt_token_ids": prompts[row] + given}, own)

    for row in range(len(prompts)):
        ask(row)
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                row, part = int(output.request_id), output.outputs[0]
                answers[row].tokens += part.token_ids
                entries = zip(part.logprobs, part.token_ids, strict=True)
                answers[row].logprobs += [entry[token].logprob for entry, token in entries]
                answers[row].reason = part.finish_reason
                if part.finish_reason == "length" and len(answers[row].tokens) < limits[row]:
                    ask(row)
        steps += 1
        if scenario.abort and steps == 12:
            core.abort_request([str(row) for row in range(0, len(prompts), 4)])
    return answers


class Engine:
    """An engine, and what is counted of its model runner where that is in this process."""

    def __init__(self, scenario: Scenario):
        platform.MODES.clear()
        self.llm, self.is_alone = engine(scenario), scenario.tensor_parallel == 1
        self.steps, self.before, self.recorder = [], Counter(), None
        if self.is_alone:
            self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            self.drafter, self.policy = self.runner.drafter, getattr(self.runner.drafter, "policy", None)
            if scenario.graph:
                self.recorder = StepRecorder.attach(self.runner)
            self.steps = launches.attach(self.runner, platform.MODES)

    def result(self, scenario: Scenario, said: list[str]) -> dict:
        """What came out, and what was counted since the last one."""
        self.steps.clear()
        said.clear()
        if self.is_alone and self.policy:
            is_own = scenario.threshold is None
            self.drafter.policy = self.policy if is_own else Threshold(K, scenario.threshold)
            self.drafter.counters["draft_errors"] = 0  # so that it is said here
        if scenario.fault:
            FAULTS[scenario.fault](self.drafter)
        answers = run(self.llm, scenario)
        if scenario.fault:
            mend(self.drafter)
        totals = {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}
        status = self.status(scenario) if self.is_alone else {}
        found = {
            "tokens": [one.tokens if one.reason else None for one in answers],
            "reasons": [one.reason for one in answers],
            "logprobs": [one.logprobs if one.reason else None for one in answers],
            **{name: self.new(name, totals.get(f"vllm:{metric}", 0)) for name, metric in METRICS.items()},
            "status": status,
            "steps": self.steps,
            "said": said,
            "replays": self.recorder and self.recorder.take().replays(),
        }
        self.llm.reset_prefix_cache()
        return found

    def new(self, name: str, total: int) -> int:
        """What a counter has counted since the last call."""
        before, self.before[name] = self.before[name], total
        return total - before

    def status(self, scenario: Scenario) -> dict:
        """What is installed; counters of this scenario; requests that are still followed after it."""
        found = installed(self.runner)
        found["has_step_costs"] = getattr(getattr(self.drafter, "policy", None), "has_table", None)
        counters = {name: int(value) for name, value in getattr(self.drafter, "counters", {}).items()}
        errors = {"draft_errors": counters.pop("draft_errors")} if "draft_errors" in counters else {}
        found["counters"] = {name: self.new(name, value) for name, value in counters.items()} | errors
        if self.policy:
            self.forget()
            found["followed"] = len(self.drafter.tracked.states)
        return found

    def forget(self) -> None:
        """Draft from no text of earlier scenarios: this project's drafter is as at the start."""
        if hasattr(self.drafter, "read_awaited"):  # of the last step
            self.drafter.read_awaited(is_timed=False)
        self.runner.requests.clear()
        self.drafter.tracked.release_finished()
        fresh = self.drafter._make_drafter(SpeculationConfig.from_vllm(self.runner.vllm_config))
        vars(self.drafter.drafter).update(vars(fresh) | {"counters": self.drafter.counters})

    def end(self) -> None:
        if self.is_alone:
            self.llm.llm_engine.engine_core.shutdown()
        acl_graph._graph_params = acl_graph._draft_graph_params = None  # vllm-ascend expects one engine a process
        del self.llm


def main() -> None:
    said: list[str] = []
    proposer.logger.exception = lambda text, *_: said.append(text)
    asked = {name: Scenario(**fields) for name, fields in json.load(sys.stdin).items()}
    engines: dict[str, list[str]] = {}
    for name, scenario in asked.items():
        own = {key: value for key, value in asdict(scenario).items() if key not in ASKED}
        engines.setdefault(json.dumps(own), []).append(name)
    for names in engines.values():
        first = asked[names[0]]
        try:
            started = Engine(first)
        except Exception as error:
            if not first.refused:
                raise
            refusal = "".join(traceback.format_exception(error))
            print("RESULT " + json.dumps([names[0], {"refused": refusal}]), flush=True)
            continue
        for name in names:
            print("RESULT " + json.dumps([name, started.result(asked[name], said)]), flush=True)
        started.end()


if __name__ == "__main__":
    main()
