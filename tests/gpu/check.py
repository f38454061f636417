"""PYTHONPATH=/tmp/site:. python3 tests/gpu/check.py [--no-engine]: what imports, a line each, then a dummy Qwen3 of two
layers for five seconds in each of vLLM's model runners.

Exit code 0 when all of it works; run it in the project's folder.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shapes import SHAPES, config_of

VERSIONS = """
vllm torch triton transformers tokenizers numpy numba pydantic huggingface-hub safetensors xgrammar matplotlib
psutil sam-rollout
"""
MODULES = """
vllm vllm.platforms.cuda vllm._C_stable_libtorch vllm.entrypoints.llm vllm.engine.arg_utils vllm.v1.engine.core
vllm.v1.executor.uniproc_executor vllm.v1.executor.multiproc_executor vllm.v1.worker.gpu_worker
vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu.model_runner vllm.vllm_flash_attn
vllm.vllm_flash_attn._vllm_fa3_C vllm.v1.attention.backends.flash_attn vllm.model_executor.models.qwen3
vllm.model_executor.model_loader.dummy_loader vllm.model_executor.warmup.kernel_warmup vllm.compilation.backends
vllm.v1.structured_output vllm.v1.sample.rejection_sampler vllm.v1.spec_decode.ngram_proposer
vllm.v1.spec_decode.ngram_proposer_gpu sam.vllm.plugin sam.vllm.bench.engine sam.vllm.v2.device_speculator
sam.tools.bench.__main__
"""
ENGINE_SECONDS = 5.0
START_SECONDS = 240  # after which an engine that has not started is ended


def check_imports() -> int:
    """Import one module after another; the number that failed."""
    failed = 0
    for name in MODULES.split():
        started = time.perf_counter()
        try:
            importlib.import_module(name)
            said = "ok"
        except ModuleNotFoundError as error:
            said = f"MISSING {error.name}"
        except Exception as error:
            said = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        failed += said != "ok"
        print(f"{name}: {said} ({time.perf_counter() - started:.1f} s)", flush=True)
    return failed


def run_engine(folder: str) -> None:
    """Start the dummy model in this process and generate for some seconds."""
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(
        model=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024,
        gpu_memory_utilization=0.3, disable_log_stats=True,
    )  # fmt: skip
    print(f"started in {time.perf_counter() - started:.0f} s", flush=True)
    sampling = SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [100 + number, 200, 300]} for number in range(16)]
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() - began < ENGINE_SECONDS:
        tokens += sum(len(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling, use_tqdm=False))
    print(f"{tokens / (time.perf_counter() - began):.0f} tokens a second, 16 requests at once", flush=True)


def check_engine(name: str, environment: dict[str, str]) -> bool:
    """The same in a process of its own, with its log's end where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(SHAPES["tiny"])))
        log = Path(tempfile.gettempdir()) / f"check-{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, "--engine", folder], stdout=output, stderr=subprocess.STDOUT,
                env=os.environ | environment, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                code = "none: it did not end in time"
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("started in") or "tokens a second" in line]
    words = ("FlashAttention version", "attention backend", "V2 Model Runner", "GPUModelRunner", "cudagraph", "took")
    noted = [line for line in lines if any(word.lower() in line.lower() for word in words)]
    print(f"engine {name}: {'; '.join(said) or 'did not start'}", *noted[-6:], sep="\n  ", flush=True)
    if code != 0:
        print(f"engine {name}: exit code {code}; the end of {log}:", *lines[-40:], sep="\n  ", flush=True)
    return code == 0


def main() -> int:
    if "--engine" in sys.argv:
        run_engine(sys.argv[-1])
        return 0
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for name in VERSIONS.split():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "MISSING"
        print(f"{name} {found}", end="; ")
    print(f"python {sys.version.split()[0]}", flush=True)
    failed = check_imports()
    if failed or "--no-engine" in sys.argv:
        print(f"{failed} modules failed")
        return 1 if failed else 0
    works = [check_engine("second-runner", {}), check_engine("first-runner", {"VLLM_USE_V2_MODEL_RUNNER": "0"})]
    return 0 if all(works) else 1


if __name__ == "__main__":
    sys.exit(main())
