"""`vllm serve` with this project's wheel, its drafter and no other key, beside stock vLLM: OpenAI's client asks."""

import concurrent.futures
import os
import random
import re
import signal
import subprocess
import time
import urllib.request

import openai
import pytest

from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from tests.sam.engine import tiny_engine

pytestmark = pytest.mark.engine

PARAMETERS = {"type": "object", "properties": {"operator": {"enum": ["add", "subtract"]}}, "required": ["operator"]}
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "calculate"}}
ARGUMENTS = [
    *"--served-model-name tiny --max-model-len 256 --max-num-seqs 32 --dtype float32 --enforce-eager".split(),
    *"--enable-auto-tool-choice --tool-call-parser hermes --structured-outputs-config".split(),
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
]
OF_SAM = ["--speculative-config", '{"model": "sam.SamProposer", "num_speculative_tokens": 5}']
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}


class Server:
    """A server of the tiny model in a folder, on a port of its own."""

    def __init__(self, python, folder, arguments: list[str], **environment: str):
        # Not one that the system gives to whoever asks for any, as Ray in the tests beside: the server takes it later.
        port = str(random.randrange(20000, 32000))
        self.address, self.log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "model"), "--port", port]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *ARGUMENTS, *arguments], cwd=folder, env=os.environ | VLLM | environment, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def read(self, page: str) -> str:
        return urllib.request.urlopen(f"{self.address}/{page}", timeout=10).read().decode()

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

    def chat(self, asked: str = "1+1", **settings):
        settings = {"max_tokens": 60, "temperature": 0.0, "extra_body": {"ignore_eos": True}, **settings}
        messages = [{"role": "user", "content": asked}]
        return self.client.chat.completions.create(model="tiny", messages=messages, **settings)


def text_of(reply) -> str:
    return reply.choices[0].message.content


@pytest.fixture(scope="module")
def servers(python_with_vllm, tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("server"), build_tokenizer()
    tiny_engine.save_model(folder / "model", vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    both = [Server(python_with_vllm, folder, [], VLLM_PLUGINS=""), Server(python_with_vllm, folder, OF_SAM)]
    try:
        for one in both:
            one.wait()
        yield both
    finally:
        for one in both:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


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
    (stock,), (sam,) = (one.chat(**settings).choices for one in servers)
    assert (sam.message.content, sam.finish_reason) == (stock.message.content, stock.finish_reason)
    called, expected = ([call.function for call in one.message.tool_calls or []] for one in (sam, stock))
    assert called == expected
    assert called or sam.message.content, "a call that was cut off is text (vLLM 0.24)"
    for one, other in zip(sam.logprobs.content, stock.logprobs.content, strict=True) if stock.logprobs else ():
        assert [entry.token for entry in one.top_logprobs] == [entry.token for entry in other.top_logprobs]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_a_stream_says_what_an_answer_says(servers):
    _, sam = servers
    parts = [part.choices[0].delta.content or "" for part in sam.chat(stream=True) if part.choices]
    assert "".join(parts) == text_of(sam.chat()) and len(parts) > 1


def test_a_seed_gives_the_same_answer_again_and_four_samples_differ(servers):
    _, sam = servers
    for settings in ({"seed": 7}, {}):
        replies = [sam.chat(temperature=1.0, n=4, **settings) for _ in range(2)]
        first, again = ([one.message.content for one in reply.choices] for reply in replies)
        assert len(set(first)) == 4 and (first == again) == bool(settings)


def test_the_log_says_what_drafts(servers):
    stock, sam = (one.log.read_text() for one in servers)
    assert sam.count("speculation: drafter SamProposer, policy goodput, verification exact") == 1
    assert "speculation:" not in stock


def test_many_requests_some_of_which_go_away(servers):
    stock, sam = servers

    def ask(number: int) -> str:
        if number % 10 == 9:  # after the first token of another one
            with sam.chat(str(number), stream=True, max_tokens=200) as stream:
                next(iter(stream))
        return text_of(sam.chat(str(number)))

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, range(100)))
    assert texts[::9] == [text_of(stock.chat(str(number))) for number in range(0, 100, 9)]
    metric = r"^vllm:spec_decode_num_accepted_tokens_total(?:\{.*\})? (\S+)$"
    accepted = re.findall(metric, sam.read("metrics"), re.MULTILINE)
    assert sum(map(float, accepted)) > 0  # how many, goodput's clock decides
