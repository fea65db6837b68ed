"""Torch's private names that gradcomp uses, except FSDP2's (fsdp/param_groups.py) and the kit's.

Importing gradcomp works without each. What can't work without a name raises RuntimeError, with the name and
torch's version. What works worse logs a warning, once.

Names that torch documents, such as torch._foreach_copy_ and Tensor._version, aren't here, nor are those in
every pickled module, such as Module._buffers.
"""

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Function = TypeVar("Function", bound=Callable[..., Any])


def _missing(name: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"gradcomp needs {name}, which torch {torch.__version__} lacks. Likely cause: gradcomp doesn't know "
        "this version of torch: use torch 2.13, or another one that docs/status.md names"
    )


@cache
def _warn(name: str, lost: str) -> None:
    logging.getLogger(__name__).warning("torch %s lacks %s: %s", torch.__version__, name, lost)


def function_of(name: str) -> Any:
    """Return torch's function of this name; without it, a function that raises RuntimeError."""
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        return partial(_missing, f"torch.{name}")


def require_names(owner: Any, *names: str) -> None:
    """Raise RuntimeError unless an object of torch's has these names."""
    for name in names:
        if not hasattr(owner, name):
            _missing(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")


# The running backward's number, -1 outside of one. It tells which backward a bucket or a gradient belongs to.
current_graph_task_id: Callable[[], int] = function_of("_C._current_graph_task_id")
# The running node; None at the end of the outermost backward, and where compiled autograd runs a hook. It
# tells whether a backward is within another.
current_autograd_node: Callable[[], Any] = function_of("_C._current_autograd_node")
# Calls a function at the end of the running backward, where averages are waited for.
queue_callback: Callable[..., None] = function_of("autograd.Variable._execution_engine.queue_callback")
# A CUDA device's current stream, and what sets it. torch.cuda's functions take several times as long.
ids_of_current_stream: Callable[[int], tuple[int, int, int]] = function_of("_C._cuda_getCurrentStream")
set_stream: Callable[..., None] = function_of("_C._cuda_setStream")
# False leaves work that begins then out of profiles.
enable_record_function: Callable[[bool], None] = function_of("autograd._enable_record_function")
# A context in which buffers may change that an earlier forward keeps for its backward.
preserve_version_counter: Callable[..., Any] = function_of("autograd._unsafe_preserve_version_counter")
# Tensors in nested containers: outputs with find_unused_parameters, and states that ranks take over.
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = function_of("utils._pytree.tree_flatten")
tree_unflatten: Callable[[list[Any], Any], Any] = function_of("utils._pytree.tree_unflatten")
tree_map_only: Callable[..., Any] = function_of("utils._pytree.tree_map_only")
# Names the parameters and buffers that wrappers, torch's too, leave alone.
ignore_for_model: Callable[..., None] = function_of(
    "nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
)
# Has the wrapper whose forward torch.compile cuts into graphs, one for each bucket.
ACTIVE_DDP = "_active_ddp_module"
try:  # Makes torch.compile leave functions alone.
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:
    set_code_exec_strategy = None  # type: ignore[assignment]
    _warn("torch._C._dynamo.eval_frame.set_code_exec_strategy", "importing gradcomp takes seconds longer")


def not_compiled(function: Function, *, recursive: bool = True) -> Function:
    """Make torch.compile leave this function alone, and with recursive the functions that it calls, too.

    torch.compiler.disable(recursive=...) does this, but its imports take seconds.
    """
    if set_code_exec_strategy is None:
        disabled: Function = torch.compiler.disable(function, recursive=recursive)
        return disabled
    within = _FrameAction.SKIP if recursive else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, within))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def names_of_groups() -> Any:
    """Return torch's dict of the names of the process groups that this rank has joined."""
    require_names(world := function_of("distributed.distributed_c10d._world"), "pg_names")
    return world.pg_names


def ignored_in(module: torch.nn.Module) -> set[str]:
    """Return the names that ignore_for_model has given: a wrapper must not average these parameters."""
    name = "_ddp_params_and_buffers_to_ignore"
    if not (hasattr(module, name) or isinstance(ignore_for_model, partial)):
        ignore_for_model(probe := torch.nn.Module(), ())
        require_names(probe, name)
    return set(getattr(module, name, ()))


def check_wrapper(wrapper: Any) -> None:
    """Check the names that a wrapper's forward uses: whether ranks run out of input, and what compiles it."""
    require_names(wrapper, "_join_config")
    if not hasattr(DistributedDataParallel, ACTIVE_DDP):
        lost = "compiled modules average all buckets after their backward"
        _warn(f"DistributedDataParallel.{ACTIVE_DDP}", lost)


def has_hooks_in_backward(param: torch.Tensor) -> bool:
    """Return whether a hook, such as an optimizer's, follows the parameter's gradient in backward."""
    require_names(param, "_post_accumulate_grad_hooks")
    return bool(param._post_accumulate_grad_hooks or optimizers_in_backward(param))


def optimizers_in_backward(param: torch.Tensor, *, detaches: bool = False) -> Any:
    """Return the optimizers that torch's _apply_optimizer_in_backward has given a parameter.

    detaches: keep them from stepping in backward.
    """
    if module := sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward"):
        _check_optimizers_in(module)
        for handle in module.param_to_optim_hook_handle_map.get(param, ()) if detaches else ():
            handle.remove()
    return getattr(param, "_in_backward_optimizers", ())


@cache
@torch.enable_grad()
def _check_optimizers_in(module: Any) -> None:
    require_names(module, "param_to_optim_hook_handle_map", "_apply_optimizer_in_backward")
    probe = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))
    module._apply_optimizer_in_backward(torch.optim.SGD, [probe], {"lr": 0.0}, register_hook=False)
    require_names(probe, "_in_backward_optimizers")


def all_reduce_traced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum a tensor over the ranks, in a function that torch.compile traces."""
    from torch.distributed import _functional_collectives as collectives  # the import takes long

    require_names(collectives, "all_reduce")
    summed: torch.Tensor = collectives.all_reduce(tensor, "sum", group)
    return summed


def overflows_of(scaler: Any) -> dict[int, Any] | None:
    """Return a GradScaler's record, which tells of the steps that it skips; None without one."""
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        require_names(scaler, "_per_optimizer_states")
    return getattr(scaler, "_per_optimizer_states", None)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a group's back end for a type of device."""
    require_names(group, "_get_backend")
    return group._get_backend(device)


# The same for CPU tensors, where backend_of has found torch's name before: it takes a third of the time.
cpu_backend_of: Callable[[dist.ProcessGroup], Any] = methodcaller("_get_backend", torch.device("cpu"))


def backends_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return a group's back ends by the type of device."""
    require_names(group, "_device_types")
    return {each.type: backend_of(group, each) for each in group._device_types}


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the time-out of a group's collectives on a type of device; None if its back end doesn't tell."""
    try:
        options = backend_of(group, device).options
    except (AttributeError, RuntimeError):  # a back end without options
        return None
    if not hasattr(options, "_timeout"):
        lost = "groups of nodes get the default time-out, and ranks are waited for as long as the store waits"
        _warn(f"{type(options).__name__}._timeout", lost)
    return getattr(options, "_timeout", None)
