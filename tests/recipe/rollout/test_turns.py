"""verl's own agent loop of several turns with the recipe's client and router: the same conversations as with verl's,
each of whose turns goes before the first ones of others."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from sam_recipe.launch.config import compose_config
from sam_recipe.rollout.client import RoutedClient
from sam_recipe.rollout.router import ContextRouter
from sam_recipe.tiny.tokenizer import build_tokenizer
from tests.sam.routing.schedule import replay

TURNS, CONVERSATIONS, TOKENS, CHUNK = 3, 12, 24, 10


@ToolParser.register("calls_after_every_response")
class CallsAfterEveryResponse(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        return "", [FunctionCall(name="look_up", arguments="{}")]


class Local:
    """An object under the calls of a Ray actor's handle."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        def remote(*args, **kwargs):
            result = getattr(self._inner, name)(*args, **kwargs)
            return asyncio.ensure_future(result if inspect.isawaitable(result) else _value(result))

        return SimpleNamespace(remote=remote)


async def _value(value):
    return value


class Server:
    """Emits what the prompt and the position say. Notes the prompts of chunks that begin a turn, in `began`."""

    def __init__(self, began):
        self._began = began

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        own = (sampling_params.get("extra_args") or {}).get("sam_prompt_tokens", len(prompt_ids))
        prompt, given = prompt_ids[:own], len(prompt_ids) - own
        if not given:
            self._began.append(tuple(prompt))
        await asyncio.sleep(0.005)
        end = min(TOKENS, given + sampling_params.get("max_tokens", TOKENS))
        tokens = [1 + (31 * sum(prompt) + 17 * position) % 200 for position in range(given, end)]
        reason = "completed" if end == TOKENS else "length"
        return TokenOutput(token_ids=tokens, stop_reason=reason, extra_fields={"global_steps": 1})

    async def routing_limits(self):
        return {"kv_tokens": 8192, "block_tokens": 16, "slots": 1, "max_model_len": 640}


def talk(folder, chunk, routed):
    """All conversations at once; returns each one's prompt and response, and its turns in the order in which they
    began."""
    config = compose_config(
        "dapo_tiny_cpu",
        [
            *("routing=context", f"routing.chunk_tokens={chunk or 'null'}", f"run_dir={folder}"),
            "actor_rollout_ref.rollout.multi_turn.format=calls_after_every_response",
            f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={TURNS}",
        ],
    )
    began: list[tuple[int, ...]] = []
    tokenizer = build_tokenizer()

    async def play():
        servers = {name: Local(Server(began)) for name in ("a", "b")}
        if routed:
            settings = {"chunk_tokens": chunk, "lookahead_tokens": 0, "log": folder / "routing.jsonl"}
            router = ContextRouter(servers, settings)
            client = RoutedClient(config, Local(router))
        else:
            client = LLMServerClient(config, Local(GlobalRequestLoadBalancer(servers)))

        async def conversation(number):
            loop = ToolAgentLoop(
                DictConfigWrap(config),
                client,
                tokenizer,
                None,
                None,
                DictConfigWrap(config.data),
                hf_model_type="qwen3",
            )
            messages = [{"role": "user", "content": f"question {number}"}]
            output = await loop.run({}, raw_prompt=messages)
            return output.prompt_ids, output.response_ids, output.num_turns

        async with asyncio.timeout(60):
            found = await asyncio.gather(*map(conversation, range(CONVERSATIONS)))
        await asyncio.sleep(0.05)  # the last are being released
        if routed:
            status = router.get_status()
            assert status["waiting"] == 0 and set(status["servers"].values()) == {0}
        return found

    found = asyncio.run(play())
    first = [tuple(prompt) for prompt, *_ in found]
    order = [next(i for i, prompt in enumerate(first) if turn[: len(prompt)] == prompt) for turn in began]
    return found, order


@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_conversations_are_those_of_verls_balancer_and_keep_their_place(tmp_path, chunk):
    expected, order = talk(tmp_path / "verl", None, routed=False)
    assert len(order) == TURNS * CONVERSATIONS and all(turns == 2 * TURNS for *_, turns in expected)
    found, order = talk(tmp_path / "context", chunk, routed=True)
    assert found == expected
    # Six at once: the first two conversations have ended before the last ones have begun.
    assert max(i for i, number in enumerate(order) if number in order[:2]) < len(order) - 2 * TURNS, order
    assert replay((tmp_path / "context" / "routing.jsonl").read_text().splitlines()) >= len(order)
