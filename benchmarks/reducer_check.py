"""Run the Reducer, the wrapper, FSDP2 and average_ on real processes, and check what they average.

With python -m benchmarks.reducer_check --backend gloo --world-size 2 --device cuda all ranks share one GPU
(or the CPU); with --backend nccl every rank has a GPU of its own. Each scenario (reducer_scenarios.py,
state_scenarios.py) has a process group of its own, and compares with the float64 mean of the ranks' own
gradients, or with torch's DistributedDataParallel on the same inputs. Common results must have equal bits on
all ranks.

A scenario fails if a rank raises, dies or hangs; every rank's traceback or stack is printed. The next
scenario gets new processes. Exit status: 0 if all is right, 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import reducer_scenarios, state_scenarios
from benchmarks.rank_devices import add_rank_arguments, chosen_world_size, take_device
from benchmarks.rank_results import Result, Results, judge
from gradcomp.testing import RankError
from gradcomp.testing.ranks.processes import Pool

# scenario(device, rank, world_size)
Scenario = Callable[[torch.device, int, int], Results]

MAX_FAILURES_SHOWN = 10

_ON_EITHER = {
    "find_unused_parameters": reducer_scenarios.unused_parameters,
    "static_graph": reducer_scenarios.static_graph,
    "sparse gradients": reducer_scenarios.sparse_gradients,
    "channels last": reducer_scenarios.channels_last,
    "no_sync": reducer_scenarios.accumulation,
    "mixed dtypes": reducer_scenarios.mixed_dtypes,
    "complex parameters": reducer_scenarios.complex_parameters,
    "bucket views": reducer_scenarios.bucket_views,
    "late gradients": reducer_scenarios.late_gradients,
    "disagreement": reducer_scenarios.disagreement,
    "checkpoints": state_scenarios.checkpoints,
}
SCENARIOS: dict[str, Scenario] = {
    f"{name}, {on}": partial(scenario, on=on)
    for name, scenario in _ON_EITHER.items()
    for on in ("Reducer", "wrapper")
} | {
    "module state, wrapper": state_scenarios.module_state,
    "join, wrapper": reducer_scenarios.join,
    "average_": state_scenarios.average_exactly,
    "average_, error feedback": state_scenarios.average_with_error_feedback,
    "FSDP2": state_scenarios.fsdp_replicas,
    "sums of shards": state_scenarios.sums_of_shards,
}


def find(name: str) -> Scenario:
    """Find a scenario: a name of SCENARIOS, or "module:attribute"."""
    if name in SCENARIOS:
        return SCENARIOS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise KeyError(f"no scenario {name!r}: one of {'; '.join(SCENARIOS)}, or module:attribute")
    found: Scenario = getattr(importlib.import_module(module), attribute)
    return found


def run_rank(
    rank: int,
    group: dist.ProcessGroup,
    name: str,
    backend: str,
    device_type: str,
    store: str,
    timeout_s: float,
) -> list[Result]:
    """Run a scenario on one rank, in a process of a Pool. The default group is on gloo. A collective."""
    world_size = group.size()
    device = take_device(rank, backend, device_type)
    logging.getLogger("gradcomp").setLevel(logging.ERROR)  # checkpoints are meant
    # The same arithmetic in every backward, and float32 that is float32.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if backend != "gloo":
        del group
        dist.destroy_process_group()
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s + 60),  # the pool's comes first, and reports stacks
        )
    gc.freeze()  # modules, which the collection below need not go through
    results = find(name)(device, rank, world_size).results
    gc.collect()  # what holds the group goes before the group
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # an error of a kernel belongs to this scenario
    return results


def run(
    backend: str,
    world_size: int,
    device: str,
    names: Sequence[str],
    timeout_s: float,
    scenario_timeout_s: float,
) -> list[str]:
    """Run the scenarios, print a line for each, and return the names of those that failed.

    scenario_timeout_s: the time limit of each scenario.
    timeout_s: the time limit of all scenarios.
    """
    # All ranks are on this machine, which need not have any network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + timeout_s
    failed = []
    pool = Pool()
    with tempfile.TemporaryDirectory(prefix="gradcomp-") as folder:
        try:
            for index, name in enumerate(names):
                limit_s = min(scenario_timeout_s, deadline - time.monotonic())
                start = time.monotonic()
                store = str(Path(folder, f"store-{index}"))
                line, details = _outcome(pool, world_size, (name, backend, device, store, limit_s), limit_s)
                print(f"{name:<36} {line}  {time.monotonic() - start:5.1f} s", flush=True)
                if details is not None:
                    print(details, flush=True)
                    failed.append(name)
        finally:
            pool.close()
    return failed


def _outcome(
    pool: Pool, world_size: int, arguments: tuple[str, str, str, str, float], limit_s: float
) -> tuple[str, str | None]:
    """Run a scenario. Return its line, and a description of the failure; None if it passed."""
    if limit_s <= 0:
        return f"{'FAILED':<8} not run", "there was no time left"
    try:
        verdict = judge(pool.run(run_rank, world_size, arguments, limit_s))
    except RankError as error:
        pool.close()  # a GPU's error stays with the process that met it
        return f"{'FAILED':<8} did not end on every rank", str(error)
    compared = f"error {verdict.error:.1e} of {verdict.max_error:.1e}"
    if not verdict.failures:
        return f"{'ok':<8} {compared}", None
    shown = [f"  {failure}" for failure in verdict.failures[:MAX_FAILURES_SHOWN]]
    count = f"  {len(verdict.failures)} failures, the first of them:"
    return f"{'FAILED':<8} {compared}", "\n".join([count, *shown])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reducer_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_rank_arguments(parser)
    parser.add_argument("--scenario", action="append", help="only this one; may be module:attribute")
    parser.add_argument("--timeout-s", type=float, default=200)
    parser.add_argument("--scenario-timeout-s", type=float, default=90)
    args = parser.parse_args(argv)
    try:
        world_size = chosen_world_size(args)
    except ValueError as error:
        print(f"reducer_check: {error}")
        return 1
    names = args.scenario or list(SCENARIOS)
    print(f"reducer_check: world size {world_size}, {args.backend}, {args.device}", flush=True)
    failed = run(args.backend, world_size, args.device, names, args.timeout_s, args.scenario_timeout_s)
    print(f"reducer_check: {len(names) - len(failed)} of {len(names)} scenarios are right", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
