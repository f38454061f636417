"""`python -m recipe.evaluate --model DIR --data FILE.parquet`: pass@1 of one checkpoint with SAM on and off.

Both runs sample alike, with the same seeds: with exact verification the responses should be the same, and their scores
with them. Responses are kept in the output folder; what is complete there is not generated again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from recipe.report.paired_test import RESAMPLES, sign_flip_p_value
from sam.command import run_command
from sam.record.atomic import replacing

METHODS = ("sam", "off")
REQUIRED = ("model", "data")


@dataclass(frozen=True)
class Settings:
    """How both runs sample, and how the one with SAM drafts."""

    model: str
    data: str
    n: int = 1
    temperature: float = 1.0
    top_p: float = 0.7
    max_tokens: int = 34816
    limit: int | None = None
    seed: int = 0
    k: int = 3
    threshold: int = 8
    max_num_seqs: int = 128
    tensor_parallel: int = 1
    dtype: str = "bfloat16"


def generate(settings: Settings, method: str, output: Path) -> None:
    """Generate with vLLM in this process, score, and write one line for each response."""
    import pandas
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from recipe.trainer.reward import compute_score

    rows = pandas.read_parquet(settings.data).head(settings.limit or 1 << 40)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    speculation = {"method": method, "batch_size_threshold": settings.threshold, "verification": "exact"}
    drafting = {"model": "sam.vllm.proposer.SamProposer", "num_speculative_tokens": settings.k}
    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel_size=settings.tensor_parallel,
        speculative_config=drafting if method == "sam" else None,
        additional_config={"speculation": speculation},
        enforce_eager=True,
    )
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_p", "max_tokens")}
    prompts, parameters = [], []
    for problem, messages in enumerate(rows["prompt"]):
        chat = list(map(dict, messages))
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for sample in range(settings.n):
            seed = settings.seed + problem * settings.n + sample
            prompts.append({"prompt_token_ids": ids})
            parameters.append(SamplingParams(seed=seed, **sampling))
    started = time.perf_counter()
    outputs = llm.generate(prompts, parameters)
    seconds = time.perf_counter() - started
    lines = [json.dumps({"settings": asdict(settings), "seconds": seconds})]
    for index, result in enumerate(outputs):
        row, response = rows.iloc[index // settings.n], result.outputs[0]
        score = compute_score(row["data_source"], response.text, row["reward_model"]["ground_truth"])
        tokens = list(response.token_ids)
        lines.append(json.dumps({"problem": index // settings.n, "right": score["acc"], "tokens": tokens}))
    with replacing(output) as partial:
        partial.write_text("\n".join(lines) + "\n")


def _read(path: Path, settings: Settings) -> tuple[float, list[dict]] | None:
    """Seconds and responses, None if the file is of other settings or not there."""
    if not path.is_file():
        return None
    head, *lines = map(json.loads, path.read_text().splitlines())
    return (head["seconds"], lines) if head.get("settings") == asdict(settings) else None


def interval(right: np.ndarray) -> tuple[float, float]:
    """95 % interval of pass@1 by resampling problems, [problems, n] in and the two ends out."""
    means = right.mean(1)
    chance = np.random.default_rng(0)
    drawn = means[chance.integers(0, len(means), (RESAMPLES, len(means)))].mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def compare(found: dict[str, tuple[float, list[dict]]], n: int) -> dict:
    """Both runs' pass@1 with intervals, the paired test, and how many responses are the same."""
    right = {name: np.array([row["right"] for row in rows]).reshape(-1, n) for name, (_, rows) in found.items()}
    same = sum(a["tokens"] == b["tokens"] for a, b in zip(found["sam"][1], found["off"][1], strict=True))
    result = {"problems": len(right["sam"]), "responses": int(right["sam"].size), "identical": same}
    for name, (seconds, rows) in found.items():
        result[name] = {
            "pass_at_1": float(right[name].mean()),
            "interval": interval(right[name]),
            "mean_tokens": float(np.mean([len(row["tokens"]) for row in rows])),
            "seconds": seconds,
        }
    return {**result, "p_value": sign_flip_p_value(right["sam"].mean(1) - right["off"].mean(1))}


def as_table(result: dict) -> str:
    lines = ["| | pass@1 | 95 % | mean tokens | seconds |", "|---|---|---|---|---|"]
    for name in METHODS:
        form = "| {} | {pass_at_1:.4f} | {interval[0]:.4f} to {interval[1]:.4f} | {mean_tokens:.0f} | {seconds:.1f} |"
        lines.append(form.format(name, **result[name]))
    lines.append(
        f"\n{result['problems']} problems, {result['identical']} of {result['responses']} responses identical; paired "
        f"permutation test of the difference: p = {result['p_value']:.3f}"
    )
    return "\n".join(lines)


def evaluate(settings: Settings, output: Path) -> dict:
    """Generate what is missing, each run in a process of its own, and compare.

    Raises:
        RuntimeError: a run's process failed; its messages are above.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "settings.json").write_text(json.dumps(asdict(settings), indent=1))
    found = {}
    for method in METHODS:
        path = output / f"{method}.jsonl"
        if _read(path, settings) is None:
            code = f"from recipe.evaluate import *; generate({settings!r}, {method!r}, Path({str(path)!r}))"
            if subprocess.run([sys.executable, "-c", code]).returncode:
                raise RuntimeError(f"generating with speculation={method} failed; its messages are above")
        found[method] = _read(path, settings)
    result = compare(found, settings.n)
    (output / "result.json").write_text(json.dumps(result, indent=1))
    (output / "result.md").write_text(as_table(result) + "\n")
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.evaluate", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/evaluation"))
    accelerators = [*Path("/dev").glob("davinci[0-9]*"), *Path("/dev").glob("nvidia[0-9]*")]
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default=None if accelerators else "cpu")
    for name, kind in Settings.__annotations__.items():
        default = getattr(Settings, name, None)
        convert = {int: int, float: float, int | None: int}.get(kind, str)
        parser.add_argument(f"--{name.replace('_', '-')}", type=convert, default=default, required=name in REQUIRED)
    options = vars(parser.parse_args(arguments))
    output, device = options.pop("output"), options.pop("device")
    for key in REQUIRED:
        if not Path(options[key]).exists():
            print(f"error: --{key} {options[key]}: there is no such path", file=sys.stderr)
            return 2
    if device == "cpu":
        from recipe.launch.environment import CPU, FIRST_MODEL_RUNNER, OFFLINE

        for name, value in {**OFFLINE, **FIRST_MODEL_RUNNER, **CPU}.items():
            os.environ.setdefault(name, value)
    return run_command(lambda: as_table(evaluate(Settings(**options), output)), (RuntimeError,), code=1)


if __name__ == "__main__":
    sys.exit(main())
