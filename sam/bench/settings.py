"""What a measurement is of: its settings, checked before an engine starts, and the variants that take turns."""

import importlib.util
import re
from dataclasses import asdict, dataclass
from typing import Any

from sam.config import WITH_DRAFT_MODEL, SpeculationConfig

STOCK = "stock"
STOCK_V1 = "stock-v1"  # with vLLM's first model runner, which all that this project installs needs
# vLLM as it is shipped with one of its own drafters, and its own verification.
STOCK_DRAFTER = re.compile(r"stock-(ngram|ngram_gpu|suffix)(?:-k([1-9]|[12][0-9]|3[0-2]))?")
VARIANTS = (STOCK, STOCK_V1, "off", "sam", "ngram", "suffix", *WITH_DRAFT_MODEL)
# sam with drafts of up to so many tokens in every step, what goodput is measured against; and with so many paths.
SAM = re.compile(r"sam(?:-k([1-9]|1[0-5]))?(?:-paths([2-8]))?")
# Set by the variants, so that nobody else may.
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
RESERVED = ("model", *SPECULATION, "additional_config", "worker_extension_cls")
# Of the memory for all engines together. All of them stay up, beside what else the machine runs.
MEMORY_SHARE = 0.6
MEMORY_ARGUMENTS = ("gpu_memory_utilization", "kv_cache_memory_bytes")


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement; it goes on (`--resume`) only with equal ones.

    Attributes:
        model: folder of the model.
        prompts: digest of the prompts' tokens, and of those of forced responses.
        requests: loads, in requests that start together.
        samples: requests of one prompt.
        responses: least responses of a round; a load of fewer requests runs in several batches.
        max_tokens: longest response, in tokens.
        text: name of the recording whose responses are forced, or None.
        history: name of the recording that every engine emits once before the rounds, or None.
        has_tokenizer: whether the model has one.
        draft_model: folder of what draft_model, hybrid and eagle3 draft with, or None.
        temperature: of sampling.
        variants: who takes turns, in the order of the first round.
        draft_tokens: longest draft of a request, in tokens, of all variants that draft.
        ignore_eos: whether all responses have max_tokens.
        seeds: whether requests carry seeds.
        engine: further arguments of vLLM's engine, as words of a command line.

    Raises:
        ValueError: a value that cannot be measured with; one line.
    """

    model: str
    prompts: str
    requests: list[int]
    samples: int
    responses: int
    max_tokens: int
    temperature: float
    variants: list[str]
    draft_tokens: int
    ignore_eos: bool
    seeds: bool
    engine: list[str]
    text: str | None = None
    history: str | None = None
    has_tokenizer: bool = True
    draft_model: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "responses", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 1 or more")
        if min(self.requests) < 1 or len(set(self.requests)) < len(self.requests):
            raise ValueError(f"--requests {_words(self.requests)}: expected different numbers from 1")
        if not self.temperature >= 0:
            raise ValueError(f"--temperature {self.temperature}: expected 0 or more")
        check_variants(self.variants, self.draft_model)
        SpeculationConfig(num_speculative_tokens=self.draft_tokens)
        for name in RESERVED:
            if name in engine_names(self.engine):
                raise ValueError(f"--{name.replace('_', '-')}: the variants set it, leave it out")

    @property
    def reference(self) -> str:
        """The variant with which the others are compared: stock, or off where stock takes no part."""
        return STOCK if STOCK in self.variants else "off"

    def start(self, variant: str, memory_is_set: bool) -> dict[str, Any]:
        """What sam.vllm.bench.engine is told to start a variant's engine.

        Args:
            memory_is_set: whether an environment variable says how much memory an engine takes.
        """
        engine = list(self.engine)
        if not memory_is_set and not engine_names(engine) & {*MEMORY_ARGUMENTS}:
            engine += ["--gpu-memory-utilization", str(round(MEMORY_SHARE / len(self.variants), 3))]
        if not self.has_tokenizer and "skip_tokenizer_init" not in engine_names(engine):
            engine.append("--skip-tokenizer-init")
        speculation = None
        own = None
        if is_stock(variant):
            own = stock_speculation_of(variant, self.draft_tokens)
        else:
            chosen = speculation_of(variant, self.draft_tokens, self.draft_model)
            if self.text is not None:
                # No uniform of this engine drew a recording's tokens, so that a draw with one would be any draw.
                chosen["draft_sample_method"] = "greedy"
            speculation = SpeculationConfig.from_dict(chosen).to_dict()
        started = {"variant": variant, "model": self.model, "engine": engine, "speculation": speculation}
        return started | {"stock_speculation": own, "forces_text": self.text is not None}

    @property
    def starts_at_once(self) -> bool:
        """Whether engines may start side by side: where vLLM does not find its memory by watching what is free."""
        return "kv_cache_memory_bytes" in engine_names(self.engine)

    def sampling(self) -> dict[str, Any]:
        """Keywords of vLLM's SamplingParams that all requests share."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos}

    def difference(self, other: dict[str, Any]) -> str | None:
        """The first setting in which an earlier measurement differs, in words; None where all are equal."""
        earlier = {"responses": 1} | other  # rounds of earlier versions are one batch
        for name, value in asdict(self).items():
            if earlier.get(name) != value:
                return f"{name.replace('_', '-')} was {earlier.get(name)}, now {value}"
        return None


def check_variants(variants: list[str], draft_model: str | None = None) -> None:
    """Raise ValueError unless the variants are known, have what they need, and one to be compared with."""
    for variant in variants:
        if variant not in VARIANTS and not SAM.fullmatch(variant) and not STOCK_DRAFTER.fullmatch(variant):
            known = f"{', '.join(VARIANTS)}, sam-k1 to sam-k15, sam-paths2 to sam-paths8, stock-ngram_gpu, ..."
            raise ValueError(f"--variants {variant}: expected some of {known}")
    if len(set(variants)) < len(variants):
        raise ValueError(f"--variants {_words(variants)}: one comes twice")
    if not {STOCK, "off"} & set(variants):
        raise ValueError(f"--variants {_words(variants)}: expected stock or off among them, to compare with")
    if any("suffix" in variant for variant in variants) and importlib.util.find_spec("arctic_inference") is None:
        raise ValueError("--variants suffix: it needs arctic-inference: install the extra `peers`, or leave it out")
    needs_one = next((variant for variant in variants if variant in WITH_DRAFT_MODEL), None)
    if needs_one and not draft_model:
        raise ValueError(f"--variants {needs_one}: it needs --draft-model DIR, the folder of a draft model")
    if draft_model and not needs_one:
        raise ValueError(
            f"--draft-model {draft_model}: no variant drafts with it: add {' or '.join(WITH_DRAFT_MODEL)} to --variants"
        )


def is_stock(variant: str) -> bool:
    """Whether a variant is vLLM without this project's plugin."""
    return variant.partition("-")[0] == STOCK


def stock_speculation_of(variant: str, draft_tokens: int) -> dict[str, Any] | None:
    """vLLM's `speculative_config` of one of its own drafters, which leaves all else to vLLM; None without drafts."""
    if not (found := STOCK_DRAFTER.fullmatch(variant)):
        return None
    return {"method": found[1], "num_speculative_tokens": int(found[2] or draft_tokens)}


def speculation_of(variant: str, draft_tokens: int, draft_model: str | None = None) -> dict[str, Any]:
    """The keys of sam.config.SpeculationConfig that make a variant."""
    if variant == "off":
        return {"method": "off"}
    if sam := SAM.fullmatch(variant):
        fixed, paths = sam.groups()
        policy, longest = ("always", int(fixed)) if fixed else ("goodput", draft_tokens)
        several = {"paths": int(paths)} if paths else {}
        return {"method": "sam", "policy": policy, **several, "num_speculative_tokens": longest}
    policy = {"policy": "goodput"} if variant in WITH_DRAFT_MODEL else {}
    drafter = {"draft_model": draft_model} if variant in WITH_DRAFT_MODEL else {}
    return {"method": variant, **policy, **drafter, "num_speculative_tokens": draft_tokens}


def engine_names(engine: list[str]) -> set[str]:
    """Names of the engine's arguments among words of a command line, with underscores."""
    return {word[2:].partition("=")[0].partition(".")[0].replace("-", "_") for word in engine if word.startswith("--")}


def engine_value(engine: list[str], name: str) -> str | None:
    """Value of an engine's argument, as the words say it."""
    for word, following in zip(engine, [*engine[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            return value if equals else following
    return None


def _words(values: list) -> str:
    return " ".join(map(str, values))
