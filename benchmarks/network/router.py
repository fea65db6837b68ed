"""A router between hosts: it throttles each host's uplink and downlink, and holds every packet for a delay.

    python -m benchmarks.network.router PID...

It makes the interface eth0 in the network namespace of each process, 10.0.0.1 being the first process's
address, and carries packets between them in user space: few kernels have netem. A line on stdin,
"BYTES_PER_S DELAY_S", changes the links, and an empty line changes nothing. The answer on stdout is the
number of packets dropped since the last answer. The end of stdin ends the program.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from collections.abc import Sequence

MTU_BYTES = 9000
# A queue holds packets for this time at its link's rate, and this number of bytes at least.
QUEUE_S, MIN_QUEUE_BYTES = 1.0, 4e6
PREFIX = b"\x0a\x00\x00"  # of the addresses 10.0.0.x
MAX_READS = 64  # from one host, before packets that are due are written
# From <linux/if_tun.h>.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class Timetable:
    """The times at which packets arrive. Each host has an uplink and a downlink of the same rate.

    A packet's bytes pass its receiver's downlink while they pass its sender's uplink, unless other packets
    are before it in the downlink's queue. The packet arrives a delay later. Meanwhile the links are free.
    """

    def __init__(self, num_hosts: int) -> None:
        # When each link is free again.
        self._up_s, self._down_s = [0.0] * num_hosts, [0.0] * num_hosts
        self.set(1e9, 0.0)

    def set(self, bytes_per_s: float, delay_s: float) -> None:
        """Change the rate and the delay of packets that are still to come."""
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._queue_s = max(QUEUE_S, MIN_QUEUE_BYTES / bytes_per_s)

    def arrival_s(self, source: int, target: int, num_bytes: int, now_s: float) -> float | None:
        """Return when a packet arrives that is sent now; None if a queue is full."""
        if max(self._up_s[source], self._down_s[target]) - now_s > self._queue_s:
            return None
        seconds = num_bytes / self._bytes_per_s
        sent_s = max(self._up_s[source], now_s) + seconds
        received_s = max(self._down_s[target] + seconds, sent_s)
        self._up_s[source], self._down_s[target] = sent_s, received_s
        return received_s + self._delay_s


class Router:
    """Packets on their way between devices, the files of the hosts' interfaces."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.timetable = Timetable(len(devices))
        self.num_dropped = 0
        self._devices = devices
        # (time of arrival, number, target, buffer, bytes); numbers keep packets of the same time in order.
        self._underway: list[tuple[float, int, int, bytearray, int]] = []
        self._num_packets = 0
        self._free: list[bytearray] = []  # buffers

    def wait_s(self) -> float | None:
        """Return the time until the next packet is due; None if there is none."""
        return max(0.0, self._underway[0][0] - time.perf_counter()) if self._underway else None

    def take(self, source: int) -> None:
        """Read packets that a host has sent."""
        for _ in range(MAX_READS):
            buffer = self._free.pop() if self._free else bytearray(MTU_BYTES)
            try:
                num_bytes = os.readv(self._devices[source], [buffer])
            except BlockingIOError:
                self._free.append(buffer)
                return
            # A packet of another protocol or to another address, a broadcast say, goes nowhere.
            target = buffer[19] - 1 if buffer[0] >> 4 == 4 and buffer[16:19] == PREFIX else -1
            if not 0 <= target < len(self._devices):
                self._free.append(buffer)
                continue
            due = self.timetable.arrival_s(source, target, num_bytes, time.perf_counter())
            if due is None:
                self.num_dropped += 1
                self._free.append(buffer)
                continue
            self._num_packets += 1
            heapq.heappush(self._underway, (due, self._num_packets, target, buffer, num_bytes))

    def deliver(self) -> None:
        """Write the packets that are due."""
        now = time.perf_counter()
        while self._underway and self._underway[0][0] <= now:
            _, _, target, buffer, num_bytes = heapq.heappop(self._underway)
            try:
                os.write(self._devices[target], memoryview(buffer)[:num_bytes])
            except OSError:
                self.num_dropped += 1
            self._free.append(buffer)


def interface(pid: int) -> int:
    """Make the interface eth0 in a process's network namespace, and return its file."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(namespace: int) -> None:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with open("/proc/self/ns/net") as own, open(f"/proc/{pid}/ns/net") as other:
        enter(other.fileno())
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        enter(own.fileno())
    return device


def main() -> None:
    devices = [interface(int(pid)) for pid in sys.argv[1:]]
    router, index = Router(devices), {device: host for host, device in enumerate(devices)}
    print(0, flush=True)
    commands = sys.stdin.fileno()
    while True:
        # Not epoll, which waits for whole milliseconds.
        ready, _, _ = select.select([*devices, commands], [], [], router.wait_s())
        for each in ready:
            if each != commands:
                router.take(index[each])
        router.deliver()
        if commands in ready:
            line = sys.stdin.readline()
            if not line:
                return
            if numbers := line.split():
                router.timetable.set(*map(float, numbers))
            print(router.num_dropped, flush=True)
            router.num_dropped = 0


if __name__ == "__main__":
    main()
