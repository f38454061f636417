"""`python -m recipe.against_stock RUN --output DIR`: would stock vLLM have taken longer for the rollouts of this run?

Stock vLLM cannot train on a CPU: its second weight sync fails. So engines of their own take turns (sam.bench): stock
vLLM as it is shipped, this project without drafts, and with the run's drafter. They have the run's model and engine
arguments and emit, request by request, the responses that the run recorded, so that all do the same work: a round is
one generation round of a training step, its requests at once. The report of the run reads what this leaves.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError

from recipe.launch import environment
from recipe.preflight.vllm_command import server_arguments
from recipe.report.runs import ReportError, Run
from recipe.report.stock import FILE, rows_of, text_of
from sam.bench.__main__ import INTERRUPTED, MEMORY_ARGUMENTS, measure
from sam.bench.environment import HUGE_PAGES
from sam.bench.result import times
from sam.bench.settings import RESERVED, STOCK
from sam.command import run_command
from sam.config import WITH_DRAFT_MODEL
from sam.record.atomic import replacing
from sam.record.responses import TOKENS
from sam.record.run_directory import read_responses

ROUNDS = 5
FOLDER = "against_stock"  # of the output; what sam.bench leaves
# Of verl's server, not of its engine; weights are loaded from the model's folder.
NOT_OF_THE_ENGINE = {
    *RESERVED, *MEMORY_ARGUMENTS, "load_format", "seed", "disable_log_stats", "enable_sleep_mode", "logprobs_mode",
    "skip_tokenizer_init", "override_generation_config", "hf_overrides",
}  # fmt: skip


def against_stock(directory: Path, output: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure what is missing of `rounds` rounds, fewer in a short run, and write stock.json into `output`.

    Raises:
        ReportError: no run of two steps is there, without responses, or without speculation; or an engine failed.
    """
    run = Run.load(directory)
    config = OmegaConf.create(run.config)
    if run.name == "off":
        raise ReportError(f"{directory}: its speculation is off; name a run that speculates")
    if not run.has_responses:
        raise ReportError(f"{directory}: no responses recorded there; expected rollouts/<step>.jsonl of every step")
    if len(run.steps) < 2:
        raise ReportError(f"{directory}: it has one training step; expected two or more, the first to warm up on")
    # A text that comes again is not measured: the drafter remembers it.
    rounds = min(rounds, len(run.steps) - 1)
    folder = output / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    steps = spread(run.steps, rounds + 1)  # one more to warm up
    try:
        requests = write_text(run, steps, int(config.actor_rollout_ref.rollout.n), folder / "text.jsonl")
        set_environment(config)
        with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
            words = bench_words(config, folder, requests, rounds)
    except ConfigAttributeError as error:
        raise ReportError(
            f"{directory}: its config.yaml lacks {error.full_key}, it is an older version's: run it again"
        ) from None
    result, code = measure(words)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ReportError(f"{folder}: not all rounds were measured")
    found = {"text": text_of(run, steps), "steps": steps, **result}
    with replacing(output / FILE) as partial:
        partial.write_text(json.dumps(found, indent=1) + "\n")
    return found


def spread(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, at equal distances.

    Example:
        >>> spread(list(range(1, 11)), 4)
        [1, 4, 7, 10]
    """
    return [steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)]


def write_text(run: Run, steps: list[int], samples: int, path: Path) -> int:
    """Write the first generation round of each step as one recording, equally many groups of each, those that have all
    their responses; returns the requests of a round."""
    rounds: list[list[list[dict]]] = []
    for step in steps:
        groups: dict[int, list[dict]] = {}
        responses = read_responses(run.directory, step)
        first = min(row.round for row in responses)
        for row in (row for row in responses if row.round == first):
            groups.setdefault(row.prompt, []).append({name: getattr(row, name).tolist() for name in TOKENS})
        rounds.append([group for group in groups.values() if len(group) == samples])
    prompts = min(map(len, rounds))
    if not prompts:
        raise ReportError(f"{run.source}: no prompt with {samples} responses in a step of {steps}")
    with replacing(path) as partial:
        rows = (row for groups in rounds for group in groups[:prompts] for row in group)
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts * samples


def set_environment(config: DictConfig) -> None:
    """The variables that a run's engine has, but for those that the user has set, and that sam.bench sets for each."""
    variables = environment.cpu_variables(config) if config.trainer.device == "cpu" else {}
    variables = {name: value for name, value in variables.items() if name not in HUGE_PAGES}  # stock has none
    for name, value in {**variables, "VLLM_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)


def bench_words(config: DictConfig, folder: Path, requests: int, rounds: int) -> list[str]:
    """The command line of sam.bench for a run's config. Without seeds, as verl asks vLLM; a round is one batch, as one
    generation round is: the recording has no other texts for more."""
    rollout, trained = config.actor_rollout_ref.rollout, []
    if config.speculation.method in WITH_DRAFT_MODEL:
        if not (drafter := Path(config.speculation.draft_model)).is_dir():
            raise ReportError(f"{drafter}: the run drafted with it, and it is not there: put it back")
        trained = ["--draft-model", str(drafter)]
    return [
        *("--model", str(config.actor_rollout_ref.model.path), "--text", str(folder / "text.jsonl")),
        *("--requests", str(requests), "--samples", str(rollout.n), "--responses", "1"),
        *("--temperature", str(rollout.temperature)),
        *("--variants", STOCK, "off", config.speculation.method),
        *("--draft-tokens", str(config.speculation.num_speculative_tokens), *trained),
        *("--rounds", str(rounds), "--no-seeds", "--output", str(folder), "--resume"),
        *engine_words(server_arguments(config)),
    ]


def engine_words(arguments: dict[str, Any]) -> list[str]:
    """vLLM's arguments as words of a command line, without those that are verl's or the bench's.

    Example:
        >>> engine_words({"dtype": "float32", "enforce_eager": True, "seed": 3, "quantization": None})
        ['--dtype', 'float32', '--enforce-eager']
    """
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if name in NOT_OF_THE_ENGINE or value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def measured(found: dict[str, Any]) -> str:
    """One line for the screen."""
    rows = rows_of(found)
    stock, others = rows.pop(STOCK), [f"{name} {row['seconds']:.2f} s, {times(row)}" for name, row in rows.items()]
    rounds = f"{stock['rounds']} rounds of {stock['requests']} requests that emit the run's own text"
    return f"engine alone: stock vLLM {stock['seconds']:.2f} s a round; {'; '.join(others)} ({rounds})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.against_stock", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a run that speculates")
    parser.add_argument("--output", type=Path, help="where to write stock.json; by default beside the run")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each engine that count")
    options = parser.parse_args(arguments)

    def shown() -> str:
        return measured(against_stock(options.run, options.output or options.run.resolve().parent, options.rounds))

    try:
        return run_command(shown, errors=(ValueError, OSError, RuntimeError))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
