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

from sam.bench.__main__ import measure_engines
from sam.bench.settings import RESERVED, STOCK, parse
from sam.command import INTERRUPTED, Parser, laid_out, number, run_command

if TYPE_CHECKING:
    from recipe.sam_dapo.report.runs import Run

# Of verl's server, not of its engine; weights are loaded from the model's folder.
NOT_OF_THE_ENGINE = {
    *RESERVED, "gpu_memory_utilization", "kv_cache_memory_bytes", "load_format", "seed", "disable_log_stats",
    "enable_sleep_mode", "logprobs_mode", "skip_tokenizer_init", "override_generation_config", "hf_overrides",
}  # fmt: skip


def of_a_run(words: list[str]) -> int:
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
    import numpy as np

    from recipe.sam_dapo.report.runs import STOCK_FILE, Run, rows_of, text_of
    from sam.bench.result import measure, times
    from sam.record import replacing
    from sam.record.responses import responses_path

    run, output = Run.load(options.run), options.output or options.run.resolve().parent
    if run.name == "off":
        raise ValueError(f"{run.directory}: its speculation is off; name a run that speculates")
    if not run.has_responses:
        raise ValueError(f"{run.directory}: no responses recorded there; expected rollouts/<step>.jsonl of every step")
    (folder := output / "against_stock").mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    # Of steps spread over the run, as many as rounds with the warm-up.
    rounds = max(1, min(options.rounds, len(run.steps) - 1))
    places = np.linspace(0, len(run.steps) - 1, rounds + 1).round().astype(int)
    steps, text = [run.steps[place] for place in np.unique(places)], folder / "text.jsonl"
    with replacing(text) as partial:
        partial.write_bytes(b"".join(responses_path(run.directory, step).read_bytes() for step in steps))
    words = [*words_of(run), "--text", str(text), "--output", str(folder), "--rounds", str(rounds)]
    result, code = measure(parse(words))
    if code:
        return code
    with replacing(output / STOCK_FILE) as partial:
        found = {"text": text_of(run, steps), "steps": steps, **result}
        partial.write_text(json.dumps(found, indent=1) + "\n")
    if options.json:
        print(json.dumps(found))
        return 0
    stock, *others = rows_of(found).values()
    said = [f"{row['variant']} {row['seconds']:.2f} s, {times(row)}" for row in others]
    of = f"{stock['rounds']} rounds of {stock['requests']} requests that emit the run's own text"
    print(f"engine alone: stock vLLM {stock['seconds']:.2f} s a round; {'; '.join(said)} ({of})")
    return 0


def words_of(run: Run) -> list[str]:
    """The command line of a run's engines, without seeds, as verl asks vLLM; a round is one batch."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError

    from recipe.sam_dapo.launch import environment
    from recipe.sam_dapo.preflight.vllm_command import server_arguments
    from sam.config import HUGE_PAGES, WITH_DRAFT_MODEL
    from sam.record.responses import read_responses

    config = OmegaConf.create(run.config)
    rounds = [row.round for row in read_responses(run.directory, run.steps[0])]
    rollout, speculation = config.actor_rollout_ref.rollout, config.speculation
    samples, drafter = int(rollout.n), []
    try:
        # The variables that a run's engine has, but for those that the user has set, and that each engine gets itself.
        variables = environment.cpu_variables(config) if config.trainer.device == "cpu" else {}
        for name, value in {**variables, "VLLM_LOGGING_LEVEL": "WARNING"}.items():
            if name not in HUGE_PAGES:  # stock has none
                os.environ.setdefault(name, value)
        with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
            engine = engine_words(server_arguments(config))
    except ConfigAttributeError as error:
        lacks = f"its config.yaml lacks {error.full_key}, it is an older version's: run it again"
        raise ValueError(f"{run.directory}: {lacks}") from None
    if speculation.method in WITH_DRAFT_MODEL:
        drafter = ["--draft-model", str(speculation.draft_model)]
    return [
        *("--model", str(config.actor_rollout_ref.model.path), "--no-seeds"),
        *("--requests", str(samples * max(1, rounds.count(min(rounds)) // samples)), "--samples", str(samples)),
        *("--responses", "1", "--temperature", str(rollout.temperature), "--variants", STOCK, "off"),
        *(speculation.method, "--draft-tokens", str(speculation.num_speculative_tokens), *drafter, *engine),
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


def of_whole_runs(words: list[str]) -> int:
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
    from sam.bench.result import compared, middle, times

    runs, rows = trained(options), []
    for variant, *own in zip(options.variants, *runs, strict=True):
        seconds, lengths = [run.seconds(run.steps) for run in own], [run.acceptance()[0] for run in own]
        against = compared(seconds, rows[0]["seconds"] if rows else seconds)
        rows.append({"variant": variant, "seconds": seconds, **against, "acceptance_length": lengths})
    (options.output / "result.json").write_text(json.dumps(rows, indent=1) + "\n")
    if options.json:
        return [json.dumps({"rows": rows})]
    cells = []
    for row in rows:
        of, known = row["seconds"], [length for length in row["acceptance_length"] if length is not None]
        seconds = f"{middle(of, 2):.2f} ({min(of):.2f}-{max(of):.2f})"
        length = f"{middle(known, 2):.2f}" if known else "-"
        cells.append([row["variant"], seconds, length, times(row), row["answer"]])
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
    from sam.bench.engines import turns

    output, names = options.output.absolute(), [f"variant_{n}" for n in range(1, len(options.variants) + 1)]
    rounds = range(1, options.rounds + 1)
    order = [(output / f"round_{round_}" / name, name) for round_ in rounds for name in turns(names, round_)]
    for directory, name in tqdm(order, unit="run", disable=None):
        if read_json(directory / STATE_FILE).get("phase") == "finished":
            continue
        command = [
            *(sys.executable, "-m", "recipe.sam_dapo.main_dapo"),
            *("--config-name", options.config_name, f"run_dir={directory}"),
            *(f"trainer.experiment_name={output.name}_{directory.parent.name}_{name}", "trainer.save_freq=-1"),
            *("trainer.val_before_train=false", "trainer.test_freq=-1"),
            *(*shlex.split(options.variants[names.index(name)]), *options.overrides),
        ]
        # The runs' own words go where nobody parses them.
        code = subprocess.run(command, stdout=sys.stderr if options.json else None).returncode
        if code:
            raise ValueError(f"{directory}: the run ended with exit code {code}, see {directory}/train.log")
    runs = [[Run.load(output / f"round_{round_}" / name) for name in names] for round_ in rounds]
    first = runs[0][0]
    for run in itertools.chain(*runs):
        same = compare_responses(run, first)
        wrong = [step for step in first.steps if not (counts := same.get(step)) or counts[0] < max(1, counts[1])]
        if run.steps != first.steps or wrong:
            raise ValueError(f"{run.directory}: other steps or responses than {first.directory}, first {wrong[:1]}")
    return runs


MODES = {"--run": of_a_run, "--config-name": of_whole_runs}


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    mode = next((MODES[flag] for word in words if (flag := word.partition("=")[0]) in MODES), measure_engines)
    try:
        return run_command(lambda: mode(words), errors=(ValueError, OSError, RuntimeError))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
