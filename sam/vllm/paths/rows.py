"""Rows of further paths in a model runner's batch (batch expansion): requests that the scheduler does not know.

vLLM verifies one path of a request. A further one is put into the worker's own copy of what was scheduled, as a new
request: its prompt is the request's text, its blocks are the request's up to the last whole one and then blocks of its
own (sam.vllm.paths.blocks), into which the request's last, partly filled one is copied. All of vLLM's steps from there
on take it for a request with drafts. When tokens have been drawn, sam.verify.paths follows the path that agrees with
them; the request gets its tokens, and the blocks that it wrote; the row gets none, and ends with the next step.
"""

import logging
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from sam import verify
from sam.verify.transfer import sent
from sam.vllm import ranks
from sam.vllm.paths.blocks import ExtraBlocks

logger = logging.getLogger(__name__)

MOST_ROWS = 32  # of all requests of a step: their blocks are reserved
UNDIVIDED = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")
COUNTERS = ("path_rows", "path_tokens", "path_wins", "path_errors")


class Row(NamedTuple):
    """A further path that is verified in this step.

    Attributes:
        owner: request id.
        start: tokens of its text before the last one, from which the row begins.
        tokens: the path.
        blocks: numbers of the row's own blocks.
    """

    owner: str
    start: int
    tokens: list[int]
    blocks: list[int]


class PathRows:
    """Puts rows of further paths into each step of a model runner, and takes what they bring.

    Args:
        runner: vLLM's.
        longest: draft tokens of a path.
        counters: of the drafter; COUNTERS are added: rows, their draft tokens, steps of a request that went on along a
            further path, and steps in which making rows failed.

    Attributes:
        planned: paths of the next step, by request; set by the drafter.
        rows: of the step under way, by the name that each has as a request.
    """

    def __init__(self, runner, longest: int, counters: dict[str, int]):
        self._runner, self.counters = runner, counters
        counters.update(dict.fromkeys(COUNTERS, 0))
        self._blocks = ExtraBlocks(runner, MOST_ROWS, longest + 1)
        self._group = ranks.tensor_parallel_group(runner)
        self.planned: dict[str, list[list[int]]] = {}
        self.rows: dict[str, Row] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows of the step under way."""
        return sum(1 + len(row.tokens) for row in self.rows.values())

    @property
    def num_draft_tokens(self) -> int:
        """Of them, those that are verified."""
        return sum(len(row.tokens) for row in self.rows.values())

    def owner_of(self, request_id: str) -> str:
        """The request that a row of the batch belongs to: itself, or the one whose path it is."""
        row = self.rows.get(request_id)
        return request_id if row is None else row.owner

    def takes(self, request_id: str) -> bool:
        """Whether a request may have rows."""
        return is_plain(self._runner.requests[request_id])

    def before_step(self, scheduled) -> None:
        """End the rows of the step before, and add those that are planned; the same on all ranks.

        Args:
            scheduled: vLLM's SchedulerOutput, a copy of the model runner's own, drafts included.
        """
        if self.rows:
            scheduled.finished_req_ids = {*scheduled.finished_req_ids, *self.rows}
        self.rows = {}
        planned, self.planned = self.planned, {}
        if not scheduled.scheduled_spec_decode_tokens:
            return
        if self._group:  # the first rank's
            planned = self._group.broadcast_object(planned)
        try:
            rows = dict(self._fitting(scheduled, planned))
            new = [self._as_request(name, row) for name, row in rows.items()]
        except Exception:
            if not self.counters["path_errors"]:
                logger.exception("no further paths in a step (logged once, then counted)")
            self.counters["path_errors"] += 1
            return
        if rows:
            self._add(scheduled, rows, new)

    def _fitting(self, scheduled, planned: dict[str, list[list[int]]]) -> Iterator[tuple[str, Row]]:
        """The planned rows that there is room for, and that say something else than the request's own draft."""
        runner, cached = self._runner, scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        free_tokens = runner.max_num_tokens - scheduled.total_num_scheduled_tokens
        free_rows = min(len(self._blocks.of_row), runner.max_num_reqs - len(scheduled.num_scheduled_tokens))
        used = 0
        for owner, paths in planned.items():
            draft, start = scheduled.scheduled_spec_decode_tokens.get(owner), computed.get(owner)
            if not draft or start is None or owner in cached.resumed_req_ids:
                continue
            if owner not in runner.input_batch.req_id_to_index or runner.requests[owner].num_tokens != start + 1:
                continue  # not all of its text is known here
            if not self.takes(owner):
                continue
            for path in paths:
                # Not longer than the request's own draft: the scheduler has made room for that many tokens.
                tokens = path[: len(draft)]
                if tokens == draft[: len(tokens)] or used == free_rows or free_tokens < len(tokens) + 1:
                    continue
                yield f"{owner}-path-{used}", Row(owner, start, tokens, self._blocks.of_row[used])
                used, free_tokens = used + 1, free_tokens - len(tokens) - 1

    def _as_request(self, name: str, row: Row):
        """vLLM's NewRequestData, whose prompt is the text: all but its last token is computed."""
        from vllm.v1.core.sched.output import NewRequestData

        runner, state = self._runner, self._runner.requests[row.owner]
        index, whole = runner.input_batch.req_id_to_index[row.owner], row.start // self._blocks.block_size
        # An array: as a list a long text would take milliseconds.
        text = runner.input_batch.token_ids_cpu[index, : row.start + 1].copy()
        # Under asynchronous scheduling a rank that does not draft has placeholders for earlier tokens, which are
        # computed: of a plain request nobody reads them but vLLM's penalties of other rows, as an index.
        np.maximum(text, 0, out=text)
        parameters = copy(state.sampling_params)
        parameters.extra_args = parameters.prompt_logprobs = None
        return NewRequestData(
            req_id=name,
            prompt_token_ids=text,
            mm_features=[],
            sampling_params=parameters,
            pooling_params=None,
            block_ids=([*state.block_ids[0][:whole], *row.blocks[: self._num_blocks(row)]],),
            num_computed_tokens=row.start,
            lora_request=state.lora_request,
        )

    def _num_blocks(self, row: Row) -> int:
        """Blocks from the one that the row begins in to the one that it ends in."""
        size = self._blocks.block_size
        return (row.start + len(row.tokens)) // size - row.start // size + 1

    def _add(self, scheduled, rows: dict[str, Row], new: list) -> None:
        scheduled.scheduled_new_reqs = [*scheduled.scheduled_new_reqs, *new]
        begun = []
        for name, row in rows.items():
            scheduled.num_scheduled_tokens[name] = 1 + len(row.tokens)
            scheduled.total_num_scheduled_tokens += 1 + len(row.tokens)
            scheduled.scheduled_spec_decode_tokens[name] = row.tokens
            if row.start % self._blocks.block_size:
                place = row.start // self._blocks.block_size
                begun.append((self._runner.requests[row.owner].block_ids[0][place], row.blocks[0]))
        self.rows = rows
        self._copy(begun)
        self.counters["path_rows"] += len(rows)
        self.counters["path_tokens"] += sum(len(row.tokens) for row in rows.values())

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        source, target = sent(torch.tensor(pairs or [(0, 0)]), self._runner.device).T
        self._blocks.copy(source[: len(pairs)], target[: len(pairs)])

    def follow(self, sampled: torch.Tensor, drafts: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Give requests with rows the tokens of the path that agrees, and their rows none.

        Args:
            sampled, drafts: as sam.verify.paths.follow_paths takes them, for each row of the batch.
            kept: int32 [rows, 1 + k], what verification keeps of each row by itself; changed in place.

        Returns:
            int64 [rows, 1 + k], the row of the batch that each kept token was drawn in.
        """
        batch, device = self._runner.input_batch, sampled.device
        of: dict[str, list[str]] = {}
        for name, row in self.rows.items():
            of.setdefault(row.owner, [row.owner]).append(name)
        widest = max(map(len, of.values()))
        places = [[batch.req_id_to_index[name] for name in names] for names in of.values()]
        table = sent(torch.tensor([[*line, *[-1] * (widest - len(line))] for line in places]), device)
        followed = verify.follow_paths(sampled, drafts, table)
        source = torch.arange(len(sampled), device=device)[:, None].repeat(1, sampled.shape[1])
        kept[sent(torch.tensor([place for line in places for place in line[1:]]), device)] = verify.PLACEHOLDER
        kept[table[:, 0]], source[table[:, 0]] = followed.tokens, followed.rows
        self._take_blocks(list(of.values()), followed.last)
        return source

    def _take_blocks(self, of: list[list[str]], last: torch.Tensor) -> None:
        """Copy the blocks of the paths that the texts have taken into the requests' own.

        No step waits for the device to tell which: where a request went on along its own draft, its blocks are copied
        onto themselves.
        """
        if last.device.type == "cpu":
            left = [(names, place) for names, place in zip(of, last.tolist(), strict=True) if place]
            of, last = [names for names, _ in left], torch.tensor([place for _, place in left])
        targets, choices, requests = [], [], []
        for number, (owner, *names) in enumerate(of):
            own = self._runner.requests[owner].block_ids[0]
            first = self.rows[names[0]].start // self._blocks.block_size
            for i in range(max(self._num_blocks(self.rows[name]) for name in names)):
                blocks = [self.rows[name].blocks[i] if i < self._num_blocks(self.rows[name]) else own[first + i]
                          for name in names]  # fmt: skip
                targets.append(own[first + i])
                choices.append([own[first + i], *blocks])
                requests.append(number)
        if not targets:
            return
        widest = max(map(len, choices))
        table = sent(torch.tensor([[*line, *line[:1] * (widest - len(line))] for line in choices]), last.device)
        taken = last[sent(torch.tensor(requests), last.device)]
        source = table[torch.arange(len(table), device=last.device), taken]
        self._blocks.copy(source, table[:, 0])


def check_engine(vllm_config) -> None:
    """Refuse an engine whose batches have a meaning beyond the rows that vLLM's model runner computes.

    Raises:
        ValueError: names the setting and what to set instead.
    """
    parallel, obstacle = vllm_config.parallel_config, None
    for key in UNDIVIDED:
        if (size := getattr(parallel, key, 1)) > 1:
            obstacle = f"{key}={size}"
    if getattr(parallel, "enable_dbo", False):
        obstacle = "enable_dbo=True"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        obstacle = "a KV connector (kv_transfer_config)"
    if getattr(vllm_config.model_config, "enable_return_routed_experts", False):
        obstacle = "enable_return_routed_experts=True"
    if parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        obstacle = "distributed_executor_backend=external_launcher"
    if obstacle:
        raise ValueError(f"speculation.paths: rows of further paths do not go with {obstacle}: set speculation.paths=1")


def is_plain(state: Any) -> bool:
    """Whether a request's tokens depend on nothing but its text, which is all that a row is given of it."""
    parameters = state.sampling_params
    return (
        state.prompt_token_ids is not None
        and not state.mm_features
        and parameters.structured_outputs is None
        and parameters.repetition_penalty == 1.0
        and parameters.frequency_penalty == parameters.presence_penalty == 0.0
        and parameters.min_tokens == 0
        and not parameters.bad_words
        and parameters.thinking_token_budget is None
    )
