"""Two nodes on one machine: namespaces of network, mounts, hostname and processes, joined by a veth pair.

A node has an address, a hostname, processes, /tmp, /dev/shm and HOME of its own; all other folders are the machine's,
as on a shared file system. Ray is started as a user does, by scripts/start_ray_cluster.sh. A node lives as long as its
first process: with it the kernel ends all others, and takes the namespaces and the link.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
# setpriv: what pytest leaves behind when it is killed goes, too.
UNSHARE = "setpriv --pdeathsig KILL unshare --net --mount --uts --ipc --pid --fork --mount-proc --kill-child".split()
# After the mounts the shell waits and, as the first process of a machine does, takes leave of all that ends: Ray's
# processes end with a raylet that is gone, not with one that nobody has waited for.
FIRST = """
hostname {name}
mount --bind {hosts} /etc/hosts
mount --bind {resolver} /etc/resolv.conf
mount --rbind {tmp} /tmp
mount -t tmpfs -o size=2g node /dev/shm
ip link set lo up
touch /tmp/up
sleep infinity &
wait
"""


def refused() -> str | None:
    """Why there can be no nodes here; None where there can."""
    programs = ("ip", "unshare", "nsenter", "setpriv", "hostname")
    if missing := [program for program in programs if not shutil.which(program)]:
        return f"two nodes need {', '.join(missing)}: install iproute2, util-linux and hostname"
    if os.geteuid() != 0:
        return "two nodes need root, for namespaces of the network"
    made = "ip link add type veth && ip link set lo up"
    tried = subprocess.run([*UNSHARE, "sh", "-c", made], capture_output=True, text=True)
    return f"this kernel makes no nodes: {tried.stderr.strip()}" if tried.returncode else None


class Node:
    """One of them; `shared` are folders that it sees under their own paths even if they are below /tmp."""

    def __init__(self, name: str, address: str, folder: Path, shared: tuple[Path, ...]):
        self.name, self.address, self.folder = name, address, folder
        (tmp := folder / "tmp").mkdir(parents=True)
        (tmp / "home").mkdir()
        lines = [FIRST.format(name=name, tmp=tmp, hosts=folder / "hosts", resolver=folder / "resolver")]
        for path in shared:
            if path.is_relative_to("/tmp"):  # made before the node's own is mounted there
                (there := tmp / path.relative_to("/tmp")).mkdir(parents=True)
                lines.insert(0, f"mount --bind {path} {there}")
        self._holder = subprocess.Popen([*UNSHARE, "bash", "-ec", "\n".join(lines)])

    def wait(self) -> None:
        """Until it is up."""
        deadline = time.monotonic() + 20.0
        while not (self.folder / "tmp" / "up").exists():
            if self._holder.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} does not come up")
            time.sleep(0.05)
        (self.first,) = [process.pid for process in psutil.Process(self._holder.pid).children()]

    def command(self, *words: str | Path, **environment: str) -> list[str]:
        """To be run on the node, in its environment."""
        own = {"HOME": "/tmp/home", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | environment
        enter = ["nsenter", "--target", str(self.first), "--net", "--mount", "--uts", "--ipc", "--pid"]
        return [*enter, "env", f"--chdir={REPOSITORY}", *(f"{key}={value}" for key, value in own.items()), *words]

    def run(self, *words: str | Path, seconds: float = 60.0, **environment: str) -> str:
        """What a command says that ends well."""
        words = self.command(*words, **environment)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
        assert ended.returncode == 0, (self.name, words, ended.stdout[-1500:], ended.stderr[-1500:])
        return ended.stdout

    def ray(self, *words: str, **environment: str) -> str:
        """scripts/start_ray_cluster.sh; a CPU's node counts a device, and cores for actors that mostly wait."""
        resources = '{"CPU": 16, "GPU": 1, "object_store_memory": 500000000}'
        return self.run("bash", "scripts/start_ray_cluster.sh", *words, RAY_OVERRIDE_RESOURCES=resources, **environment)

    def processes(self) -> list[psutil.Process]:
        """All that run there, but the first."""
        own, found = os.readlink(f"/proc/{self.first}/ns/pid"), []
        for process in psutil.process_iter():
            try:
                is_here = process.pid != self.first and os.readlink(f"/proc/{process.pid}/ns/pid") == own
                if is_here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                pass
        return found

    def bytes_sent(self) -> int:
        return int(re.search(r"eth0:((?:\s+\d+){9})", Path(f"/proc/{self.first}/net/dev").read_text())[1].split()[-1])

    def set_link(self, *words: str) -> None:
        self.run("ip", "link", "set", "eth0", *words)

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()


def two(folder: Path, shared: tuple[Path, ...]) -> tuple[Node, Node]:
    """A head and a worker, joined; without Ray."""
    names = {"head": "10.77.0.1", "worker": "10.77.0.2"}
    for name in names:
        (folder / name).mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in names.items())]
        (folder / name / "hosts").write_text("\n".join(lines) + "\n")
        (folder / name / "resolver").write_text("nameserver 127.0.0.1\n")  # nobody: the answer is no, and at once
    head, worker = nodes = [Node(name, address, folder / name, shared) for name, address in names.items()]
    for node in nodes:
        node.wait()
    ends = [("name", "eth0", "netns", str(node.first)) for node in nodes]
    subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
    for node in nodes:
        node.run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        node.set_link("up")
    for node, other in ((head, worker), (worker, head)):
        node.run("ip", "route", "add", "default", "via", other.address)
    return head, worker
