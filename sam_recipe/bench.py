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

from sam.bench.settings import RESERVED, STOCK, parse
from sam.command import INTERRUPTED, Parser, laid_out, run_command

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sam_recipe.report.runs import Run

# Of verl's server, not of its engine; weights are loaded from the model's folder.
NOT_OF_THE_ENGINE = {
    *RESERVED, "gpu_memory_utilization", "kv_cache_memory_bytes", "load_format", "seed", "disable_log_stats",
    "enable_sleep_mode", "logprobs_mode", "skip_tokenizer_init", "override_generation_config", "hf_overrides",
}  # fmt: skip


def of_engines(words: list[str]) -> int:
    """`--model DIR`: engines, each in a process of its own."""
    settings = parse(words)
    if settings.check:
        return 0
    from sam.bench.result import as_text, measure

    result, code = measure(settings)
    print(as_text(result))
    if code == INTERRUPTED:
        print("interrupted: go on with the same command and --resume")
    return code


def of_a_run(words: list[str]) -> int:
    """`--run RUN`: would stock vLLM have taken longer for its rollouts?

    Stock vLLM cannot train on a CPU: its second weight sync fails. So engines of their own take turns: stock vLLM as it
    is shipped, this project without drafts, and with the run's drafter. They have the run's model and engine arguments
    and emit, request by request, the responses that the run recorded, so that all do the same work: a round is one
    generation round of a training step, its requests at once. The report of the run reads what this leaves.
    """
    parser = Parser(prog="sam bench", description="Would stock vLLM have taken longer for the rollouts of a run?")
    parser.add_argument("--run", type=Path, required=True, help="directory of a run that speculates")
    parser.add_argument("--output", type=Path, help="where to write stock.json; by default beside the run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each engine that count")
    options = parser.parse_args(words)
    found = against_stock(options.run, options.output or options.run.resolve().parent, options.rounds)
    from sam.bench.result import times
    from sam_recipe.report.runs import rows_of

    rows = rows_of(found)
    stock, others = rows.pop(STOCK), [f"{name} {row['seconds']:.2f} s, {times(row)}" for name, row in rows.items()]
    rounds = f"{stock['rounds']} rounds of {stock['requests']} requests that emit the run's own text"
    print(f"engine alone: stock vLLM {stock['seconds']:.2f} s a round; {'; '.join(others)} ({rounds})")
    return 0


def against_stock(directory: Path, output: Path, rounds: int) -> dict[str, Any]:
    """Measure what is missing of `rounds` rounds, fewer in a short run, and write stock.json into `output`.

    Raises:
        ValueError: no run of two steps is there, without responses, or without speculation; or an engine failed.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError

    from sam.bench.result import measure
    from sam.record import replacing
    from sam_recipe.report.runs import STOCK_FILE, Run, text_of

    run = Run.load(directory)
    if run.name == "off":
        raise ValueError(f"{directory}: its speculation is off; name a run that speculates")
    if not run.has_responses:
        raise ValueError(f"{directory}: no responses recorded there; expected rollouts/<step>.jsonl of every step")
    if len(run.steps) < 2:
        raise ValueError(f"{directory}: it has one training step; expected two or more, the first to warm up on")
    # A text that comes again is not measured: the drafter remembers it.
    rounds = min(rounds, len(run.steps) - 1)
    folder = output / "against_stock"
    folder.mkdir(parents=True, exist_ok=True)
    steps = spread(run.steps, rounds + 1)  # one more to warm up
    try:
        words = bench_words(run, OmegaConf.create(run.config), steps, folder)
    except ConfigAttributeError as error:
        raise ValueError(
            f"{directory}: its config.yaml lacks {error.full_key}, it is an older version's: run it again"
        ) from None
    result, code = measure(parse([*words, "--rounds", str(rounds)]))
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ValueError(f"{folder}: not all rounds were measured")
    found = {"text": text_of(run, steps), "steps": steps, **result}
    with replacing(output / STOCK_FILE) as partial:
        partial.write_text(json.dumps(found, indent=1) + "\n")
    return found


def spread(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, at equal distances.

    Example:
        >>> spread(list(range(1, 11)), 4)
        [1, 4, 7, 10]
    """
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def bench_words(run: Run, config: DictConfig, steps: list[int], folder: Path) -> list[str]:
    """The command line of a run's engines. Without seeds, as verl asks vLLM; a round is one batch, as one generation
    round is: the recording has no other texts for more."""
    from sam.config import HUGE_PAGES, WITH_DRAFT_MODEL
    from sam_recipe.launch import environment
    from sam_recipe.preflight.vllm_command import server_arguments

    rollout, speculation = config.actor_rollout_ref.rollout, config.speculation
    requests = write_text(run, steps, int(rollout.n), folder / "text.jsonl")
    # The variables that a run's engine has, but for those that the user has set, and that each engine gets of its own.
    variables = environment.cpu_variables(config) if config.trainer.device == "cpu" else {}
    for name, value in {**variables, "VLLM_LOGGING_LEVEL": "WARNING"}.items():
        if name not in HUGE_PAGES:  # stock has none
            os.environ.setdefault(name, value)
    trained = []
    if speculation.method in WITH_DRAFT_MODEL:
        if not (drafter := Path(speculation.draft_model)).is_dir():
            raise ValueError(f"{drafter}: the run drafted with it, and it is not there: put it back")
        trained = ["--draft-model", str(drafter)]
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
        engine = engine_words(server_arguments(config))
    return [
        *("--model", str(config.actor_rollout_ref.model.path), "--text", str(folder / "text.jsonl")),
        *("--requests", str(requests), "--samples", str(rollout.n), "--responses", "1"),
        *("--temperature", str(rollout.temperature), "--variants", STOCK, "off", speculation.method),
        *("--draft-tokens", str(speculation.num_speculative_tokens), *trained),
        *("--no-seeds", "--output", str(folder), "--resume", *engine),
    ]


def write_text(run: Run, steps: list[int], samples: int, path: Path) -> int:
    """Write the first generation round of each step as one recording, equally many groups of each, those that have all
    their responses; returns the requests of a round."""
    from sam.record import replacing
    from sam.record.responses import TOKENS, read_responses

    rounds: list[list[list[dict]]] = []
    for step in steps:
        groups: dict[int, list[dict]] = {}
        responses = read_responses(run.directory, step)
        first = min(row.round for row in responses)
        for row in (row for row in responses if row.round == first):
            tokens = {name: getattr(row, name).tolist() for name in TOKENS}
            groups.setdefault(row.prompt, []).append({**tokens, "given_spans": row.given_spans})
        rounds.append([group for group in groups.values() if len(group) == samples])
    prompts = min(map(len, rounds))
    if not prompts:
        raise ValueError(f"{run.directory}: no prompt with {samples} responses in a step of {steps}")
    with replacing(path) as partial:
        rows = (row for groups in rounds for group in groups[:prompts] for row in group)
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts * samples


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
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant (default 5)")
    parser.add_argument("--overrides", nargs="*", default=[], help="Hydra overrides of every run")
    options = parser.parse_args(words)
    if options.rounds < 1 or len(set(options.variants)) < max(2, len(options.variants)):
        value = f"--rounds {options.rounds} --variants {options.variants}"
        raise ValueError(f"{value}: expected 1 or more rounds of two variants or more, all different")
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

    from sam.bench.engines import turns
    from sam_recipe.record import STATE_FILE, read_json
    from sam_recipe.report.runs import Run, compare_responses

    output, names = options.output.absolute(), [f"variant_{n}" for n in range(1, len(options.variants) + 1)]
    rounds = range(1, options.rounds + 1)
    order = [(output / f"round_{round_}" / name, name) for round_ in rounds for name in turns(names, round_)]
    for directory, name in tqdm(order, unit="run", disable=None):
        if read_json(directory / STATE_FILE).get("phase") == "finished":
            continue
        command = [
            *(sys.executable, "-m", "sam_recipe.main_dapo"),
            *("--config-name", options.config_name, f"run_dir={directory}"),
            *(f"trainer.experiment_name={output.name}_{directory.parent.name}_{name}", "trainer.save_freq=-1"),
            *("trainer.val_before_train=false", "trainer.test_freq=-1"),
            *(*shlex.split(options.variants[names.index(name)]), *options.overrides),
        ]
        if code := subprocess.run(command).returncode:
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
    mode = next((MODES[flag] for word in words if (flag := word.partition("=")[0]) in MODES), of_engines)
    try:
        return run_command(lambda: mode(words), errors=(ValueError, OSError, RuntimeError))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
