"""From bare nodes to the first curve on two nodes, and what disturbs or ends a run there: a link that is cut, smaller
packets, clocks apart, a node that dies, a node that is not as the head.

A run draws one node's tokens: the same two ranks and replicas on one node without speculation are what it is compared
with.
"""

import shutil
import subprocess
import threading
import time
from importlib.metadata import distribution

import pytest

from tests.end_to_end.conftest import assets as assets
from tests.end_to_end.runs import MINUTES, SHORT, end, log_of, metrics, responses, start, wait_for_step
from tests.nodes import machines

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 3
SETTINGS = (
    *(setting for setting in SHORT if "micro_batch" not in setting), "trainer.save_freq=1",
    f"trainer.total_training_steps={STEPS}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)  # fmt: skip
OVER_TWO = ("trainer.nnodes=2", "speculation.scope=history")
ENVIRONMENT = {"RAY_worker_niceness": "0", "PYTHONPATH": str(machines.REPOSITORY)}
# An hour is added to what the C library says of the time of day.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return code;
}
time_t time(time_t *kept) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    return kept ? *kept = exact.tv_sec : exact.tv_sec;
}
"""


class Cluster:
    """Two nodes, a folder that both see, and their Ray."""

    def __init__(self, folder, assets):
        (shared := folder / "shared").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8g", "shared", shared], check=True)
        self.shared, self.assets = shared, shutil.copytree(assets, shared / "assets")
        self.head, self.worker = self.nodes = machines.two(folder, (machines.REPOSITORY, shared))
        self.environment = ENVIRONMENT | {"RAY_ADDRESS": f"{self.head.address}:6379"}

    def limit_disk(self, free):
        """Of the folder that both see, to so many bytes that are free."""
        size = shutil.disk_usage(self.shared).used + free
        subprocess.run(["mount", "-o", f"remount,size={size}", self.shared], check=True)

    def start_ray(self, **of_worker):
        self.head.ray("head", **ENVIRONMENT)
        self.worker.ray("worker", self.head.address, **ENVIRONMENT, **of_worker)

    def stop_ray(self):
        for node in self.nodes:
            node.ray("stop")

    def python(self, *words, **pipes):
        """A command of this project on the head, as a process."""
        command = self.head.command("python", "-m", *words, *SETTINGS, *OVER_TWO, **self.environment)
        return subprocess.Popen([*command, f"assets={self.assets}"], stdin=subprocess.DEVNULL, text=True, **pipes)

    def start(self, run_directory, *overrides):
        words = ("recipe.sam_dapo.main_dapo", "--config-name", "dapo_tiny_cpu", f"run_dir={run_directory}")
        return self.python(*words, *overrides, stderr=subprocess.PIPE)

    def doctor(self, run_directory):
        """Its exit code, and what it says."""
        words = ("sam.command_line", "doctor", "--config-name", "dapo_tiny_cpu", f"run_dir={run_directory}")
        process = self.python(*words, stdout=subprocess.PIPE)
        said, _ = process.communicate(timeout=3 * MINUTES)
        return process.returncode, said

    def left(self):
        """Waits for what a run could leave on a node to go: processes, sockets, temporary folders."""
        deadline = time.monotonic() + 2 * MINUTES
        while (left := [*map(of_runs, self.nodes)]) != [set(), set()] and time.monotonic() < deadline:
            time.sleep(0.5)
        return left


def of_runs(node):
    titles = {process.name() for process in node.processes()}
    own = {title for title in titles if title.startswith(("VLLM", "ray::")) and title != "ray::IDLE"}
    found = {title for title in own if not title.startswith(("ray::Dashboard", "ray::RuntimeEnv"))}
    return found | {path for pattern in ("sam-*", "rl-colocate-zmq-*") for path in (node.folder / "tmp").glob(pattern)}


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    if said := machines.refused():
        pytest.skip(said)
    cluster = Cluster(tmp_path_factory.mktemp("nodes"), request.getfixturevalue("assets"))
    try:
        cluster.start_ray()
        yield cluster
    finally:
        for node in cluster.nodes:
            node.end()
        subprocess.run(["umount", "--lazy", cluster.shared], check=True)


@pytest.fixture(scope="module")
def alone(cluster):
    """The same on one node, without speculation."""
    directory = cluster.shared / "alone"
    end(start(cluster.assets, directory, *SETTINGS, "trainer.n_gpus_per_node=2", "speculation=off"), directory)
    return directory


def test_a_node_that_is_not_as_the_head_is_named(cluster):
    code, said = cluster.doctor(cluster.shared / "run")
    assert code == 0 and "2 nodes x 1 cpu devices" in said and said.endswith("\n0 problems\n"), said
    # On the worker: another commit, another vLLM, and a run_dir that is not the head's.
    clone, vllm = cluster.shared / "clone", distribution("vllm")._path
    of_vllm, git = cluster.shared / vllm.name, machines.REPOSITORY / ".git"
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", machines.REPOSITORY, clone], check=True)
    author = ["-c", "user.name=n", "-c", "user.email=n@n"]
    subprocess.run(["git", "-C", clone, *author, "commit", "--quiet", "--allow-empty", "-m", "other"], check=True)
    (cluster.shared / "git").write_text(f"gitdir: {clone / '.git'}\n")
    shutil.copytree(vllm, of_vllm)
    described = (vllm / "METADATA").read_text().replace("Version: 0.24.0", "Version: 0.22.1", 1)
    (of_vllm / "METADATA").write_text(described)
    mounts = {vllm: of_vllm, git: clone / ".git" if git.is_dir() else cluster.shared / "git"}
    for place, other in mounts.items():
        cluster.worker.run("mount", "--bind", other, place)
    code, said = cluster.doctor("/tmp/run")
    for place in mounts:
        cluster.worker.run("umount", place)
    assert code == 2 and f"on {cluster.head.address}" not in said
    for line in (
        "vllm 0.22.1, the head has 0.24.0: install the same on every node [node.differs]",
        "/tmp is another folder than the head's: a rank's part of a checkpoint stays here: set run_dir to a folder",
    ):
        assert f"on {cluster.worker.address}: {line}" in said
    assert f"on {cluster.worker.address}: commit " in said


@pytest.fixture(scope="module")
def lost(cluster):
    """A run whose link was cut for 5 s, that ended with a full disk, went on, and has lost a node: its directory, the
    last lines on the screen, and what each time was left."""
    directory, screens, left = cluster.shared / "run", [], []

    def ends(run):
        _, screen = run.communicate(timeout=2 * MINUTES)
        assert run.returncode == 1, (screen, log_of(directory)[-3000:])
        screens.append(screen.splitlines()[-1])
        left.append(cluster.left())

    run = cluster.start(directory, "routing=context")
    wait_for_step(run, directory, 1)
    cluster.worker.set_link("down")
    time.sleep(5.0)
    cluster.worker.set_link("up")
    cluster.limit_disk(1 << 20)
    ends(run)
    cluster.limit_disk(8 << 30)
    run = cluster.start(directory, "routing=context")
    wait_for_step(run, directory, 2)
    (raylet,) = [process for process in cluster.worker.processes() if process.name() == "raylet"]
    raylet.kill()
    ends(run)
    cluster.stop_ray()
    return directory, screens, left


def test_a_run_that_cannot_go_on_says_why_and_leaves_nothing(cluster, lost):
    directory, (full, last), left = lost
    assert full.startswith(f"error: no space left on the disk of {directory}, in step 2"), full
    assert full.endswith("free some space; then the same command goes on after step 1")
    assert last.startswith(f"error: node {cluster.worker.address} is lost: "), (last, log_of(directory)[-3000:])
    assert last.endswith("then the same command goes on after step 2")
    assert left == [[set(), set()]] * 2


def test_a_run_draws_one_nodes_tokens_through_all_that_disturbs_it(cluster, lost, alone):
    """It goes on with verl's balancer, a worker whose clock is an hour ahead, smaller packets, a link that flaps."""
    directory, *_ = lost
    for node in cluster.nodes:
        node.set_link("mtu", "1400")
    (source := cluster.shared / "clock.c").write_text(CLOCK)
    library = cluster.shared / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    assert abs(float(cluster.worker.run("date", "+%s", LD_PRELOAD=str(library))) - time.time() - 3600) < 10
    cluster.start_ray(LD_PRELOAD=str(library))
    before = [node.bytes_sent() for node in cluster.nodes]
    run = cluster.start(directory, "routing=verl")
    over = threading.Event()
    flapping = threading.Thread(target=flap, args=(cluster.worker, over))
    flapping.start()
    try:
        screen = end(run, directory)
    finally:
        over.set()
        flapping.join()
    assert f"resumed from step 2 of {directory}" in screen
    assert cluster.left() == [set(), set()]
    sent = [node.bytes_sent() - earlier for node, earlier in zip(cluster.nodes, before, strict=True)]
    assert min(sent) > 1 << 20, "over the link"

    rows, reference = metrics(directory), metrics(alone)
    assert [row["step"] for row in rows] == [row["step"] for row in reference] == list(range(1, STEPS + 1))
    for mine, theirs in zip(rows, reference, strict=True):
        assert responses(directory, mine["step"]) == responses(alone, mine["step"])
        assert mine["actor/grad_norm"] == theirs["actor/grad_norm"]
        assert (directory / "engine_steps" / f"{mine['step']}.npz").exists()
    assert rows[-1]["rollout/drafter/sharing_received_tokens"] > 0, "verl's balancer spreads a prompt's samples"
    assert rows[-1]["rollout/drafter/sharing_lost_tokens"] >= 0, "counted"
    assert sum(row["actor/grad_norm"] for row in rows) > 0
    assert sum(row["rollout/spec_accepted_tokens"] for row in rows) > 0
    assert {path.name for path in (directory / "history").glob("*.sqlite")} == {"head.sqlite", "worker.sqlite"}
    assert len({path.name.rpartition("-")[2] for path in (directory / "wandb").glob("offline-run-*")}) == 1


def flap(node, over):
    """200 ms without a link every 2 s."""
    while not over.wait(1.8):
        node.set_link("down")
        time.sleep(0.2)
        node.set_link("up")
