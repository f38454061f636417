"""What needs a real Ray: actors are killed under the recipe's router and client, and a node says what it lacks."""

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf

from recipe.sam_dapo import preflight
from recipe.sam_dapo.launch import versions
from recipe.sam_dapo.launch.screen import is_death, role_of
from recipe.sam_dapo.preflight import machine
from tests.recipe.sam_dapo.preflight.preflight_node import composed

pytestmark = pytest.mark.e2e
LENGTH, CHUNK, ABORTED = 64, 16, 99


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A head with 16 dies that are none."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie below
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray leaves a token in HOME
        ray.init(
            num_cpus=1, resources={"NPU": 16}, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
            object_store_memory=100 << 20, runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[3])}},
        )  # fmt: skip
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_node_says_what_it_lacks_and_which_nodes_say_the_same():
    head = {"versions": versions.known() | {"vllm": "0.22.1"}, "file": "/proc/none"}
    asked = machine.ask_nodes(composed("dapo_qwen3_32b"), ray.nodes(), preflight.node_problems, head)
    ((address, problems),) = asked.items()
    assert address == ray.util.get_node_ip_address()
    said = "\n".join(problems)
    vllm = versions.installed("vllm")
    assert f"vllm {vllm}, the head has 0.22.1: install the same on every node [node.differs]" in said
    assert "[run_dir.not_shared]" in said and "[data.missing]" in said


class Server:
    """Emits, token by token, what the seed and the position say, as exact sampling does."""

    def __init__(self):
        self.asked = []

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append((prompt_ids, sampling_params))
        given, seed = len(prompt_ids) - 3, sampling_params["seed"]
        if seed == ABORTED and given:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        end = min(given + sampling_params.get("max_tokens", LENGTH), LENGTH)
        for _ in range(given, end):
            await asyncio.sleep(0.005)
        tokens = [token(seed, position) for position in range(given, end)]
        return TokenOutput(
            token_ids=tokens, log_probs=[-one / 10 for one in tokens], num_preempted=1,
            stop_reason="completed" if end == LENGTH else "length",
            extra_fields={"global_steps": 0, "num_cached_tokens": given, "spec_num_draft_tokens": 2},
        )  # fmt: skip

    def take_asked(self):
        asked, self.asked = self.asked, []
        return asked

    def routing_limits(self):
        return {"kv_tokens": 4096, "block_tokens": 16, "slots": 4, "max_model_len": 512}

    def pid(self):
        return os.getpid()


def token(seed: int, position: int) -> int:
    return 1 + (seed * 7919 + position * 104729) % 1000


@pytest.fixture(scope="module")
def routed():
    """Two servers, the router, and a function that makes a client for chunks of so many tokens."""
    from recipe.sam_dapo.rollout.agent_loop import RoutedClient
    from recipe.sam_dapo.rollout.router import ContextRouterActor

    servers = {name: ray.remote(Server).options(num_cpus=0).remote() for name in ("a", "b")}
    router = ContextRouterActor.remote(servers, {"chunk_tokens": CHUNK, "lookahead_tokens": 0})
    rollout = {"name": "vllm", "max_model_len": 128, "prompt_length": 64, "response_length": LENGTH}

    def client(chunk=CHUNK):
        config = {"actor_rollout_ref": {"rollout": rollout}, "routing": {"chunk_tokens": chunk}}
        return RoutedClient(OmegaConf.create(config), router)

    return servers, router, client


@pytest.fixture
def generate(routed):
    """Asks for a response; returns the output, and what the servers were asked for."""
    servers, _, client = routed

    def generate(chunk, **sampling):
        asking = client(chunk).generate("r", prompt_ids=[1, 2, 3], sampling_params=sampling)
        output, asked = asyncio.run(asking), ray.get([server.take_asked.remote() for server in servers.values()])
        return output, sorted((one for its in asked for one in its), key=lambda one: len(one[0]))

    return generate


def test_chunks_are_joined_and_a_whole_response_is_asked_for_as_verl_asks_for_it(generate):
    whole, asked = generate(None, seed=1)
    assert asked == [([1, 2, 3], {"seed": 1})]
    joined, asked = generate(CHUNK, seed=1)
    assert joined.token_ids == whole.token_ids == [token(1, position) for position in range(LENGTH)]
    assert (joined.log_probs, joined.stop_reason, joined.num_preempted) == (whole.log_probs, "completed", 4)
    assert joined.extra_fields == whole.extra_fields | {"spec_num_draft_tokens": 4 * 2}, "cached ones are the prompt's"
    assert [prompt for prompt, _ in asked] == [[1, 2, 3, *whole.token_ids[:given]] for given in range(0, LENGTH, CHUNK)]
    hints = {"sam_prompt_tokens": 3, "sam_response_limit": LENGTH}  # those of the whole, to drafters
    assert [one for _, one in asked] == [{"seed": 1, "max_tokens": CHUNK, "extra_args": hints}] * 4


@pytest.mark.parametrize(
    ("parameters", "chunks"),
    [
        *(({name: value}, 1) for name, value in (("stop", ["x"]), ("min_tokens", 30), ("frequency_penalty", -0.5))),
        ({"repetition_penalty": 1.2, "presence_penalty": 0.0}, 4),  # vLLM's repetition penalty is of the prompt too
    ],
)
def test_what_reads_the_responses_own_tokens_is_not_divided(generate, parameters, chunks):
    assert len(generate(CHUNK, seed=1, **parameters)[1]) == chunks


def test_an_aborted_chunk_ends_its_response_with_the_tokens_so_far(generate):
    output, _ = generate(CHUNK, seed=ABORTED)
    assert (len(output.token_ids), output.stop_reason) == (CHUNK, "aborted")


def test_more_than_rays_thousand_calls_may_wait(routed):
    """With an actor's default of 1000 calls at once, requests that wait keep releases from coming in."""
    from recipe.sam_dapo.rollout.router import RoutedRequest

    _, router, _ = routed
    names = [str(number) for number in range(1100)]
    calls = {router.acquire.remote(RoutedRequest(name, name, 8, 64, name)): name for name in names}
    while calls:
        (done, *_), _ = ray.wait(list(calls), timeout=600)
        router.release.remote(calls.pop(done), 5)
    assert ray.get(router.get_status.remote())["waiting"] == 0


async def killed(client, router, chunks: int, kill) -> list:
    """What twelve responses end with, after the router has placed so many chunks and `kill` was called."""

    async def generate(number):
        prompt = [1, 2, 3 + number // 4]
        output = await client.generate(str(number), prompt_ids=prompt, sampling_params={"seed": number})
        return list(output.token_ids)

    before = (await router.get_status.remote())["admissions"]
    responses = [asyncio.ensure_future(generate(number)) for number in range(12)]
    while (await router.get_status.remote())["admissions"] < before + chunks:
        await asyncio.sleep(0.01)
    kill()
    async with asyncio.timeout(600):
        return await asyncio.gather(*responses, return_exceptions=True)


def test_a_killed_servers_chunks_go_on_elsewhere_and_a_killed_router_ends_every_request_with_its_death(routed):
    servers, router, client = routed
    pid = ray.get(servers["a"].pid.remote())
    # Some are in their second chunk.
    found = asyncio.run(killed(client(), router, 14, lambda: os.kill(pid, signal.SIGKILL)))
    assert found == [[token(number, position) for position in range(LENGTH)] for number in range(12)]
    status = ray.get(router.get_status.remote())
    assert list(status["servers"]) == ["b"] and status["waiting"] == 0
    # One server has room for six.
    found = asyncio.run(killed(client(), router, 6, lambda: ray.kill(router)))
    assert all(isinstance(one, ray.exceptions.RayActorError) for one in found)
    # By which the run's last line names it; the watchdog does by its title.
    assert is_death(repr(found[0]))
    assert role_of("ray::ContextRouter.acquire") == "the router"
