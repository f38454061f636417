"""`sam data --output DIR [NAMES]`: the math data sets in verl's parquet format, one row per problem.

Published files come from the Hugging Face hub, or with --from FOLDER from there. A second call makes what is missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sam.command import Parser, run_command
from sam.reading import ReadError, expect, one_line
from sam.record import replacing
from sam.record.tokenizer import check_chat

if TYPE_CHECKING:
    import pandas  # help and a wrong name are answered before it is installed

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def _published(frame: pandas.DataFrame, place: str) -> pandas.DataFrame:
    """DAPO-Math-17k and AIME-2024 come in verl's format, each problem many times over: verl repeats by itself."""
    import pandas

    texts = []
    for number, row in enumerate(frame[list(COLUMNS)].to_dict("records"), start=1):
        row_place = f"{place}, row {number}"
        with one_line(row_place, "not a row of the published file"):
            chat = list(row["prompt"])
            check_chat(chat, f"{row_place}, prompt")
            for text in (row["data_source"], row["reward_model"]["ground_truth"]):
                expect(isinstance(text, str) and bool(text), row_place, "texts as data_source and ground_truth", text)
        texts.append(json.dumps(chat, sort_keys=True, default=str))
    return frame[~pandas.Series(texts, frame.index, dtype=object).duplicated()].reset_index(drop=True)


def _gsm8k(frame: pandas.DataFrame, place: str) -> pandas.DataFrame:
    import pandas

    rows = []
    for index, (question, answer) in enumerate(zip(frame["question"], frame["answer"], strict=True)):
        number = re.search(r"#### (\-?[0-9\.,]+)", str(answer))
        is_whole = number is not None and isinstance(question, str)
        expect(is_whole, f"{place}, row {index + 1}", "a question, and an answer with a number after ####", answer)
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": number[1].replace(",", "")},
                "extra_info": {"index": index},
            }
        )
    return pandas.DataFrame(rows, columns=COLUMNS)


class Source(NamedTuple):
    """A published file: repository and path on the hub, and how its rows become verl's."""

    repository: str
    path: str
    convert: Callable[[pandas.DataFrame, str], pandas.DataFrame]


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
        raise ReadError(f"{folder} holds no {name}: put {source.repository}/{source.path} there")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source.repository, source.path, repo_type="dataset"))
    except Exception as error:  # the hub's, its HTTP library's, the disk's
        reason = str(error).splitlines()[0]
        raise ReadError(
            f"{source.repository}/{source.path} cannot be fetched ({reason}): download it elsewhere and give its "
            "folder with --from"
        ) from error


def prepare(name: str, output: Path, folder: Path | None = None) -> str:
    """Make one data set below `output` unless it is there; says what was done.

    Raises:
        ReadError: the source is missing or is not what it should be.
    """
    import pandas

    target = output / f"{name}.parquet"
    if target.exists():
        return f"{target}: is there; remove it to have it made anew"
    path = _fetch(SOURCES[name], folder)
    with one_line(str(path), "not the published file"):
        frame = SOURCES[name].convert(pandas.read_parquet(path), str(path))
        expect(len(frame) > 0, str(path), "the published file", "no rows")
    output.mkdir(parents=True, exist_ok=True)
    with replacing(target) as partial:
        frame[list(COLUMNS)].to_parquet(partial)
    return f"{target}: {len(frame)} rows from {path.name}"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam data", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SOURCES)} (default: all)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--from", dest="folder", type=Path, help="folder with the published files")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SOURCES]
    if unknown:
        print(f"error: {unknown[0]} is unknown: expected some of {', '.join(SOURCES)}", file=sys.stderr)
        return 2
    names = options.names or SOURCES
    return run_command(lambda: (prepare(name, options.output, options.folder) for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
