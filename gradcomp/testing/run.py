"""Run a communication hook on every rank's gradients, bucket by bucket, like DDP."""

from __future__ import annotations

import gc
import io
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.comm.announcement import silenced
from gradcomp.comm.bucket import GradBucket, Hook, result_of
from gradcomp.command_line import in_words
from gradcomp.testing.ranks import run_ranks
from gradcomp.testing.workload import Workload

MakeState = Callable[[dist.ProcessGroup], Any] | None
ErrorsOf = Callable[[Any], Mapping[int, Tensor]]
Ranks = Literal["simulated", "gloo"]


class CheckpointError(RuntimeError):
    """A state can't be saved, or its checkpoint can't be loaded."""


@dataclass(frozen=True)
class Output:
    """The average of one tensor in one step on one rank. str() says where it is, for messages."""

    workload: Workload
    step: int
    rank: int
    index: int
    average: Tensor

    @property
    def mean(self) -> Tensor:
        """The float64 mean of the ranks' gradients."""
        return self.workload.mean(self.step)[self.index]

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}, {self.workload.where(self.index)}"


@dataclass(frozen=True)
class Run:
    """The outputs and measurements of a run. Tensors are copies.

    outputs[step][rank][index]: the averages, in the tensors' shapes.
    errors[step][rank][index]: the hook's errors after a step; [] per rank without errors_of.
    state_bytes, state_numels[step][rank]: the bytes of the tensors that the state holds after a step, and the
        number of elements of its floating-point tensors.
    wire_bytes[step][rank]: the bytes that a rank handed to collectives in a step; 0, uncounted, on gloo.
    random_numbers[step][rank]: what the program draws after a step from torch's and Python's generators.
    """

    workload: Workload
    outputs: list[list[list[Tensor]]]
    errors: list[list[list[Tensor]]]
    state_bytes: list[list[int]]
    state_numels: list[list[int]]
    wire_bytes: list[list[int]]
    random_numbers: list[list[tuple[float, float]]]

    def each_output(self, first_step: int = 0) -> Iterator[Output]:
        """Yield every output from first_step on."""
        for step in range(first_step, len(self.outputs)):
            for rank, averages in enumerate(self.outputs[step]):
                for index, average in enumerate(averages):
                    yield Output(self.workload, step, rank, index, average)


def run_hook(
    hook: Hook,
    make_state: MakeState,
    workload: Workload,
    *,
    ranks: Ranks = "simulated",
    schedule: int = 0,
    checkpoint_at: int | None = None,
    safe_checkpoint: bool = True,
    errors_of: ErrorsOf | None = None,
    seed: int = 0,
) -> Run:
    """Run the hook on every rank's gradients, step by step.

    Gradients arrive by backward passes. A bucket keeps its buffer and its parameters in all steps; a workload
    that is `rearranged` changes both after its first step. All buckets of a step are in flight before the
    first one is waited for. The average is the value of the hook's future, converted to the bucket's dtype.

    make_state: make_state(process_group) makes a rank's state. None if the state is the process group.
    ranks, schedule: see run_ranks. On "gloo" all arguments must be picklable.
    checkpoint_at, safe_checkpoint: the step before which the state is saved and loaded, by `reload(safe=…)`.
    errors_of: errors_of(state) returns errors by bucket index, each flat like its bucket; none if missing.
    seed: a rank's generators start with this seed plus its rank.

    Raises RankError if a rank fails, also if its state can't be loaded.
    """
    arguments = (hook, make_state, workload, checkpoint_at, safe_checkpoint, errors_of, seed)
    world_size, before = workload.world_size, random.getstate()
    try:
        by_rank = run_ranks(_steps, world_size * workload.groups, *arguments, ranks=ranks, schedule=schedule)
    finally:
        random.setstate(before)
    by_step = list(zip(*by_rank[:world_size], strict=True))
    parts = {name: [[each[name] for each in step] for step in by_step] for name in by_step[0][0]}
    return Run(workload, **parts)


@silenced()
def _steps(
    rank: int,
    process_group: dist.ProcessGroup,
    hook: Hook,
    make_state: MakeState,
    workload: Workload,
    checkpoint_at: int | None,
    safe_checkpoint: bool,
    errors_of: ErrorsOf | None,
    seed: int,
) -> list[dict[str, Any]]:
    """Run all steps on one rank, and return each step's parts of a Run."""
    torch.default_generator.manual_seed(seed + rank)
    random.seed(seed + rank)
    group_index, rank = divmod(rank, workload.world_size)
    if workload.groups > 1:
        process_group, _ = dist.new_subgroups(workload.world_size)
    state = process_group if make_state is None else make_state(process_group)
    zeros = [torch.zeros(shape, dtype=workload.dtype, device=workload.device) for shape in workload.shapes]
    parameters = [torch.nn.Parameter(zero) for zero in zeros]
    steps = []
    for step in range(workload.num_steps):
        buckets = workload.buckets_in(step)
        if step == 0 or buckets != workload.buckets_in(step - 1):
            owned = [[parameters[index] for index in indices] for indices in buckets]
            buffers = [torch.cat([each.detach().flatten() for each in of_bucket]) for of_bucket in owned]
        if step == checkpoint_at and make_state is not None:
            state = reload(state, make_state, process_group, safe=safe_checkpoint)
        gradients = workload.gradients(step, rank)
        for parameter in parameters:
            parameter.grad = None
        for share in (0.5, 0.5) if workload.accumulated else (1.0,):
            factor = -share if group_index else share
            torch.autograd.backward(parameters, [each.to(workload.device) * factor for each in gradients])
        sent_before = getattr(process_group, "sent_bytes", 0)
        futures = []
        for bucket_index, (indices, buffer) in enumerate(zip(buckets, buffers, strict=True)):
            buffer.copy_(torch.cat([parameters[index].grad.flatten() for index in indices]))  # type: ignore[union-attr]
            is_last = bucket_index == len(buffers) - 1
            bucket = GradBucket(bucket_index, buffer, owned[bucket_index], is_last=is_last)
            futures.append(hook(state, bucket))
        results = [result_of(future, hook, buffers[i]) for i, future in enumerate(futures)]
        if any(parameter.detach().count_nonzero() for parameter in parameters):
            raise ValueError("the hook changed a parameter: it may change the buffer only")
        averages = [result.detach().to(workload.dtype) for result in results]
        errors = errors_of(state) if errors_of else {}
        errors_by_bucket = [errors.get(i, torch.zeros_like(buffer)) for i, buffer in enumerate(buffers)]
        kept = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors_in(state)]
        parts = {
            "outputs": _by_index(workload, buckets, averages),
            "errors": _by_index(workload, buckets, errors_by_bucket) if errors_of else [],
            "state_bytes": sum(size for _, size in kept),
            "state_numels": sum(size // each.itemsize for each, size in kept if each.is_floating_point()),
            "wire_bytes": getattr(process_group, "sent_bytes", 0) - sent_before,
            "random_numbers": (float(torch.rand((), dtype=torch.float32, device="cpu")), random.random()),
        }
        steps.append(parts)
    return steps


def _by_index(workload: Workload, buckets: Sequence[Sequence[int]], flat: list[Tensor]) -> list[Tensor]:
    """Copy the tensors out of flat buckets, and return the copies by tensor index."""
    order = [index for indices in buckets for index in indices]
    joined = torch.cat([buffer.flatten().cpu() for buffer in flat])
    parts = joined.split([workload.numel(index) for index in order])
    copies = {i: part.clone().view(workload.shapes[i]) for i, part in zip(order, parts, strict=True)}
    return [copies[index] for index in range(len(copies))]


def reload(
    state: Any, make_state: Callable[[Any], Any], process_group: dist.ProcessGroup, *, safe: bool = True
) -> Any:
    """Save a state, load it, and return the loaded one, its `process_group` attribute being the given one.

    safe: by torch.save and torch.load with its safe default. Otherwise by state_dict() and load_state_dict()
        of a new state; a state without these by torch.load(weights_only=False).

    Raises CheckpointError if that fails.
    """
    can_not = f"{type(state).__name__} can't be saved and loaded"
    what = "torch.save and torch.load (safe default)" if safe else can_not
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # PowerSGD states warn that process groups are not saved
    try:
        by_dict, file = not safe and hasattr(state, "load_state_dict"), io.BytesIO()
        torch.save(state.state_dict() if by_dict else state, file)
        file.seek(0)
        loaded = saved = torch.load(file, weights_only=safe)
        if by_dict:
            loaded = make_state(process_group)
            loaded.load_state_dict(saved)
    except Exception as error:  # a state's own methods may raise anything
        raise CheckpointError(f"{what}: {in_words(error)}") from error
    finally:
        logging.disable(disabled)
    if hasattr(loaded, "process_group"):
        loaded.process_group = process_group
    return loaded


# The types of objects that a state may refer to without owning them.
_FOREIGN = (type, ModuleType, BuiltinFunctionType, dist.ProcessGroup, torch.nn.Parameter, torch.Generator)


def tensors_in(state: Any) -> list[Tensor]:
    """Find the tensors reachable from a state, one per storage.

    The search goes through containers, attributes, closures and partials, and skips what the state doesn't
    own: process groups, parameters, Python modules.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    left: list[Any] = [state]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _FOREIGN) or each is None:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):  # its globals belong to its module
            left += [*(each.__defaults__ or ()), *(cell.cell_contents for cell in each.__closure__ or ())]
        elif isinstance(each, Tensor):
            if each.layout == torch.strided:
                found.setdefault(each.untyped_storage().data_ptr(), each)
        elif not isinstance(each, str | bytes | int | float | torch.dtype | torch.device):
            left += gc.get_referents(each)
    return list(found.values())
