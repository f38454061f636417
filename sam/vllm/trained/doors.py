"""Where vLLM makes a drafter with a model: this project's take its place, where speculation asks for one."""

from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.vllm.trained.eagle import Eagle3Proposer
from sam.vllm.trained.proposer import TrainedProposer

DOORS = {"draft_model": DraftModelProposer, "eagle3": EagleProposer}
MADE = {DraftModelProposer: TrainedProposer, EagleProposer: Eagle3Proposer}


def open_doors() -> None:
    """Let vLLM's `draft_model` and `eagle3` make a SwitchedDraftModel where speculation asks for one.

    Root cause: vLLM 0.23 takes no other class for a drafter with a model. Its own run in every step, since they read
    the step's tokens only. Symptom: nothing can switch them off. Doing so twice changes nothing; engines without
    `speculation` keep vLLM's own. Can go when vLLM lets a drafter of its users have a KV cache.
    """
    for door in MADE:
        if not getattr(door.__new__, "_sam", False):
            _open(door)


def made(door: type, asynchronous: bool) -> type:
    """The class that a class of vLLM's makes, without or with asynchronous scheduling."""
    if not asynchronous:
        return MADE[door]
    from sam.vllm.trained import async_proposer  # with vLLM's ngram_gpu, where it is wanted only

    return getattr(async_proposer, f"Async{MADE[door].__name__}")


def _open(door: type) -> None:
    def make(cls, *arguments, **keywords):
        if cls is door:
            vllm_config = arguments[0] if arguments else keywords["vllm_config"]
            config = SpeculationConfig.from_vllm(vllm_config)
            asked = config is not None and config.method in WITH_DRAFT_MODEL
            if asked and DOORS.get(vllm_config.speculative_config.method) is door:
                cls = made(door, vllm_config.scheduler_config.async_scheduling)
        return object.__new__(cls)

    make._sam = True
    door.__new__ = make
