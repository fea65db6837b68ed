"""gradcomp's hooks under torch's names, for code that takes them from torch by itself."""

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

TORCHS_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_MODULES = ("default_hooks", "powerSGD_hook", "quantization_hooks", "debugging_hooks")
_logger = logging.getLogger("gradcomp.hooks")


@contextmanager
def apply_to_torch() -> Iterator[None]:
    """Put gradcomp's hooks in the place of those in torch.distributed.algorithms.ddp_comm_hooks, for a while.

    For code that looks hooks up there by name when it needs them, such as Accelerate's
    ``DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)``. Every public name that
    both have is replaced, and DDPCommHookType and register_ddp_comm_hook with them; names that were imported
    before are not. What has been registered stays.

    It changes torch for the whole process. Blocks may be nested, and may overlap in several threads: the
    names are replaced when the first block begins, and put back when the last one ends. Both are logged. A
    name that other code has changed meanwhile keeps the value of that code, and a warning is logged.

    Example::

        with gradcomp.apply_to_torch():
            model = accelerator.prepare(model)
    """
    _begin_block()
    try:
        yield
    finally:
        _end_block()


class _Name(NamedTuple):
    """A name that is replaced in a module of torch's."""

    module: ModuleType
    name: str
    theirs: Any
    ours: Any

    @property
    def is_ours(self) -> bool:
        return getattr(self.module, self.name, None) is self.ours

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


# Reentrant: a block's generator may be collected, and the block ended, in the middle of _begin_block.
_lock = threading.RLock()
_num_blocks = 0
_replaced: list[_Name] = []


def _begin_block() -> None:
    global _num_blocks
    with _lock:
        if not _num_blocks:
            _replace()
        elif others := [name for name in _replaced if not name.is_ours]:
            _logger.warning(
                "apply_to_torch does not replace %s: other code has changed the value since another block of "
                "apply_to_torch began.",
                ", ".join(map(str, others)),
            )
        _num_blocks += 1


def _end_block() -> None:
    global _num_blocks
    with _lock:
        _num_blocks -= 1
        if not _num_blocks:
            _put_back()
            _logger.info("%s has its own hooks again.", TORCHS_PACKAGE)


def _replace() -> None:
    """Replace every name, or none: an error puts back what has been replaced before it."""
    names = list(_names())
    try:
        for name in names:
            _replaced.append(name)
            setattr(name.module, name.name, name.ours)
    except BaseException:
        _put_back()
        raise
    _logger.info("%s has gradcomp's %s.", TORCHS_PACKAGE, ", ".join(name.name for name in names))


def _put_back() -> None:
    """Put back the values of torch's names, except where other code has put another value."""
    while _replaced:
        name = _replaced.pop()
        value = getattr(name.module, name.name, None)
        if value is name.ours:
            setattr(name.module, name.name, name.theirs)
        elif value is not name.theirs:
            _logger.warning(
                "%s stays %r, which other code has put there in a block of apply_to_torch; before the block "
                "it was %r.",
                *(name, value, name.theirs),
            )


def _names() -> Iterator[_Name]:
    """Yield the public names that a module of torch's and one of ours both have."""
    for module in _MODULES:
        torchs = importlib.import_module(f"{TORCHS_PACKAGE}.{module}")
        ours = importlib.import_module(f"gradcomp.hooks.{module}")
        for name in ours.__all__:
            if hasattr(torchs, name):
                yield _Name(torchs, name, getattr(torchs, name), getattr(ours, name))
    torchs, ours = map(importlib.import_module, (TORCHS_PACKAGE, "gradcomp.hooks"))
    for name in ("DDPCommHookType", "register_ddp_comm_hook"):
        yield _Name(torchs, name, getattr(torchs, name), getattr(ours, name))
