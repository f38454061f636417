"""The log as an actor of real Ray, which is killed; a server in a thread; engines that are drafters here.

Nothing here asserts how long something takes: `until` gives up after a minute.
"""

import os
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from sam.sharing.client import Client
from sam.sharing.drafter import SharingDrafter
from sam.sharing.link import Link, address_of
from sam.sharing.log import Log
from tests.sam.sharing.channel import K
from tests.sam.sharing.server import Server
from tests.sam.stepping import draft, tokens

pytestmark = pytest.mark.engine
ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]


def until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("not within a minute")


@pytest.fixture(scope="module")
def log():
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie below
    settings = {"include_dashboard": False, "configure_logging": False, "object_store_memory": 100 << 20}
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=1, _temp_dir=folder, runtime_env=environment, **settings)
    yield ray.remote(Log).options(num_cpus=0, max_restarts=-1).remote(1 << 24)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engines(log):
    """Two drafters that share, each with its thread and a request of a prompt that no other test has."""
    address = address_of(secrets.token_hex(8), 0)
    server, made, prompt = Server(address, ask=log.exchange.remote), [], tokens(1, secrets.randbits(16))
    for name in "ab":
        made.append(SharingDrafter(max_draft_tokens=K))
        client = Client(Link(address).ask)
        made[-1].share(client)
        client.start()
        made[-1].start(name, prompt)
    yield made
    server.end()


def wait_for_text(drafter, name, total):
    """Until the drafter has `total` tokens from elsewhere, taking steps with tokens that say nothing."""
    fresh = iter(range(10_000, 20_000))

    def arrived():
        draft(drafter, name, next(fresh))
        return drafter.counters["sharing_received_tokens"] >= total

    until(arrived)
    assert drafter.counters["sharing_received_tokens"] == total, "nothing twice"


def test_a_log_that_is_killed_delays_text_and_nothing_else(log, engines):
    writer, reader = engines
    draft(writer, "a", 10, 11, 12, 13, 14)
    wait_for_text(reader, "b", 5)
    assert draft(reader, "b", 10) == [11, 12, 13]
    assert reader.counters["sharing_errors"] == writer.counters["sharing_errors"] == 0
    os.kill(ray.get(log.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    for i in range(50):  # both go on while there is no log
        draft(reader, "b", 5000 + i)
        draft(writer, "a", 20, 21, 22, 23)
    wait_for_text(reader, "b", 5 + 200)
    assert draft(reader, "b", 20) == [21, 22, 23]
