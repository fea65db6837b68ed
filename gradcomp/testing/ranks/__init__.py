"""Run a function on every rank of a process group: simulated ranks, or processes on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from gradcomp.testing.ranks.processes import Pool, in_unguarded_script
from gradcomp.testing.ranks.simulation import CollectiveMismatch, RankError, Simulation

__all__ = ["CollectiveMismatch", "RankError", "in_unguarded_script", "run_ranks"]

_pool = Pool()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    ranks: Literal["simulated", "gloo"] = "simulated",
    schedule: int = 0,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call function(rank, process_group, *arguments) on every rank, and return the results by rank.

    In the function, process_group is also the default group. The rank is the seed of torch's CPU generator.

    ranks: "simulated", threads of this process that run one at a time and share the arguments; see
        gradcomp.testing.ranks.simulation. "gloo": processes, kept from call to call, with copies of the
        arguments: function and arguments must be picklable.
    schedule: the order in which simulated ranks run. Schedule 0 runs collectives and callbacks as early as
        possible, any other schedule at random times, repeated bit for bit.
    timeout_s: the seconds after which gloo ranks must be done, and in which simulated ones must make a call.

    Raises RankError if a rank raises, if the ranks wait for each other, or if they are not done in time;
    CollectiveMismatch, a RankError, if simulated ranks disagree on a collective (gloo ranks hang, die or
    compute nonsense then); ValueError for fewer than one rank or another value of `ranks`; TypeError if
    function or arguments can't be pickled.
    """
    if world_size < 1:
        raise ValueError(f"world_size is at least 1, got {world_size}")
    if ranks == "simulated":
        return Simulation(function, world_size, arguments, schedule).run(timeout_s)
    if ranks == "gloo":
        return _pool.run(function, world_size, arguments, timeout_s)
    raise ValueError(f"ranks is 'simulated' or 'gloo', got {ranks!r}")
