"""verl's single-turn agent loop with a seed for every sample."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.seeds import parse_prompt_uid, sample_seed


class SeededAgentLoop(SingleTurnAgentLoop):
    """verl gives all samples of a prompt the same sampling parameters; seeded alike they would be identical."""

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        """verl's, with the seed of this step, prompt and sample in `sampling_params`."""
        sample = int(kwargs["session_id"])
        run_seed = int(self.config.seed)
        identity = parse_prompt_uid(str(kwargs["uid"]))
        if identity is not None:
            seed = sample_seed(run_seed, "train", *identity, sample)
        else:
            seed = sample_seed(run_seed, "validation", int(kwargs["global_steps"]), int(kwargs["index"]), sample)
        # verl takes token ids: text that nobody reads would be made anew of every token.
        return await super().run(dict(sampling_params, seed=seed, detokenize=False), **kwargs)
