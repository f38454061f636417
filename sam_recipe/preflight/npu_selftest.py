"""`python -m sam_recipe.preflight --npu-selftest`: what only a device can show, in about five minutes.

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

from sam import verify
from sam.verify.exact import uniforms
from sam_recipe.launch import versions
from sam_recipe.patch import Patches
from sam_recipe.preflight import compatibility
from sam_recipe.preflight.machine import first_line
from sam_recipe.tiny.model import ModelSettings, build_model
from sam_recipe.tiny.tokenizer import build_tokenizer

ENGINES = {"off": (False, None), "sam": (True, None), "sam, graph": (True, "FULL")}  # whether it drafts, its graphs
TIMES = ("step_ms", "forward_ms", "verify_ms", "draft_ms")
QWEN_VOCABULARY = 151_936
REQUESTS, LENGTH, K = 16, 128, 3
# Verification may take this share of a decode step of about 20 ms before another rule is recommended.
SLOW_VERIFICATION_MS = 2.0
CODE = "import sys; from sam_recipe.preflight import npu_selftest; npu_selftest.run_engine(*sys.argv[1:])"


def write_tiny_model(path: Path) -> None:
    """A random Qwen3 with the head size of the real ones, whose greedy text repeats."""
    settings = ModelSettings(hidden_size=256, intermediate_size=512, head_dim=128, initializer_range=0.1)
    build_model(settings, build_tokenizer(), seed=3).to(torch.bfloat16).save_pretrained(path)


def run_engine(model: str, device: str, name: str) -> None:
    """Generate in this process, half of the requests greedy, half sampled with seeds; prints a row of the report."""
    from vllm import LLM, SamplingParams

    from sam.vllm.plugin import installed
    from sam.vllm.step_recorder import StepRecorder

    drafts, graph = ENGINES[name]
    options: dict = {"enforce_eager": True}
    if graph:
        options = {"compilation_config": {"cudagraph_mode": graph} | ({"mode": 0} if device == "cpu" else {})}
    if drafts:
        options["speculative_config"] = {"model": "sam.SamProposer", "num_speculative_tokens": K}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32" if device == "cpu" else "bfloat16",
        seed=0,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.3,
        additional_config={"speculation": {"verification": "exact", "batch_size_threshold": 1000}},
        **options,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    recorder, chance, vocabulary = StepRecorder.attach(runner), random.Random(0), runner.model_config.get_vocab_size()
    texts = [[chance.randrange(vocabulary) for _ in range(8)] * 2 for _ in range(REQUESTS)]
    common = {"max_tokens": LENGTH, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    parameters = [SamplingParams(temperature=0.0 if row % 2 else 0.5, seed=row, **common) for row in range(REQUESTS)]
    answers = llm.generate([{"prompt_token_ids": text} for text in texts], parameters, use_tqdm=True)
    outputs, steps = [answer.outputs[0] for answer in answers], recorder.take()
    row = {
        "status": installed(runner),
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
        **{name: int(getattr(steps, name).sum()) for name in ("drafted", "accepted", "emitted")},
        **{name: float(statistics.median(getattr(steps, name))) for name in TIMES},
    }
    print("RESULT " + json.dumps(row))


def engine_in_process(model: Path, device: str, name: str) -> dict:
    """An engine keeps its device memory until its process ends."""
    finished = subprocess.run(
        [sys.executable, "-c", CODE, str(model), device, name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"},
    )
    for line in finished.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"error": f"the engine's process ended with code {finished.returncode}; its messages are above"}


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


def verifications(device: str, batch: int = 8) -> dict[str, dict]:
    """Median milliseconds of both ways to verify, logits [batch x (1 + K), vocabulary]; `error` where one fails."""
    logits = 3 * torch.randn(batch, K + 1, QWEN_VOCABULARY, generator=torch.Generator().manual_seed(0)).to(device)
    drafts = torch.nn.functional.pad(logits[:, :K].argmax(-1), (0, 1), value=-2)
    temperature, ends = torch.ones(batch, device=device), (torch.arange(1, batch + 1) * K).to(device)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=temperature, generators={})
    keys = torch.arange(batch).repeat_interleave(K + 1).numpy()
    positions = torch.arange(K + 1).repeat(batch).numpy()

    def exact() -> torch.Tensor:
        """As the engine does it: uniforms on the host, one copy, two calls."""
        draws = torch.from_numpy(uniforms(keys, positions)).to(device, non_blocking=True)
        sampled = verify.sample_inverse_cdf(logits.flatten(0, 1), draws).view(batch, K + 1)
        return verify.accept_matching(sampled, drafts)

    def rejection() -> torch.Tensor:
        """The bonus tokens drawn as vLLM does: an exponential race."""
        race = logits[:, K].softmax(-1) / torch.empty_like(logits[:, K]).exponential_()
        bonus, target = race.argmax(-1)[:, None].to(torch.int32), logits[:, :K].flatten(0, 1)
        drafted = drafts[:, :K].flatten()
        return verify.rejection_sample(drafted, [K] * batch, K, ends, None, target, bonus, metadata)

    rows = {}
    for name, call in (("exact", exact), ("rejection", rejection)):
        try:
            rows[name] = {"median_ms": _median_ms(call, device)}
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {first_line(error)}"}
    return rows


def _median_ms(call: Callable[[], object], device: str) -> float:
    """Of ten calls after one to warm up."""
    times = []
    for _ in range(11):
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


def selftest(output: Path, device: str) -> int:
    """Run all engines; what fails is in the report, and the rest goes on. 1: one of them failed."""
    output.mkdir(parents=True, exist_ok=True)
    engines: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        for number, name in enumerate(ENGINES, start=1):
            print(f"{number}/{len(ENGINES)}: generating with {name}", flush=True)
            engines[name] = engine_in_process(Path(folder), device, name)
    compared = [name for name in engines if name != "off" and "error" not in engines["off"] | engines[name]]
    print("timing verification", flush=True)
    rows = verifications(device)
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: versions.installed(name) for name in ("torch", "torch-npu", "vllm", "vllm-ascend")},
        "cann": compatibility.cann_version(),
        "patches": [Patches().status()],
        "engines": engines,
        "parity": {name: compare(engines["off"], engines[name]) for name in compared},
        "verifications": rows,
        "recommendation": recommend(rows),
    }
    (output / "report.json").write_text(json.dumps(report, indent=1))
    (output / "report.md").write_text(text := markdown(report))
    print(text)
    return int(any("error" in row for row in engines.values()))


def markdown(report: dict) -> str:
    lines = [f"# Self-test, {report['date']}", "", f"versions: {report['versions']}, CANN {report['cann']}", ""]
    lines += ["```", *report["patches"], "```", "", "| engine | step ms | forward | verify | draft | accepted |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, row in report["engines"].items():
        times = "" if "error" in row else " | ".join(f"{row[time]:.2f}" for time in TIMES)
        lines.append(f"| {name} | " + (row.get("error") or f"{times} | {row['accepted']} of {row['drafted']}") + " |")
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
