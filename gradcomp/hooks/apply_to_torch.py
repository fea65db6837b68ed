"""gradcomp's hooks under torch's names, for code that looks up torch's hooks by name."""

from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any

TORCHS_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"
_SHARED: dict[str, tuple[str, ...] | None] = {  # module -> names; without any, all public ones
    **dict.fromkeys([".default_hooks", ".powerSGD_hook", ".quantization_hooks", ".debugging_hooks"]),
    "": ("DDPCommHookType", "register_ddp_comm_hook"),
}


def apply_to_torch() -> AbstractContextManager[Any]:
    """Replace the hooks in torch.distributed.algorithms.ddp_comm_hooks by gradcomp's.

    A call alone replaces them for good; in a with statement, until the block ends. Use it with code that
    looks up torch's hooks by name when it needs them, such as Accelerate's
    ``DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)``. Every public name that
    torch's and gradcomp's modules share is replaced, and so are DDPCommHookType and register_ddp_comm_hook.
    Names imported before keep torch's hooks. A hook that is registered on a model stays there.

    The names change in all threads. The end of a block puts back what was there at its beginning.

    Example::

        with gradcomp.apply_to_torch():
            model = accelerator.prepare(model)
    """
    with ExitStack() as block:
        for name, shared in _SHARED.items():
            torchs, ours = import_module(TORCHS_PACKAGE + name), import_module(f"gradcomp.hooks{name}")
            for each in shared or ours.__all__:
                if hasattr(torchs, each):
                    block.callback(setattr, torchs, each, getattr(torchs, each))
                    setattr(torchs, each, getattr(ours, each))
        return block.pop_all()
