"""The client that divides responses: what it asks for, and how it joins what comes."""

import asyncio
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayActorError
from verl.workers.rollout.replica import TokenOutput

from sam.drafting.texts import digest
from sam_recipe.rollout.client import RoutedClient
from sam_recipe.rollout.router import Placement

RESPONSE = list(range(100, 150))


def group_of(prompt):
    return digest(np.asarray(prompt)).hex()


class Server:
    """Gives the tokens of RESPONSE that follow those it is sent, as sam_recipe.rollout's do.

    `change` alters an output, by how many there were before.
    """

    def __init__(self, change=lambda output, before: output):
        self.asked, self.change = [], change
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request_id, prompt_ids, sampling_params, **about):
        self.asked.append((prompt_ids, sampling_params))
        given = len(prompt_ids) - 3
        end = min(given + sampling_params.get("max_tokens", 1 << 20), len(RESPONSE))
        tokens = RESPONSE[given:end]
        is_whole = end == len(RESPONSE) or not sampling_params.get("extra_args")
        output = TokenOutput(
            token_ids=tokens, log_probs=[-t / 10 for t in tokens], num_preempted=1,
            stop_reason="completed" if is_whole else "length",
            extra_fields={"global_steps": 3, "num_cached_tokens": given, "spec_num_draft_tokens": 2},
        )  # fmt: skip
        return self.change(output, len(self.asked) - 1)


class Router:
    """Of one server."""

    def __init__(self, server):
        self.server, self.told, self.released = server, [], []
        for name in ("acquire", "proceed", "fail"):
            setattr(self, name, SimpleNamespace(remote=partial(self._place, name)))
        self.release = SimpleNamespace(remote=lambda name, tokens: self.released.append(tokens))

    async def _place(self, name, *told):
        self.told.append((name, *told[name != "acquire" :]))
        if name == "fail":
            raise RuntimeError("No available servers in load balancer")
        return Placement("a", self.server)


ROLLOUT = {"name": "vllm", "max_model_len": 64, "prompt_length": 14, "response_length": 50}


def generate(chunk, server=None, **sampling):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}, "routing": {"chunk_tokens": chunk}})
    router = Router(server := server or Server())
    client = RoutedClient(config, router)
    output = asyncio.run(client.generate("r", prompt_ids=[1, 2, 3], sampling_params=sampling))
    return output, router, server.asked


def test_chunks_are_joined():
    whole, *_ = generate(None, seed=1)
    output, router, asked = generate(20, seed=1)
    assert output.token_ids == whole.token_ids == RESPONSE and output.log_probs == whole.log_probs
    assert (output.stop_reason, output.num_preempted) == ("completed", 3)
    assert output.extra_fields["num_cached_tokens"] == 0, "of the prompt, as without chunks"
    assert output.extra_fields["spec_num_draft_tokens"] == 6
    assert [prompt for prompt, _ in asked] == [[1, 2, 3], [1, 2, 3, *RESPONSE[:20]], [1, 2, 3, *RESPONSE[:40]]]
    assert [one["max_tokens"] for _, one in asked] == [20, 20, 10]
    assert [one["seed"] for _, one in asked] == [1, 1, 1]
    (_, request), *later = router.told
    assert request[1:] == (group_of([1, 2, 3]), 3, 50, "r") and later == [("proceed", 20), ("proceed", 20)]
    assert router.released == [10]


def test_chunks_of_a_later_turn_are_of_the_conversations_group():
    _, router, asked = generate(20, extra_args={"sam_prompt_tokens": 2, "sam_turn": 2})
    assert router.told[0][1][1:] == (group_of([1, 2]), 3, 50, "r")
    hints = {"sam_prompt_tokens": 2, "sam_turn": 2, "sam_response_limit": 1 + 50}
    assert [one["extra_args"] for _, one in asked] == [hints] * 3


@pytest.mark.parametrize(
    ("parameters", "chunks"),
    [
        *(({name: value}, 1) for name, value in (("stop", ["x"]), ("min_tokens", 30), ("frequency_penalty", -0.5))),
        ({"repetition_penalty": 1.2, "presence_penalty": 0.0}, 3),  # vLLM's repetition penalty is of the prompt too
    ],
)
def test_what_reads_the_responses_own_tokens_is_not_divided(parameters, chunks):
    assert len(generate(20, **parameters)[2]) == chunks


def test_a_whole_response_is_asked_for_as_verl_asks_for_it():
    caller = {"seed": 1, "temperature": 0.5}
    _, router, asked = generate(None, **caller)
    assert asked == [([1, 2, 3], caller)] and router.released == [50] and len(caller) == 2


def test_an_aborted_chunk_ends_its_response_with_the_tokens_so_far():
    def abort(output, before):
        return TokenOutput(token_ids=[], stop_reason="aborted") if before == 1 else output

    output, router, _ = generate(20, Server(abort))
    assert (output.token_ids, output.stop_reason) == (RESPONSE[:20], "aborted")
    assert router.released == [None], "its length says nothing about its group"


def test_with_no_replica_left_the_death_is_the_error():
    def die(output, before):
        raise RayActorError()

    with pytest.raises(RayActorError):
        generate(20, Server(die))
