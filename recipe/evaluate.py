"""`python -m recipe.evaluate --model DIR --data FILE.parquet`: pass@1 of one checkpoint with SAM on and off.

Both runs sample alike, with the same seeds: with exact verification the responses should be the same, and their scores
with them. `--temperature 0 1.0` does so greedily and sampled, in one table. Responses are kept in the output folder;
what is complete there is not generated again.
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
from sam.bench.prompts import read_prompts
from sam.command import run_command
from sam.reading import json_rows
from sam.record.atomic import replacing

METHODS = ("sam", "off")
REQUIRED = ("model", "data")


@dataclass(frozen=True)
class Settings:
    """How both runs sample, and how the one with SAM drafts. Temperature 0 is greedy, with one response a problem."""

    model: str
    data: str
    n: int = 1
    temperature: tuple[float, ...] = (1.0,)
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
    from vllm import LLM, SamplingParams

    from recipe.trainer.reward import compute_score

    rows = pandas.read_parquet(settings.data).head(settings.limit or 1 << 40)
    prompts = read_prompts(Path(settings.data), Path(settings.model), settings.limit)
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
    seconds, lines = [], []
    for temperature in settings.temperature:
        n = samples(settings, temperature)
        common = {"temperature": temperature, "top_p": settings.top_p, "max_tokens": settings.max_tokens}
        requests = [
            (problem, settings.seed + problem * n + sample) for problem in range(len(prompts)) for sample in range(n)
        ]
        started = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[problem]} for problem, _ in requests],
            [SamplingParams(seed=seed, **common) for _, seed in requests],
        )
        seconds.append(time.perf_counter() - started)
        for (problem, _), result in zip(requests, outputs, strict=True):
            row, response = rows.iloc[problem], result.outputs[0]
            right = compute_score(row["data_source"], response.text, row["reward_model"]["ground_truth"])["acc"]
            tokens = list(response.token_ids)
            lines.append({"temperature": temperature, "problem": problem, "right": right, "tokens": tokens})
    head = {"settings": asdict(settings), "seconds": seconds}
    with replacing(output) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))


def samples(settings: Settings, temperature: float) -> int:
    """Responses to a problem: greedy ones would all be the same."""
    return settings.n if temperature > 0 else 1


Responses = dict[float, tuple[float, list[dict]]]  # by temperature: seconds, and what was said of each response


def _read(path: Path, settings: Settings) -> Responses | None:
    """None if the file is of other settings or not there."""
    if not path.is_file():
        return None
    head, *lines = json_rows(path, lambda row, _: row)
    if head.get("settings") != json.loads(json.dumps(asdict(settings))):
        return None
    return {
        temperature: (seconds, [line for line in lines if line["temperature"] == temperature])
        for temperature, seconds in zip(settings.temperature, head["seconds"], strict=True)
    }


def interval(right: np.ndarray) -> tuple[float, float]:
    """95 % interval of pass@1 by resampling problems, [problems, n] in and the two ends out."""
    means = right.mean(1)
    chance = np.random.default_rng(0)
    drawn = means[chance.integers(0, len(means), (RESAMPLES, len(means)))].mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def compare(found: dict[str, tuple[float, list[dict]]], n: int) -> dict:
    """Both runs' pass@1 at one temperature, with intervals, the paired test, and how many responses are the same."""
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


def as_table(results: list[dict]) -> str:
    lines = ["| | pass@1 | 95 % | mean tokens | seconds |", "|---|---|---|---|---|"]
    said = []
    for result in results:
        sampling = f"temperature {result['temperature']:g}" if result["temperature"] else "greedy"
        for name in METHODS:
            form = "| {pass_at_1:.4f} | {interval[0]:.4f} to {interval[1]:.4f} | {mean_tokens:.0f} | {seconds:.1f} |"
            lines.append(f"| {sampling}, {name} {form.format(**result[name])}")
        said.append(
            f"{sampling}: {result['problems']} problems, {result['identical']} of {result['responses']} responses "
            f"identical; paired permutation test of the difference: p = {result['p_value']:.3f}"
        )
    return "\n".join([*lines, "", *said])


def evaluate(settings: Settings, output: Path) -> list[dict]:
    """Generate what is missing, each run in a process of its own, and compare them at each temperature.

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
    results = []
    for temperature in settings.temperature:
        at_this = {method: by_temperature[temperature] for method, by_temperature in found.items()}
        results.append({"temperature": temperature, **compare(at_this, samples(settings, temperature))})
    (output / "result.json").write_text(json.dumps(results, indent=1))
    (output / "result.md").write_text(as_table(results) + "\n")
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.evaluate", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/evaluation"))
    accelerators = [*Path("/dev").glob("davinci[0-9]*"), *Path("/dev").glob("nvidia[0-9]*")]
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default=None if accelerators else "cpu")
    for name, kind in Settings.__annotations__.items():
        default = getattr(Settings, name, None)
        convert = {int: int, float: float, int | None: int, tuple[float, ...]: float}.get(kind, str)
        several = {"nargs": "+"} if isinstance(default, tuple) else {}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=convert, default=default, required=name in REQUIRED, **several)
    options = vars(parser.parse_args(arguments))
    output, device = options.pop("output"), options.pop("device")
    options["temperature"] = tuple(dict.fromkeys(options["temperature"]))
    if (lowest := min(options["temperature"])) < 0:
        parser.error(f"--temperature {lowest}: expected 0 (greedy) or more")
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
