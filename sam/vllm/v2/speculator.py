"""The second runner's speculator: drafts of the host's drafter, as tokens on the device.

    execute_model    waits for the last step's tokens, where it had drafts or some are to come; plans and drafts; the
                     session is told which requests are gone and which are new; puts true counts into what was
                     scheduled, and the drafts on the device; vLLM computes
    sample_tokens    vLLM verifies, and starts the copy of the tokens to the host, which is noted; after a step that is
                     not waited for the next one is planned at once

Scheduled asynchronously vLLM has scheduled a step, with room for drafts, before the last one's tokens are known: the
wait comes when that is done and the device is busy. Scheduled synchronously it asks for the drafts after each step.
"""

from dataclasses import replace

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from sam.config import SpeculationConfig
from sam.engine.requests import Step, Text
from sam.engine.session import Drafting, Session
from sam.sharing.drafter import make_drafter
from sam.vllm import hooks, patches, warmup_cost


def is_warmup(request_id: str) -> bool:
    """Whether a request is vLLM's own, before it serves: _warmup_0_, _v2_mixed_warmup_decode_."""
    return request_id[0] == "_" and "warmup_" in request_id


class SamSpeculator(Drafting, BaseSpeculator):
    """Drafts for the requests of a step once its tokens have come to the host, by the copy that is on its way anyway.

    Of several tensor-parallel ranks the first drafts, and sends the others what it has drafted.

    Attributes:
        session: drafts.
        verifying: drafts of the step under way, by request.
    """

    on = "the host"  # where drafts are made
    session_class = Session
    supports_mm_inputs = False
    draft_logits = None  # a draft token is certain: vLLM's own rejection sampler takes it with its target probability

    def __init__(self, vllm_config, device: torch.device):
        self.model = torch.nn.Module()  # of a draft model vLLM would prepare the communication
        self._ranks = get_tp_group()
        self.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._is_async = vllm_config.scheduler_config.async_scheduling
        config = SpeculationConfig.from_vllm(vllm_config)
        costs = {"step_cost": warmup_cost.table_of(config), "graph_sizes": warmup_cost.graph_sizes(vllm_config)}
        longest = vllm_config.model_config.max_model_len
        drafter = make_drafter(config, self.num_speculative_tokens)
        self.session = self.session_class(config, drafter, costs, longest, self._is_async)
        self.session.warm_up()
        self.verifying: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}  # of the next step
        self._unread: Step | None = None  # the last step, until it is waited for
        # What `propose` returns, and the runner may write -1 into.
        most = vllm_config.scheduler_config.max_num_seqs
        self._nothing = torch.zeros((most, self.num_speculative_tokens), dtype=torch.int64, device=device)

    def bind(self, runner) -> None:
        """Take part in the steps of a model runner."""
        self._runner = runner
        runner.drafter = self  # by the first runner's name, for who shares text and says that weights are new
        if self._ranks.is_first_rank:
            config = SpeculationConfig.from_vllm(runner.vllm_config)
            self.session.begin(config, runner.vllm_config.model_config)
        patches.wrap(runner, "execute_model", "draft_on_host", self._execute_model)
        patches.wrap(runner, "sample_tokens", "draft_on_host", self._sample_tokens)
        patches.put(runner, "take_draft_token_ids", "draft_on_host", self.take_draft_token_ids)

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas, as Session.share."""
        if self._ranks.is_first_rank:
            self.session.share(address)

    def weights_updated(self) -> None:
        """Count a weight sync."""
        self.read_awaited(is_timed=False)
        self.session.weights_updated()

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """There is no graph to make."""

    def capture(self, *_) -> None:
        """There is no graph to capture."""

    def propose(self, input_batch, *_, **__) -> torch.Tensor:
        """int64 [requests, k] on the device, zeros: drafts come with the step that verifies them."""
        return self._nothing[: input_batch.num_reqs]

    def _sample_tokens(self, sample, *arguments, **keywords):
        """What the runner does without drafts, unless it has some to verify; it files none for its scheduler."""
        runner = self._runner
        state = runner.execute_model_state
        if state is None:
            return sample(*arguments, **keywords)
        batch = state.input_batch
        is_needed = self._drafts_follow(batch) or batch.num_draft_tokens > 0
        usual = {"speculator": self, "num_speculative_steps": self.num_speculative_tokens}
        now = {"speculator": self if is_needed else None, "num_speculative_steps": 0}
        try:
            for name, value in now.items():
                patches.put(runner, name, "draft_on_host", value)
            output = sample(*arguments, **keywords)
        finally:
            for name, value in usual.items():
                patches.put(runner, name, "draft_on_host", value)
        if self._ranks.is_first_rank:
            with self.session.harmless():
                self._end_step(batch, output)
                hooks.ask_for_room(output.model_runner_output, self)
        return output

    def _drafts_follow(self, batch) -> bool:
        """Whether drafts for the next step are made as this one ends: its tokens come to the host first."""
        return False

    @staticmethod
    def _step_of(batch, output=None) -> Step:
        """A step as the session knows it; before there is an `output` its tokens are not on their way."""
        rows = batch.num_reqs
        ends = batch.num_computed_tokens_np[:rows] + batch.num_scheduled_tokens[:rows]
        return Step(
            request_ids=batch.req_ids,
            emits=ends >= batch.prefill_len_np[:rows],
            context=float(ends.mean()),
            had_drafts=batch.num_draft_tokens > 0,
            tokens=output and output.sampled_token_ids,
            counts=output and output.num_sampled_tokens_np,
            copied=output and output.copy_event,
            verified=batch.num_draft_tokens_per_req,
        )

    def _end_step(self, batch, output) -> None:
        """Note what a step brings: the copy of its tokens to the host has begun."""
        step = self._step_of(batch, output)
        self.session.stepped(step)
        self._drafts = {}
        if step.had_drafts or self.wants_drafts or not self._is_async:
            self._unread = step
        else:
            self._draft(step, is_known=False)

    def _draft(self, step: Step, is_known: bool) -> None:
        self._drafts = self.session.draft(step, is_known)

    def read_awaited(self, is_timed: bool = True) -> None:
        """Draft after the last step, if it is one that is waited for; may be called again. Not `is_timed` where the
        engine may have been idle since that step."""
        if not is_timed:
            self.last.state = None
            self.last.valid_for_steps = 0
        if self._unread is None:
            return
        step = self._unread
        self._unread = None
        self._draft(step, is_known=True)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for vLLM's synchronous scheduler; the asynchronous one leaves room for them."""
        if self._is_async:
            return None
        self.read_awaited()
        return DraftTokenIds(list(self._drafts), list(self._drafts.values())) if self._drafts else None

    def _execute_model(self, execute, scheduled, *arguments, dummy_run=False, **keywords):
        if not dummy_run:
            scheduled = self._prepared(scheduled)
        return execute(scheduled, *arguments, dummy_run=dummy_run, **keywords)

    def _prepared(self, scheduled):
        """What is computed of vLLM's SchedulerOutput; the same on all ranks."""
        # No request goes on from the step before: the engine was idle in between.
        self.read_awaited(is_timed=bool(scheduled.scheduled_cached_reqs.req_ids))
        if self._ranks.is_first_rank:
            with self.session.harmless():
                self._note(scheduled)
        if self._is_async and scheduled.scheduled_spec_decode_tokens:
            scheduled = self._with_drafts(scheduled)
        self.verifying = scheduled.scheduled_spec_decode_tokens
        self.last.drafted = sum(map(len, self.verifying.values()))
        if self.verifying:
            self._send()
        return scheduled

    def _note(self, scheduled) -> None:
        """Which requests have finished and which are new; a preempted one stays, and comes back as new."""
        self.session.ended(scheduled.finished_req_ids)
        for request in scheduled.scheduled_new_reqs:
            if (tokens := request.prefill_token_ids) and not is_warmup(request.req_id):
                end = len(request.prompt_token_ids)
                self.session.started(request.req_id, Text(request.sampling_params, tokens[:end], tokens[end:]))
        if not scheduled.num_scheduled_tokens:
            self.session.read()

    def _with_drafts(self, scheduled):
        """vLLM's asynchronous scheduler leaves room for drafts: put in those that there are."""
        room = scheduled.scheduled_spec_decode_tokens
        drafts = [
            [0] * len(places) if is_warmup(name) else self._drafts.get(name, [])[: len(places)]
            for name, places in room.items()
        ]
        if self._ranks.world_size > 1:  # the requests, and their order, are the same on all ranks
            drafts = self._ranks.broadcast_object(drafts)
        counts = dict(scheduled.num_scheduled_tokens)
        total = scheduled.total_num_scheduled_tokens
        for (name, places), draft in zip(room.items(), drafts, strict=True):
            counts[name] -= len(places) - len(draft)
            total -= len(places) - len(draft)
        return replace(
            scheduled,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=total,
            scheduled_spec_decode_tokens={name: draft for name, draft in zip(room, drafts, strict=True) if draft},
        )

    def _send(self) -> None:
        """Put the drafts of the step where the runner takes them from: one copy."""
        states = self._runner.req_states
        rows = np.zeros((len(self.verifying), 1 + self.num_speculative_tokens), dtype=np.int64)
        for row, (name, draft) in zip(rows, self.verifying.items(), strict=True):
            row[0] = states.req_id_to_index[name]
            row[1 : 1 + len(draft)] = draft
        sent = async_tensor_h2d(rows, device=self._nothing.device)
        states.draft_tokens[sent[:, 0]] = sent[:, 1:]
