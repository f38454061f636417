"""Where vLLM makes a drafter with a model: this project's take its place, where speculation asks for one."""

import functools

from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.vllm import patches
from sam.vllm.trained.eagle import Eagle3Proposer
from sam.vllm.trained.proposer import TrainedProposer

DOORS = {"draft_model": DraftModelProposer, "eagle3": EagleProposer}
MADE = {DraftModelProposer: TrainedProposer, EagleProposer: Eagle3Proposer}


def open_doors() -> None:
    """Let vLLM's `draft_model` and `eagle3` make a SwitchedDraftModel where speculation asks for one; engines without
    `speculation` keep vLLM's own."""
    for door in MADE:
        patches.wrap(door, "__new__", "make_trained", functools.partial(_make, door))


def made(door: type, asynchronous: bool) -> type:
    """The class that a class of vLLM's makes, without or with asynchronous scheduling."""
    if not asynchronous:
        return MADE[door]
    from sam.vllm.trained import async_proposer  # with vLLM's ngram_gpu, where it is wanted only

    return getattr(async_proposer, f"Async{MADE[door].__name__}")


def _make(door: type, _original, cls: type, *arguments, **keywords):
    if cls is door:
        vllm_config = arguments[0] if arguments else keywords["vllm_config"]
        config = SpeculationConfig.from_vllm(vllm_config)
        asked = config is not None and config.method in WITH_DRAFT_MODEL
        if asked and DOORS.get(vllm_config.speculative_config.method) is door:
            cls = made(door, vllm_config.scheduler_config.async_scheduling)
    return object.__new__(cls)
