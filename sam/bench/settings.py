"""What is measured: the command's options, checked, and what each variant's engine is told.

`python -m sam.bench.settings ARGUMENTS` looks at them with Python's standard library alone: scripts/bench_cuda.sh asks
before anything is installed.
"""

import argparse
import difflib
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sam.command import run_command
from sam.config import WITH_DRAFT_MODEL, SpeculationConfig

STOCK = "stock"
STOCK_V1 = "stock-v1"  # with vLLM's first model runner, which all that this project installs needs
# vLLM as it is shipped with one of its own drafters, and its own verification.
STOCK_DRAFTERS = {f"stock-{method}": method for method in ("ngram", "ngram_gpu", "suffix")}
VARIANTS = (STOCK, STOCK_V1, *STOCK_DRAFTERS, "off", "sam", "ngram", "suffix", *WITH_DRAFT_MODEL)
# sam with drafts of up to so many tokens in every step, what goodput is measured against; and with so many paths.
SAM = re.compile(r"sam(?:-k([1-9]|1[0-5]))?(?:-paths([2-8]))?")
# Set by the variants, so that nobody else may.
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
RESERVED = ("model", *SPECULATION, "additional_config", "worker_extension_cls")
DEFAULT_MAX_TOKENS = 256
ALIKE = 0.8  # an option of vLLM's engine is less like any of this command's, but for one
THEIRS = "--seed"
DESCRIPTION = "Does speculation pay for this model, engine and load, compared with stock vLLM?"
EPILOG = "Further options, such as --max-model-len 2048, are vLLM's engine's, by its own names, and go to all variants."


@dataclass(frozen=True)
class Settings:
    """The command's options by their names, as `parser` explains them, and `engine`: further arguments of vLLM's
    engine, as words of a command line.

    Raises:
        ValueError: a value that cannot be measured with; one line.
    """

    model: Path
    prompts: Path | None
    text: Path | None
    requests: list[int]
    samples: int
    responses: int
    max_tokens: int | None
    temperature: float
    variants: list[str]
    draft_tokens: int
    draft_model: Path | None
    rounds: int
    ignore_eos: bool
    seeds: bool
    output: Path
    resume: bool
    engine: list[str]

    def __post_init__(self) -> None:
        for name in ("samples", "responses", "rounds", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
        if min(self.requests) < 1 or len(set(self.requests)) < len(self.requests):
            raise ValueError(f"--requests {_words(self.requests)}: expected different numbers from 1")
        if not self.temperature >= 0:
            raise ValueError(f"--temperature {self.temperature}: expected 0 or more")
        if self.text and self.prompts:
            raise ValueError("--text has its own prompts: leave --prompts out")
        if not (self.model / "config.json").is_file():
            raise ValueError(f"{self.model}: no config.json there; expected the folder of a model")
        self._check_variants()
        SpeculationConfig(num_speculative_tokens=self.draft_tokens)
        for name in RESERVED:
            if name in engine_arguments(self.engine):
                raise ValueError(f"--{name.replace('_', '-')}: the variants set it, leave it out")

    def _check_variants(self) -> None:
        for variant in self.variants:
            if variant not in VARIANTS and not SAM.fullmatch(variant):
                known = f"{', '.join(VARIANTS)}, sam-k1 to sam-k15, sam-paths2 to sam-paths8"
                raise ValueError(f"--variants {variant}: expected some of {known}")
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"--variants {_words(self.variants)}: one comes twice")
        if not {STOCK, "off"} & set(self.variants):
            raise ValueError(f"--variants {_words(self.variants)}: expected stock or off among them, to compare with")
        if self.trained and not self.draft_model:
            raise ValueError(f"--variants {self.trained[0]}: it needs --draft-model DIR, the folder of a draft model")
        if self.draft_model and not self.trained:
            choice = " or ".join(WITH_DRAFT_MODEL)
            raise ValueError(f"--draft-model {self.draft_model}: no variant drafts with it: add {choice} to --variants")

    @property
    def trained(self) -> list[str]:
        """The variants that draft with `draft_model`."""
        return [variant for variant in self.variants if variant in WITH_DRAFT_MODEL]

    @property
    def reference(self) -> str:
        """The variant with which the others are compared: stock, or off where stock takes no part."""
        return STOCK if STOCK in self.variants else "off"

    def of_measurement(self) -> dict[str, Any]:
        """What a measurement must have in common with the one that it goes on with (`--resume`), as JSON holds it."""
        own = {name: value for name, value in vars(self).items() if name not in ("rounds", "output", "resume")}
        own["text"] = self.text and self.text.resolve().name
        return {name: str(value) if isinstance(value, Path) else value for name, value in own.items()}

    def start(self, variant: str) -> dict[str, Any]:
        """What sam.vllm.bench.engine.BenchEngine is told to start a variant's engine."""
        if is_stock(variant):
            method = STOCK_DRAFTERS.get(variant)
            speculation = method and {"method": method, "num_speculative_tokens": self.draft_tokens}
        else:
            speculation = SpeculationConfig.from_dict(self._speculation(variant)).to_dict()
        started = {"model": str(self.model), "engine": self.engine, "forces_text": self.text is not None}
        return started | {"is_stock": is_stock(variant), "speculation": speculation}

    def _speculation(self, variant: str) -> dict[str, Any]:
        if variant == "off":
            return {"method": "off"}
        keys: dict[str, Any] = {"method": variant, "num_speculative_tokens": self.draft_tokens}
        if self.text is not None:
            # No uniform of this engine drew a recording's tokens, so that a draw with one would be any draw.
            keys["draft_sample_method"] = "greedy"
        if sam := SAM.fullmatch(variant):
            fixed, paths = sam.groups()
            keys |= {"method": "sam", "policy": "goodput", "paths": int(paths or 1)}
            return keys | ({"policy": "always", "num_speculative_tokens": int(fixed)} if fixed else {})
        return keys | ({"policy": "goodput", "draft_model": str(self.draft_model)} if variant in self.trained else {})


def is_stock(variant: str) -> bool:
    """Whether a variant is vLLM without this project's plugin."""
    return variant.partition("-")[0] == STOCK


def engine_arguments(words: list[str]) -> dict[str, str]:
    """Values of the engine's arguments by name, with underscores, among words of a command line.

    Example:
        >>> engine_arguments(["--max-model-len", "512", "--enforce-eager", "--hf_overrides.a=9"])
        {'max_model_len': '512', 'enforce_eager': '', 'hf_overrides': '9'}
    """
    found = {}
    for word, following in itertools.pairwise([*words, "--"]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            name = flag[2:].partition(".")[0].replace("-", "_")
            found[name] = value if equals else "" if following.startswith("--") else following
    return found


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> Parser:
    """The command's own options."""
    found = Parser(prog="python -m sam.bench", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    found.add_argument("--model", type=Path, required=True, help="folder of the model")
    found.add_argument("--prompts", type=Path, help=".jsonl or .parquet with prompt or prompt_token_ids; or built in")
    found.add_argument("--text", type=Path, help="recording or run directory whose responses all requests emit")
    found.add_argument(
        "--requests", type=int, nargs="+", default=[1, 4, 24], help="loads: requests that start together"
    )
    found.add_argument("--samples", type=int, default=8, help="requests of one prompt")
    found.add_argument("--responses", type=int, default=8, help="of a round at least: small loads run several batches")
    found.add_argument("--max-tokens", type=int, help=f"of a response; {DEFAULT_MAX_TOKENS}, or with --text all of it")
    found.add_argument("--temperature", type=float, default=1.0)
    variants = "stock off sam ngram suffix draft_model hybrid eagle3; sam-k2: drafts of 2 in every step; sam-paths4"
    found.add_argument("--variants", nargs="+", default=[STOCK, "off", "sam"], help=variants)
    found.add_argument("--draft-tokens", type=int, default=8, help="longest draft of a request, 1 to 15")
    found.add_argument("--draft-model", type=Path, metavar="DIR", help="of draft_model and hybrid, or eagle3's head")
    found.add_argument("--rounds", type=int, default=3, help="runs of each load and variant that count")
    found.add_argument("--ignore-eos", action="store_true", help="all responses have --max-tokens tokens")
    seeds = "whether requests carry seeds, so that tokens can be compared; by default unless --text is given"
    found.add_argument("--seeds", action=argparse.BooleanOptionalAction, help=seeds)
    found.add_argument("--output", type=Path, default=Path("outputs/bench"), help="folder for rounds, logs, result")
    found.add_argument("--resume", action="store_true", help="go on where a measurement stopped")
    return found


def parse(arguments: list[str] | None) -> Settings:
    """Settings as far as they are known without the model and its prompts.

    Raises:
        ValueError: one line.
    """
    known = parser()
    options, engine = known.parse_known_args(arguments)
    own = {name for action in known._actions for name in action.option_strings}
    for word in engine:
        if word != THEIRS and (close := difflib.get_close_matches(word.partition("=")[0], own, 1, ALIKE)):
            raise ValueError(f"{word}: did you mean {close[0]}?")
    if engine and not engine[0].startswith("-"):
        raise ValueError(f"{engine[0]}: expected an option of sam.bench, or one of vLLM's engine")
    options.seeds = options.text is None if options.seeds is None else options.seeds
    options.ignore_eos |= options.text is not None
    for name in ("model", "draft_model"):
        setattr(options, name, getattr(options, name) and getattr(options, name).absolute())
    return Settings(**vars(options), engine=engine)


def _words(values: list) -> str:
    return " ".join(map(str, values))


if __name__ == "__main__":
    sys.exit(run_command(lambda: parse(None) and []))
