"""gradcomp's hooks under torch's names, for code that looks up torch's hooks by name."""

import logging
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
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

    The names change in all threads. A name that other code changes during a block keeps that code's value.

    Example::

        with gradcomp.apply_to_torch():
            model = accelerator.prepare(model)
    """
    with ExitStack() as block:
        block.callback(_logger.info, "%s has its own hooks again.", TORCHS_PACKAGE)
        for name, shared in _SHARED.items():
            torchs, ours = import_module(TORCHS_PACKAGE + name), import_module(f"gradcomp.hooks{name}")
            for each in shared or ours.__all__:
                theirs, own = getattr(torchs, each, None), getattr(ours, each)
                if theirs not in (None, own):
                    block.callback(_put_back, torchs, each, theirs, own)
                    setattr(torchs, each, own)
        _logger.info("%s has gradcomp's hooks.", TORCHS_PACKAGE)
        return block.pop_all()


def _put_back(module: Any, name: str, theirs: Any, ours: Any) -> None:
    if getattr(module, name, None) is ours:
        setattr(module, name, theirs)
