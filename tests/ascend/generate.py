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
from tests.sam.engine.faults import FAULTS, mend  # noqa: E402

VOCABULARY = 512
COUNTED = ("emitted", "scheduled_while_off", "rows_while_off", "drafted_while_off")
METRICS = {"drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}
METRICS["preemptions"] = "num_preemptions"
ASKED = ("workload", "temperature", "stop", "abort", "threshold", "fault", "responses", "parts")
SPECULATIVE = {
    "off": None,
    "sam": {"model": "sam.SamProposer"},
    "sam async": {"method": "ngram_gpu"},
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    **{name: {"method": name} for name in ("eagle3", "eagle", "mtp", "deepseek_mtp")},  # vllm-ascend's own
    "eagle3 unpadded": {"method": "eagle3", "disable_padded_drafter_batch": True},  # as this project asks for a head
}


@dataclass
class Scenario:
    """model: a folder. method: a key of SPECULATIVE; `sam async` is through vllm-ascend's asynchronous door. policy: of
    the switch; threshold: None leaves it, a number replaces it by that of the policy `threshold`. refused: the engine
    does not start, and what it says is the result.

    workload: mixed, long. temperature: 0 is greedy. graph: None (eager) or vLLM's cudagraph_mode. stop: tokens that end
    a response. abort: abort every fourth request after some steps. blocks: of the KV cache; few mean preemption. paged:
    numbers of tokens for which vllm-ascend takes the paged operator. async_scheduling: None leaves it to vLLM. fault:
    one of tests.sam.engine.faults. draft_model: folder of a head. paths: of a request. parts: each response is cut
    anywhere into so many at most, each a request of its own.
    """

    model: str
    method: str = "off"
    verification: str = "exact"
    k: int = 3
    policy: str = "always"
    threshold: int | None = None
    workload: str = "mixed"
    temperature: float = 0.0
    graph: str | None = None
    tensor_parallel: int = 1
    expert_parallel: bool = False
    batch: int = 8
    batched_tokens: int = 64
    blocks: int = 64
    stop: list[int] | None = None
    abort: bool = False
    paged: list[int] | None = None
    draft_shape: str = "auto"
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
    chance = random.Random(0)
    prompts, settings = [], []
    for row in range(scenario.responses):
        if scenario.workload == "mixed":  # some prompts longer than a step's tokens, responses of all lengths
            length, tokens = chance.choice([2, 3, 5, 9, 100]), chance.choice([5, 20, 60, 90])
        else:
            length, tokens = 8, 150
        prompt = [chance.randrange(VOCABULARY) for _ in range(length)]
        prompts.append(prompt)
        settings.append(
            {
                "temperature": scenario.temperature,
                "max_tokens": tokens,
                "ignore_eos": True,
                "stop_token_ids": scenario.stop,
                "detokenize": False,
                "logprobs": 1,
                "seed": row if scenario.temperature > 0 else None,
            }
        )
    return prompts, settings


def engine(scenario: Scenario):
    from vllm import LLM

    options, asked = {}, {}
    if scenario.method.startswith("eagle3"):
        asked = {"method": "eagle3", "draft_model": scenario.draft_model}
    if speculative := SPECULATIVE[scenario.method]:
        options["speculative_config"] = {**speculative, "num_speculative_tokens": scenario.k}
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
        max_num_batched_tokens=scenario.batched_tokens,
        async_scheduling=scenario.async_scheduling,
        num_gpu_blocks_override=scenario.blocks,
        gpu_memory_utilization=0.5,
        disable_log_stats=False,
        additional_config={
            "speculation": {
                "verification": scenario.verification,
                "policy": scenario.policy,
                "draft_shape": scenario.draft_shape,
                "paths": scenario.paths,
                **asked,
            },
            "pa_shape_list": scenario.paged or [],
        },
        **options,
    )


def count_tokens(runner) -> Counter:
    """Tokens sampled, and what was scheduled for steps that follow one in which the switch was off."""
    counts: Counter[str] = Counter()
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(scheduled, *arguments, **keywords):
        rows = scheduled.num_scheduled_tokens
        decoding = not scheduled.scheduled_new_reqs and scheduled.total_num_scheduled_tokens > 0
        prefilling = any(
            runner.requests[row].num_computed_tokens < runner.requests[row].num_prompt_tokens
            for row in rows
            if row in runner.requests
        )
        if not getattr(getattr(runner.drafter, "last", None), "is_on", True) and decoding and not prefilling:
            counts["scheduled_while_off"] += scheduled.total_num_scheduled_tokens
            counts["rows_while_off"] += len(rows)
            counts["drafted_while_off"] += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        return execute(scheduled, *arguments, **keywords)

    def sample_tokens(*arguments, **keywords):
        output = sample(*arguments, **keywords)
        counts["emitted"] += sum(map(len, getattr(output, "sampled_token_ids", ())))
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    return counts


def note_drafts(runner) -> list[tuple[int, int, list[int]]]:
    """Request, length of its text and draft tokens, of each draft that is scheduled synchronously."""
    noted: list[tuple[int, int, list[int]]] = []
    execute = runner.execute_model

    def execute_model(scheduled, *arguments, **keywords):
        for name, draft in scheduled.scheduled_spec_decode_tokens.items():
            noted.append((int(name.split("-")[0]), runner.requests[name].num_tokens, list(draft)))
        return execute(scheduled, *arguments, **keywords)

    runner.execute_model = execute_model
    return noted


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
        self.counts, self.steps, self.drafts, self.before, self.recorder = Counter(), [], [], Counter(), None
        if self.is_alone:
            self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            self.drafter, self.policy = self.runner.drafter, getattr(self.runner.drafter, "policy", None)
            self.counts, self.drafts = count_tokens(self.runner), note_drafts(self.runner)
            if scenario.graph:
                self.recorder = StepRecorder.attach(self.runner)
            self.steps = launches.attach(self.runner, platform.MODES)

    def result(self, scenario: Scenario, said: list[str]) -> dict:
        """What came out, and what was counted since the last one."""
        for one in (self.counts, self.steps, self.drafts, said):
            one.clear()
        if self.is_alone and self.policy:
            is_own = scenario.threshold is None
            self.drafter.policy = self.policy if is_own else Threshold(scenario.k, scenario.threshold)
            self.drafter.counters["draft_errors"] = 0  # so that it is said here
        if scenario.fault:
            FAULTS[scenario.fault](self.drafter)
        answers = run(self.llm, scenario)
        if scenario.fault:
            mend(self.drafter)
        totals = {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}
        status = self.status(scenario) if self.is_alone else {}
        found = {
            "prompts": requests(scenario)[0],
            "tokens": [one.tokens if one.reason else None for one in answers],
            "reasons": [one.reason for one in answers],
            "logprobs": [one.logprobs if one.reason else None for one in answers],
            **{name: self.new(name, totals.get(f"vllm:{metric}", 0)) for name, metric in METRICS.items()},
            "status": status,
            "steps": self.steps,
            "drafts": self.drafts,
            "said": said,
            "replays": self.recorder and self.recorder.take().replays(),
            **{name: self.counts[name] for name in COUNTED},
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
