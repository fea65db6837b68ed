"""Run `python -m gradcomp bench` with torchrun on two hosts, which are network namespaces of this machine.

A program for benchmarks.network.hosts.isolated(). The arguments: a folder for the hosts' stderr, the number
of ranks per host, and bench's arguments. Prints the first host's output, and exits with the largest status.
"""

import os
import sys
from pathlib import Path

from benchmarks.network.hosts import Network

LINK_MBIT_PER_S = 200
TIMEOUT_S = 240


def main() -> int:
    folder, ranks_per_host, *arguments = sys.argv[1:]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with Network(2) as network:
        network.throttle(LINK_MBIT_PER_S)
        programs = []
        for rank, host in enumerate(network.hosts):
            torchrun = ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
            torchrun += ["--nproc-per-node", ranks_per_host]
            torchrun += ["--master-addr", "10.0.0.1", "--master-port", "29500"]
            command = [sys.executable, "-m", *torchrun, "-m", "gradcomp", "bench", *arguments]
            programs.append(host.start(command, environment, Path(folder) / f"host{rank}"))
        output, _ = programs[0].communicate(timeout=TIMEOUT_S)
        print(output)
        return max(program.wait(timeout=TIMEOUT_S) for program in programs)


if __name__ == "__main__":
    sys.exit(main())
