"""The `speculation` part of the config: checked, and translated into vLLM's own arguments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sam.switch.policy import POLICIES, check_rotation
from sam.switch.step_cost import StepCost

METHODS = ("sam", "off", "ngram", "suffix")
SCOPES = ("request", "group", "history")
VERIFICATIONS = ("exact", "standard")
# Ascend's fused attention verifies at most 16 tokens of a request at once (vllm-ascend 0.23.0.post1).
MAX_SPECULATIVE_TOKENS = 15
MAX_MEMORY_BUDGET_MIB = 65536  # what 32-bit indices of 32-byte records reach (sam.automaton.store)


@dataclass(frozen=True)
class Speculation:
    """Settings as in configs/speculation/knobs.yaml, which documents each.

    Raises:
        ValueError: a value outside its range; the line names the key, the value and what is allowed.
    """

    method: str
    num_speculative_tokens: int
    policy: str
    turns: list[str] | None
    batch_size_threshold: int
    hysteresis: int
    step_cost: str | None
    scope: str
    history_tokens: int
    memory_budget_mib: int
    corpus: str | None
    corpus_bias: int
    verification: str
    prompt_lookup_max: int
    prompt_lookup_min: int

    def __post_init__(self) -> None:
        _expect_one_of("method", self.method, METHODS)
        _expect_one_of("policy", self.policy, POLICIES)
        _check_turns(self.turns)
        _expect_one_of("scope", self.scope, SCOPES)
        _expect_one_of("verification", self.verification, VERIFICATIONS)
        _expect_between("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        _expect_between("batch_size_threshold", self.batch_size_threshold, 0, None)
        _expect_between("hysteresis", self.hysteresis, 0, None)
        _expect_between("history_tokens", self.history_tokens, 0, None)
        _expect_between("memory_budget_mib", self.memory_budget_mib, 1, MAX_MEMORY_BUDGET_MIB)
        _expect_between("corpus_bias", self.corpus_bias, 0, None)
        if self.corpus is not None:
            _check_corpus(self.corpus)
        if self.step_cost is not None:
            _check_step_cost(self.step_cost)
        _expect_between("prompt_lookup_min", self.prompt_lookup_min, 1, None)
        _expect_between("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, None)

    @classmethod
    def from_config(cls, section: dict[str, Any]) -> Speculation:
        """Build from the plain dictionary of the config's `speculation` section; unknown keys are errors."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(section) - set(known)):
            raise ValueError(f"speculation.{unknown[0]} is unknown: the keys are {', '.join(known)}")
        if missing := sorted(set(known) - set(section)):
            raise ValueError(f"speculation.{missing[0]} is missing: choose speculation={'|'.join(METHODS)}")
        return cls(**section)

    def vllm_arguments(self) -> dict[str, Any]:
        """vLLM engine arguments: `speculative_config` (absent when off) and `additional_config`.

        `additional_config` is vLLM's own place for plugins' settings; `sam.vllm` reads `speculation` from it
        in every engine process.
        """
        arguments: dict[str, Any] = {"additional_config": {"speculation": asdict(self)}}
        draft = {"num_speculative_tokens": self.num_speculative_tokens}
        if self.method == "sam":
            arguments["speculative_config"] = {"model": "sam.vllm.proposer.SamProposer", **draft}
        elif self.method == "ngram":
            lookup = {
                "prompt_lookup_max": self.prompt_lookup_max,
                "prompt_lookup_min": self.prompt_lookup_min,
            }
            arguments["speculative_config"] = {"method": "ngram", **draft, **lookup}
        elif self.method == "suffix":
            arguments["speculative_config"] = {"method": "suffix", **draft}
        return arguments


def _check_turns(turns: list[str] | None) -> None:
    if turns is None:
        return
    try:
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{turns!r}: expected policies as in [never,'threshold 8',goodput], or null")
        check_rotation(turns)
    except ValueError as error:
        raise ValueError(f"speculation.turns={error}") from error


def _check_corpus(path: str) -> None:
    from sam.automaton.corpus_file import load_corpus  # numba takes a second to import, and few runs have a corpus

    try:
        load_corpus(Path(path))
    except ValueError as error:
        raise ValueError(f"speculation.corpus: {error}") from error


def _check_step_cost(path: str) -> None:
    try:
        StepCost.load(Path(path))
    except ValueError as error:
        raise ValueError(f"speculation.step_cost: {error}") from error


def _expect_one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"speculation.{key}={value!r}: expected one of {', '.join(allowed)}")


def _expect_between(key: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
        raise ValueError(f"speculation.{key}={value!r}: expected {allowed}")
