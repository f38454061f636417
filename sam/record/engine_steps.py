"""The engine steps of a rollout: filled by sam.vllm.step_recorder, read by everything that measures a run."""

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from sam.reading import Values, array_of, content_of, expect, npz_arrays, one_line
from sam.record import replacing

TURNS = 4  # of a conversation that are told apart; the last stands for all later ones
HISTOGRAMS = ("drafted_at", "accepted_at", "turn_steps", "turn_emitted")
# The columns, in the order of the fields.
PER_STEP = {
    "end_s": np.float64,
    "step_ms": np.float32,
    "running": np.int32,
    "prefilling": np.int32,
    "drafted": np.int32,
    "accepted": np.int32,
    "emitted": np.int32,
    "drafting": np.bool_,
    "forward_ms": np.float32,
    "verify_ms": np.float32,
    "draft_ms": np.float32,
    "replayed": np.bool_,
}
# What each field of a file is, but for the counters.
COUNTER = Values("a count", "int64", dimensions=0)
SUM = Values("a sum", "float64", dimensions=0)  # of milliseconds
FIELDS = {
    **{name: Values("a figure of a step", np.dtype(dtype).name) for name, dtype in PER_STEP.items()},
    "end_s": Values("a time", "float64", least=None),  # on a clock that may begin anywhere
    **dict.fromkeys(HISTOGRAMS, Values("a count", "int64")),
    "preemptions": COUNTER,
    **dict.fromkeys(("asynchronous", "has_graphs"), Values("true or false", "bool", dimensions=0)),
}


@dataclass(eq=False)
class EngineSteps:
    """A replica's engine steps in the rollout of one training step, in order: arrays of the dtypes in FIELDS.

    Columns that are left out are zeros, `end_s` that of steps without pauses; ValueError if their lengths differ.

    Example:
        >>> steps = EngineSteps(step_ms=[10, 10, 30], running=[4, 2, 1], drafted=[0, 6, 3], accepted=[0, 2, 1])
        >>> len(steps), int(steps.accepted.sum()), steps.in_tail(2).tolist()
        (3, 3, [False, True, True])
        >>> EngineSteps.from_bytes(steps.to_bytes()).drafted.tolist()
        [0, 6, 3]
    """

    end_s: np.ndarray | None = None  # seconds on the engine process's clock at which the step ended
    step_ms: np.ndarray | None = None  # milliseconds since the step before ended; after a pause, since this one began
    running: np.ndarray | None = None  # requests in the batch
    prefilling: np.ndarray | None = None  # those of them whose prompt was not complete
    drafted: np.ndarray | None = None  # draft tokens verified
    accepted: np.ndarray | None = None  # draft tokens accepted
    emitted: np.ndarray | None = None  # tokens emitted
    drafting: np.ndarray | None = None  # whether the policy let requests speculate
    forward_ms: np.ndarray | None = None  # milliseconds of the model's forward pass
    verify_ms: np.ndarray | None = None  # of sampling and verification
    draft_ms: np.ndarray | None = None  # of drafting
    replayed: np.ndarray | None = None  # whether the forward pass replayed a graph, whole or in pieces
    drafted_at: np.ndarray = ()  # [num_speculative_tokens], drafts verified that were longer than the index
    accepted_at: np.ndarray = ()  # of these, the drafts whose token at the index was accepted
    turn_steps: np.ndarray = ()  # [TURNS], verifications by turn of the conversation
    turn_emitted: np.ndarray = ()  # [TURNS], tokens that these emitted
    asynchronous: bool = False  # whether vLLM scheduled a step before it knew the tokens of the one before
    has_graphs: bool = False  # whether the engine has graphs to replay; False also where that was not recorded
    preemptions: int = 0  # requests that the scheduler turned out because the KV cache was full
    counters: dict[str, int | float] = field(default_factory=dict)  # the drafter's totals since the engine started

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in PER_STEP if getattr(self, name) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"engine steps: columns of lengths {lengths}: expected one value for each engine step")
        steps = max(lengths.values(), default=0)
        if self.end_s is None and self.step_ms is not None:
            self.end_s = np.cumsum(self.step_ms, dtype=np.float64) / 1e3
        for name, field_ in FIELDS.items():
            value = getattr(self, name)
            value = np.zeros(steps, field_.dtype) if value is None else np.asarray(value, field_.dtype)
            setattr(self, name, value if field_.dimensions else value.item())

    def __len__(self) -> int:
        return len(self.step_ms)

    def to_bytes(self) -> bytes:
        """The contents of a compressed .npz file; counters are arrays named counter_*."""
        arrays = {name: getattr(self, name) for name in FIELDS}
        arrays |= {f"counter_{name}": value for name, value in self.counters.items()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, place: str = "engine steps") -> Self:
        """Read what `to_bytes` gave; arrays that are no field are left out. ReadErrors begin with `place`."""
        arrays = npz_arrays(content, place)
        known = {name: array_of(arrays[name], f"{place}, {name}", FIELDS[name]) for name in FIELDS if name in arrays}
        expect("step_ms" in known and "running" in known, place, "step_ms and running among its arrays", sorted(arrays))
        lengths = [len(known.get(name, ())) for name in HISTOGRAMS]
        fits = lengths[0] == lengths[1] and lengths[2] == lengths[3] and lengths[2] in (0, TURNS)
        expect(fits, f"{place}, {', '.join(HISTOGRAMS)}", f"two of one length, two of {TURNS} or of none", lengths)
        counters = {}
        for name, value in arrays.items():
            if name.startswith("counter_"):
                wanted = SUM if value.dtype.kind == "f" else COUNTER
                counters[name.removeprefix("counter_")] = array_of(value, f"{place}, {name}", wanted).item()
        with one_line(place, "not engine steps"):
            return cls(**known, counters=counters)

    @staticmethod
    def path(run_directory: Path, step: int) -> Path:
        """The file of a training step: engine_steps/<step>.npz in the run's directory."""
        return run_directory / "engine_steps" / f"{step}.npz"

    def save(self, run_directory: Path, step: int) -> None:
        """Write the file of a training step, whole or not at all."""
        with replacing(self.path(run_directory, step)) as partial:
            partial.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, run_directory: Path, step: int) -> Self:
        """Read the file of a training step; ReadError if it is not there, or no file of `save`'s."""
        path = cls.path(run_directory, step)
        return cls.from_bytes(content_of(path), str(path))

    @staticmethod
    def turn_lengths(parts: Iterable["EngineSteps"]) -> dict[int, float]:
        """Mean acceptance length by turn, of all parts together; nothing where no conversation had a second turn."""
        counts = [(part.turn_steps, part.turn_emitted) for part in parts if len(part.turn_steps)]
        if not counts:
            return {}
        steps, emitted = np.sum(counts, axis=0, dtype=np.float64)
        lengths = {int(i) + 1: float(emitted[i] / steps[i]) for i in np.flatnonzero(steps)}
        return lengths if lengths.keys() - {1} else {}

    @property
    def start_s(self) -> np.ndarray:
        """float64 [steps], seconds on the engine process's clock at which each step began."""
        return self.end_s - self.step_ms.astype(np.float64) / 1e3

    @property
    def seconds(self) -> float:
        """From the first step's begin to the last one's end."""
        return float(self.end_s[-1] - self.start_s[0]) if len(self) else 0.0

    def replays(self) -> dict[str, tuple[int, int]] | None:
        """Steps that replayed a graph and all steps, by phase: `with_drafts` to verify, and `without_drafts`. None for
        an engine without graphs."""
        if not self.has_graphs:
            return None
        phases = {"with_drafts": self.drafted > 0, "without_drafts": self.drafted == 0}
        return {name: (int((self.replayed & phase).sum()), int(phase.sum())) for name, phase in phases.items()}

    def split_rounds(self, rounds: int) -> list[Self]:
        """The steps of each generation round; histograms and counters, which are of all rounds, are left out.

        The next round is dispatched when the last response of this one is judged: the engine is idle meanwhile, longer
        than ever within a round.
        """
        pauses = self.start_s[1:] - self.end_s[:-1]
        longest = np.argsort(pauses, kind="stable")[max(0, len(pauses) - (rounds - 1)) :]
        columns = [np.split(getattr(self, name), 1 + np.sort(longest)) for name in PER_STEP]
        return [EngineSteps(*pieces) for pieces in zip(*columns, strict=True)]

    def in_tail(self, threshold: int) -> np.ndarray:
        """bool [steps]: the steps of a tail, from when running requests first stay at or below `threshold` to the end
        of the generation round.

        A round begins where running requests rise above the threshold again; the steps on the way up are not tail.
        Without any step above it the whole rollout is tail.
        """
        above = self.running > threshold
        tail = ~above
        tail[: above.argmax()] = False  # 0 where no step is above
        for step in np.flatnonzero(tail[:-1])[::-1]:
            if not tail[step + 1] and self.running[step] < self.running[step + 1]:
                tail[step] = False
        return tail
