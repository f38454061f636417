"""`python -m recipe.preflight --npu-selftest`: what only a device can show, in about five minutes.

Parity: the same requests without speculation, with sam, and with sam and graphs; tokens must be equal where logits are.
Precision: log-probabilities of tokens decoded one by one against the same tokens verified 1 + k at once, the operators'
own difference. Timing: engine steps, drafting, and both ways to verify, at the vocabulary of Qwen3. Writes report.json
and report.md and prints the latter.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from recipe.launch import source_patches, versions
from recipe.preflight import compatibility

ENGINES = {
    "off": {"method": "off"},
    "sam": {"method": "sam"},
    "sam, graph": {"method": "sam", "graph": "FULL"},
    "sam, rejection": {"method": "sam", "verification": "rejection"},
}
TIMES = ("step_ms", "forward_ms", "verify_ms", "draft_ms")
QWEN_VOCABULARY = 151_936
REQUESTS, LENGTH, K = 16, 128, 3
# Verification may take this share of a decode step of about 20 ms before another rule is recommended.
SLOW_VERIFICATION_MS = 2.0
CODE = "import sys; from recipe.preflight import npu_selftest; npu_selftest.run_engine(*sys.argv[1:])"


def write_model(path: Path) -> None:
    """A random Qwen3 with the vocabulary and head size of the real ones, whose greedy text repeats."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    common = {"vocab_size": QWEN_VOCABULARY, "tie_word_embeddings": True, "initializer_range": 0.1}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **common)).to(torch.bfloat16).save_pretrained(path)


def run_engine(model: str, device: str, fields: str) -> None:
    """Generate in this process, half of the requests greedy, half sampled with seeds; prints a row of the report."""
    from vllm import LLM, SamplingParams

    from sam.vllm.plugin import installed
    from sam.vllm.step_recorder import StepRecorder

    settings = {"verification": "exact", "graph": None, **json.loads(fields)}
    options: dict = {"enforce_eager": True}
    if settings["graph"]:
        options = {
            "compilation_config": {"cudagraph_mode": settings["graph"]} | ({"mode": 0} if device == "cpu" else {})
        }
    if settings["method"] == "sam":
        options["speculative_config"] = {"model": "sam.SamProposer", "num_speculative_tokens": K}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32" if device == "cpu" else "bfloat16",
        seed=0,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.3,
        additional_config={"speculation": {"verification": settings["verification"], "batch_size_threshold": 1000}},
        **options,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    recorder, chance = StepRecorder.attach(runner), random.Random(0)
    texts = [[chance.randrange(QWEN_VOCABULARY) for _ in range(8)] * 2 for _ in range(REQUESTS)]
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


def engine_in_process(model: Path, device: str, fields: dict) -> dict:
    """An engine keeps its device memory until its process ends."""
    finished = subprocess.run(
        [sys.executable, "-c", CODE, str(model), device, json.dumps(fields)],
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


def recommend(exact: dict, rejection: dict) -> str:
    """Which verification to choose, by the rows of two engines."""
    if "error" in exact:
        return f"exact verification does not run here ({exact['error']}): set speculation.verification=rejection"
    took, other = exact["verify_ms"], rejection.get("verify_ms", float("inf"))
    if other < took > SLOW_VERIFICATION_MS:
        return (
            f"exact verification takes {took:.1f} ms here, rejection sampling {other:.1f}: "
            "speculation.verification=rejection is faster, but its tokens differ from those without speculation"
        )
    return f"keep speculation.verification=exact: {took:.2f} ms for {REQUESTS} requests"


def selftest(output: Path, device: str) -> int:
    """Run all engines; what fails is in the report, and the rest goes on. 1: one of them failed."""
    output.mkdir(parents=True, exist_ok=True)
    engines: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for number, (name, fields) in enumerate(ENGINES.items(), start=1):
            print(f"{number}/{len(ENGINES)}: generating with {name}", flush=True)
            engines[name] = engine_in_process(Path(folder), device, fields)
    compared = [name for name in ("sam", "sam, graph") if "error" not in engines["off"] | engines[name]]
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: versions.installed(name) for name in ("torch", "torch-npu", "vllm", "vllm-ascend")},
        "cann": compatibility.cann_version(),
        "patches": [source_patches.status(series) for series in source_patches.load()],
        "engines": engines,
        "parity": {name: compare(engines["off"], engines[name]) for name in compared},
        "recommendation": recommend(engines["sam"], engines["sam, rejection"]),
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
    return "\n".join([*lines, "", report["recommendation"], ""])
