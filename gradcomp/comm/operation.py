"""Errors of what several ranks do together, in one wording: what failed on which rank, and what to look at.

A backend's own text names a socket and a time. It comes from a collective that another rank has not reached,
which the text doesn't tell.
"""

import json
import re
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Where the default group's store has what a rank waits for; see consistency.py.
WAITING = "gradcomp/waiting"
# A store whose machine is gone may never answer.
_READ_TIMEOUT_S = 5.0
# What torch makes of an error in a future's callback; nested where a callback waits for another future.
_IN_CALLBACK = re.compile(r".*when running the callback: (\w+): (.*?)\n+At:\n.*", re.DOTALL)


class ExplainedError(RuntimeError):
    """An error whose message says what is wrong, on which ranks, and what to look at."""


class Operation(NamedTuple):
    """What ranks do together, as a context that explains the errors of collectives.

    what: goes on after "could not". Holds no process group, because gloo's threads keep callbacks, and must
    not be the last to hold a group.

    Example::

        with Operation.of("compare options", group):
            dist.all_gather(gathered, mine, group=group)
    """

    what: str
    rank: int
    world_size: int

    @classmethod
    def of(cls, what: str, group: dist.ProcessGroup) -> "Operation":
        return cls(what, group.rank(), group.size())

    @classmethod
    def averaging(cls, index: int, hook_name: str, group: dist.ProcessGroup | None) -> "Operation":
        """Return the averaging of a bucket with a hook."""
        rank, world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        return cls(f"average bucket {index} with {hook_name}", rank, world_size)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and (explained := self.explained(error)) is not error:
            raise explained from error

    def explained(self, error: BaseException) -> BaseException:
        """Return an ExplainedError in the place of one that a collective may have raised, or the error."""
        # Not of subclasses: memory that is lacking, and errors that are explained, say so themselves.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return error
        text = str(error)
        if found := _IN_CALLBACK.fullmatch(text):
            kind, text = found.groups()
            if kind == ExplainedError.__name__:
                return ExplainedError(text)
            if kind != RuntimeError.__name__ and not kind.startswith("Dist"):
                # With the line in the callback.
                return ExplainedError(f"rank {self.rank} of {self.world_size} could not {self.what}: {error}")
        return ExplainedError(_message(self, text.rstrip(". \n"), _who_waits()))


def _message(operation: Operation, text: str, who_waits: str) -> str:
    others = who_waits or (
        "another rank has ended, raised an error, left this step out, or is alone in what all ranks have to "
        "call, such as a save: accelerator.save_state, CommHook.state_dict and consolidated_state_dict "
        "belong on every rank, not under `if is_main_process`"
    )
    return (
        f"rank {operation.rank} of {operation.world_size} could not {operation.what}: {text}. If nothing is "
        f"wrong on this rank, {others}. Look for the first error in the output of the other ranks"
    )


def _who_waits() -> str:
    """Return what a rank that waits for this one has left in the store, "" if there is nothing."""
    found: list[Any] = []

    def read() -> None:
        with suppress(Exception):
            store = distributed_c10d._get_default_store()
            if store.check([WAITING]):
                found.append(json.loads(store.get(WAITING)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(_READ_TIMEOUT_S)
    if not found or not dist.is_initialized() or found[0]["rank"] == dist.get_rank():
        return ""
    return str(found[0]["text"]) if dist.get_rank() in found[0]["ranks"] else ""
