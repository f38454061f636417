"""Generates with the real vllm-ascend on the simulated NPU: one engine after another, one JSON line for each.

python generate.py MODEL < scenarios.json, a list of objects with the fields of `Scenario`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

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

from simulator import graph, launches, operators, platform  # noqa: E402
from vllm_ascend.compilation import acl_graph  # noqa: E402

from sam.vllm import proposer  # noqa: E402
from sam.vllm.plugin import installed  # noqa: E402
from sam.vllm.step_recorder import StepRecorder  # noqa: E402
from tests.sam.engine.faults import FAULTS  # noqa: E402

VOCABULARY = 512
COUNTED = ("emitted", "scheduled_while_off", "rows_while_off", "drafted_while_off")
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
    """method: a key of SPECULATIVE; `sam async` is through vllm-ascend's asynchronous door. policy, threshold: of the
    switch.

    workload: mixed, long. temperature: 0 is greedy. graph: None (eager) or vLLM's cudagraph_mode. stop: tokens that end
    a response. abort: abort every fourth request after some steps. blocks: of the KV cache; few mean preemption. paged:
    numbers of tokens for which vllm-ascend takes the paged operator. async_scheduling: None leaves it to vLLM. fault:
    one of tests.sam.engine.faults. draft_model: folder of a head. paths: of a request. parts: each response is cut
    anywhere into so many at most, each a request of its own.
    """

    method: str = "off"
    verification: str = "exact"
    k: int = 3
    policy: str = "threshold"
    threshold: int = 1000
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
    seeds: bool = True
    paged: list[int] | None = None
    draft_shape: str = "auto"
    async_scheduling: bool | None = None
    fault: str | None = None
    draft_model: str | None = None
    paths: int = 1
    responses: int = 14
    parts: int = 1


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
                "seed": row if scenario.seeds and scenario.temperature > 0 else None,
            }
        )
    return prompts, settings


def engine(model: str, scenario: Scenario):
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
        model,
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
                "batch_size_threshold": scenario.threshold,
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


def main(model: str) -> None:
    said = []
    proposer.logger.exception = lambda text, *_: said.append(text)
    for fields in json.load(sys.stdin):
        scenario = Scenario(**fields)
        said.clear()
        for counter in (graph.COUNTS, platform.MODES, operators.CALLS):
            counter.clear()
        llm = engine(model, scenario)
        start = dict(graph.COUNTS)
        counts, status, followed, steps, recorder, drafts = Counter(), {}, 0, [], None, []
        if scenario.tensor_parallel == 1:
            runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            counts = count_tokens(runner)
            drafts = note_drafts(runner)
            if scenario.fault:
                FAULTS[scenario.fault](runner.drafter)
            if scenario.graph:
                recorder = StepRecorder.attach(runner)
            steps = launches.attach(runner, platform.MODES)
        answers = run(llm, scenario)
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        if scenario.tensor_parallel == 1:
            status = installed(runner)
            counters = getattr(runner.drafter, "counters", None)
            status["has_step_costs"] = getattr(getattr(runner.drafter, "policy", None), "has_table", None)
            status["counters"] = {name: int(value) for name, value in (counters or {}).items()}
            if scenario.method == "sam":
                runner.requests.clear()
                runner.drafter.tracked.release_finished()
                followed = len(runner.drafter.tracked.states)
        result = {
            "prompts": requests(scenario)[0],
            "tokens": [one.tokens if one.reason else None for one in answers],
            "reasons": [one.reason for one in answers],
            "logprobs": [one.logprobs if one.reason else None for one in answers],
            "drafted": metrics.get("vllm:spec_decode_num_draft_tokens", 0),
            "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
            "preemptions": metrics.get("vllm:num_preemptions", 0),
            "modes": dict(platform.MODES),
            "graph": {name: count - start.get(name, 0) for name, count in graph.COUNTS.items()},
            "captures": graph.COUNTS["captures"],
            "calls": dict(operators.CALLS),
            "status": status,
            "followed": followed,
            "steps": steps,
            "drafts": drafts,
            "said": list(said),
            "replays": recorder and recorder.take().replays(),
            **{name: counts[name] for name in COUNTED},
        }
        print("RESULT " + json.dumps(result), flush=True)
        if scenario.tensor_parallel == 1:
            llm.llm_engine.engine_core.shutdown()
        acl_graph._graph_params = acl_graph._draft_graph_params = None  # vllm-ascend expects one engine a process
        del llm


if __name__ == "__main__":
    main(sys.argv[1])
