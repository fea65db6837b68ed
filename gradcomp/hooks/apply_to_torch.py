"""gradcomp's hooks under torch's names, for code that looks up torch's hooks by name."""

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from types import ModuleType
from typing import Any

TORCHS_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_SHARED: dict[str, tuple[str, ...] | None] = {  # module -> names; without any, all public ones
    **dict.fromkeys([".default_hooks", ".powerSGD_hook", ".quantization_hooks", ".debugging_hooks"]),
    "": ("DDPCommHookType", "register_ddp_comm_hook"),
}
_logger = logging.getLogger("gradcomp.hooks")


def apply_to_torch() -> AbstractContextManager[Any]:
    """Replace the hooks in torch.distributed.algorithms.ddp_comm_hooks by gradcomp's.

    A call alone replaces them for good; in a with statement, until the block ends. Use it with code that
    looks up torch's hooks by name when it needs them, such as Accelerate's
    ``DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)``. Every public name that
    torch's and gradcomp's modules share is replaced, and so are DDPCommHookType and register_ddp_comm_hook.
    Names imported before keep torch's hooks. A hook that is registered on a model stays there.

    The names change for the whole process. Blocks may be nested, and may overlap in several threads: the
    names are replaced when the first block begins, and restored when the last block ends. A name that other
    code changes during a block keeps that code's value.

    Example::

        with gradcomp.apply_to_torch():
            model = accelerator.prepare(model)
    """
    global _num_blocks
    block = ExitStack()
    block.callback(_end)
    with _lock, block:
        _num_blocks += 1
        if _num_blocks == 1:
            _replaced[:] = _names()
            for module, name, _, ours in _replaced:
                setattr(module, name, ours)
            _logger.info("%s has gradcomp's hooks.", TORCHS_PACKAGE)
        return block.pop_all()


def _end() -> None:
    """End a block: the last one restores torch's values, but no other code's."""
    global _num_blocks
    with _lock:
        _num_blocks -= 1
        if not _num_blocks:
            for module, name, theirs, ours in _replaced:
                if getattr(module, name, None) is ours:
                    setattr(module, name, theirs)
            _logger.info("%s has its own hooks again.", TORCHS_PACKAGE)


_lock = threading.RLock()
_num_blocks = 0
_replaced: list[tuple[ModuleType, str, Any, Any]] = []


def _names() -> Iterator[tuple[ModuleType, str, Any, Any]]:
    """Yield (torch's module, a public name that gradcomp's module has, too, torch's value, gradcomp's)."""
    for module, shared in _SHARED.items():
        torchs, ours = import_module(TORCHS_PACKAGE + module), import_module(f"gradcomp.hooks{module}")
        for name in shared or ours.__all__:
            if hasattr(torchs, name):
                yield torchs, name, getattr(torchs, name), getattr(ours, name)
