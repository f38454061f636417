"""The settings of speculation: every default, once, checked, and translated into vLLM's own arguments."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from sam.trained_drafter import is_eagle3_head

# Weights in huge pages, of vLLM's CPU engine: steps that memory bounds take about 5 % less time. Stock does not ask.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
LOOKUP = (2, 5)  # tokens of the shortest and the longest match of ngram
METHODS = ("sam", "off", "ngram", "suffix", "draft_model", "hybrid", "eagle3")
WITH_DRAFT_MODEL = ("draft_model", "hybrid", "eagle3")
SCHEDULED_AHEAD = ("sam", *WITH_DRAFT_MODEL)  # methods that draft under asynchronous scheduling too
POLICIES = ("threshold", "goodput", "always", "never")
SCOPES = ("request", "group", "history")
CHOICES = {
    "method": METHODS,
    "policy": POLICIES,
    "scope": SCOPES,
    "verification": ("exact", "rejection"),
    "batch_invariant": ("auto", "off"),
    "async_scheduling": ("auto", "off"),
    "draft_on": ("auto", "host"),
    "sharing": ("auto", "replicas", "none"),
    "draft_sample_method": ("greedy", "probabilistic"),
}
# Least and largest value. Ascend's attention verifies at most 16 tokens of a request; 32-bit indices of 32-byte nodes
# reach 64 GiB.
RANGES = {
    "num_speculative_tokens": (1, 15),
    "batch_size_threshold": (0, None),
    "history_tokens": (0, None),
    "history_epochs": (1, None),
    "memory_budget_mib": (1, 65536),
    "paths": (1, 8),
}


@dataclass(frozen=True)
class SpeculationConfig:
    """The `speculation` section of a config. sam/configs/speculation/knobs.yaml says what each key means.

    Raises:
        ValueError: a value outside its range; the line names the key, the value and what is allowed.

    Example:
        >>> config = SpeculationConfig(num_speculative_tokens=5, scope="request")
        >>> SpeculationConfig.from_dict(config.to_dict()) == config
        True
        >>> config.vllm_arguments()["speculative_config"]
        {'model': 'sam.SamProposer', 'num_speculative_tokens': 5}
        >>> SpeculationConfig(scope="galaxy")
        Traceback (most recent call last):
        ValueError: speculation.scope='galaxy': expected one of request, group, history
    """

    method: str = "sam"
    draft_model: str | None = None
    draft_sample_method: str = "probabilistic"
    num_speculative_tokens: int = 8
    paths: int = 1
    policy: str = "goodput"
    batch_size_threshold: int = 8
    step_cost: str | None = None
    scope: str = "group"
    history_tokens: int = 2_000_000
    history_path: str | None = None
    history_epochs: int = 2
    memory_budget_mib: int = 2048
    cross_prompt: bool = True
    corpus: tuple[str, ...] = ()
    sharing: str = "auto"
    verification: str = "exact"
    batch_invariant: str = "auto"
    async_scheduling: str = "auto"
    draft_on: str = "host"

    def __post_init__(self) -> None:
        for key, allowed in CHOICES.items():
            self._expect(key, getattr(self, key) in allowed, f"one of {', '.join(allowed)}")
        for key, (low, high) in RANGES.items():
            value = getattr(self, key)
            is_valid = type(value) is int and low <= value and (high is None or value <= high)
            limits = f"of at least {low}" if high is None else f"from {low} to {high}"
            self._expect(key, is_valid, f"an integer {limits}")
        self._expect("cross_prompt", type(self.cross_prompt) is bool, "true or false")
        for key in ("draft_model", "history_path", "step_cost"):
            self._expect(key, isinstance(getattr(self, key), str | Path | None), "a path, or null")
        are_paths = isinstance(self.corpus, tuple) and all(isinstance(path, str) and path for path in self.corpus)
        self._expect("corpus", are_paths, "a path, or a list of paths")
        self._check_combinations()

    def _expect(self, key: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ValueError(f"speculation.{key}={getattr(self, key)!r}: expected {expected}")

    def _check_combinations(self) -> None:
        """Refuse values that do not go together, none of which would be used as it was meant."""
        method = self.method
        if self.history_path is not None and self.scope != "history":
            unused = f"unused with speculation.scope={self.scope}: set the scope to history, or leave the path out"
            fault = f"history_path={self.history_path}: {unused}"
        elif self.sharing == "replicas" and self.scope == "request":
            fault = "sharing=replicas: speculation.scope=request drafts from no sibling: set group"
        elif self.corpus and not self.cross_prompt:
            fault = "corpus: with speculation.cross_prompt=false there is no memory for it: set it to true"
        elif method in WITH_DRAFT_MODEL and not self.draft_model:
            fault = f"draft_model={self.draft_model}: speculation={method} needs one: name its folder"
        elif self.paths > 1 and method not in ("sam", "off"):
            fault = f"paths={self.paths}: speculation={method} drafts one path: set paths to 1, or speculation=sam"
        elif self.paths > 1 and self.verification != "exact":
            fault = f"paths={self.paths}: verification={self.verification} verifies one path: set verification=exact"
        else:
            return
        raise ValueError(f"speculation.{fault}")

    @classmethod
    def from_dict(cls, section: dict[str, Any]) -> Self:
        """Rebuild from `to_dict`, or from the keys that a user set; the rest keep their defaults."""
        values = dict(section)
        for key in ("batch_invariant", "async_scheduling"):
            if values.get(key) is False:  # what YAML makes of off
                values[key] = "off"
        corpus = values.get("corpus") or ()
        if isinstance(corpus, str):
            corpus = (corpus,)
        values["corpus"] = tuple(corpus) if isinstance(corpus, Iterable) else corpus  # a list of Hydra's is no list
        known = [field.name for field in fields(cls)]
        unknown = sorted(values.keys() - set(known))
        if unknown:
            raise ValueError(f"speculation.{unknown[0]} is unknown: the keys are {', '.join(known)}")
        return cls(**values)

    @classmethod
    def from_vllm(cls, vllm_config) -> Self | None:
        """What an engine was given as `additional_config["speculation"]`: nothing has to be set where it names this
        project's drafter; None where it asks for nothing of this project."""
        section = (vllm_config.additional_config or {}).get("speculation")
        drafter = getattr(getattr(vllm_config, "speculative_config", None), "model", None) or ""
        if section is None and str(drafter).startswith("sam."):
            section = {}
        return None if section is None else cls.from_dict(section)

    def to_dict(self) -> dict[str, Any]:
        """All keys and values, as JSON and YAML hold them."""
        return {**asdict(self), "corpus": list(self.corpus)}

    def trained_method(self) -> str:
        """What vLLM calls the trained drafter: with hybrid what its folder holds, draft_model if that is not there."""
        if self.method != "hybrid":
            return self.method
        return "eagle3" if is_eagle3_head(Path(self.draft_model)) else "draft_model"

    def schedules_asynchronously(self, device: str, pipeline: int = 1, engine_setting: bool | None = None) -> bool:
        """Whether the method drafts under asynchronous scheduling.

        Args:
            device: cuda, npu or cpu.
            pipeline: vLLM's pipeline_parallel_size; in a pipeline it cannot be (sam.vllm.ranks.check_async).
            engine_setting: vLLM's own async_scheduling, where the user has set it.
        """
        is_possible = device in ("cuda", "npu") and pipeline == 1 and engine_setting is not False
        return self.method in SCHEDULED_AHEAD and self.async_scheduling != "off" and is_possible

    def vllm_arguments(self, asynchronous: bool = False) -> dict[str, Any]:
        """vLLM engine arguments: `speculative_config` (absent when off) and `additional_config`, read by `from_vllm`.
        `asynchronous`: the method drafts under asynchronous scheduling, sam through the door of vLLM's ngram_gpu."""
        arguments: dict[str, Any] = {"additional_config": {"speculation": self.to_dict()}}
        if self.method == "off":
            return arguments
        if self.method in WITH_DRAFT_MODEL:
            drafter: dict[str, Any] = {"method": self.trained_method(), "model": self.draft_model}
            if not asynchronous:
                # vLLM calls the drafter after the step's tokens have come to the host, where the switch decides.
                drafter["disable_padded_drafter_batch"] = True
            if self.draft_sample_method == "probabilistic" and self.verification == "rejection":
                drafter["draft_sample_method"] = "probabilistic"  # vLLM then reserves memory for the probabilities
        elif self.method == "ngram":
            shortest, longest = LOOKUP
            drafter = {"method": "ngram", "prompt_lookup_max": longest, "prompt_lookup_min": shortest}
        elif self.method == "suffix":
            drafter = {"method": "suffix"}
        else:
            drafter = {"method": "ngram_gpu"} if asynchronous else {"model": "sam.SamProposer"}
        arguments["speculative_config"] = {**drafter, "num_speculative_tokens": self.num_speculative_tokens}
        return arguments
