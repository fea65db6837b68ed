"""Hosts on links with a rate and a delay: network namespaces whose packets pass through a router."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.network.hosts import Namespace, NoPrivilegeError
from benchmarks.network.router import MTU_BYTES

# Least, first and largest bytes of a connection's buffers. Linux's default is less than a link's rate times
# its delay there and back.
BUFFER_BYTES = "4096 131072 33554432"
MAX_WAITING_PACKETS = 5000  # for the router to read


class DelayedHost(Namespace):
    """One network namespace, with an address behind the router."""

    def connect(self, index: int) -> None:
        """Turn the interface on that the router has made."""
        for name in ("tcp_rmem", "tcp_wmem"):
            self.run("sh", "-c", f"echo {BUFFER_BYTES} > /proc/sys/net/ipv4/{name}")
        self.run("ip", "addr", "add", f"10.0.0.{index + 1}/24", "dev", "eth0")
        sizes = ("mtu", str(MTU_BYTES), "txqueuelen", str(MAX_WAITING_PACKETS))
        self.run("ip", "link", "set", "eth0", *sizes, "up")

    def num_lost(self) -> int:
        """Return how many packets found no place to wait for the router, since the host started."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[11])
        raise RuntimeError("this host has no eth0")


class DelayedNetwork:
    """Hosts around one router, in place of hosts.Network; a context manager, inside isolated()."""

    def __init__(self, num_hosts: int) -> None:
        self.hosts = [DelayedHost() for _ in range(num_hosts)]
        pids = [str(host.pid) for host in self.hosts]
        self._router = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.network.router", *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answer()
        for index, host in enumerate(self.hosts):
            host.connect(index)
        self._num_lost = 0

    def __enter__(self) -> DelayedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self._router.kill()
        self._router.communicate()
        for host in self.hosts:
            host.end()

    def throttle(self, mbit_per_s: float, delay_ms: float) -> None:
        """Limit what each host sends, and what it receives, to this rate, and delay every packet."""
        self._ask(f"{mbit_per_s * 125_000} {delay_ms / 1e3}")

    def num_dropped(self) -> int:
        """Return how many packets were dropped since the last call."""
        lost, before = sum(host.num_lost() for host in self.hosts), self._num_lost
        self._num_lost = lost
        return self._ask("") + lost - before

    def _ask(self, line: str) -> int:
        assert self._router.stdin is not None
        self._router.stdin.write(line + "\n")
        self._router.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._router.stdout is not None
        line = self._router.stdout.readline()
        if not line:
            _, errors = self._router.communicate()
            reason = (errors.strip().splitlines() or ["without a message"])[-1]
            raise NoPrivilegeError(f"the router ended: {reason}. It needs /dev/net/tun")
        return int(line)
