"""The client that divides responses: what it asks for, and how it joins what comes. Real actors are in
tests/recipe/test_ray.py, turns of a conversation in tests/end_to_end/test_replicas.py."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayActorError
from verl.workers.rollout.replica import TokenOutput

from sam_recipe.rollout.client import RoutedClient
from sam_recipe.rollout.router import Placement

PROMPT, RESPONSE = [1, 2, 3], list(range(100, 150))


class Server:
    """Gives the tokens of RESPONSE that follow those it is sent, as sam_recipe.rollout's do.

    `change` alters an output, by how many there were before.
    """

    def __init__(self, change):
        self.asked, self.change = [], change
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request_id, prompt_ids, sampling_params, **about):
        self.asked.append((prompt_ids, sampling_params))
        given = len(prompt_ids) - len(PROMPT)
        end = min(given + sampling_params.get("max_tokens", 1 << 20), len(RESPONSE))
        tokens = RESPONSE[given:end]
        output = TokenOutput(
            token_ids=tokens, log_probs=[-t / 10 for t in tokens], num_preempted=1,
            stop_reason="completed" if end == len(RESPONSE) else "length",
            extra_fields={"global_steps": 3, "num_cached_tokens": given, "spec_num_draft_tokens": 2},
        )  # fmt: skip
        return self.change(output, len(self.asked) - 1)


class Router:
    """Of one server; `told` are the lengths of chunks, the last one's by its release."""

    def __init__(self, server):
        self.told, self.placement = [], Placement("a", server)
        calls = {"acquire": self._place, "proceed": self._place, "fail": self._fail, "release": self._release}
        for name, call in calls.items():
            setattr(self, name, SimpleNamespace(remote=call))

    async def _place(self, request, *tokens):
        self.told += tokens
        return self.placement

    async def _fail(self, request, server):
        raise RuntimeError("No available servers in load balancer")

    def _release(self, request, tokens):
        self.told.append(tokens)


def generate(chunk, change=lambda output, before: output, **sampling):
    """The output, what the router was told, and what the server was asked for."""
    rollout = {"name": "vllm", "max_model_len": 64, "prompt_length": 14, "response_length": 50}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "routing": {"chunk_tokens": chunk}})
    router = Router(server := Server(change))
    client = RoutedClient(config, router)
    output = asyncio.run(client.generate("r", prompt_ids=PROMPT, sampling_params=sampling))
    return output, router.told, server.asked


def test_chunks_are_joined_and_a_whole_response_is_asked_for_as_verl_asks_for_it():
    whole, told, asked = generate(None, seed=1)
    assert asked == [(PROMPT, {"seed": 1})] and told == [50]
    output, told, asked = generate(20, seed=1)
    assert output.token_ids == whole.token_ids == RESPONSE and output.log_probs == whole.log_probs
    assert (output.stop_reason, output.num_preempted) == ("completed", 3)
    assert output.extra_fields["num_cached_tokens"] == 0, "of the prompt, as without chunks"
    assert output.extra_fields["spec_num_draft_tokens"] == 6
    assert [prompt for prompt, _ in asked] == [PROMPT, [*PROMPT, *RESPONSE[:20]], [*PROMPT, *RESPONSE[:40]]]
    assert [(one["max_tokens"], one["seed"]) for _, one in asked] == [(20, 1), (20, 1), (10, 1)]
    hints = {"sam_prompt_tokens": 3, "sam_response_limit": 50}  # those of the whole, to drafters
    assert [one["extra_args"] for _, one in asked] == [hints] * 3 and told == [20, 20, 10]


@pytest.mark.parametrize(
    ("parameters", "chunks"),
    [
        *(({name: value}, 1) for name, value in (("stop", ["x"]), ("min_tokens", 30), ("frequency_penalty", -0.5))),
        ({"repetition_penalty": 1.2, "presence_penalty": 0.0}, 3),  # vLLM's repetition penalty is of the prompt too
    ],
)
def test_what_reads_the_responses_own_tokens_is_not_divided(parameters, chunks):
    assert len(generate(20, **parameters)[2]) == chunks


def test_an_aborted_chunk_ends_its_response_with_the_tokens_so_far():
    def abort(output, before):
        return TokenOutput(token_ids=[], stop_reason="aborted") if before == 1 else output

    output, told, _ = generate(20, abort)
    assert (output.token_ids, output.stop_reason) == (RESPONSE[:20], "aborted")
    assert told == [20, None], "its length says nothing about its group"


def test_with_no_replica_left_the_death_is_the_error():
    def die(output, before):
        raise RayActorError()

    with pytest.raises(RayActorError):
        generate(20, die)
