"""Process groups: the group that an argument stands for, and operations of its ranks.

A failed collective raises the backend's own error, with a socket and a time. Its likely cause, a rank that
never came, is not in it. Explaining says what failed on which rank, and what to look at.
"""

import json
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from gradcomp.device import has_streams

from ..rules import described
from . import torch_private

# The key under which the default group's store says what a rank waits for; see consistency.py.
WAITING = "gradcomp/waiting"
# A store whose machine is gone may never answer.
_READ_TIMEOUT_S = 5.0
# The groups that resolve_group has checked.
known_groups: WeakSet[dist.ProcessGroup] = WeakSet()
_kept: WeakKeyDictionary[dist.ProcessGroup, tuple[int, int, dict[Any, Any]]] = WeakKeyDictionary()
_LIKELY = (
    "another rank has ended, raised an error, left this step out, or is alone in what all ranks must call, "
    "such as a save: accelerator.save_state, CommHook.state_dict and consolidated_state_dict belong on every "
    "rank, not under `if is_main_process`"
)
# torch's text around an error in a future's callback; nested where a callback waits for another future.
_IN_CALLBACK = re.compile(r".*when running the callback: (\w+): (.*?)\n+At:\n.*", re.DOTALL)


def require_group(whose: str, process_group: Any, argument: str = "process_group") -> None:
    """Raise TypeError for anything but a process group and None, which means the default one.

    A group that torch.distributed hasn't made must be a plain ProcessGroup, as the parent of torchft's is.

    Raises ValueError for another group that torch.distributed doesn't know.
    """
    if process_group is None:
        return
    if isinstance(process_group, dist.ProcessGroup):
        # torch names the groups that it makes; destroy_process_group leaves the name.
        is_plain = type(process_group) is dist.ProcessGroup and torch_private.backends_of(process_group)
        if not ((is_plain and not process_group.group_name) or is_registered(process_group)):
            raise ValueError(
                f"torch.distributed doesn't know the {type(process_group).__name__} that {whose} got as its "
                f"{argument}: pass a group that init_process_group, new_group or init_device_mesh has made. "
                "Likely cause: the group is torchft's, which has the ranks in its .parent after each quorum "
                "(see gradcomp.frameworks.torchft), or destroy_process_group has ended it"
            )
        return
    if type(process_group) is int and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        cause = "this rank is not in the group that new_group made; only the group's ranks may use it"
    else:
        cause = "another argument came first"
    raise TypeError(
        f"{whose} takes a process group or None as its {argument}, got {described(process_group)}. "
        f"Likely cause: {cause}"
    )


def resolve_group(whose: str, process_group: Any, argument: str = "process_group") -> dist.ProcessGroup:
    """Return the process group given to `whose` as this argument, or the default group for None.

    Raises RuntimeError if there is no default group, and the errors of require_group.
    """
    group = dist.group.WORLD if process_group is None else process_group
    if group is not None and group in known_groups:
        return group
    require_group(whose, process_group, argument)
    if group is None:
        raise RuntimeError(
            f"{whose} has None as its {argument}, which means the default process group, but there is none: "
            "call torch.distributed.init_process_group first"
        )
    known_groups.add(group)
    return group


def joined_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group, or for None the default group if there is one."""
    return dist.group.WORLD if process_group is None else process_group


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the group's global ranks; the ranks in itself if torch.distributed hasn't made it."""
    return dist.get_process_group_ranks(group) if is_registered(group) else [*range(group.size())]


def global_ranks_of(whose: str, group: dist.ProcessGroup) -> list[int]:
    """Return the group's global ranks. Raises ValueError for a group that torch.distributed hasn't made."""
    if not is_registered(group):
        raise ValueError(
            f"{whose} needs the global ranks of a process group that torch.distributed hasn't made: pass a "
            "group that init_process_group, new_group or init_device_mesh has made"
        )
    return dist.get_process_group_ranks(group)


def backends_of(group: dist.ProcessGroup) -> list[str]:
    """Return the group's back ends by the type of device, such as ["cpu:gloo", "cuda:nccl"]."""
    if is_registered(group):
        return dist.get_backend_config(group).split(",")
    return [f"{kind}:{backend.name()}" for kind, backend in torch_private.backends_of(group).items()]


def has_backend(group: dist.ProcessGroup, name: str) -> bool:
    """Return whether a group has this back end for a type of device, such as "cpu:gloo"."""
    kept = kept_of(group)
    if name not in kept:
        kept[name] = name in backends_of(group)
    return bool(kept[name])


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch.distributed has made the group, and not ended it."""
    try:
        dist.get_backend(group)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


def kept_of(group: dist.ProcessGroup) -> dict[Any, Any]:
    """Return what is remembered of a group, until it ends or its size or this rank's number in it changes."""
    size, rank = group.size(), group.rank()
    found = _kept.get(group)
    if found is None or found[:2] != (size, rank):
        found = _kept[group] = size, rank, {}
    return found[2]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time-out of a group's collectives; None if its backend doesn't tell."""
    return torch_private.timeout_of(group, device_for(group, ()))


def device_for(group: dist.ProcessGroup, tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return a device whose tensors the group exchanges.

    With NCCL: the device of the first CUDA tensor, where the model is; the current device if there is none.
    """
    if any(each.startswith("cpu:") for each in backends_of(group)):
        return torch.device("cpu")
    devices = (tensor.device for tensor in tensors if has_streams(tensor.device))
    return next(devices, None) or torch.device("cuda", torch.cuda.current_device())


class ExplainedError(RuntimeError):
    """An error whose message says what is wrong, on which ranks, and what to look at."""


class Explaining(NamedTuple):
    """A context that explains the errors of an operation's collectives.

    what: the operation, in words that follow "could not".

    Holds no process group: gloo's threads keep callbacks, and must not hold the last reference to a group.
    """

    what: str
    rank: int
    world_size: int

    @classmethod
    def of(cls, what: str, group: dist.ProcessGroup) -> "Explaining":
        return cls(what, group.rank(), group.size())

    @classmethod
    def averaging(cls, index: int, hook_name: str, group: dist.ProcessGroup | None) -> "Explaining":
        """Return the operation that averages a bucket with a hook."""
        rank, world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        return cls(f"average bucket {index} with {hook_name}", rank, world_size)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and (explained := self.explained(error)) is not error:
            raise explained from error

    def explained(self, error: BaseException) -> BaseException:
        """Return an ExplainedError for an error that a collective may have raised; any other as it is."""
        # Subclasses of RuntimeError explain themselves: out of memory, or explained already.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return error
        text = str(error)
        if found := _IN_CALLBACK.fullmatch(text):  # which names the line in the callback
            kind, text = found.groups()
            if kind == ExplainedError.__name__:
                return ExplainedError(text)
            if kind != RuntimeError.__name__ and not kind.startswith("Dist"):
                return ExplainedError(f"rank {self.rank} of {self.world_size} could not {self.what}: {error}")
        text, cause = text.rstrip(". \n"), _who_waits() or _LIKELY
        return ExplainedError(
            f"rank {self.rank} of {self.world_size} could not {self.what}: {text}. If nothing is wrong on "
            f"this rank, {cause}. Look for the first error in the output of the other ranks"
        )


def _who_waits() -> str:
    """Return the note in the store of a rank that waits for this one, "" if there is none."""
    found: list[Any] = []

    def read() -> None:
        with suppress(Exception):
            store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]  # None: nothing found
            if store.check([WAITING]):
                found.append(json.loads(store.get(WAITING)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(_READ_TIMEOUT_S)
    if not found or not dist.is_initialized() or found[0]["rank"] == dist.get_rank():
        return ""
    return str(found[0]["text"]) if dist.get_rank() in found[0]["ranks"] else ""
