"""`sam doctor --npu-selftest`: what only a device can show, in about five minutes.

Parity: the same requests without speculation, with sam, and with sam and graphs; tokens must be equal where logits are.
Precision: log-probabilities of tokens decoded one by one against the same tokens verified 1 + k at once, the operators'
own difference. Timing: engine steps, drafting, and exact verification at a vocabulary of 151,936. Writes report.json.
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

from recipe.sam_dapo.patch import Patches
from recipe.sam_dapo.preflight import compatibility
from recipe.sam_dapo.tiny.model import ModelSettings, build_model
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from sam import verify
from sam.verify.exact import uniforms

ENGINES = ("off", "sam", "sam, graph")
TIMES = ("step_ms", "forward_ms", "verify_ms", "draft_ms")
QWEN_VOCABULARY = 151_936
REQUESTS = 16
LENGTH = 128  # of a response, tokens
K = 3  # draft tokens
CODE = "import sys; from recipe.sam_dapo.preflight import npu_selftest; npu_selftest.run_engine(*sys.argv[1:])"


def run_engine(model: str, device: str, name: str) -> None:
    """Generate in this process, half of the requests greedy, half sampled with seeds; prints a row of the report."""
    from vllm import LLM, SamplingParams

    from sam.vllm.plugin import installed
    from sam.vllm.step_recorder import StepRecorder

    options: dict = {"enforce_eager": True}
    if name == "sam, graph":
        compilation = {"cudagraph_mode": "FULL"}
        if device == "cpu":
            compilation["mode"] = 0
        options = {"compilation_config": compilation}
    if name != "off":
        options["speculative_config"] = {"model": "sam.SamProposer", "num_speculative_tokens": K}
    speculation = {"verification": "exact", "policy": "always"}
    llm = LLM(
        model, skip_tokenizer_init=True, dtype="float32" if device == "cpu" else "bfloat16", seed=0, max_model_len=512,
        max_num_seqs=REQUESTS, gpu_memory_utilization=0.3, additional_config={"speculation": speculation}, **options,
    )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    recorder = StepRecorder.attach(runner)
    chance = random.Random(0)
    vocabulary = runner.model_config.get_vocab_size()
    texts = [[chance.randrange(vocabulary) for _ in range(8)] * 2 for _ in range(REQUESTS)]
    common = {"max_tokens": LENGTH, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    parameters = [SamplingParams(temperature=0.0 if row % 2 else 0.5, seed=row, **common) for row in range(REQUESTS)]
    answers = llm.generate([{"prompt_token_ids": text} for text in texts], parameters, use_tqdm=True)
    outputs = [answer.outputs[0] for answer in answers]
    steps = recorder.take()
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
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    command = [sys.executable, "-c", CODE, str(model), device, name]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=variables)
    for line in finished.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"error": f"the engine's process ended with code {finished.returncode}; its messages are above"}


def compare(off: dict, on: dict) -> dict:
    """Identical responses, and the differences of log-probabilities up to each response's first other token."""
    differences = []
    identical = 0
    for a, b, x, y in zip(off["tokens"], on["tokens"], off["logprobs"], on["logprobs"], strict=True):
        same = len(os.path.commonprefix([a, b]))
        identical += a == b
        differences += [abs(p - q) for p, q in zip(x[:same], y[:same], strict=True)]
    return {
        "identical": identical,
        "responses": len(off["tokens"]),
        "compared_tokens": len(differences),
        "logprob_difference_median": statistics.median(differences),
        "logprob_difference_max": max(differences),
    }


def verification_ms(device: str, batch: int = 8) -> float:
    """Median milliseconds of ten exact verifications as the engine does them, logits [batch x (1 + K), vocabulary]."""
    logits = 3 * torch.randn(batch, K + 1, QWEN_VOCABULARY, generator=torch.Generator().manual_seed(0)).to(device)
    drafts = torch.nn.functional.pad(logits[:, :K].argmax(-1), (0, 1), value=-2)
    keys = torch.arange(batch).repeat_interleave(K + 1).numpy()
    positions = torch.arange(K + 1).repeat(batch).numpy()
    times = []
    for _ in range(11):
        started = time.perf_counter()
        draws = torch.from_numpy(uniforms(keys, positions)).to(device, non_blocking=True)
        sampled = verify.sample_inverse_cdf(logits.flatten(0, 1), draws).view(batch, K + 1)
        verify.accept_matching(sampled, drafts).cpu()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])  # the first warms up


def selftest(output: Path, device: str) -> int:
    """Run all engines; what fails is in the report, and the rest goes on. 1: one of them failed."""
    output.mkdir(parents=True, exist_ok=True)
    # A random Qwen3 with the head size of the real ones, whose greedy text repeats.
    settings = ModelSettings(hidden_size=256, intermediate_size=512, head_dim=128, initializer_range=0.1)
    with tempfile.TemporaryDirectory() as folder:
        build_model(settings, build_tokenizer(), seed=3).to(torch.bfloat16).save_pretrained(folder)
        engines = {name: engine_in_process(Path(folder), device, name) for name in ENGINES}
    worked = {name: row for name, row in engines.items() if "error" not in row}
    parity = {}
    if "off" in worked:
        parity = {name: compare(worked["off"], row) for name, row in worked.items() if name != "off"}
    report = {
        "versions": {name: version for name, version, _ in compatibility.installed_parts("npu")},
        "patches": Patches().status(),
        "parity": parity,
        "exact_verification_ms": verification_ms(device),
    }
    for name, row in engines.items():
        report[name] = {key: value for key, value in row.items() if key not in ("tokens", "logprobs")}
    text = json.dumps(report, indent=1)
    print(text)
    (output / "report.json").write_text(text)
    return int(any("error" in row for row in engines.values()))
