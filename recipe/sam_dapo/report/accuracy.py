"""`sam report RUN [BASELINE]` of runs with trainer.val_only=true: pass@1 by data set with its interval, and how many
responses are the same."""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recipe.sam_dapo.record import VAL_ROLLOUTS
from sam.command import laid_out
from sam.reading import ReadError, expect, json_rows
from sam.record.responses import CONFIG_FILE, read_config
from sam.tools.page import Section, page

NORMAL = 1.96  # standard errors of an interval of 95 %
TITLE = "pass@1"
CAPTION = (
    "The share of right answers, a mean over problems, and the interval that holds it with 95 %: 1.96 standard errors "
    "of that mean, by the differences between problems. The last column compares problem by problem."
)


class Answer(NamedTuple):
    """A response. AIME-2024 is published with each problem many times over: rows of one prompt are one problem."""

    problem: tuple[int, ...]  # the prompt's tokens
    is_right: float  # 0 or 1
    tokens: list[int]


Answers = dict[tuple[str, int, int], Answer]  # by data set, row and sample


def only_validated(directories: list[Path]) -> bool:
    """Whether runs have answered a held-out set and not trained; what is no run directory has not."""
    if not all((directory / CONFIG_FILE).is_file() for directory in directories):
        return False
    return all(read_config(directory).get("trainer", {}).get("val_only") for directory in directories)


def report(directories: list[Path], output: Path | None) -> str:
    """Write report.html into `output`, by default the first run's parent; returns what is printed."""
    runs = [read_answers(directory) for directory in directories[:2]]
    names = [read_config(directory)["speculation"]["method"] for directory in directories[:2]]
    header, rows = table(names, runs)
    lines = []
    if runs[1:]:
        first, second = runs
        common = first.keys() & second.keys()
        same = sum(first[key].tokens == second[key].tokens for key in common)
        lines = [f"Identical responses: {same} of {len(common)}, token for token."]
    path = (output or directories[0].parent) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(TITLE, lines, [Section("", caption=CAPTION, table=(header, rows))]))
    return "\n".join([*laid_out(header, rows), *lines, f"report: {path}"])


def read_answers(directory: Path) -> Answers:
    """The answers of a run's last validation; ReadError where there is none, or the reward says nothing of right."""
    files = sorted((directory / VAL_ROLLOUTS).glob("*.jsonl"), key=lambda file: int(file.stem))
    if not files:
        raise ReadError(f"{directory}: no {VAL_ROLLOUTS}/*.jsonl there: its validation has not ended, start it again")

    def read(row: dict, place: str) -> tuple[tuple, Answer]:
        expect(row.get("acc") in (0, 1), f"{place}, acc", "0 or 1, which the reward gives", row.get("acc"))
        key = row["data_source"], row["prompt"], row["sample"]
        return key, Answer(tuple(row["prompt_tokens"]), row["acc"], row["response_tokens"])

    return dict(json_rows(files[-1], read))


def table(names: list[str], runs: list[Answers]) -> tuple[list[str], list[list[str]]]:
    """A header, and a row for each data set."""
    header = ["data set", "problems", "samples", *names]
    if len(runs) > 1:
        header.append("first less second")
    rows = []
    for source in sorted({source for source, _, _ in runs[0]}):
        shares = [by_problem(run, source) for run in runs]
        problems = sorted(set.intersection(*(set(share) for share in shares)))
        columns = [np.array([share[problem] for problem in problems]) for share in shares]
        cells = [interval(column, least=0.0) for column in columns]
        if len(columns) > 1:
            cells.append(interval(columns[0] - columns[1], least=-100.0))
        samples = sum(key[0] == source for key in runs[0]) / len(shares[0])
        rows.append([source, str(len(problems)), f"{samples:.3g}", *cells])
    return header, rows


def by_problem(answers: Answers, source: str) -> dict[tuple[int, ...], float]:
    """A data set's problems, and the share of right answers to each."""
    rights = defaultdict(list)
    for (answers_source, _row, _sample), answer in answers.items():
        if answers_source == source:
            rights[answer.problem].append(answer.is_right)
    return {problem: float(np.mean(right)) for problem, right in rights.items()}


def interval(shares: np.ndarray, least: float) -> str:
    """The mean of float [problems], in percent, and its interval of 95 % between `least` and 100.

    Example:
        >>> interval(np.array([0.0, 0.0, 1.0, 1.0, 1.0, 1.0]), 0.0)
        '66.7 % (25.3 to 100.0)'
    """
    mean = 100 * shares.mean()
    error = NORMAL * 100 * shares.std(ddof=1) / math.sqrt(len(shares)) if len(shares) > 1 else math.inf
    return f"{mean:.1f} % ({max(least, mean - error):.1f} to {min(100.0, mean + error):.1f})"
