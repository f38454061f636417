"""`python -m recipe.preflight --npu-selftest`: what only a device can show, in about five minutes.

Parity: the same requests without speculation, with sam, and with sam and graphs; tokens must be equal where logits are.
Precision: log-probabilities of tokens decoded one by one against the same tokens verified 1 + k at once, the operators'
own difference. Timing: engine steps, drafting, and both ways to verify, at a vocabulary of 151,936. Writes report.json
and report.md and prints the latter.
"""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from recipe.launch import versions
from recipe.preflight import compatibility
from recipe.preflight.problem import first_line
from recipe.tiny.model import ModelSettings, build_model
from recipe.tiny.tokenizer import build_tokenizer
from sam import verify
from sam.verify.uniforms import uniforms

ENGINES = {"off": {"method": "off"}, "sam": {"method": "sam"}, "sam, graph": {"method": "sam", "graph": "FULL"}}
TIMES = ("step_ms", "forward_ms", "verify_ms", "draft_ms")
ENGINE_ROW = "{step_ms:.2f} | {forward_ms:.2f} | {verify_ms:.2f} | {draft_ms:.2f} | {accepted} of {drafted}"
QWEN_VOCABULARY = 151_936
REQUESTS, LENGTH, K = 16, 128, 3
# Verification may take this share of a decode step of about 20 ms before another rule is recommended.
SLOW_VERIFICATION_MS = 2.0


def write_tiny_model(path: Path) -> None:
    """A random Qwen3 with the head size of the real ones, whose greedy text repeats."""
    settings = ModelSettings(hidden_size=256, intermediate_size=512, head_dim=128, initializer_range=0.1)
    build_model(settings, build_tokenizer(), seed=3).to(torch.bfloat16).save_pretrained(path)


def run_engine(
    model: str, method: str, graph: str | None = None, compiled: bool = True, dtype: str = "bfloat16"
) -> dict:
    """Generate in this process: half of the requests greedy, half sampled with seeds."""
    from vllm import LLM, SamplingParams

    from sam.vllm.plugin import installed
    from sam.vllm.step_recorder import StepRecorder

    compilation = {"cudagraph_mode": graph, **({} if compiled else {"mode": 0})}
    options = {"compilation_config": compilation} if graph else {"enforce_eager": True}
    if method == "sam":
        options["speculative_config"] = {"model": "sam.SamProposer", "num_speculative_tokens": K}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype=dtype,
        seed=0,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.3,
        additional_config={"speculation": {"verification": "exact", "batch_size_threshold": 1000}},
        **options,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    recorder = StepRecorder.attach(runner)
    chance, vocabulary = random.Random(0), runner.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": [chance.randrange(vocabulary) for _ in range(8)] * 2} for _ in range(REQUESTS)]
    common = {"max_tokens": LENGTH, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    parameters = [SamplingParams(temperature=0.0 if row % 2 else 0.5, seed=row, **common) for row in range(REQUESTS)]
    outputs = [output.outputs[0] for output in llm.generate(prompts, parameters, use_tqdm=True)]
    steps = recorder.take()
    return {
        "status": installed(runner),
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
        **{name: int(getattr(steps, name).sum()) for name in ("drafted", "accepted", "emitted")},
        **{name: float(statistics.median(getattr(steps, name))) for name in TIMES},
    }


def compare(off: dict, on: dict) -> dict:
    """Identical responses, and the differences of log-probabilities up to each response's first other token."""
    differences, identical = [], 0
    for a, b, x, y in zip(off["tokens"], on["tokens"], off["logprobs"], on["logprobs"], strict=True):
        same = next((i for i, (s, t) in enumerate(zip(a, b, strict=False)) if s != t), min(len(a), len(b)))
        identical += a == b
        differences += [abs(p - q) for p, q in zip(x[:same], y[:same], strict=True)]
    differences.sort()
    return {
        "identical": identical,
        "responses": len(off["tokens"]),
        "compared_tokens": len(differences),
        "logprob_difference_median": differences[len(differences) // 2],
        "logprob_difference_99": differences[int(0.99 * (len(differences) - 1))],
        "logprob_difference_max": differences[-1],
    }


def make_case(batch: int, k: int, vocabulary: int, device: str) -> SimpleNamespace:
    """Logits like a language model's, drafts of which about 70 % are the likeliest token."""
    generator = torch.Generator().manual_seed(batch * 100 + k)
    logits = 3 * torch.randn(batch, k + 1, vocabulary, generator=generator)
    is_likely = torch.rand(batch, k, generator=generator) < 0.7
    anything = torch.randint(vocabulary, (batch, k), generator=generator)
    drafts = torch.where(is_likely, logits[:, :k].argmax(-1), anything).to(device)
    logits, temperature = logits.to(device), torch.ones(batch, device=device)
    return SimpleNamespace(
        batch=batch,
        k=k,
        logits=logits.flatten(0, 1),
        target=logits[:, :k].flatten(0, 1),
        bonus=logits[:, k],
        drafts=drafts,
        ends=(torch.arange(1, batch + 1) * k).to(device),
        metadata=SimpleNamespace(all_greedy=False, all_random=True, temperature=temperature, generators={}),
    )


def exact_match(case: SimpleNamespace) -> torch.Tensor:
    """Exact match over all logits rows as the engine does it: uniforms on the host, one copy, two calls."""
    width = case.k + 1
    rng_keys = torch.arange(case.batch).repeat_interleave(width).numpy()
    positions = torch.arange(width).repeat(case.batch).numpy()
    draws = torch.from_numpy(uniforms(rng_keys, positions)).to(case.logits.device, non_blocking=True)
    sampled = verify.sample_inverse_cdf(case.logits, draws).view(case.batch, width)
    drafts = torch.full_like(sampled, -2)
    drafts[:, : case.k] = case.drafts
    return verify.accept_matching(sampled, drafts)


def rejection(rule: Callable, case: SimpleNamespace) -> torch.Tensor:
    """A `rejection_sample` of vLLM 0.23's signature, with the bonus tokens drawn as vLLM does: an exponential race."""
    bonus = (case.bonus.softmax(-1) / torch.empty_like(case.bonus).exponential_()).argmax(-1)[:, None].to(torch.int32)
    counts = [case.k] * case.batch
    return rule(case.drafts.flatten(), counts, case.k, case.ends, None, case.target, bonus, case.metadata)


def verifications(device: str, batch: int = 8) -> dict[str, dict]:
    """Median milliseconds of both ways to verify, logits [batch x (1 + k), vocabulary]; `error` where one fails."""
    case, rows = make_case(batch, K, QWEN_VOCABULARY, device), {}
    calls = {"exact": lambda: exact_match(case), "rejection": lambda: rejection(verify.rejection_sample, case)}
    for name, call in calls.items():
        try:
            rows[name] = {"median_ms": _median_ms(call, device)}
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {first_line(error)}"}
    return rows


def _median_ms(call: Callable[[], object], device: str, repeats: int = 10) -> float:
    """After one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        if device != "cpu":
            getattr(torch, torch.device(device).type).synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def recommend(rows: dict[str, dict]) -> str:
    exact, rejection = rows["exact"], rows["rejection"].get("median_ms", math.inf)
    if "error" in exact:
        return f"exact verification does not run here ({exact['error']}): set speculation.verification=rejection"
    if rejection < exact["median_ms"] > SLOW_VERIFICATION_MS:
        return (
            f"exact verification takes {exact['median_ms']:.1f} ms here, rejection sampling {rejection:.1f}: "
            "speculation.verification=rejection is faster, but its tokens differ from those without speculation"
        )
    return f"keep speculation.verification=exact: {exact['median_ms']:.2f} ms for 8 requests"


def _engine_in_process(model: Path, fields: dict) -> dict:
    """An engine keeps its device memory until its process ends."""
    code = (
        "import json, sys; from recipe.preflight.npu_selftest import run_engine;"
        "print('RESULT ' + json.dumps(run_engine(sys.argv[1], **json.loads(sys.argv[2]))))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, str(model), json.dumps(fields)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"},
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": f"the engine's process ended with code {finished.returncode}; its messages are above"}
    return json.loads(lines[-1].removeprefix("RESULT "))


def selftest(output: Path, device: str = "npu", **engine) -> dict:
    """Run all parts; what fails is in the report, and the rest goes on. `engine`: further arguments of run_engine."""
    output.mkdir(parents=True, exist_ok=True)
    report: dict = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: versions.installed(name) for name in ("torch", "torch-npu", "vllm", "vllm-ascend")},
        "cann": compatibility.cann_version(),
        "patches": [versions.Patches().status()],
        "engines": {},
        "parity": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(model := Path(folder))
        for number, (name, fields) in enumerate(ENGINES.items(), start=1):
            print(f"{number}/{len(ENGINES)}: generating with {name}", flush=True)
            report["engines"][name] = _engine_in_process(model, {**fields, **engine})
    off = report["engines"]["off"]
    for name, on in report["engines"].items():
        if name != "off" and "error" not in off and "error" not in on:
            report["parity"][name] = compare(off, on)
    print("timing verification", flush=True)
    report["verifications"] = verifications(device)
    report["recommendation"] = recommend(report["verifications"])
    (output / "report.json").write_text(json.dumps(report, indent=1))
    (output / "report.md").write_text(markdown(report))
    return report


def markdown(report: dict) -> str:
    lines = [f"# Self-test, {report['date']}", "", f"versions: {report['versions']}, CANN {report['cann']}", ""]
    lines += ["```", *report["patches"], "```", "", "| engine | step ms | forward | verify | draft | accepted |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, row in report["engines"].items():
        lines.append(f"| {name} | {('{error}' if 'error' in row else ENGINE_ROW).format_map(row)} |")
    for name, row in report["parity"].items():
        names = {"median": "median", "99": "99 %", "max": "largest"}
        differences = ", ".join(f"{name} {row[f'logprob_difference_{key}']:.1e}" for key, name in names.items())
        equal = f"{row['identical']} of {row['responses']} responses identical"
        what = f"log-probabilities of {row['compared_tokens']} tokens, one-token decode against 1+{K} verify"
        lines += ["", f"{name} against off: {equal}; {what}: {differences}."]
    lines += ["", f"| verification, [{8 * (1 + K)}, {QWEN_VOCABULARY:,}] | ms |", "|---|---|"]
    for name, row in report["verifications"].items():
        lines.append(f"| {name} | {row.get('error') or round(row['median_ms'], 3)} |")
    return "\n".join([*lines, "", report["recommendation"], ""])
