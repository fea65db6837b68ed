"""The simulation uses private names of torch in this module only.

tests/testing/ranks/test_simulation.py fails when torch changes one.

Real ranks are processes: each has its own default group and random generator, and waits in C++. Simulated
ranks share a process, so this module exchanges the group, the generator and the wait while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

BACKEND = "simulated"


def new_world(group: dist.ProcessGroup, ranks: Sequence[int], first_name: int) -> SimpleNamespace:
    """Make the tables of c10d for one rank that has just initialized `group` as its default group.

    first_name: the name of the rank's first group; the names of later groups count up. All names are in one
        registry of the process, so no two ranks may use the same name.
    """
    group._set_group_name(str(first_name))  # type: ignore[arg-type]
    return SimpleNamespace(
        default_pg=group,
        pg_map={group: (BACKEND, dist.HashStore())},
        pg_names={group: str(first_name)},
        pg_group_ranks={group: {rank: index for index, rank in enumerate(ranks)}},
        pg_backend_config={group: f"cpu:{BACKEND},cuda:{BACKEND}"},
        group_count=first_name + 1,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        pg_flight_recorder_hooks={},  # since torch 2.15
        comms=[],
        groups=[group],  # all groups of this rank; c10d has no such table
    )


class Identity:
    """The rank that this process stands for: its default group, torch's CPU generator, modules' variables.

    Inside the context, `become` changes the rank. Leaving it restores the process's own.

    modules: the variables of modules of which each rank has its own, for example a counter of steps.
    """

    def __init__(self, worlds: Sequence[SimpleNamespace], modules: Sequence[dict[str, Any]] = ()) -> None:
        self._worlds, self._modules = worlds, modules
        self._rank: int | None = None  # no rank's, but the process's own
        self._kept: dict[int | None, tuple[Any, torch.Tensor, list[dict[str, Any]]]] = {
            rank: (world, torch.Generator().manual_seed(rank).get_state(), self._variables())
            for rank, world in enumerate(worlds)
        }

    def _variables(self) -> list[dict[str, Any]]:
        return [dict(module) for module in self._modules]

    def __enter__(self) -> Identity:
        self._name_of = name_of = distributed_c10d._process_group_name
        # Groups that only their members make are named by a hash of the ranks, which is equal on these ranks.
        distributed_c10d._process_group_name = lambda ranks, **_: name_of(ranks, use_hashed_name=False)
        return self

    def become(self, rank: int | None) -> None:
        if rank == self._rank or not self._kept:
            return
        own = distributed_c10d._world, torch.default_generator.get_state(), self._variables()
        self._kept[self._rank], self._rank = own, rank
        distributed_c10d._world, random, variables = self._kept[rank]
        torch.default_generator.set_state(random)
        for module, values in zip(self._modules, variables, strict=True):
            for name in module.keys() - values.keys():
                if not isinstance(module[name], ModuleType):  # which Python imports once
                    del module[name]
            module.update(values)

    def __exit__(self, *_: Any) -> None:
        self.become(None)
        self._kept.clear()  # threads that could not be ended must not change the rank
        distributed_c10d._process_group_name = self._name_of
        for world in self._worlds:
            for group, name in world.pg_names.items():
                if group is not world.default_pg:
                    torch._C._distributed_c10d._unregister_process_group(name)


def futures_by(
    pause: Callable[[torch.futures.Future[Any]], None], later: Callable[[Callable[[], object]], None]
) -> AbstractContextManager[Any]:
    """Make every future call `pause` before it blocks, and run its callbacks by `later` when it is done.

    On real ranks, too, one that waits for a future may go on before its callbacks run.
    """
    original, then = torch._C.Future.wait, torch._C.Future.then
    devices: list[Any] = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    def wait(future: Any) -> Any:
        pause(future)
        return original(future)

    def then_later(future: Any, callback: Callable[[Any], Any]) -> Any:
        if future.done():
            return then(future, callback)
        called: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        then(future, lambda _: later(lambda: called.set_result(None)))
        return then(called, lambda _: callback(future))

    return mock.patch.multiple(torch._C.Future, wait=wait, then=then_later)
