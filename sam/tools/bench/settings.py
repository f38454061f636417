"""What is measured: the options of `sam bench --model DIR`, checked, and what each variant's engine is told.

With Python's standard library alone: scripts/bench_cuda.sh asks before anything is installed.
"""

import argparse
import ast
import difflib
import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

from sam.command import Parser, number
from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.tools.bench.hub import is_hub_name

STOCK = "stock"
ON_DEVICE = "sam-device"
VARIANTS = (STOCK, "off", "sam", ON_DEVICE, "ngram", "suffix", *WITH_DRAFT_MODEL)
FIXED = {f"sam-k{tokens}": tokens for tokens in range(1, 16)}  # drafts of up to so many tokens in every step
# Set by the variants, so that nobody else may.
RESERVED = (
    "model",
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "additional_config",
    "worker_extension_cls",
)
DEFAULT_MAX_TOKENS = 256
EPILOG = (
    "Further options, such as --max-model-len 2048, are vLLM's engine's, by its own names, and go to all variants. "
    "`sam bench --run RUN` measures engines on the text of a recorded run, `sam bench --config-name NAME` whole runs."
)


class Settings(argparse.Namespace):
    """The command's options by their names, as `parser` explains them, and `engine`: further arguments of vLLM's
    engine, as words of a command line."""

    def validate(self) -> None:
        """Raise ValueError, one line, for a value that cannot be measured with."""
        if len(set(self.requests)) < len(self.requests):
            raise ValueError(f"--requests {_words(self.requests)}: expected different numbers")
        if not self.temperature >= 0:
            raise ValueError(f"--temperature {self.temperature}: expected 0 or more")
        if self.text and self.prompts:
            raise ValueError("--text has its own prompts: leave --prompts out")
        for folder in filter(None, (self.model, self.draft_model)):
            if not (folder / "config.json").is_file() and not (folder is self.model and is_hub_name(folder)):
                expected = "the folder of a model, or for --model a name, as Qwen/Qwen3-8B"
                raise ValueError(f"{folder}: no config.json there; expected {expected}")
        if len(set(self.variants)) < len(self.variants) or not {STOCK, "off"} & set(self.variants):
            expected = "different ones, stock or off among them, to compare with"
            raise ValueError(f"--variants {_words(self.variants)}: expected {expected}")
        if bool(self.draft_model) != bool({*self.variants} & {*WITH_DRAFT_MODEL}):
            choice = " or ".join(WITH_DRAFT_MODEL)
            raise ValueError(
                f"--draft-model {self.draft_model}: it goes with {choice} among --variants, and they with it"
            )
        SpeculationConfig(num_speculative_tokens=self.draft_tokens)
        known = engine_options()
        for word in self.engine:
            if known and re.match("--?[a-zA-Z]", word) and not is_engine_option(word, known):
                own = [f"--{name.replace('_', '-')}" for name in vars(self)]
                near = difflib.get_close_matches(word.partition("=")[0], sorted({*known, *own}), 1)
                meant = f"did you mean {near[0]}?" if near else "leave it out"
                raise ValueError(f"{word}: neither sam bench nor vLLM's engine knows it: {meant}")
        for name in RESERVED:
            if name in engine_arguments(self.engine):
                raise ValueError(f"--{name.replace('_', '-')}: the variants set it, leave it out")

    @property
    def reference(self) -> str:
        """The variant with which the others are compared: stock, or off where stock takes no part."""
        return STOCK if STOCK in self.variants else "off"

    def of_measurement(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}

    def start(self, variant: str) -> dict[str, Any]:
        """What sam.vllm.bench.engine.BenchEngine is told to start a variant's engine."""
        speculation = None
        if variant != STOCK:
            speculation = SpeculationConfig.from_dict(self._speculation(variant)).to_dict()
        return {
            "model": str(self.model),
            "engine": self.engine,
            "forces_text": self.text is not None,
            "speculation": speculation,
        }

    def _speculation(self, variant: str) -> dict[str, Any]:
        if variant == "off":
            return {"method": "off"}
        keys: dict[str, Any] = {"method": variant, "num_speculative_tokens": self.draft_tokens}
        if self.text is not None:
            # No uniform of this engine drew a recording's tokens, so that a draw with one would be any draw.
            keys["draft_sample_method"] = "greedy"
        if variant == ON_DEVICE:
            return keys | {"method": "sam", "draft_on": "auto"}
        if variant in FIXED:
            return keys | {"method": "sam", "policy": "always", "num_speculative_tokens": FIXED[variant]}
        if variant in WITH_DRAFT_MODEL:
            keys["draft_model"] = str(self.draft_model)
        return keys


def engine_arguments(words: list[str]) -> dict[str, str]:
    """Values of the engine's arguments by name, with underscores, among words of a command line.

    Example:
        >>> engine_arguments(["--max-model-len", "512", "--enforce-eager", "--hf_overrides.a=9"])
        {'max_model_len': '512', 'enforce_eager': '', 'hf_overrides': '9'}
    """
    arguments = {}
    for word, following in itertools.pairwise([*words, "--"]):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        if not equals and not following.startswith("--"):
            value = following
        name = flag[2:].partition(".")[0].replace("-", "_")
        arguments[name] = value
    return arguments


def engine_options() -> set[str]:
    """Flags of vLLM's engine, read off the installed one's source, which takes seconds to import; none without it."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return set()
    source = Path(package.origin).with_name("engine") / "arg_utils.py"
    if not source.is_file():
        return set()
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    engine = [node for definition in classes if definition.name == "EngineArgs" for node in ast.walk(definition)]
    calls = [node for node in engine if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", None) == "add_argument"]
    return {word.value for call in added for word in call.args if isinstance(word, ast.Constant)}


def is_engine_option(word: str, known: set[str]) -> bool:
    """Whether argparse takes a word for one of the known flags: also by its beginning, or with a value behind it."""
    flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
    if flag.startswith("--"):
        return any(option.startswith((flag, flag.replace("--no-", "--", 1))) for option in known)
    short = [option for option in known if not option.startswith("--")]
    return flag.startswith(("-O", *short))


def parser() -> Parser:
    """The command's own options."""
    description = "Does speculation pay for this model, engine and load, compared with stock vLLM?"
    options = Parser(prog="sam bench", description=description, epilog=EPILOG, allow_abbrev=False)
    positive = number(1)
    options.add_argument("--model", type=Path, required=True, help="its folder, or its name on Hugging Face")
    options.add_argument("--prompts", type=Path, help=".jsonl or .parquet with prompt or prompt_token_ids; or built in")
    options.add_argument("--text", type=Path, help="recording or run directory whose responses all requests emit")
    requests = "loads: requests that start together"
    options.add_argument("--requests", type=positive, nargs="+", default=[1, 4, 24], help=requests)
    options.add_argument("--samples", type=positive, default=8, help="requests of one prompt")
    options.add_argument("--responses", type=positive, default=8, help="least number of responses in a round")
    of_response = f"tokens of a response at most; by default {DEFAULT_MAX_TOKENS}, with --text as many as it has"
    options.add_argument("--max-tokens", type=positive, help=of_response)
    options.add_argument("--temperature", type=float, default=1.0)
    variants = {"choices": (*VARIANTS, *FIXED), "default": [STOCK, "off", "sam"], "metavar": "VARIANT"}
    choices = f"{', '.join(VARIANTS)}, or sam-k1 to sam-k15, which draft so many tokens in every step"
    options.add_argument("--variants", nargs="+", **variants, help=choices)
    options.add_argument(
        "--draft-tokens",
        type=int,
        default=SpeculationConfig.num_speculative_tokens,
        help="longest draft of a request, 1 to 15",
    )
    options.add_argument("--draft-model", type=Path, metavar="DIR", help="of draft_model and hybrid, or eagle3's head")
    options.add_argument("--rounds", type=positive, default=3, help="runs of each load and variant that count")
    options.add_argument("--ignore-eos", action="store_true", help="all responses have --max-tokens tokens")
    seeds = "whether requests carry seeds, so that tokens can be compared; by default unless --text is given"
    options.add_argument("--seeds", action=argparse.BooleanOptionalAction, help=seeds)
    options.add_argument("--output", type=Path, default=Path("outputs/bench"), help="folder for logs and result")
    options.add_argument("--resume", action="store_true", help="go on with the rounds that --output has")
    options.add_argument(
        "--json", action="store_true", help="print one object, as result.json has it, in place of a table"
    )
    options.add_argument("--check", action="store_true", help="check the arguments, and measure nothing")
    return options


def parse(arguments: list[str]) -> Settings:
    """Settings as far as they are known without the model and its prompts.

    Raises:
        ValueError: one line.
    """
    settings, engine = parser().parse_known_args(arguments, Settings())
    if engine and not engine[0].startswith("-"):
        raise ValueError(f"{engine[0]}: expected an option of sam bench, or one of vLLM's engine")
    settings.engine = engine
    settings.seeds = settings.text is None if settings.seeds is None else settings.seeds
    settings.ignore_eos |= settings.text is not None
    if settings.text is None and settings.max_tokens is None:
        settings.max_tokens = DEFAULT_MAX_TOKENS
    if not is_hub_name(settings.model):
        settings.model = settings.model.absolute()
    if settings.draft_model:
        settings.draft_model = settings.draft_model.absolute()
    settings.validate()
    return settings


def _words(values: list) -> str:
    return " ".join(map(str, values))
