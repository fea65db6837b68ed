"""gradcomp's hooks under torch's names, for code that takes them from torch by itself."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.

TORCHS_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_MODULES = ("default_hooks", "powerSGD_hook", "quantization_hooks", "debugging_hooks")
_logger = logging.getLogger("gradcomp.hooks")


@contextmanager
def apply_to_torch() -> Iterator[None]:
    """Put gradcomp's hooks in the place of those in torch.distributed.algorithms.ddp_comm_hooks, for a while.

    For code that looks hooks up there by name when it needs them, such as Accelerate's
    ``DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)``. Every public name that
    both have is replaced, and DDPCommHookType and register_ddp_comm_hook with them; names that were imported
    before are not. At the end of the with block what was there before is put back. Both are logged.

    It changes torch for the whole process: not while other threads register hooks. What has been registered
    stays.

    Example::

        with gradcomp.apply_to_torch():
            model = accelerator.prepare(model)
    """
    replaced: list[tuple[ModuleType, str, Any]] = []
    try:
        for torchs, ours, names in _pairs():
            for name in names:
                replaced.append((torchs, name, getattr(torchs, name)))
                setattr(torchs, name, getattr(ours, name))
        _logger.info("%s has gradcomp's %s.", TORCHS_PACKAGE, ", ".join(name for _, name, _ in replaced))
        yield
    finally:
        for torchs, name, value in reversed(replaced):
            setattr(torchs, name, value)
        _logger.info("%s has its own hooks again.", TORCHS_PACKAGE)


def _pairs() -> Iterator[tuple[ModuleType, ModuleType, list[str]]]:
    """Yield (a module of torch's, ours, the public names that both have)."""
    for name in _MODULES:
        torchs = importlib.import_module(f"{TORCHS_PACKAGE}.{name}")
        ours = importlib.import_module(f"gradcomp.hooks.{name}")
        yield torchs, ours, [each for each in ours.__all__ if hasattr(torchs, each)]
    package, own_package = map(importlib.import_module, (TORCHS_PACKAGE, "gradcomp.hooks"))
    yield package, own_package, ["DDPCommHookType", "register_ddp_comm_hook"]
