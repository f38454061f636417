"""Rows of further paths in a model runner's batch (batch expansion): requests that the scheduler does not know.

A further path is put into the worker's own copy of what was scheduled, as a new request: its prompt is the request's
text, its blocks are the request's up to the last whole one and then blocks of its own, into which the request's last,
partly filled one is copied. When tokens have been drawn, sam.verify follows the path that agrees with them; the request
gets its tokens, and the blocks that it wrote; the row gets none, and ends with the next step.
"""

import logging
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sam import verify
from sam.drafting.drafter import Drafter
from sam.drafting.further_paths import further_paths
from sam.guard import guard
from sam.switch.policies import Policy
from sam.switch.step_cost import StepState
from sam.verify.exact import sent
from sam.vllm import patches, ranks

logger = logging.getLogger(__name__)

MOST_ROWS = 32  # of all requests of a step: their blocks are reserved
COUNTERS = ("path_rows", "path_tokens", "path_wins", "path_errors")


class Row(NamedTuple):
    """A further path that is verified in this step."""

    owner: str  # request id
    draft: list[int]  # the request's own
    start: int  # tokens of its text before the last one, from which the row begins
    tokens: list[int]  # the path
    blocks: list[int]  # numbers of the row's own


class PathRows:
    """Plans rows of further paths when drafts have been chosen (`plan`), puts them into what was scheduled for a model
    runner (`before_step`), and takes what they bring when tokens have been drawn (`follow`).

    Args:
        runner: vLLM's; its `initialize_kv_cache` is wrapped, so this has to come before it is called.
        drafter: that drafts for its requests.
        paths: of a request at most, its draft included.
        longest: draft tokens of a path.
        counters: of the drafter, to which COUNTERS are added.

    Attributes:
        planned: paths of the next step, by request.
        rows: of the step under way, by the name that each has as a request.
    """

    def __init__(self, runner, drafter: Drafter, paths: int, longest: int, counters: dict[str, int]):
        self._runner = runner
        self._drafter = drafter
        self._paths = paths
        self.counters = counters
        self._longest = longest
        counters.update(dict.fromkeys(COUNTERS, 0))
        self._group = ranks.tensor_parallel_group(runner)
        self._block_size = self._num_blocks = 0  # tokens of a block; blocks of vLLM and of rows
        self._own_blocks: list[list[int]] = []  # of each row
        self.planned: dict[str, list[list[int]]] = {}
        self.rows: dict[str, Row] = {}
        patches.wrap(runner, "initialize_kv_cache", "add_path_rows", self._with_room)
        further_paths(drafter, [], np.zeros(0), 2)  # compiled, so that no step waits for it

    def _with_room(self, initialize, config, *arguments, **keywords):
        """Give vLLM's KVCacheConfig more blocks, of which the scheduler does not know."""
        check_cache(config)
        self._block_size = config.kv_cache_groups[0].kv_cache_spec.block_size
        each = -(-(self._longest + 1) // self._block_size) + 1  # they may begin anywhere in a block
        self._num_blocks = config.num_blocks + MOST_ROWS * each
        first = range(config.num_blocks, self._num_blocks, each)
        self._own_blocks = [list(range(start, start + each)) for start in first]
        tensors = [
            replace(tensor, size=tensor.size // config.num_blocks * self._num_blocks)
            for tensor in config.kv_cache_tensors
        ]
        more = sum(new.size - old.size for new, old in zip(tensors, config.kv_cache_tensors, strict=True))
        logger.info("further paths: %d blocks of KV cache beside vLLM's, %.0f MiB", MOST_ROWS * each, more / 2**20)
        config = replace(config, num_blocks=self._num_blocks, kv_cache_tensors=tensors)
        return initialize(config, *arguments, **keywords)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the rows of the step under way verify; each row has one more."""
        return sum(len(row.tokens) for row in self.rows.values())

    def owner_of(self, request_id: str) -> str:
        """The request that a row of the batch belongs to: itself, or the one whose path it is."""
        row = self.rows.get(request_id)
        return request_id if row is None else row.owner

    def plan(self, policy: Policy, state: StepState, ids: list[str], drafts: list[list[int]], longest) -> list:
        """Plan rows for the next step.

        Args:
            policy: that chose the drafts.
            drafts: of each request, as chosen.
            longest: int [requests], tokens that a path may have.

        Returns:
            The drafts to give to vLLM: of a request with rows its longest path, since no row may be longer.
        """
        takes = [
            len(draft) > 0 and is_plain(self._runner.requests[name]) for name, draft in zip(ids, drafts, strict=True)
        ]
        grown = further_paths(self._drafter, ids, np.where(takes, longest, 0), self._paths)
        own, offsets = grown.own()
        taken = policy.choose_paths(state, sum(map(len, drafts)), own, offsets, grown.shared + 1)
        chosen = np.flatnonzero(taken)
        likeliest = chosen[np.argsort(-own[offsets[chosen]], kind="stable")][:MOST_ROWS]
        paths: dict[int, list[list[int]]] = {}
        for i in np.sort(likeliest).tolist():
            tokens = grown.tokens[i, : grown.shared[i] + taken[i]].tolist()
            paths.setdefault(int(grown.request[i]), []).append(tokens)
        given = list(drafts)
        for i, further in paths.items():
            # Of equally long ones the draft comes first.
            given[i], *self.planned[ids[i]] = sorted([list(drafts[i]), *further], key=len, reverse=True)
        return given

    def before_step(self, scheduled) -> None:
        """End the rows of the step before, and add those that are planned; the same on all ranks.

        Args:
            scheduled: vLLM's SchedulerOutput, a copy of the model runner's own, drafts included.
        """
        if self.rows:
            self._count_wins()
            scheduled.finished_req_ids = {*scheduled.finished_req_ids, *self.rows}
        self.rows = {}
        planned = self.planned
        self.planned = {}
        if not scheduled.scheduled_spec_decode_tokens:
            return
        if self._group:  # the first rank's
            planned = self._group.broadcast_object(planned)
        new = []
        with guard(logger, self.counters, "path_errors", "no further paths in a step"):
            rows = dict(self._fitting(scheduled, planned))
            new = [self._as_request(name, row) for name, row in rows.items()]
        if new:
            self._add(scheduled, rows, new)

    def _count_wins(self) -> None:
        """Of the step before: requests whose text has not gone on along their own draft."""
        batch = self._runner.input_batch
        for owner, draft, start in {(row.owner, tuple(row.draft), row.start) for row in self.rows.values()}:
            if (index := batch.req_id_to_index.get(owner)) is not None:
                accepted = batch.token_ids_cpu[index, start + 1 : batch.num_tokens_no_spec[index] - 1].tolist()
                self.counters["path_wins"] += accepted != list(draft[: len(accepted)])

    def _fitting(self, scheduled, planned: dict[str, list[list[int]]]) -> Iterator[tuple[str, Row]]:
        """The planned rows that there is room for, and that say something else than the request's own draft."""
        runner = self._runner
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        free_tokens = runner.max_num_tokens - scheduled.total_num_scheduled_tokens
        free_rows = min(len(self._own_blocks), runner.max_num_reqs - len(scheduled.num_scheduled_tokens))
        used = 0
        for owner, paths in planned.items():
            draft = scheduled.scheduled_spec_decode_tokens.get(owner)
            start = computed.get(owner)
            if not draft or start is None or owner in cached.resumed_req_ids:
                continue
            if owner not in runner.input_batch.req_id_to_index or runner.requests[owner].num_tokens != start + 1:
                continue  # not all of its text is known here
            if not is_plain(runner.requests[owner]):
                continue
            for path in paths:
                # Not longer than the request's own draft: the scheduler has made room for that many tokens.
                tokens = path[: len(draft)]
                if tokens == draft[: len(tokens)] or used == free_rows or free_tokens < len(tokens) + 1:
                    continue
                yield f"{owner}-path-{used}", Row(owner, draft, start, tokens, self._own_blocks[used])
                used += 1
                free_tokens -= len(tokens) + 1

    def _as_request(self, name: str, row: Row):
        """vLLM's NewRequestData, whose prompt is the text: all but its last token is computed."""
        from vllm.v1.core.sched.output import NewRequestData

        runner = self._runner
        state = self._runner.requests[row.owner]
        index = runner.input_batch.req_id_to_index[row.owner]
        whole = row.start // self._block_size
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
            block_ids=([*state.block_ids[0][:whole], *self._blocks_of(row)],),
            num_computed_tokens=row.start,
            lora_request=state.lora_request,
        )

    def _blocks_of(self, row: Row) -> list[int]:
        """Its own blocks from the one that it begins in to the one that it ends in."""
        size = self._block_size
        return row.blocks[: (row.start + len(row.tokens)) // size - row.start // size + 1]

    def _add(self, scheduled, rows: dict[str, Row], new: list) -> None:
        scheduled.scheduled_new_reqs = [*scheduled.scheduled_new_reqs, *new]
        begun = []
        for name, row in rows.items():
            scheduled.num_scheduled_tokens[name] = 1 + len(row.tokens)
            scheduled.total_num_scheduled_tokens += 1 + len(row.tokens)
            scheduled.scheduled_spec_decode_tokens[name] = row.tokens
            place, rest = divmod(row.start, self._block_size)
            if rest:
                begun.append((self._runner.requests[row.owner].block_ids[0][place], row.blocks[0]))
        self.rows = rows
        self._copy_begun(begun)
        self.counters["path_rows"] += len(rows)
        self.counters["path_tokens"] += self.num_draft_tokens

    def _copy_begun(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self._copy(*sent(torch.tensor(pairs), self._runner.device).T)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks, in all layers; int64 [n], numbers of blocks on the cache's device, no target twice."""
        for caches in self._runner.kv_caches:
            for cache in caches if isinstance(caches, list | tuple) else [caches]:
                # Attention kernels may have smaller blocks than the scheduler.
                dimension = next(d for d, size in enumerate(cache.shape) if size and size % self._num_blocks == 0)
                parts = cache.shape[dimension] // self._num_blocks
                part = torch.arange(parts, device=cache.device)
                to, source_blocks = ((blocks[:, None] * parts + part).ravel() for blocks in (target, source))
                cache.index_copy_(dimension, to, cache.index_select(dimension, source_blocks))

    def follow(self, sampled: torch.Tensor, drafts: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Give requests with rows the tokens of the path that agrees, and their rows none.

        Args:
            sampled, drafts: as sam.verify.follow_paths takes them, for each row of the batch.
            kept: int32 [rows, 1 + k], what verification keeps of each row by itself; changed in place.

        Returns:
            int64 [rows, 1 + k], the row of the batch that each kept token was drawn in.
        """
        batch = self._runner.input_batch
        device = sampled.device
        paths_of: dict[str, list[str]] = {}
        for name, row in self.rows.items():
            paths_of.setdefault(row.owner, [row.owner]).append(name)
        places = [[batch.req_id_to_index[name] for name in names] for names in paths_of.values()]
        table = sent(_table(places, lambda line: -1), device)
        followed = verify.follow_paths(sampled, drafts, table)
        source = torch.arange(len(sampled), device=device)[:, None].repeat(1, sampled.shape[1])
        kept[sent(torch.tensor([place for line in places for place in line[1:]]), device)] = verify.PLACEHOLDER
        kept[table[:, 0]] = followed.tokens
        source[table[:, 0]] = followed.rows
        self._take_blocks(list(paths_of.values()), followed.last)
        return source

    def _take_blocks(self, paths: list[list[str]], last: torch.Tensor) -> None:
        """Copy the blocks of the paths that the texts have taken into the requests' own, or those onto themselves: no
        step waits for the device to tell which."""
        # Of each block of a request: its own, and that of each row.
        choices = []
        requests = []
        for number, (owner, *names) in enumerate(paths):
            blocks = [self._blocks_of(self.rows[name]) for name in names]
            first = self.rows[names[0]].start // self._block_size
            for i in range(max(map(len, blocks))):
                own = self._runner.requests[owner].block_ids[0][first + i]
                choices.append([own, *(row[i] if i < len(row) else own for row in blocks)])
                requests.append(number)
        table = sent(_table(choices, lambda line: line[0]), last.device)
        taken = last[sent(torch.tensor(requests), last.device)]
        self._copy(table[torch.arange(len(table), device=last.device), taken], table[:, 0])


def _table(lines: list[list[int]], filler) -> torch.Tensor:
    """int64 [lines, longest], each line filled up with what `filler` says of it."""
    widest = max(map(len, lines))
    return torch.tensor([[*line, *[filler(line)] * (widest - len(line))] for line in lines])


def check_cache(config) -> None:
    """Raise ValueError unless one group of full attention layers is all that the KV cache has."""
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    if len(kinds) != 1 or kinds[0] not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise ValueError(
            f"speculation.paths: this model's KV cache is of {', '.join(kinds) or 'no kind'}, rows of further paths "
            "need one of full attention only: set speculation.paths=1"
        )


def check_engine(vllm_config) -> None:
    """Raise ValueError for an engine whose batches have a meaning beyond the rows that its model runner computes."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    obstacles = {
        "enable_dbo=True": getattr(parallel, "enable_dbo", False),
        "a KV connector (kv_transfer_config)": getattr(vllm_config, "kv_transfer_config", None) is not None,
        "enable_return_routed_experts=True": getattr(model, "enable_return_routed_experts", False),
    }
    divided = ranks.several(parallel, "pipeline", "prefill_context", "decode_context") | ranks.launched_apart(parallel)
    ranks.refuse(divided | obstacles, "rows of further paths do not go with it: set speculation.paths=1")


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
