"""Which further paths the next step verifies, and what became of the last ones."""

from collections.abc import Sequence

import numpy as np

from sam.drafting.drafter import Drafter
from sam.drafting.paths.further import ForkRate, FurtherPaths, further_paths
from sam.drafting.shape import FILLER
from sam.switch.policy import Policy, StepState
from sam.vllm.paths.rows import MOST_ROWS, PathRows


class PathPlanner:
    """Plans the rows of a proposer's next step.

    Args:
        drafter: that drafted.
        rows: where the plan goes, and who counts what became of it.
        paths: of a request at most, its draft included.
        whole: tokens that every row has (a uniform step); 0: as many as are worth it.
    """

    def __init__(self, drafter: Drafter, rows: PathRows, paths: int, whole: int):
        self._drafter, self._rows, self._paths, self._whole = drafter, rows, paths, whole
        self._rate = ForkRate()
        self._ids: list[str] = []  # for which paths were last grown
        self._grown: FurtherPaths | None = None
        self._drafts: dict[str, list[int]] = {}  # of the last plan, for requests with rows

    def learn(self, request_ids: list[str], tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Compare the last paths with the tokens that have come since.

        Args:
            tokens: int32 [total], new tokens of each request, one after the other; offsets: int64 [requests + 1].
        """
        grown, self._grown = self._grown, None
        if grown is None or not len(grown.request):
            return
        place = {name: i for i, name in enumerate(request_ids)}
        at = np.array([place.get(name, -1) for name in self._ids], np.int64)[grown.request]
        begins, ends = np.where(at < 0, 0, offsets[at]), np.where(at < 0, 0, offsets[at + 1])
        self._rate.learn(grown, tokens, begins, ends)
        verified = {row.owner for row in self._rows.rows.values()}
        for name in verified & place.keys():
            accepted = tokens[offsets[place[name]] : offsets[place[name] + 1] - 1].tolist()
            self._rows.counters["path_wins"] += accepted != self._drafts.get(name, [])[: len(accepted)]

    def plan(
        self,
        policy: Policy,
        state: StepState,
        request_ids: list[str],
        drafts: Sequence[list[int]],
        longest: np.ndarray,
    ) -> list[list[int]]:
        """Plan rows for the next step.

        Args:
            policy: that chose the drafts.
            drafts: of each request, as chosen.
            longest: int [requests], tokens that a path may have.

        Returns:
            The drafts to give to vLLM: of a request with rows its longest path, since no row may be longer.
        """
        named = zip(request_ids, drafts, strict=True)
        depths = np.where([len(draft) > 0 and self._rows.takes(name) for name, draft in named], longest, 0)
        grown = further_paths(self._drafter, request_ids, depths, self._paths)
        self._ids, self._grown = request_ids, grown
        own, offsets = grown.own(self._rate.scale)
        drafted = state.running * self._whole or sum(map(len, drafts))
        taken = policy.choose_paths(state, drafted, own, offsets, grown.shared + 1)
        chosen = np.flatnonzero(taken)
        likeliest = chosen[np.argsort(-own[offsets[chosen]], kind="stable")][:MOST_ROWS]
        paths: dict[int, list[list[int]]] = {}
        for i in np.sort(likeliest).tolist():
            tokens = grown.tokens[i, : grown.shared[i] + taken[i]].tolist()
            paths.setdefault(int(grown.request[i]), []).append(tokens)
        given = list(drafts)
        for i, further in paths.items():
            # Of equally long ones the draft comes first.
            given[i], *rest = sorted([list(drafts[i]), *further], key=len, reverse=True)
            self._rows.planned[request_ids[i]] = [self._filled(path) for path in rest]
        self._drafts = {request_ids[i]: given[i] for i in paths}
        return given

    def _filled(self, path: list[int]) -> list[int]:
        return path + [FILLER] * (self._whole - len(path))
