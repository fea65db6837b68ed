"""The process group of simulated ranks, and its collectives.

Rank s's SimulatedWork of a collective holds the tensors that s sends to each rank r, and those that s fills:
with tensors from each rank or, in a reduction, with the reduced value. With W ranks:

    all_reduce       s sends t to all                  r: t = t_0 + ... + t_(W-1)
    all_gather       s sends t to all                  r: outputs[s] = t_s
    reduce_scatter   s sends inputs[r] to r            r: output = inputs_0[r] + ... + inputs_(W-1)[r]
    all_to_all       s sends inputs[r] to r            r: outputs[s] = inputs_s[r]
    broadcast, reduce, gather, scatter: like these, with one source or one destination

Arguments are accepted and refused as by gloo in torch 2.13, and futures have the same values, but:

- `reduce` leaves the tensors of non-root ranks as they are. gloo leaves partial sums in them.
- Tensors must be contiguous, as with NCCL. gloo computes nonsense for tensors with gaps.
- `all_gather_into_tensor` takes a stacked output and `reduce_scatter` has a future, as with NCCL.
"""

# mypy: disable-error-code="override, assignment"
# torch overloads these methods with a form without options. dist.all_reduce and its like don't use that form.

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from gradcomp.testing.ranks.simulation import Simulation

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": lambda total, term: torch.where(term < total, term, total),
    "MAX": lambda total, term: torch.where(term > total, term, total),
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

# By rank.
_Tensors = Mapping[int, Sequence[Tensor]]


@dataclass(eq=False, repr=False)
class SimulatedWork(dist.Work):
    """A collective that a rank issued: its tensors, and the handle that torch returns.

    place, site: its position in its group's sequence and the line that issued it, for messages.
    call: its name with the arguments that must be equal on all ranks.
    sends: by destination rank, the tensors to send. receives: by source rank, the tensors to fill.
    op: the name of the reduction that fills the future's `value`; "" for none.
    """

    simulation: Simulation
    rank: int
    place: str
    site: str
    call: str
    sends: _Tensors = field(default_factory=dict)
    receives: _Tensors = field(default_factory=dict)
    value: Sequence[Tensor] = ()
    op: str = ""
    done: bool = False
    future: torch.futures.Future[list[Tensor]] | None = None

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def sent_bytes(self) -> int:
        """The bytes that the rank hands to the collective: a tensor for several ranks counts once."""
        return sum({id(each): each.nbytes for tensors in self.sends.values() for each in tensors}.values())

    def wait(self, timeout: Any = None) -> bool:
        """Wait until every rank has issued the collective and the output tensors are filled."""
        self.simulation.pause(self.is_completed, f"{self.call}, {self.place}")
        return True

    synchronize = wait  # torch's returns nothing

    def is_completed(self) -> bool:
        return self.done

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self.value)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the list of output tensors. Callbacks run on a new thread, as this rank."""
        if self.future is None:
            self.future = torch.futures.Future(devices=list(_devices([self])))
            if self.done:
                self.future.set_result(list(self.value))
        return self.future


def _devices(works: Sequence[SimulatedWork]) -> set[torch.device]:
    return {tensor.device for work in works for tensor in work.value if tensor.is_cuda}


def carry_out(works: Sequence[SimulatedWork]) -> None:
    """Carry out a collective: one work per rank, in rank order. Raises RuntimeError if shapes don't fit.

    Reductions add up in rank order, in the tensors' dtype: with two ranks they have gloo's bits, with more up
    to rounding. MIN and MAX ignore a NaN unless it is rank 0's; gloo's ignore one or another.
    """
    for device in _devices(works):  # the order of streams is not simulated
        torch.cuda.synchronize(device)
    with torch.no_grad():
        writes: list[tuple[Tensor, Tensor]] = []
        for rank, work in enumerate(works):
            for source, outputs in work.receives.items():
                inputs = works[source].sends[rank]
                sent, expected = ([list(t.shape) for t in tensors] for tensors in (inputs, outputs))
                if sent != expected:
                    raise RuntimeError(f"rank {source} sends {sent} to rank {rank}, which expects {expected}")
                writes += zip(outputs, inputs, strict=True)
            if work.op:
                for output, *terms in zip(work.value, *(peer.sends[rank] for peer in works), strict=True):
                    total = reduce(REDUCTIONS[work.op], terms)
                    writes.append((output, total / len(terms) if work.op == "AVG" else total))
        for output, value in writes:
            output.detach().copy_(value)  # autograd does not see collectives
    for device in _devices(works):
        torch.cuda.synchronize(device)


class SimulatedProcessGroup(dist.ProcessGroup):
    """One rank's process group in a simulation.

    ranks: the global ranks of the members.
    index: distinguishes groups of the same ranks.
    sent_bytes, num_issued: the bytes that this rank has handed to collectives so far, and their number.
    """

    def __init__(self, simulation: Simulation, rank: int, ranks: Sequence[int], index: int) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]  # the form for subclasses
        self.ranks = tuple(ranks)
        self.index = index
        self.sent_bytes = self.num_issued = 0
        self.simulation = simulation

    def _set_group_name(self, name: str) -> None:  # torch stores the name in the backend; here is none
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 the name that torch calls
        return "simulated"

    def _issue(self, name: str, alike: list[Tensor], agreed: dict[str, Any], **parts: Any) -> dist.Work:
        """Issue a collective. alike: tensors with an equal dtype and equal shapes on all ranks."""
        shown = ", ".join(f"{key}={value}" for key, value in (agreed | _traits(name, alike)).items())
        return self.simulation.issue(self, f"{name}({shown})", **parts)

    def _all(self, tensors: Sequence[Tensor]) -> _Tensors:
        return dict.fromkeys(range(self.size()), tensors)

    def _root(self, name: str, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise RuntimeError(f"{name}: invalid root rank {root} in a group of {self.size()}")
        return root

    def allreduce(self, tensors: list[Tensor], opts: Any = None, name: str = "all_reduce") -> dist.Work:
        op = _reduction_name(name, opts, tensors)
        return self._issue(name, tensors, {"op": op}, sends=self._all(tensors), value=tensors, op=op)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts, "all_reduce_coalesced")

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        op, root = _reduction_name("reduce", opts, tensors), self._root("reduce", opts)
        agreed, sends = {"op": op, "root": root}, {root: tensors}
        return self._issue(
            "reduce", tensors, agreed, sends=sends, value=tensors, op=op if self.rank() == root else ""
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        root = self._root("broadcast", opts)
        moves = {"sends": self._all(tensors)} if self.rank() == root else {"receives": {root: tensors}}
        return self._issue("broadcast", tensors, {"root": root}, value=tensors, **moves)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._gather("all_gather", outputs[0], inputs, self._all(inputs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        name = "all_gather_into_tensor"
        return self._gather(name, self._rows(name, output, input), [input], self._all([input]))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        root = self._root("gather", opts)
        mine = outputs[0] if self.rank() == root else []
        return self._gather("gather", mine, inputs, {root: inputs}, root=root)

    def _gather(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], sends: _Tensors, **agreed: int
    ) -> dist.Work:
        receives = self._by_rank(name, outputs, inputs[0]) if self.rank() in sends else {}
        return self._issue(name, inputs, agreed, sends=sends, receives=receives, value=outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        root = self._root("scatter", opts)
        sends = self._by_rank("scatter", inputs[0], outputs[0]) if self.rank() == root else {}
        moves = {"sends": sends, "receives": {root: outputs}}
        return self._issue("scatter", outputs, {"root": root}, value=outputs, **moves)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        return self._reduce_scatter("reduce_scatter", outputs, inputs[0], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        rows = self._rows("reduce_scatter_tensor", input, output)
        return self._reduce_scatter("reduce_scatter_tensor", [output], rows, opts)

    def _reduce_scatter(self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        op = _reduction_name(name, opts, outputs)
        sends = self._by_rank(name, inputs, outputs[0])
        return self._issue(name, outputs, {"op": op}, sends=sends, value=outputs, op=op)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._all_to_all("all_to_all", outputs, inputs, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        outputs, inputs = self._split(output, output_split_sizes), self._split(input, input_split_sizes)
        return self._all_to_all("all_to_all_single", outputs, inputs, [output])

    def _all_to_all(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], value: list[Tensor]
    ) -> dist.Work:
        moves = {"sends": self._by_rank(name, inputs), "receives": self._by_rank(name, outputs)}
        _traits(name, [*outputs, *inputs])
        if any(_overlap(output, input) for output in outputs for input in inputs):
            raise RuntimeError(f"{name}: output and input share memory; gloo computes nonsense then")
        return self._issue(name, [], {"dtype": inputs[0].dtype}, value=value, **moves)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._issue("barrier", [], {})

    def _rows(self, name: str, whole: Tensor, part: Tensor) -> list[Tensor]:
        """Split `whole` into W views shaped like `part`; `whole` has them concatenated or stacked."""
        _traits(name, [whole])
        return list(whole.view(self.size(), *part.shape).unbind())

    def _split(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        return list(tensor.split(list(sizes) or [tensor.shape[0] // self.size()] * self.size()))

    def _by_rank(self, name: str, tensors: Sequence[Tensor], like: Tensor | None = None) -> _Tensors:
        """Return the tensor of each rank. Raises RuntimeError unless there is one, like `like` if given."""
        if len(tensors) != self.size():
            raise RuntimeError(f"{name}: {len(tensors)} tensors in a group of {self.size()}")
        for index, tensor in enumerate(tensors):
            if like is not None and (tensor.shape != like.shape or tensor.dtype != like.dtype):
                raise RuntimeError(
                    f"{name}: tensor {index} is {tensor.dtype} {list(tensor.shape)}, expected {like.dtype} "
                    f"{list(like.shape)}"
                )
        return {rank: [tensor] for rank, tensor in enumerate(tensors)}

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


_INTEGRAL = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_OTHERS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def _traits(name: str, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the dtype and shapes of tensors, to compare them across ranks; {} for no tensors.

    Raises RuntimeError or ValueError for tensors that gloo or NCCL refuses.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{name}: simulated ranks take dense tensors, got {tensor.layout}")
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        if not (tensor.is_contiguous() or channels_last):
            raise ValueError(
                f"{name}: tensors must be contiguous, got strides {tensor.stride()} of {list(tensor.shape)}"
            )
        if tensor.dtype not in _INTEGRAL + _OTHERS or (tensor.is_complex() and name == "gather"):
            raise RuntimeError(f"{name}: invalid scalar type {tensor.dtype}")
    if not tensors:
        return {}
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"dtype": tensors[0].dtype, "shape": shapes[0] if len(shapes) == 1 else shapes}


def _reduction_name(name: str, opts: Any, tensors: Sequence[Tensor]) -> str:
    """Return the name of the reduction in opts. Raises RuntimeError if gloo refuses it for these tensors."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    op_name = str(getattr(op, "op", op)).rpartition(".")[2]
    refused = ("AVG",) if tensors[0].dtype in _INTEGRAL else ("BAND", "BOR", "BXOR")
    if op_name not in REDUCTIONS or op_name in refused:
        raise RuntimeError(f"{name}: cannot use ReduceOp.{op_name} with {tensors[0].dtype}")
    return op_name


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    first, second = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in (one, other))
    return first[0] + first[1] > second[0] and second[1] > 0


def _refuse(method: str, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(f"simulated ranks have no {method}: run with ranks='gloo'")


_COMMUNICATES = re.compile("all|reduce|gather|scatter|cast|send|recv|barrier|coalescing|split_group")
for _method in filter(_COMMUNICATES.search, dir(dist.ProcessGroup)):
    if not hasattr(object, _method) and _method not in vars(SimulatedProcessGroup):
        setattr(SimulatedProcessGroup, _method, staticmethod(partial(_refuse, _method)))
