"""Functions that torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function, *, recursive: bool = True) -> Function:
    """Make torch.compile leave this function alone, and if recursive the functions that it calls.

    This is torch.compiler.disable(recursive=...), which would take seconds to import what it needs. Where
    torch has other private names for it, that import is made.
    """
    try:
        action = eval_frame._FrameAction
        within = action.SKIP if recursive else action.DEFAULT
        strategy = eval_frame._FrameExecStrategy(action.SKIP, within)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        disabled: Function = torch.compiler.disable(function, recursive=recursive)
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
