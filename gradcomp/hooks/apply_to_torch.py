"""gradcomp's hooks under torch's names, for code that looks up torch's hooks by name."""

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any

TORCHS_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_MODULES = ("default_hooks", "powerSGD_hook", "quantization_hooks", "debugging_hooks")
_logger = logging.getLogger("gradcomp.hooks")


def apply_to_torch() -> AbstractContextManager[Any]:
    """Replace the hooks in torch.distributed.algorithms.ddp_comm_hooks by gradcomp's.

    A call alone replaces them for good; in a with statement, until the block ends. Use it with code that
    looks up torch's hooks by name when it needs them, such as Accelerate's
    ``DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)``. Every public name that
    torch's and gradcomp's modules share is replaced, and so are DDPCommHookType and register_ddp_comm_hook.
    Names imported before keep torch's hooks. A hook that is registered on a model stays there.

    The names change for the whole process. Blocks may be nested, and may overlap in several threads: the
    names are replaced when the first block begins, and restored when the last block ends. Both are logged. If
    other code changes a name during a block, that code's value stays, and a warning is logged.

    Example::

        with gradcomp.apply_to_torch():
            model = accelerator.prepare(model)
    """
    global _num_blocks, _replaced
    with _lock:
        if not _num_blocks:
            _replaced = _replace()
        _num_blocks += 1
    block = ExitStack()
    block.callback(_end)
    return block


def _end() -> None:
    """End a block: the last one restores torch's values."""
    global _num_blocks
    with _lock:
        _num_blocks -= 1
        if not _num_blocks:
            _replaced.close()
            _logger.info("%s has its own hooks again.", TORCHS_PACKAGE)


_lock = threading.Lock()
_num_blocks = 0
_replaced = ExitStack()  # its end restores torch's values


def _replace() -> ExitStack:
    """Replace all names, or none: after an error, the names replaced so far get torch's values back."""
    names = list(_names())
    with ExitStack() as replaced:
        for module, name, theirs, ours in names:
            replaced.callback(_put_back, module, name, theirs, ours)
            setattr(module, name, ours)
        _logger.info("%s has gradcomp's %s.", TORCHS_PACKAGE, ", ".join(name for _, name, *_ in names))
        return replaced.pop_all()


def _put_back(module: ModuleType, name: str, theirs: Any, ours: Any) -> None:
    """Restore torch's value, unless other code has changed the name."""
    value = getattr(module, name, None)
    if value is ours:
        setattr(module, name, theirs)
    elif value is not theirs:
        _logger.warning(
            "%s.%s stays %r, which other code has put there in a block of apply_to_torch; before the "
            "block it was %r.",
            *(module.__name__, name, value, theirs),
        )


def _names() -> Iterator[tuple[ModuleType, str, Any, Any]]:
    """Yield (torch's module, a public name that gradcomp's module has, too, torch's value, gradcomp's)."""
    for module in _MODULES:
        torchs = importlib.import_module(f"{TORCHS_PACKAGE}.{module}")
        ours = importlib.import_module(f"gradcomp.hooks.{module}")
        for name in ours.__all__:
            if hasattr(torchs, name):
                yield torchs, name, getattr(torchs, name), getattr(ours, name)
    torchs, ours = map(importlib.import_module, (TORCHS_PACKAGE, "gradcomp.hooks"))
    for name in ("DDPCommHookType", "register_ddp_comm_hook"):
        yield torchs, name, getattr(torchs, name), getattr(ours, name)
