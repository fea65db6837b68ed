"""Scenarios of reducer_check beside gradients: module state, average_, FSDP2, checkpoints of states."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradcomp
from benchmarks import checked_hooks
from benchmarks.checked_hooks import NO_HOOK, NUM_STEPS_WITH_ERROR, HookCheck
from benchmarks.rank_results import Results, rounding
from benchmarks.reducer_models import Averaged, ConvNet, Given, On, loss_of, made, numbers, wrapped
from gradcomp.comm.bucket import ShardBucket
from gradcomp.fsdp import compress_replicas
from gradcomp.hooks.quantization_hooks import QuantizationState
from gradcomp.layout import ShardLayout

WITH_ERROR_FEEDBACK = ("powerSGD_hook", "quantization_hook int4")
SHAPES = ((64, 48), (30,), (33, 70), (5, 8, 3, 3), (17,))


def module_state(device: torch.device, rank: int, world_size: int) -> Results:
    """Wrap other weights and buffers on every rank: rank 0's become everyone's, also before forwards."""
    results = Results(world_size)
    models = [made(ConvNet, device, seed=rank) for _ in range(2)]
    for model in models:
        for buffer in model.buffers():
            buffer.add_(rank)
    before = {name: each.clone() for name, each in models[0].state_dict().items()}
    torch_ddp = wrapped(TorchDDP, models[0], device)
    ddp = wrapped(gradcomp.DistributedDataParallel, models[1], device)
    for name, each in models[1].state_dict().items():
        results.rank_0s(f"wrapped, {name}", before[name], each)
    # What BatchNorm's buffers are when the module's forward begins.
    seen: list[dict[str, torch.Tensor]] = [{}, {}]
    for model, there in zip(models, seen, strict=True):
        model.register_forward_pre_hook(
            lambda module, _, there=there: there.update({n: b.clone() for n, b in module.named_buffers()})
        )
    for step in range(4):
        inputs = numbers(device, rank, step, (4, 3 * 8 * 8))
        for each in (torch_ddp, ddp):
            each.zero_grad()
            loss_of(each(inputs)).backward()
        for name, buffer in models[1].named_buffers():
            results.like(
                f"step {step}, {name} before", seen[0][name], seen[1][name], _exact(buffer, world_size)
            )
            after = dict(models[0].named_buffers())[name]
            results.like(
                f"step {step}, {name} after", after, buffer, _exact(buffer, world_size), is_common=False
            )
        for (name, param), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            results.like(f"step {step}, {name}", theirs.grad, param.grad)
    return results


def _exact(buffer: torch.Tensor, world_size: int) -> float:
    return rounding(buffer.dtype, world_size) if buffer.is_floating_point() else 0.0


def average_exactly(device: torch.device, rank: int, world_size: int) -> Results:
    """Average tensors of several dtypes and memory layouts without a hook, and in 16 bits."""
    results = Results(world_size)
    for name, wire in (("none", None), ("bf16_compress_hook", torch.bfloat16)):
        hook = checked_hooks.find(name).make()
        for call in range(3):
            storages = {
                "contiguous": numbers(device, rank, 10 * call, (33, 70)),
                "transposed": numbers(device, rank, 10 * call + 1, (19, 31)).t(),
                "every other row": numbers(device, rank, 10 * call + 2, (40, 7)),
                "channels last": numbers(device, rank, 10 * call + 3, (4, 6, 3, 3)).contiguous(
                    memory_format=torch.channels_last
                ),
                "one number": numbers(device, rank, 10 * call + 4, ()),
                "empty": numbers(device, rank, 10 * call + 5, (0, 2)),
                "float64": numbers(device, rank, 10 * call + 6, (300,)).double(),
                "bfloat16": numbers(device, rank, 10 * call + 7, (300,)).bfloat16(),
                "complex": torch.view_as_complex(numbers(device, rank, 10 * call + 8, (50, 3, 2))).t(),
            }
            own = {each: tensor.clone() for each, tensor in storages.items()}
            sliced = {
                each: tensor[::2] if each == "every other row" else tensor
                for each, tensor in storages.items()
            }
            gradcomp.average_(list(sliced.values()), hook)
            for each, tensor in storages.items():
                where = f"{name}, call {call}, {each}"
                max_error = None if wire is None else rounding(wire, world_size)
                if each == "every other row":
                    results.mean(where, own[each][::2], tensor[::2], max_error)
                    results.same(f"{where}, the rows between", own[each][1::2], tensor[1::2])
                else:
                    results.mean(where, own[each], tensor, max_error)
    return results


def average_with_error_feedback(device: torch.device, rank: int, world_size: int) -> Results:
    """Average tensors through PowerSGD and int4: averages and kept errors together equal the inputs."""
    results = Results(world_size)
    for name in WITH_ERROR_FEEDBACK:
        hook_check = checked_hooks.HOOKS[name]
        hook, state = hook_check.make(), hook_check.make_state()
        sums = _Sums()
        for step in range(NUM_STEPS_WITH_ERROR):
            tensors = [_laid_out(each) for each in _gradients(device, rank, step)]
            own = [tensor.clone() for tensor in tensors]
            keys = [str(index) for index in range(len(tensors))]
            gradcomp.average_(tensors, hook, state, keys=keys)
            sums.add(own, tensors)
        sums.expect(results, name, _errors(state, range(len(SHAPES))), hook_check.max_error)
    return results


def fsdp_replicas(device: torch.device, rank: int, world_size: int) -> Results:
    """Average the replicas of FSDP2 models exactly, through PowerSGD and in int4. A rank is a replica."""
    results = Results(world_size)
    for name in (NO_HOOK, *WITH_ERROR_FEEDBACK):
        hook_check = checked_hooks.find(name)
        state = hook_check.make_state() if hook_check.make_state else None
        model = made(lambda: Given(SHAPES), device)
        mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        compress_replicas(model, mesh["replicate"].get_group(), state)
        sums = _Sums()
        for step in range(NUM_STEPS_WITH_ERROR):
            own = _gradients(device, rank, step)
            model.zero_grad()
            model(own).backward()
            sums.add(own, [param.grad.to_local() for param in model.parameters()])
        errors = {index: torch.zeros(shape, device=device) for index, shape in enumerate(SHAPES)}
        if state is not None:
            errors = _errors(state, range(len(SHAPES)))
        sums.expect(results, name, errors, hook_check.max_error)
    return results


def sums_of_shards(device: torch.device, rank: int, world_size: int) -> Results:
    """Reduce-scatter buckets as compress_reduce_scatter does, in 4 and 8 bits, plainly in the first step."""
    results, layout = Results(world_size), ShardLayout(SHAPES, world_size)
    parameters = [torch.empty(shape, device="meta") for shape in SHAPES]
    for bits in (4, 8):
        state, sums = QuantizationState(bits=bits, start_iter=1), _Sums()
        for step in range(NUM_STEPS_WITH_ERROR):
            own = _gradients(device, rank, step)
            flat = torch.cat([each.reshape(-1) for each in own])
            buffer = torch.zeros(world_size, layout.row_numel, device=device)
            for row, in_tensors, in_row in layout.shards():
                buffer[row, in_row] = flat[in_tensors]
            shard = torch.full((layout.row_numel,), math.nan, device=device)
            state.average("sums_of_shards", ShardBucket(0, buffer.view(-1), parameters, shard)).wait()
            state.end_step()
            found = torch.zeros_like(flat)
            for row, in_tensors, in_row in layout.shards():
                if row == rank:
                    found[in_tensors] = shard[in_row]
            dist.all_reduce(found)
            parts = (found / world_size).split([each.numel() for each in own])
            sums.add(own, [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)])
        max_error = checked_hooks.HOOKS["quantization_hook int4"].max_error
        sums.expect(results, f"{bits} bits", _errors(state, range(len(SHAPES))), max_error)
    return results


def checkpoints(device: torch.device, rank: int, world_size: int, on: On) -> Results:
    """Save a state in the middle of a run, load it and go on: no error or direction is lost."""
    results = Results(world_size)
    for name in WITH_ERROR_FEEDBACK:
        for way in _WAYS:
            _resume(results, name, way, device, rank, on)
    return results


def _resume(results: Results, name: str, way: str, device: torch.device, rank: int, on: On) -> None:
    hook_check = checked_hooks.HOOKS[name]
    state = hook_check.make_state()
    run = _Run(on, hook_check.make(), state, device)
    sums, where = _Sums(), f"{name}, {way}"
    for step in range(NUM_STEPS_WITH_ERROR):
        own = _gradients(device, rank, step)
        if step == NUM_STEPS_WITH_ERROR // 2:
            saved, errors = _WAYS[way][0](state), run.errors()
            uninterrupted = run.step(own)
            state = _WAYS[way][1](saved, hook_check)
            results.fact(f"{where}, the step's number", state.iter == step)
            results.fact(f"{where}, errors to save", any(bool(error.any()) for error in errors.values()))
            run = _Run(on, hook_check.make(), state, device)
            averages = run.step(own)
            if name == "powerSGD_hook":  # in int4 a last bit may change a code
                for index, (one, other) in enumerate(zip(uninterrupted, averages, strict=True)):
                    # With other directions it would be another approximation altogether.
                    results.like(f"{where}, parameter {index} as uninterrupted", one, other, max_error=1e-3)
        else:
            averages = run.step(own)
        sums.add(own, averages)
    sums.expect(results, where, run.errors(), hook_check.max_error)


def _saved_file(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded_file(saved: bytes, hook_check: HookCheck) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def _loaded_dict(saved: bytes, hook_check: HookCheck) -> Any:
    state = hook_check.make_state()
    # As users do, who can't know which GPU the next run has.
    state.load_state_dict(torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True))
    return state


# By name, how a state is saved, and how it is loaded.
_WAYS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes, HookCheck], Any]]] = {
    "torch.save": (_saved_file, _loaded_file),
    "state_dict": (lambda state: _saved_file(state.state_dict()), _loaded_dict),
}


class _Run:
    """A model with gradients that are given, averaged through a hook."""

    def __init__(self, on: On, hook: Any, state: Any, device: torch.device) -> None:
        self._model = made(lambda: Given(SHAPES), device)
        self._averaged = Averaged(on, self._model, device)
        self._state = state
        self._first_seen: list[torch.Tensor] = []  # parameters, in the hook's order

        @wraps(hook)
        def recording(state: Any, bucket: Any) -> Any:
            known = {id(param) for param in self._first_seen}
            self._first_seen += [param for param in bucket.parameters() if id(param) not in known]
            return hook(state, bucket)

        self._averaged.register(state, recording)

    def step(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the averages of the gradients."""
        self._model.zero_grad()
        self._averaged(gradients).backward()
        return [param.grad.clone() for param in self._model.parameters()]

    def errors(self) -> dict[int, torch.Tensor]:
        """Return this rank's errors by the index of the parameter in the model."""
        index_of = {id(param): index for index, param in enumerate(self._model.parameters())}
        return _errors(self._state, [index_of[id(param)] for param in self._first_seen])


def _errors(state: Any, first_seen: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return a state's errors by the parameters' indices in the model.

    first_seen: the indices in the order in which the hook first saw the parameters.
    """
    errors: dict[int, torch.Tensor] = {}
    for memory in state.state_dict()["buckets"].values():
        parts = memory["error"].split([math.prod(shape) for shape in memory["shapes"]])
        for index, shape, part in zip(memory["parameters"], memory["shapes"], parts, strict=True):
            errors[first_seen[index]] = part.view(tuple(shape))
    return errors


class _Sums:
    """Sums, over the steps, of a rank's inputs and of the averages."""

    def __init__(self) -> None:
        self._own: list[torch.Tensor] = []
        self._out: list[torch.Tensor] = []

    def add(self, own: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> None:
        self._own = _added(self._own, own)
        self._out = _added(self._out, averages)

    def expect(
        self, results: Results, where: str, errors: Mapping[int, torch.Tensor], max_error: float
    ) -> None:
        """Expect that the averages are the mean of the inputs minus the errors."""
        for index, (own, out) in enumerate(zip(self._own, self._out, strict=True)):
            error = errors[index].double()
            results.mean(f"{where}, tensor {index}", own - error, out, max_error)
            # A hook that sends nothing and keeps everything would satisfy that, too.
            is_sent = bool(error.norm() < 0.75 * own.norm())
            results.fact(f"{where}, tensor {index}, most of it is sent", is_sent)


def _added(sums: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    wide = [tensor.double() for tensor in tensors]
    return [one + other for one, other in zip(sums, wide, strict=True)] if sums else wide


def _gradients(device: torch.device, rank: int, step: int) -> list[torch.Tensor]:
    """Return gradients with a part common to all ranks and steps, like gradients in training."""
    return [
        numbers(device, 0, 900 + index, shape) + 0.3 * numbers(device, rank, 20 * step + index, shape)
        for index, shape in enumerate(SHAPES)
    ]


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to a layout with another order of elements, or with gaps."""
    if tensor.dim() == 4:
        return tensor.clone(memory_format=torch.channels_last)
    if tensor.dim() == 2:
        return tensor.t().clone(memory_format=torch.contiguous_format).t()
    return torch.stack([tensor, tensor], dim=1)[:, 0]
