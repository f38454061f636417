"""`sam bench`: engines beside stock vLLM (`--model DIR`), on the text of a recorded run (`--run RUN`), or whole runs of
verl (`--config-name NAME`). All take turns, round by round, and are compared in the same round.

With Python's standard library alone until something is measured: scripts/bench_cuda.sh asks before anything is
installed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam.command import INTERRUPTED, Parser, laid_out, number, run_command
from sam.tools.bench.__main__ import measure_engines
from sam.tools.bench.settings import RESERVED, STOCK, parse

if TYPE_CHECKING:
    from recipe.sam_dapo.report.runs import Run

# Of verl's server, not of its engine; weights are loaded from the model's folder.
NOT_OF_THE_ENGINE = {
    *RESERVED, "gpu_memory_utilization", "kv_cache_memory_bytes", "load_format", "seed", "disable_log_stats",
    "enable_sleep_mode", "logprobs_mode", "skip_tokenizer_init", "override_generation_config", "hf_overrides",
}  # fmt: skip


def compare_with_stock(words: list[str]) -> int:
    """`--run RUN`: would stock vLLM have taken longer for its rollouts?

    Stock vLLM cannot train on a CPU: its second weight sync fails. So engines of their own take turns: stock vLLM as it
    is shipped, this project without drafts, and with the run's drafter. They have the run's model and engine arguments
    and emit, request by request, responses that the run recorded, so that all do the same work: a round is as many
    requests at once as a generation round of the run. The report of the run reads what this leaves.
    """
    parser = Parser(prog="sam bench", description="Would stock vLLM have taken longer for the rollouts of a run?")
    parser.add_argument("--run", type=Path, required=True, help="directory of a run that speculates")
    parser.add_argument("--output", type=Path, help="where to write stock.json; by default beside the run")
    parser.add_argument("--rounds", type=number(1), default=5, help="runs of each engine that count, at most")
    parser.add_argument("--json", action="store_true", help="print one object, as stock.json has it")
    options = parser.parse_args(words)
    from recipe.sam_dapo.report.runs import STOCK_FILE, Run, rows_of, text_of
    from sam.record import replacing
    from sam.record.responses import responses_path
    from sam.tools.bench.result import measure, times

    run = Run.load(options.run)
    output = options.output or options.run.resolve().parent
    if run.name == "off":
        raise ValueError(f"{run.directory}: its speculation is off; name a run that speculates")
    if not run.has_responses:
        raise ValueError(f"{run.directory}: no responses recorded there; expected rollouts/<step>.jsonl of every step")
    folder = output / "against_stock"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    rounds = max(1, min(options.rounds, len(run.steps) - 1))
    steps = spread(run.steps, rounds + 1)  # one to warm up
    text = folder / "text.jsonl"
    with replacing(text) as partial:
        partial.write_bytes(b"".join(responses_path(run.directory, step).read_bytes() for step in steps))
    words = words_of(run)
    words += ["--text", str(text)]
    words += ["--output", str(folder)]
    words += ["--rounds", str(rounds)]
    measured, code = measure(parse(words))
    if code:
        return code
    result = {"text": text_of(run, steps), "steps": steps, **measured}
    with replacing(output / STOCK_FILE) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
        return 0
    stock, *others = rows_of(result).values()
    figures = [f"{row['variant']} {row['seconds']:.2f} s, {times(row)}" for row in others]
    work = f"{stock['rounds']} rounds of {stock['requests']} requests that emit the run's own text"
    print(f"engine alone: stock vLLM {stock['seconds']:.2f} s a round; {'; '.join(figures)} ({work})")
    return 0


def spread(steps: list[int], count: int) -> list[int]:
    """So many of a run's steps, from the first to the last.

    Example:
        >>> spread([1, 2, 3, 4, 5, 6], 3)
        [1, 3, 6]
    """
    import numpy as np

    places = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return [steps[place] for place in np.unique(places)]


def words_of(run: Run) -> list[str]:
    """The command line of a run's engines, without seeds, as verl asks vLLM; a round is one batch."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError

    from recipe.sam_dapo.preflight.vllm_command import server_arguments
    from sam.config import WITH_DRAFT_MODEL
    from sam.record.responses import read_responses

    config = OmegaConf.create(run.config)
    rollout = config.actor_rollout_ref.rollout
    speculation = config.speculation
    try:
        _set_variables(config)
        with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
            engine = engine_words(server_arguments(config))
    except ConfigAttributeError as error:
        lacks = f"its config.yaml lacks {error.full_key}, it is an older version's: run it again"
        raise ValueError(f"{run.directory}: {lacks}") from None
    rounds = [row.round for row in read_responses(run.directory, run.steps[0])]
    samples = int(rollout.n)
    groups = max(1, rounds.count(min(rounds)) // samples)
    words = ["--model", str(config.actor_rollout_ref.model.path)]
    words += ["--no-seeds"]
    words += ["--requests", str(samples * groups)]
    words += ["--samples", str(samples)]
    words += ["--responses", "1"]
    words += ["--temperature", str(rollout.temperature)]
    words += ["--variants", STOCK, "off", speculation.method]
    words += ["--draft-tokens", str(speculation.num_speculative_tokens)]
    if speculation.method in WITH_DRAFT_MODEL:
        words += ["--draft-model", str(speculation.draft_model)]
    return words + engine


def _set_variables(config) -> None:
    """Set what a run's engine has, but for what the user has set, and for what each engine gets by itself."""
    from recipe.sam_dapo.launch import environment
    from sam.config import HUGE_PAGES

    variables = {"VLLM_LOGGING_LEVEL": "WARNING"}
    if config.trainer.device == "cpu":
        variables = environment.cpu_variables(config) | variables
    for name, value in variables.items():
        if name not in HUGE_PAGES:  # stock has none
            os.environ.setdefault(name, value)


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
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            words += [f"--{flag}", text]
    return words


def compare_whole_runs(words: list[str]) -> int:
    """`--config-name NAME`: policies, methods, sharing, routers, numbers of replicas, in whole training runs.

    A variant's seconds are compared with the first one's of the same round. Sampling is exact: all runs must generate
    the same tokens, which is checked.
    """
    parser = Parser(prog="sam bench", description="Compares settings in whole training runs that take turns.")
    parser.add_argument("--config-name", required=True, help="a file of configs/ without .yaml")
    variants = "overrides of each, in quotes; the first is the peer"
    parser.add_argument("--variants", nargs="+", required=True, help=variants)
    parser.add_argument("--output", type=Path, default=Path("outputs/whole_runs"), help="its finished runs are kept")
    parser.add_argument("--rounds", type=number(1), default=5, help="runs of each variant (default 5)")
    parser.add_argument("--overrides", nargs="*", default=[], help="Hydra overrides of every run")
    parser.add_argument("--json", action="store_true", help="print one object, with the rows of result.json")
    options = parser.parse_args(words)
    if len(set(options.variants)) < max(2, len(options.variants)):
        raise ValueError(f"--variants {options.variants}: expected two or more, all different")
    return run_command(lambda: compared_runs(options), (ValueError,), code=1)


def compared_runs(options) -> list[str]:
    """Train what is missing, write result.json, and lay out a row for each variant.

    Raises:
        ValueError: as `trained`.
    """
    from sam.tools.bench.result import compared, middle, times

    rounds = trained(options)
    rows = []
    for variant, *runs in zip(options.variants, *rounds, strict=True):
        seconds = [run.seconds(run.steps) for run in runs]
        peers = rows[0]["seconds"] if rows else seconds
        lengths = [run.acceptance()[0] for run in runs]
        rows.append({"variant": variant, "seconds": seconds, **compared(seconds, peers), "acceptance_length": lengths})
    (options.output / "result.json").write_text(json.dumps(rows, indent=1) + "\n")
    if options.json:
        return [json.dumps({"rows": rows})]
    cells = []
    for row in rows:
        seconds = row["seconds"]
        spread = f"{middle(seconds, 2):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
        lengths = [length for length in row["acceptance_length"] if length is not None]
        length = f"{middle(lengths, 2):.2f}" if lengths else "-"
        cells.append([row["variant"], spread, length, times(row), row["answer"]])
    header = ["variant", "rollout seconds", "length", "over the first", f"of {options.rounds} rounds"]
    return laid_out(header, cells)


def trained(options) -> list[list[Run]]:
    """Train each variant once a round, but for runs that are finished; returns the runs by round and variant.

    Raises:
        ValueError: a run failed, has other steps or responses than the first one, or has not recorded them.
    """
    from tqdm import tqdm

    from recipe.sam_dapo.record import STATE_FILE, read_json
    from recipe.sam_dapo.report.runs import Run, compare_responses
    from sam.tools.bench.engines import turns

    output = options.output.absolute()
    variants = {f"variant_{n}": overrides for n, overrides in enumerate(options.variants, 1)}
    rounds = range(1, options.rounds + 1)
    names = list(variants)
    order = [(output / f"round_{round_}" / name, name) for round_ in rounds for name in turns(names, round_)]
    for directory, name in tqdm(order, unit="run", disable=None):
        if read_json(directory / STATE_FILE).get("phase") == "finished":
            continue
        command = [sys.executable, "-m", "recipe.sam_dapo.main_dapo"]
        command += ["--config-name", options.config_name]
        command += [f"run_dir={directory}"]
        command += [f"trainer.experiment_name={output.name}_{directory.parent.name}_{name}"]
        command += ["trainer.save_freq=-1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
        command += shlex.split(variants[name])
        command += options.overrides
        # The runs' own words go where nobody parses them.
        code = subprocess.run(command, stdout=sys.stderr if options.json else None).returncode
        if code:
            raise ValueError(f"{directory}: the run ended with exit code {code}, see {directory}/train.log")
    runs = [[Run.load(output / f"round_{round_}" / name) for name in names] for round_ in rounds]
    first = runs[0][0]
    for run in itertools.chain(*runs):
        wrong = []
        counts = compare_responses(run, first)
        for step in first.steps:
            same, common = counts.get(step, (0, 0))
            if same < max(1, common):
                wrong.append(step)
        if run.steps != first.steps or wrong:
            raise ValueError(f"{run.directory}: other steps or responses than {first.directory}, first {wrong[:1]}")
    return runs


MODES = {"--run": compare_with_stock, "--config-name": compare_whole_runs}


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    flags = [word.partition("=")[0] for word in words]
    mode = next((MODES[flag] for flag in flags if flag in MODES), measure_engines)
    try:
        return run_command(lambda: mode(words), errors=(ValueError, OSError, RuntimeError))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
