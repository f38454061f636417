"""The second runner's speculator whose drafts the device makes: no step waits for its tokens on the host.

    execute_model   gives each request as many drafts as the plan says; which they are is on the device
    sample_tokens   reads what has come to the host, and plans; vLLM verifies, starts the copy of the tokens, and writes
                    them behind the texts on the device; then one launch drafts behind those, for the next step

The drafter's arrays stay where the host extends them. The device reads them there, through the bus: an automaton copied
to the device would be read in half the time, but each writer of the store would have to say what it changed. What a
launch needs of each request goes by value, so that it cannot disagree with how many tokens the host has appended.
"""

import itertools

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_uva_available
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
from vllm.v1.worker.gpu import buffer_utils

from sam.automaton.store import NONE
from sam.config import SpeculationConfig
from sam.drafting.texts import RECENT_TOKENS, SEQUENCE
from sam.engine.late import LateSession
from sam.vllm.v2 import device_walk
from sam.vllm.v2.speculator import SamSpeculator

DEVICES = ["cuda"]
STAGES = 3  # two steps are under way; a launch ends before the next step but one samples
PINNED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def make_speculator(vllm_config, config: SpeculationConfig, device: torch.device) -> SamSpeculator:
    """The speculator of an engine; with draft_on=auto that of the device where it can be."""
    if config.draft_on == "host":
        return SamSpeculator(vllm_config, device)
    reason = why_not(vllm_config)
    if reason is None:
        ranks = get_tp_group()
        try:
            speculator = SamDeviceSpeculator(vllm_config, device)
        except RuntimeError as error:  # CUDA's, of memory that cannot be pinned
            if not ranks.is_first_rank:
                raise
            reason = str(error).partition("\n")[0]
        reason = ranks.broadcast_object(reason)  # only the first pins memory; all of them do as it does
    if reason is None:
        return speculator
    speculator = SamSpeculator(vllm_config, device)
    speculator.on = f"the host ({reason})"
    return speculator


def why_not(vllm_config) -> str | None:
    """Why the device cannot draft, in a few words; None: it can."""
    reasons = {
        "no CUDA device": current_platform.device_type not in DEVICES,
        "no memory that a device reads": not is_uva_available(),
        "scheduled synchronously": not vllm_config.scheduler_config.async_scheduling,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class SamDeviceSpeculator(SamSpeculator):
    """Drafts on the device, for the requests of a step as its tokens are drawn.

    Of several tensor-parallel ranks the first drafts, and gives the others its drafts from device to device.
    """

    on = "the device"
    session_class = LateSession

    def __init__(self, vllm_config, device: torch.device):
        super().__init__(vllm_config, device)
        most = len(self._nothing)
        self._rows = torch.arange(most, dtype=torch.int32, device=device)
        self._batch_rows = self._rows[:0]  # the runner's, of the last step
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        if self._ranks.is_first_rank:
            automaton = device_walk.automaton_of(self.drafter)
            read = {name: read_by_device(getattr(automaton, name), device) for name in ("nodes", "buckets", "rows")}
            stages = [Stage(automaton._replace(**read), most) for _ in range(STAGES)]
            self._stages = itertools.cycle(stages)

    def bind(self, runner) -> None:
        """Take part in the steps of a model runner; compiles the kernel."""
        super().bind(runner)
        if self._ranks.is_first_rank:
            with self.session.harmless():
                self._launch([], self._rows[:1])

    def _drafts_follow(self, batch) -> bool:
        self._batch_rows = batch.idx_mapping
        self._drafts = {}
        if self._ranks.is_first_rank:
            with self.session.harmless():
                self._draft(self._step_of(batch), is_known=False)
        return bool(self._drafts)

    def _end_step(self, batch, output) -> None:
        self.session.stepped(self._step_of(batch, output))

    def _send(self) -> None:
        """On one rank the drafts are there; others are given them, for all requests of the step that was to draft."""
        if self._ranks.world_size > 1:
            drafts = self._runner.req_states.draft_tokens
            drafts[self._batch_rows] = self._ranks.broadcast(drafts[self._batch_rows])

    def propose(self, input_batch, *_, dummy_run: bool = False, **__) -> torch.Tensor:
        """int64 [requests, k] on the device, those of the next step; fill-ups where a draft ends earlier."""
        if self._drafts and not dummy_run:
            with self.session.harmless():
                return self._launch(input_batch.req_ids, input_batch.idx_mapping)
        return super().propose(input_batch)

    def _launch(self, request_ids: list[str], rows: torch.Tensor) -> torch.Tensor:
        """Draft for requests, in the runner's `rows` (int32 [requests]); waits for nothing."""
        stage = next(self._stages)
        stage.fill(self.drafter, request_ids, self.session.follows(request_ids))
        states = self._runner.req_states
        texts = states.all_token_ids.gpu, states.total_len.gpu
        requests = device_walk.Requests(self._rows[: len(rows)], rows, *texts)
        return device_walk.draft(stage.automaton, requests, self.num_speculative_tokens, self._vocabulary)[0]


class Stage:
    """What a launch takes by value, in memory that the device reads: it is written anew when that launch has ended.

    Args:
        automaton: of the drafter.
        most: requests of a step.
    """

    def __init__(self, automaton: device_walk.Automaton, most: int):
        recent = most * RECENT_TOKENS // 2
        sizes = [most * len(SEQUENCE.names), recent, len(automaton.counters), len(automaton.weights)]
        buffer = buffer_utils.UvaBuffer(sum(sizes), torch.int64)
        texts, recent, counters, weights = buffer.uva.split(sizes)
        self.automaton = automaton._replace(
            texts=texts, recent=recent.view(torch.int32), counters=counters, weights=weights.view(torch.float64)
        )
        texts, recent, self._counters, weights = np.split(buffer.np, np.cumsum(sizes[:-1]))
        self._texts = texts.view(SEQUENCE)
        self._texts["group"] = NONE
        self._recent = recent.view(np.int32).reshape(most, RECENT_TOKENS)
        self._weights = weights.view(np.float64)

    def fill(self, drafter, request_ids: list[str], is_followed: np.ndarray) -> None:
        """Write the record of each request that is followed, and what all of them share."""
        rows = np.flatnonzero(is_followed)
        slots = drafter.slots_of([request_ids[row] for row in rows])
        sequences = drafter.sequences
        self._texts["group"][: len(request_ids)] = NONE
        self._texts[rows] = sequences.texts[slots]
        self._recent[rows] = sequences.recent_tokens[slots]
        self._counters[:] = drafter.store.counters.view(np.int64)
        self._weights[:] = drafter.learned.mixing.reshape(-1).view(np.float64)


def read_by_device(words: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same memory as a device reads it; it is pinned for that, all of it at once.

    Raises:
        RuntimeError: it cannot be.
    """
    if device.type == "cpu":
        return words
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.nbytes, PINNED))
    if not words.is_pinned():  # of other memory vLLM gives a view of a copy
        raise RuntimeError("the drafter's memory cannot be pinned")
    return get_accelerator_view_from_cpu_tensor(words)
