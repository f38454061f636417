"""Read a run directory of recipe.main_dapo: its config, its metrics, and the responses of each training step."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sam.reading import content_of, expect, json_rows, one_line, token_ids

CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.jsonl"
LARGEST = 1e300  # of a figure, so that sums of figures are finite too


class Response(NamedTuple):
    """A recorded response: its prompt's number in the training step, its sample's, the generation round, and tokens."""

    prompt: int
    sample: int
    round: int
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of config.yaml, those of `speculation` among them.

    Raises:
        ReadError: no such file, or something else in it.
    """
    with one_line(path := f"{directory / CONFIG_FILE}", "PyYAML is not installed, requirements/cpu.txt has it"):
        import yaml
    content = content_of(directory / CONFIG_FILE)
    with one_line(path, "not the config of a run of recipe.main_dapo"):
        config = yaml.safe_load(content)
    expect(isinstance(config, dict), path, "a run's config", config)
    section = config.get("speculation")
    is_section = isinstance(section, dict) and isinstance(section.get("method"), str)
    expect(is_section, f"{path}, speculation", "settings with a method", section)
    return config


def read_metrics(directory: Path, left_out: list[str] | None = None) -> dict[int, dict[str, float]]:
    """Training step to its figures in metrics.jsonl; those that are no finite numbers are not recorded.

    Args:
        left_out: takes the lines about rows that cannot be read, which a full disk leaves. Half a last line
            is none: the run goes on.

    Raises:
        ReadError: no such file or, without `left_out`, a row that cannot be read.
    """
    metrics: dict[int, dict[str, float]] = {}

    def read(row: dict[str, Any], place: str) -> None:
        step = row.pop("step", None)
        expect(type(step) is int and step >= 0, f"{place}, step", "a training step", step)
        for key, value in row.items():
            expect(type(value) in (int, float), f"{place}, {key}", "a number", value)
        known, row = metrics.setdefault(step, {}), finite(row)
        # A run that is resumed validates again before it trains.
        for key in sorted(key for key in known.keys() & row.keys() if not key.startswith("val-")):
            expect(
                known[key] == row[key], f"{place}, {key}", f"{known[key]} as in an earlier row of the step", row[key]
            )
        known |= row

    for _ in json_rows(directory / METRICS_FILE, read, left_out, is_growing=True):
        pass
    return metrics


def finite(row: dict[str, float]) -> dict[str, float]:
    """The figures that are finite numbers: a mean of nothing is not a number, and not recorded."""
    return {key: float(value) for key, value in row.items() if abs(value) < LARGEST}


def responses_path(directory: Path, step: int) -> Path:
    """The file of a training step's responses."""
    return directory / "rollouts" / f"{step}.jsonl"


def read_responses(directory: Path, step: int) -> list[Response]:
    """The responses of a training step, in dispatch order.

    Raises:
        ReadError: no such file, a row that cannot be read, or a response that is there twice.
    """
    seen: set[tuple[int, int]] = set()

    def read(row: dict[str, Any], place: str) -> Response:
        numbers = [row.get("prompt"), row.get("sample"), row.get("round", 0)]
        expect(all(type(n) is int for n in numbers), place, "whole numbers as prompt, sample and round", numbers)
        expect(tuple(numbers[:2]) not in seen, place, "every prompt and sample once", numbers)
        seen.add(tuple(numbers[:2]))
        texts = (token_ids(row.get(name), f"{place}, {name}") for name in ("prompt_tokens", "response_tokens"))
        return Response(*numbers, *texts)

    responses = list(json_rows(path := responses_path(directory, step), read))
    expect(bool(responses), str(path), "a row for each response", "none")
    return responses
