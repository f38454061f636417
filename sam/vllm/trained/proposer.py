"""The drafters with a model that vLLM's model runner is given: loops whose session has a TrainedDrafter.

vLLM asks of its drafter that it be one of its own classes with a model; whatever a step does is SamProposer's, or
AsyncDrafting's. So each class here has a base of either kind, and all else is in objects.
"""

from dataclasses import replace

import numpy as np
import torch
from vllm.config import replace as replace_config
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from sam.automaton.store import NONE
from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.drafting.drafter import NOTHING, Drafter
from sam.drafting.texts import start_sequence
from sam.engine.session import Drafting
from sam.vllm import patches, ranks, warmup_cost
from sam.vllm.async_proposer import AsyncDrafting
from sam.vllm.proposer import Adapter, SamProposer
from sam.vllm.trained.drafter import PassCost, TrainedDrafter
from sam.vllm.trained.passes import EaglePasses, ModelPasses


class NoText(Drafter):
    """In sam's place where a trained drafter drafts alone: knows how long a request's text is, and drafts nothing."""

    def __init__(self, max_draft_tokens: int):
        super().__init__(max_draft_tokens=max_draft_tokens, memory_budget_bytes=1 << 20, cross_prompt=False)

    def start(self, request_id: str, prompt_token_ids: np.ndarray, given: np.ndarray = NOTHING) -> None:
        """Follow a new request, in no group."""
        slot = self._slots[request_id] = self._free_slot()
        start_sequence(self.sequences, slot, NONE, 0, prompt_token_ids, 0)


class WithModel(Adapter):
    """What gives a loop's session a TrainedDrafter, and what vLLM calls of a base after it, its own class with the
    model."""

    def __init__(self, vllm_config, device, runner=None):
        # Data-parallel engines of a dense model are independent: each has a 1.
        kinds = ("tensor", "pipeline", "data", "prefill_context", "decode_context")
        reason = "a trained drafter's passes run on one rank: set it to 1, or speculation=sam"
        ranks.refuse(ranks.several(vllm_config.parallel_config, *kinds), reason)
        super(Drafting, self).__init__(vllm_config, device, runner)  # vLLM's, which holds the model
        super().__init__(vllm_config)
        passes = (EaglePasses if isinstance(self, EagleProposer) else ModelPasses)(self, runner)
        self.trained = self.session.trained = TrainedDrafter(passes, self.num_speculative_tokens, self.counters)

    def bind(self, runner) -> None:
        """Draft after each step with what has come to the host; vLLM's own drafters read the device's in every step."""
        super().bind(runner)
        name = "draft_with_model"
        patches.put(runner, "propose_draft_token_ids", name, self._draft_after)
        patches.put(runner, "_get_spec_decode_draft_probs", name, self.trained.draft_probabilities)

    @classmethod
    def _effective(cls, config: SpeculationConfig) -> SpeculationConfig:
        """What is kept of text serves sam alone."""
        if config.method == "hybrid":
            return config
        return replace(config, scope="group", history_path=None, sharing="none", corpus=())

    def _make_drafter(self, config: SpeculationConfig):
        return super()._make_drafter(config) if config.method == "hybrid" else NoText(self.num_speculative_tokens)

    def weights_updated(self) -> None:
        super().weights_updated()
        self.trained.weights_updated()

    def _draft_after(self, *step) -> list[list[int]]:
        """In place of GPUModelRunner.propose_draft_token_ids; with its arguments."""
        _, sampled, _, hidden_states, _, aux_hidden_states, _, metadata, *_ = step
        with self.trained.harmless():
            self.trained.passes.keep_states(hidden_states, aux_hidden_states, metadata)
        batch = self._runner.input_batch
        if isinstance(sampled, torch.Tensor):
            # Asynchronous scheduling: these are the next step's input if nobody waits for them. `after_step` drafts.
            batch.prev_sampled_token_ids = sampled[:, :1]
            return []
        return self.propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)

    def load_model(self, target_model, *_arguments, **_keywords) -> None:
        """Compile sam's kernels, and load the draft model; a copy stays on the host where sleeping would lose it."""
        super().load_model()
        super(Drafting, self).load_model(target_model)
        if self.vllm_config.model_config.enable_sleep_mode:
            self.trained.passes.keep_weights(target_model)

    def _create_draft_vllm_config(self):
        """With the weights of its folder.

        Root cause: vLLM loads a draft model as the target is loaded, which verl asks to be filled with random
        numbers, as a weight sync follows. Symptom: no draft is ever accepted. Can go when vLLM heeds
        `draft_load_config` for draft models, and sets it for EAGLE's.
        """
        base = super()._create_draft_vllm_config()
        return replace_config(base, load_config=replace_config(base.load_config, load_format="auto"))

    def _raise_if_padded_drafter_batch_disabled(self) -> None:
        """vLLM's own passes need a padded batch; these take tokens from the host."""

    def dummy_run(self, num_tokens: int, *arguments, **keywords) -> None:
        """vLLM's, to measure memory; none once there is a KV cache: steps are timed without the draft model then, and
        no graph of its passes is replayed."""
        if self.kv_cache_gid < 0:
            super().dummy_run(num_tokens, *arguments, **keywords)

    def measure_passes(self) -> None:
        """Time the draft model's passes for goodput, when the KV cache is there."""
        most = min(self.max_num_tokens, 4 * self.max_batch_size)
        self.trained.pass_cost = PassCost(*warmup_cost.measured(self.trained.passes.time, most, agreed=int))


class AsyncWithModel(WithModel, AsyncDrafting):
    """The same under asynchronous scheduling. A step with drafts waits once, for the tokens of the step before. What
    passes draft stays on the device: the next step is prepared while they run, and they are put into its input there.
    The host learns them when that step's tokens have come."""

    def bind(self, runner) -> None:
        """vLLM puts drafts of the device into an input only if it takes the sampled tokens from there too."""
        super().bind(runner)
        self.trained.reads_later = True

        def prepare_and_fill_in(prepare, scheduler_output, num_reqs, total, ends):
            prepare(scheduler_output, num_reqs, total, ends)
            self.trained.fill_in(ends[:num_reqs], self.verifying)

        patches.wrap(runner, "_prepare_input_ids", "draft_on_host", prepare_and_fill_in)

    def after_step(self, output) -> None:
        """Passes begin when tokens are known, and run while vLLM schedules."""
        super().after_step(output)
        self.read_awaited()


class TrainedProposer(WithModel, SamProposer, DraftModelProposer):
    """With a language model of its own: vLLM's method `draft_model`."""


class Eagle3Proposer(WithModel, SamProposer, EagleProposer):
    """With a head on the target's hidden states: vLLM's method `eagle3`."""


class AsyncTrainedProposer(AsyncWithModel, DraftModelProposer):
    """`draft_model` under asynchronous scheduling."""


class AsyncEagle3Proposer(AsyncWithModel, EagleProposer):
    """`eagle3` under asynchronous scheduling."""


# For vLLM's class and method, without and with asynchronous scheduling.
MADE = {
    (DraftModelProposer, "draft_model"): (TrainedProposer, AsyncTrainedProposer),
    (EagleProposer, "eagle3"): (Eagle3Proposer, AsyncEagle3Proposer),
}


def open_doors() -> None:
    """Let vLLM's `draft_model` and `eagle3` make a class of this module where speculation asks for one; engines without
    `speculation` keep vLLM's own."""

    def choose(cls: type, vllm_config) -> type:
        config = SpeculationConfig.from_vllm(vllm_config)
        made = (cls, vllm_config.speculative_config.method)
        if made in MADE and config is not None and config.method in WITH_DRAFT_MODEL:
            return MADE[made][bool(vllm_config.scheduler_config.async_scheduling)]
        return cls

    for door, _ in MADE:
        patches.make_instead(door, "make_trained", choose)
