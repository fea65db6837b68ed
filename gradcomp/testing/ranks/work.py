"""The handle of a simulated collective, which torch calls its work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.testing.ranks.transfer import Call

if TYPE_CHECKING:
    from gradcomp.testing.ranks.collectives import SimulatedProcessGroup
    from gradcomp.testing.ranks.simulation import Simulation


class SimulatedWork(dist.Work):
    """The handle of a collective that a rank issued. index: its position in its group's sequence."""

    def __init__(
        self, simulation: Simulation, rank: int, call: Call, group: SimulatedProcessGroup, index: int
    ) -> None:
        super().__init__()
        self.rank = rank
        self.call = call
        self.done = False
        self.future: torch.futures.Future[list[Tensor]] | None = None
        self._simulation = simulation
        self._group = group
        self._index = index

    @property
    def place(self) -> str:
        """The collective's position in its group's sequence, for messages."""
        return f"collective {self._index} of the group {list(self._group.ranks)}"

    def __str__(self) -> str:
        return f"{self.call}, {self.place}"

    def wait(self, timeout: Any = None) -> bool:
        """Wait until every rank has issued the collective and its tensors are filled."""
        self._simulation.wait(self)
        return True

    synchronize = wait  # type: ignore[assignment]  # torch's returns nothing

    def is_completed(self) -> bool:
        return self.done

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self.call.value)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the list of output tensors; its callbacks run on a new thread, as this rank."""
        if self.future is None:
            self.future = torch.futures.Future(devices=list(self.call.devices))
            if self.done:
                self.complete()
        return self.future

    def complete(self) -> None:
        """Set the future's value, which runs its callbacks."""
        assert self.future is not None
        self.future.set_result(list(self.call.value))
