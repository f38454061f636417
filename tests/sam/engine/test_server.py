"""`vllm serve` with this project's wheel, its drafter and no other key, beside stock vLLM: OpenAI's client asks."""

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request

import openai
import pytest

from sam_recipe.tiny.tokenizer import build_tokenizer
from tests.sam.engine import tiny_engine

pytestmark = pytest.mark.engine

SAM = {"model": "sam.SamProposer", "num_speculative_tokens": 5}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {
            "type": "object",
            "properties": {"operator": {"enum": ["add", "subtract"]}},
            "required": ["operator"],
        },
    },
}

NAMED = {"type": "function", "function": {"name": "calculate"}}


class Server:
    """A server of the tiny model that `save_model` made, on a port of its own."""

    def __init__(self, python, folder, name: str, **environment: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = folder / f"{name}.log"
        arguments = ["--max-model-len", "256", "--max-num-seqs", "32", "--dtype", "float32", "--enforce-eager"]
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        arguments += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
        if name == "sam":
            arguments += ["--speculative-config", json.dumps(SAM)]
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model")]
        command += ["--served-model-name", "tiny", "--port", self.address.rsplit(":", 1)[1], *arguments]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", **environment}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
            )
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def wait(self) -> None:
        """Until it answers.

        Raises:
            AssertionError: it ended, or did not answer within five minutes; the log's end is in the message.
        """
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-4000:])

    def metric(self, name: str) -> float:
        """The sum of a counter of vLLM's Prometheus endpoint."""
        text = urllib.request.urlopen(f"{self.address}/metrics", timeout=10).read().decode()
        return sum(map(float, re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def chat(self, **settings):
        settings = {"max_tokens": 60, "temperature": 0.0, "extra_body": {"ignore_eos": True}, **settings}
        return self.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "1+1"}], **settings
        )

    def complete(self, prompt: str, **settings):
        settings = {"max_tokens": 60, "temperature": 0.0, **settings}
        return self.client.completions.create(model="tiny", prompt=prompt, **settings)


@pytest.fixture(scope="module")
def servers(python_with_vllm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    tokenizer = build_tokenizer()
    tiny_engine.save_model(folder / "model", vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    both = [Server(python_with_vllm, folder, "stock", VLLM_PLUGINS=""), Server(python_with_vllm, folder, "sam")]
    try:
        for one in both:
            one.wait()
        yield both
    finally:
        for one in both:
            one.stop()


def answers(reply) -> list:
    return [(one.message.content, one.finish_reason) for one in reply.choices]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["7", "ab", "\n"]},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 150, "extra_body": {}},
        {"tools": [TOOL], "tool_choice": NAMED, "extra_body": {}},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"extra_body": {"min_tokens": 10, "repetition_penalty": 1.1}},
        {"response_format": {"type": "json_object"}, "extra_body": {}},
    ],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_a_greedy_answer_is_that_of_stock_vllm(servers, settings):
    stock, sam = (one.chat(**settings) for one in servers)
    assert answers(sam) == answers(stock)
    for of_sam, of_stock in zip(sam.choices, stock.choices, strict=True):
        called = [[call.function for call in one.message.tool_calls or []] for one in (of_sam, of_stock)]
        assert called[0] == called[1]
        assert bool(called[0]) == ("tools" in settings)
        if of_stock.logprobs:
            pairs = zip(of_sam.logprobs.content, of_stock.logprobs.content, strict=True)
            for one, other in pairs:
                assert [entry.token for entry in one.top_logprobs] == [entry.token for entry in other.top_logprobs]
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_a_stream_says_what_an_answer_says(servers):
    for server in servers:
        parts = [part.choices[0].delta.content or "" for part in server.chat(stream=True) if part.choices]
        assert "".join(parts) == server.chat().choices[0].message.content
        assert len(parts) > 1


def test_a_seed_gives_the_same_answer_again_and_four_samples_differ(servers):
    _, sam = servers
    settings = {"temperature": 1.0, "seed": 7, "n": 4}
    first = answers(sam.chat(**settings))
    assert answers(sam.chat(**settings)) == first
    assert len({text for text, _ in first}) == 4
    unseeded = {answers(sam.chat(temperature=1.0))[0][0] for _ in range(4)}
    assert len(unseeded) == 4


def test_the_log_says_what_drafts(servers):
    stock, sam = (one.log.read_text() for one in servers)
    assert sam.count("speculation: drafter SamProposer, policy goodput, verification exact") == 1
    assert "speculation:" not in stock


def test_two_hundred_requests_some_of_which_are_aborted(servers):
    _, sam = servers

    def ask(number: int) -> str | None:
        prompt = f"{number % 20}:{'xy' * (number % 7)}"
        if number % 10 == 9:  # goes away after the first token
            with sam.complete(prompt, stream=True, max_tokens=200, extra_body={"ignore_eos": True}) as stream:
                next(iter(stream))
            return None
        return sam.complete(prompt).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, range(200)))
    assert sum(text is None for text in texts) == 20
    assert sam.process.poll() is None
    assert sam.metric("spec_decode_num_accepted_tokens_total") > 0  # how many, goodput's clock decides
    alone = [servers[0].complete(f"{number % 20}:{'xy' * (number % 7)}").choices[0].text for number in range(0, 200, 9)]
    assert alone == [texts[number] or alone[place] for place, number in enumerate(range(0, 200, 9))]
