"""Choose the device that tests compute on, and prepare torch's PowerSGD and Triton's interpreter for it.

This module may be imported before TRITON_INTERPRET is set: it doesn't import Triton.
"""

from typing import Any

import torch


def device_of_rank() -> torch.device:
    """Return a rank's device: its GPU on NCCL, the first GPU on gloo, or the CPU without a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def let_torchs_power_sgd_have_cpu_buckets() -> None:
    """Let torch's hook average CPU buckets also if a GPU is visible.

    The hook passes the bucket's device to torch.cuda.synchronize, which raises an error for the CPU.
    """
    synchronize = torch.cuda.synchronize
    if torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: (
            None if getattr(device, "type", "cuda") == "cpu" else synchronize(device)
        )


def patch_triton_once_per_launch() -> None:
    """Let the interpreter patch triton.language once per launch for each module of kernels.

    Triton does so in every call of a function that a kernel calls, which takes a third of the tests' time.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if function.__module__ in patched:
            return None
        is_launch = not patched
        patched.add(function.__module__)
        scope = patch(function)
        if is_launch:  # Triton restores this scope at the end, and drops the scopes of called functions
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once
