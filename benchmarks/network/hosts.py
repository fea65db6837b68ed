"""Hosts on throttled links, all on this machine: Linux network namespaces around a switch or a router.

The namespaces have no names and belong to processes. Everything runs in one process namespace, so whatever
ends the program, SIGKILL included, ends the processes, and the kernel removes hosts, links and throttles.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.network.router import MTU_BYTES

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
# A link sends so much at once after a pause, without being throttled. A hook that sends no more than that
# would seem to have no link at all; but with less, packets are cut up, which costs more than the link.
MIN_BURST_BYTES, BURST_S = 16 * 1024, 0.001
QUEUE_MS = 50
# With a router: least, first and largest bytes of a connection's buffers. Linux's default is less than a
# link's rate times its delay there and back. And the packets that may wait for the router.
BUFFER_BYTES = "4096 131072 33554432"
MAX_WAITING_PACKETS = 5000
SENT_BYTES, LOST_PACKETS = 8, 11  # columns of /proc/net/dev


class NoPrivilegeError(Exception):
    """This machine doesn't let the program make hosts; the message says what is missing."""


def isolated(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` as root of namespaces of its own.

    No rights are needed where the kernel gives every user namespaces; elsewhere root's. Raises
    NoPrivilegeError.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoPrivilegeError(f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)")
    namespaces = ["--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    reasons = []
    for user in (["--user", "--map-root-user"], []):
        # Whatever ends this process kills unshare, whose end kills everything in its namespaces.
        prefix = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", *user, *namespaces]
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
        if not tried.returncode:
            return [*prefix, *command]
        reasons.append(tried.stderr.strip())
    raise NoPrivilegeError(
        "can't make network namespaces, with a user namespace or without: "
        f"{'; '.join(reasons)}. Run it as root, or allow user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0); "
        "a container needs --privileged"
    )


class Namespace:
    """One network namespace, and the processes in it."""

    def __init__(self) -> None:
        # The process holds the namespace. It says when it is in it.
        command = ["unshare", "--net", sys.executable, "-c", "print(flush=True); input()"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self.pid = self._holder.pid
        self.run_inside = ("nsenter", f"--net=/proc/{self.pid}/ns/net")
        self.run("ip", "link", "set", "lo", "up")

    def start(self, command: Sequence[str], environment: dict[str, str], errors: Path) -> Any:
        """Start a process on the host, with pipes; what it writes to stderr goes to a file."""
        with errors.open("w") as file:
            return subprocess.Popen(
                [*self.run_inside, *command],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def take_address(self, index: int, *options: str) -> None:
        """Turn the interface on, as the network's host of this index."""
        self.run("ip", "addr", "add", f"10.0.0.{index + 1}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", *options, "up")

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()

    def run(self, *command: str) -> None:
        run(*self.run_inside, *command)


class Host(Namespace):
    """One network namespace, with an address on the switch."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.port = f"port{index}"
        run("ip", "link", "add", self.port, "type", "veth", "peer", "eth0", "netns", str(self.pid))
        run("ip", "link", "set", self.port, "master", "switch", "up")
        self.take_address(index)

    def throttle(self, mbit_per_s: float) -> None:
        """Limit what the host sends, and what it receives, to this rate each."""
        burst = max(MIN_BURST_BYTES, round(mbit_per_s * 125_000 * BURST_S))
        rate = ("rate", f"{mbit_per_s}mbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)
        run("tc", "qdisc", "replace", "dev", self.port, "root", "tbf", *rate)


class Network(AbstractContextManager):
    """Hosts on one switch; a context manager, inside isolated()."""

    def __init__(self, num_hosts: int) -> None:
        run("ip", "link", "add", "switch", "type", "bridge")
        run("ip", "link", "set", "switch", "up")
        self.hosts = [Host(index) for index in range(num_hosts)]

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end()
        run("ip", "link", "del", "switch")

    def throttle(self, mbit_per_s: float, delay_ms: None) -> None:
        for host in self.hosts:
            host.throttle(mbit_per_s)

    def num_dropped(self) -> int:
        return 0  # tbf drops packets to throttle


class DelayedNetwork(AbstractContextManager):
    """Hosts around one router, in place of Network: links with a rate and a delay."""

    def __init__(self, num_hosts: int) -> None:
        self.hosts = [Namespace() for _ in range(num_hosts)]
        pids = [str(host.pid) for host in self.hosts]
        self._router: Any = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.network.router", *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answer()
        for index, host in enumerate(self.hosts):
            for name in ("tcp_rmem", "tcp_wmem"):
                host.run("sh", "-c", f"echo {BUFFER_BYTES} > /proc/sys/net/ipv4/{name}")
            host.take_address(index, "mtu", str(MTU_BYTES), "txqueuelen", str(MAX_WAITING_PACKETS))
        self._num_lost = 0

    def __exit__(self, *_: object) -> None:
        self._router.kill()
        self._router.communicate()
        for host in self.hosts:
            host.end()

    def throttle(self, mbit_per_s: float, delay_ms: float) -> None:
        """Limit what each host sends, and what it receives, to this rate, and delay every packet."""
        self._ask(f"{mbit_per_s * 125_000} {delay_ms / 1e3}")

    def num_dropped(self) -> int:
        """Return how many packets were dropped since the last call, also before they came to the router."""
        lost, before = sum(eth0_counter(LOST_PACKETS, host.pid) for host in self.hosts), self._num_lost
        self._num_lost = lost
        return self._ask("") + lost - before

    def _ask(self, line: str) -> int:
        self._router.stdin.write(line + "\n")
        self._router.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        line = self._router.stdout.readline()
        if not line:
            _, errors = self._router.communicate()
            reason = (errors.strip().splitlines() or ["without a message"])[-1]
            raise NoPrivilegeError(f"the router ended: {reason}. It needs /dev/net/tun")
        return int(line)


def eth0_counter(column: int, process: int | str = "self") -> int:
    """Return a counter of the interface of a process's host, since the host started."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[column])
    raise RuntimeError("this host has no eth0")


def run(*command: str) -> None:
    """Run a command. Raises NoPrivilegeError if it fails, with what it says."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoPrivilegeError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}. It may lack rights, or the kernel a "
            "module (bridge, veth, sch_tbf)"
        )
