"""A user's agent loop that asks twice for the same prompt."""

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class TwoDrafts(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        first = await super().run({"temperature": 1.0, "logprobs": True, "max_tokens": 16}, **kwargs)
        second = await super().run(dict(sampling_params), **kwargs)
        assert first.response_ids != second.response_ids[:16], "both drew the same numbers"
        return second
