"""`python -m recipe.data --output DIR [NAMES]`: the math data sets in verl's parquet format, one row per problem.

Published files come from the Hugging Face hub, or with --from FOLDER from there. Each output has its checksum in
DIR/manifest.json; a second call makes only what is missing or differs.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from recipe.arguments import Parser
from sam.command import run_command
from sam.record.atomic import replacing

if TYPE_CHECKING:
    import pandas  # help and a wrong name are answered before it is installed

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


class DataError(ValueError):
    """One line: which file is wrong and what to do."""


def _published(frame: pandas.DataFrame) -> pandas.DataFrame:
    """DAPO-Math-17k and AIME-2024 come in verl's format, each problem many times over: verl repeats by itself."""
    text = frame["prompt"].map(lambda messages: json.dumps([dict(message) for message in messages], sort_keys=True))
    return frame[~text.duplicated()].reset_index(drop=True)


def _gsm8k(frame: pandas.DataFrame) -> pandas.DataFrame:
    import pandas

    rows = []
    for index, (question, answer) in enumerate(zip(frame.question, frame.answer, strict=True)):
        if (found := re.search(r"#### (\-?[0-9\.,]+)", answer)) is None:
            raise DataError(f"GSM8K, row {index}: no answer after ####: take the published file")
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": found[1].replace(",", "")},
                "extra_info": {"index": index},
            }
        )
    return pandas.DataFrame(rows)


class Source(NamedTuple):
    """A published file: repository and path on the hub, and how its rows become verl's."""

    repository: str
    path: str
    convert: Callable[[pandas.DataFrame], pandas.DataFrame]


SOURCES = {
    "dapo_math_17k": Source("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet", _published),
    "aime_2024": Source("BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet", _published),
    "gsm8k_train": Source("openai/gsm8k", "main/train-00000-of-00001.parquet", _gsm8k),
    "gsm8k_test": Source("openai/gsm8k", "main/test-00000-of-00001.parquet", _gsm8k),
}


def _fetch(source: Source, folder: Path | None) -> Path:
    name = Path(source.path).name
    if folder is not None:
        for candidate in (folder / source.repository / source.path, folder / source.repository / name, folder / name):
            if candidate.is_file():
                return candidate
        raise DataError(f"{folder} holds no {name}: put {source.repository}/{source.path} there")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source.repository, source.path, repo_type="dataset"))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{source.repository}/{source.path} cannot be fetched ({reason}): download it elsewhere and give its "
            "folder with --from"
        ) from error


def prepare(name: str, output: Path, folder: Path | None = None) -> str:
    """Make one data set below `output` unless it is there; says what was done.

    Raises:
        DataError: the source is missing or is not what it should be.
    """
    import pandas

    manifest_path = output / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    target = output / f"{name}.parquet"
    if target.exists() and manifest.get(name, {}).get("sha256") == _digest(target):
        return f"{target}: complete, {manifest[name]['rows']} rows"
    source_path = _fetch(SOURCES[name], folder)
    try:
        frame = SOURCES[name].convert(pandas.read_parquet(source_path))
    except DataError:
        raise
    except (OSError, ValueError, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{source_path}: not the published file ({reason}): fetch it again") from error
    if missing := [column for column in COLUMNS if column not in frame]:
        raise DataError(f"{source_path}: column {missing[0]} is missing: fetch the published file again")
    output.mkdir(parents=True, exist_ok=True)
    with replacing(target) as partial:
        frame[list(COLUMNS)].to_parquet(partial)
    manifest[name] = {"rows": len(frame), "sha256": _digest(target), "source_sha256": _digest(source_path)}
    manifest_path.write_text(json.dumps(manifest, indent=1) + "\n")
    return f"{target}: {len(frame)} rows from {source_path.name}"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m recipe.data", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SOURCES)} (default: all)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--from", dest="folder", type=Path, help="folder with the published files")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in SOURCES]:
        print(f"error: {unknown[0]} is unknown: expected some of {', '.join(SOURCES)}", file=sys.stderr)
        return 2
    names = options.names or SOURCES
    return run_command(lambda: (prepare(name, options.output, options.folder) for name in names), (DataError,))


if __name__ == "__main__":
    sys.exit(main())
