"""`vllm serve` with this project's wheel, its drafter and no other key, beside stock vLLM: OpenAI's client asks."""

import concurrent.futures
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.request

import openai
import pytest

from sam_recipe.tiny.tokenizer import build_tokenizer
from tests.sam.engine import tiny_engine

pytestmark = pytest.mark.engine

PARAMETERS = {"type": "object", "properties": {"operator": {"enum": ["add", "subtract"]}}, "required": ["operator"]}
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "calculate"}}
ARGUMENTS = {
    "--served-model-name": "tiny", "--max-model-len": "256", "--max-num-seqs": "32", "--dtype": "float32",
    "--tool-call-parser": "hermes",
    "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
}  # fmt: skip
OF_SAM = {"--speculative-config": json.dumps({"model": "sam.SamProposer", "num_speculative_tokens": 5})}


class Server:
    """A server of the tiny model that `save_model` made, on a port of its own."""

    def __init__(self, python, folder, arguments: dict[str, str], **environment: str):
        # Not one that the system gives to whoever asks for any, as Ray in the tests beside: the server takes it later.
        self.port = str(random.randrange(20000, 32000))
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model"), "--port", self.port]
        command += ["--enforce-eager", "--enable-auto-tool-choice", *sum((ARGUMENTS | arguments).items(), ())]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", **environment}
        self.log = folder / f"{self.port}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
            )
        address = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)

    def read(self, page: str) -> str:
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{page}", timeout=10).read().decode()

    def wait(self) -> None:
        """Until it answers; AssertionError if it ends, or does not answer within five minutes."""
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.read("health")
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-4000:])

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def chat(self, **settings):
        settings = {"max_tokens": 60, "temperature": 0.0, "extra_body": {"ignore_eos": True}, **settings}
        asked = [{"role": "user", "content": "1+1"}]
        return self.client.chat.completions.create(model="tiny", messages=asked, **settings)

    def complete(self, number: int, **settings):
        prompt = f"{number % 20}:{'xy' * (number % 7)}"
        settings = {"max_tokens": 60, "temperature": 0.0, **settings}
        return self.client.completions.create(model="tiny", prompt=prompt, **settings)


@pytest.fixture(scope="module")
def servers(python_with_vllm, tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("server"), build_tokenizer()
    tiny_engine.save_model(folder / "model", vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    both = [Server(python_with_vllm, folder, {}, VLLM_PLUGINS=""), Server(python_with_vllm, folder, OF_SAM)]
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
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["7", "ab", "\n"]},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 150, "extra_body": {}},
        {"tools": [TOOL], "tool_choice": NAMED, "extra_body": {}},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"extra_body": {"min_tokens": 10, "repetition_penalty": 1.1}},
        {"response_format": {"type": "json_object"}, "extra_body": {}},
    ],
    ids=",".join,
)
def test_a_greedy_answer_is_that_of_stock_vllm(servers, settings):
    stock, sam = (one.chat(**settings) for one in servers)
    assert answers(sam) == answers(stock)
    for of_sam, of_stock in zip(sam.choices, stock.choices, strict=True):
        called = [[call.function for call in one.message.tool_calls or []] for one in (of_sam, of_stock)]
        assert called[0] == called[1]
        assert bool(called[0]) == ("tools" in settings)
        if of_stock.logprobs:
            for one, other in zip(of_sam.logprobs.content, of_stock.logprobs.content, strict=True):
                assert [entry.token for entry in one.top_logprobs] == [entry.token for entry in other.top_logprobs]
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_a_stream_says_what_an_answer_says(servers):
    _, sam = servers
    parts = [part.choices[0].delta.content or "" for part in sam.chat(stream=True) if part.choices]
    assert "".join(parts) == sam.chat().choices[0].message.content and len(parts) > 1


def test_a_seed_gives_the_same_answer_again_and_four_samples_differ(servers):
    _, sam = servers
    for settings in ({"seed": 7}, {}):
        first, again = (answers(sam.chat(temperature=1.0, n=4, **settings)) for _ in range(2))
        assert len({text for text, _ in first}) == 4 and (first == again) == bool(settings)


def test_the_log_says_what_drafts(servers):
    stock, sam = (one.log.read_text() for one in servers)
    assert sam.count("speculation: drafter SamProposer, policy goodput, verification exact") == 1
    assert "speculation:" not in stock


def test_many_requests_some_of_which_are_aborted(servers):
    stock, sam = servers

    def ask(number: int) -> str | None:
        if number % 10 == 9:  # goes away after the first token
            with sam.complete(number, stream=True, max_tokens=200, extra_body={"ignore_eos": True}) as stream:
                next(iter(stream))
            return None
        return sam.complete(number).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, range(120)))
    assert texts.count(None) == 12 and sam.process.poll() is None
    metric = r"^vllm:spec_decode_num_accepted_tokens_total(?:\{.*\})? (\S+)$"
    accepted = re.findall(metric, sam.read("metrics"), re.MULTILINE)
    assert sum(map(float, accepted)) > 0  # how many, goodput's clock decides
    asked = [number for number in range(0, 120, 9) if texts[number]]
    assert [stock.complete(number).choices[0].text for number in asked] == [texts[number] for number in asked]
