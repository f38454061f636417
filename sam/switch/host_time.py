"""Step costs as another engine would have them: scheduled asynchronously, with graphs, or without.

A synchronous step takes the host's time, then the longer of launching its operators and running them. In a graph
there is nothing to launch. Scheduled asynchronously the host prepares a step without drafts while the device runs the
one before, so that the step takes the longer of the two; a step with drafts waits for its tokens (sam.vllm.
async_proposer), and takes what it takes synchronously. What a step takes longer than the table's shortest one is taken
to be the device's, after what was launched, as sam.simulate.setups has it.

What a graph saves of a plain step on Ascend is taken from two reports: 67 % (Qwen3-Coder-480B-A35B, one request: 171 ms
a token without graphs, 56 ms with them, at 256k tokens of context: https://github.com/vllm-project/vllm-ascend/issues/7723)
and up to 71 % (Qwen3-VL-30B-A3B without graphs: the device idles in 591 of a layer's 832 microseconds:
https://github.com/vllm-project/vllm-ascend/issues/9404). Both are of other models than the published set-ups. No figure
is published, as far as we know, of the host's time apart from launching; ours is `rollout/other_ms_per_step` on a CPU.
"""

from dataclasses import dataclass, replace

import numpy as np

from sam.switch.step_cost import NOISE, StepCost

LAUNCH_SHARE = 2 / 3  # of a plain step without graphs, the lower of the two reports
HOST_MS = 3.0  # the upper end of what was seen on a CPU


@dataclass(frozen=True)
class Scheduling:
    """How an engine schedules, and which of its steps replay a graph.

    Attributes:
        asynchronous: whether a step is scheduled before the tokens of the one before are known.
        graph_share: share of the steps that replay a graph, with drafts and without; None: as the table's engine, all
            or none.
        host_ms: milliseconds of scheduling, preparing inputs and handling outputs in a step.
        launch_ms: milliseconds that a plain step takes longer without a graph; None: LAUNCH_SHARE of a plain step's, if
            the table's engine has no graphs.

    Raises:
        ValueError: a value outside its range.
    """

    asynchronous: bool = False
    graph_share: tuple[float, float] | None = None
    host_ms: float = HOST_MS
    launch_ms: float | None = None

    def __post_init__(self) -> None:
        if self.graph_share and not all(0.0 <= share <= 1.0 for share in self.graph_share):
            raise ValueError(f"graph_share={self.graph_share}: expected shares from 0 to 1")
        for name in ("host_ms", "launch_ms"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}={value}: expected milliseconds, 0 or more")

    @property
    def label(self) -> str:
        """In words."""
        words = f"scheduled {'asynchronously' if self.asynchronous else 'synchronously'}"
        if self.graph_share:
            words += ", graphs in {:.0%} of the steps with drafts and {:.0%} of those without".format(*self.graph_share)
        return words

    def apply(self, table: StepCost) -> StepCost:
        """The costs that an engine of a table has when it is scheduled so.

        Args:
            table: of an engine that was scheduled synchronously, all of whose steps replayed a graph, or none (its
                fingerprint says `eager`).

        Raises:
            ValueError: `launch_ms` is needed and not known, or more milliseconds are to be taken off a plain step than
                it has.

        Example:
            >>> from sam.switch.step_cost import linear
            >>> eager = linear(89.0, 0.0, 1.0, fingerprint={"eager": 1})
            >>> with_graphs = Scheduling(asynchronous=True, graph_share=(1, 1), host_ms=5.0, launch_ms=60.0)
            >>> with_graphs.apply(eager).step_ms(1, [1, 16], 1)  # 90 and 105 ms; the first hides 5 ms
            array([25., 45.])
        """
        table = with_short_drafts(table)
        plain, eager = float(table.milliseconds.min()), is_eager(table)
        shares = self.graph_share or ((0.0, 0.0) if eager else (1.0, 1.0))
        launch_ms = LAUNCH_SHARE * plain if self.launch_ms is None and eager else self.launch_ms
        if launch_ms is None and min(shares) < 1:
            raise ValueError("launch_ms is missing: these step costs, of an engine with graphs, do not tell it")
        launch_ms = launch_ms or 0.0
        replayed = table.milliseconds - (launch_ms if eager else 0.0)
        if replayed.min() <= self.host_ms:
            raise ValueError(
                f"host_ms={self.host_ms:g} and launch_ms={launch_ms:g}: a plain step of {plain:g} ms has nothing left "
                "for the device: name less"
            )
        launched = replayed + launch_ms
        with_drafts, without = (share * replayed + (1 - share) * launched for share in shares)
        if self.asynchronous:
            device = replayed - self.host_ms
            hidden, floor = np.maximum(self.host_ms, device), np.maximum(launched.min(), device)
            without = shares[1] * hidden + (1 - shares[1]) * floor
        drafted = table.tokens_per_request > 1
        if (with_drafts[:, drafted] < (1.0 - NOISE) * without[:, :1]).any():
            raise ValueError(
                f"graph_share={shares}: a step with drafts would be much faster than one without: expected a smaller "
                "first share or a larger second one"
            )
        cells = np.where(drafted[None, :, None], with_drafts, without)
        return replace(
            table, milliseconds=cells, source=f"{table.source}; taken as {self.label}, by sam.switch.host_time"
        )


def with_short_drafts(table: StepCost) -> StepCost:
    """The same costs, with a column of their own for two tokens a request: between it and plain steps, which wait for
    nothing, lie steps in which fewer than every request has a draft."""
    axis = np.union1d(table.tokens_per_request, [2])
    if len(table.tokens_per_request) == 1 or len(axis) == len(table.tokens_per_request):
        return table
    cells = np.apply_along_axis(lambda its: np.interp(axis, table.tokens_per_request, its), 1, table.milliseconds)
    return replace(table, tokens_per_request=axis, milliseconds=cells)


def is_eager(table: StepCost) -> bool:
    """Whether a table is of an engine without graphs, as far as its fingerprint says."""
    return bool(table.fingerprint.get("eager", "eager" in str(table.fingerprint.get("device", ""))))
