"""Buckets as communication hooks see them, what hooks keep of them, and the checks of buckets and hooks."""

from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp.device import has_streams, require_no_capture
from gradcomp.layout import FlatLayout

from ..rules import described
from .process_group import ExplainedError, known_groups, resolve_group

_PYTHON_REDUCER = (
    ". Likely cause: torch._dynamo.config.optimize_ddp is 'python_reducer', under which torch's DDP gives "
    "hooks a gradient and its parameter. allreduce_hook, fp16_compress_hook and bf16_compress_hook average "
    "these in a backward that compiled autograd compiles. For any other hook set "
    "torch._dynamo.config.optimize_ddp = True before the model is wrapped, and "
    "torch._dynamo.config.compiled_autograd = False"
)


def as_real(buffer: torch.Tensor) -> torch.Tensor:
    """View a flat complex buffer as twice as many real elements; return any other buffer as it is."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def real_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter's gradient in hooks: with a last dimension of 2 if it is complex."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def memory_layout(parameters: Iterable[torch.Tensor], *, as_real: bool = True) -> FlatLayout:
    """Return the layout of a bucket: each gradient in its parameter's memory order, as in torch's DDP.

    as_real: whether complex ones have the real_shape.
    """
    like = [
        each
        if each.is_contiguous() or torch.empty_like(each, device="meta").stride() == each.stride()
        else torch.empty(each.shape, dtype=each.dtype, device="meta")  # row-major, as it has gaps or overlaps
        for each in parameters
    ]
    like = [torch.view_as_real(each) if as_real and each.is_complex() else each for each in like]
    return FlatLayout([each.shape for each in like], [each.stride() for each in like])


def named_tensors(call: str, params: Any, *, needs_names: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) pairs; without needs_names a parameter alone gets a name such as "number 3".

    Raises TypeError, which names the call, for anything but an iterable of these.
    """
    pairs = []
    is_one = isinstance(params, torch.Tensor) or not isinstance(params, Iterable)
    for index, item in enumerate([(None, params)] if is_one else params):
        is_pair = isinstance(item, tuple) and len(item) == 2
        name, param = item if is_pair else (None if needs_names else f"number {index}", item)
        if not (isinstance(name, str) and isinstance(param, torch.Tensor)):
            raise TypeError(
                f"{call} takes {'' if needs_names else 'model.parameters() or '}model.named_parameters(), "
                f"got {described(params if is_one else item)}. Likely cause: the module itself, one tensor, "
                "a dict, or a method without its parentheses"
            )
        pairs.append((name, param))
    return pairs


class GradBucket:
    """A bucket as communication hooks see it, with the methods of ``torch.distributed.GradBucket``.

    buffer: the gradients in memory_layout, 1-D, undivided. The hook's result, with as many elements,
        replaces it. Hooks see complex gradients as real ones, with a last dimension of 2.
    unit: the gradients have been multiplied by it.
    watched: the tensors that an optimizer changes between two steps: the parameters, or their shards.
    """

    def __init__(self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], is_last: bool):
        self._index, self._buffer = index, as_real(buffer)
        self._parameters, self._is_last, self.unit = parameters, is_last, 1.0
        self.watched = parameters

    def index(self) -> int:
        """Return the bucket's place in the order of averaging, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the flat buffer."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by another tensor with as many elements, in another dtype for example."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of the current buffer in the parameters' shapes."""
        return memory_layout(self._parameters).parts(self._buffer)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this is the step's last bucket."""
        return self._is_last


class ShardBucket(GradBucket):
    """A bucket that is reduce-scattered: a rank gets the sum of its own shard, not the average of all.

    buffer: [world size · n], in the order of a ShardLayout: row r has rank r's piece of every gradient. So
        no gradient is in one piece: `gradients` has no meaning.
    parameters: in their whole shapes.
    shard: [n], in the buffer's dtype; gets the ranks' sum of this rank's row. The buffer may change.
    """

    def __init__(
        self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], shard: torch.Tensor
    ):
        super().__init__(index, buffer, parameters, is_last=False)
        self.shard = as_real(shard)


_BUCKETS = (dist.GradBucket, GradBucket)


def require_bucket(hook_name: str, bucket: Any) -> None:
    """Raise TypeError for anything but torch's GradBucket and gradcomp's.

    Under torch.load's safe default a file may call hooks with arguments of its choice. It can make neither of
    the two buckets, so it can't start a collective.
    """
    if not isinstance(bucket, _BUCKETS):
        raise TypeError(
            f"{hook_name} takes a torch.distributed.GradBucket or a gradcomp.reducer.GradBucket, got "
            f"{described(bucket)}{_PYTHON_REDUCER if isinstance(bucket, tuple) else ''}"
        )


def require_dense_floats(hook_name: str, buffer: torch.Tensor) -> None:
    """Raise TypeError for a bucket that is not floating-point, or not dense."""
    if not buffer.is_floating_point():
        raise TypeError(f"{hook_name} compresses floating-point buckets, got {buffer.dtype}")
    if buffer.layout != torch.strided:
        raise TypeError(
            f"{hook_name} compresses dense buckets, got {buffer.layout}. Likely cause: "
            "nn.Embedding(sparse=True), for which torch's DDP makes a sparse bucket; gradcomp's averages it "
            "apart from the hook"
        )


def checked_bucket(
    hook_name: str, bucket: Any, process_group: Any, group_name: str = "state"
) -> tuple[torch.Tensor, dist.ProcessGroup]:
    """Return a hook's buffer and process group, once both are checked. Every hook calls this once per bucket.

    hook_name: the hook's name in messages.
    process_group: the group that the hook was given, None for the default one.
    group_name: the group's name in messages.

    Raises TypeError for anything but a dense floating-point bucket, or but a process group; RuntimeError if
    there is no default group, in inference mode, and while a CUDA graph is captured.
    """
    if not isinstance(bucket, _BUCKETS):
        require_bucket(hook_name, bucket)
    buffer: torch.Tensor = bucket.buffer()
    if has_streams(buffer.device):
        require_no_capture(f"{hook_name} can't average gradients", buffer.device)
    if torch.is_inference_mode_enabled() or buffer.is_inference():
        raise RuntimeError(
            f"{hook_name} can't average bucket {bucket.index()} in torch.inference_mode(), or if its buffer "
            "was made there: wrap the model and run backward outside of it. gradcomp.average_ works in it"
        )
    group = dist.group.WORLD if process_group is None else process_group
    if group is None or group not in known_groups:
        group = resolve_group(hook_name, process_group, group_name)
    if buffer.layout != torch.strided or not buffer.is_floating_point():
        require_dense_floats(hook_name, buffer)
    return buffer, group


# Any: hooks that are written for torch name torch.distributed.GradBucket as their bucket's type.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def require_hook(hook: Any, state: Any = None, whose: str = "") -> None:
    """Raise TypeError for a hook that can't be called, without `whose` in torch's words."""
    if not callable(hook):
        got = f" {whose} got {described(hook)}." if whose else ""
        swapped = " The state can be called: state and hook are swapped." if callable(state) else ""
        module = (
            f" {hook.__name__} is a module, with a hook of its name." if isinstance(hook, ModuleType) else ""
        )
        raise TypeError(f"Communication hook must be callable.{got}{swapped}{module}")


def refuse_result(returned: Any, hook: Any) -> NoReturn:
    """Raise RuntimeError for a hook that returned anything but a Future."""
    raise ExplainedError(
        f"the communication hook {name_of(hook)} returned {type(returned).__name__}, but must return a "
        "torch.futures.Future that holds the averaged bucket"
    )


def result_of(future: Any, hook: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a hook's future. Returns the averaged bucket, 1-D.

    Raises RuntimeError if the future doesn't hold one tensor of as many elements as the buffer.
    """
    if not isinstance(future, torch.Future):  # a collective's future is one, too
        refuse_result(future, hook)
    result: Any = future.wait()
    if isinstance(result, list | tuple) and len(result) == 1:
        (result,) = result
    if not isinstance(result, torch.Tensor) or result.numel() != buffer.numel():
        found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ExplainedError(
            f"the future of the communication hook {name_of(hook)} holds {found}, but a bucket of "
            f"{buffer.numel()} elements must come back"
        )
    return result.view(-1)


def name_of(hook: Any) -> str:
    """Return a hook's name in messages."""
    return str(getattr(hook, "__qualname__", hook))


class Hooked(NamedTuple):
    """A hook with its state, which is asked here what it can do: states of torch's hooks, and yours, do less.

    hook: None for a plain all-reduce; the state is then the process group.
    """

    hook: Any
    state: Any

    @property
    def name(self) -> str:
        """The hook's name in messages."""
        return "an all-reduce" if self.hook is None else name_of(self.hook)

    def can(self, method: str) -> bool:
        """Return whether the state has a method, or an attribute, of this name."""
        return hasattr(self.state, method)

    @property
    def group(self) -> Any:
        """The process group that the state is, or has; None for the default one, or if the state has none."""
        if isinstance(self.state, dist.ProcessGroup):
            return resolve_group(self.name, self.state)
        return getattr(self.state, "process_group", None)

    def regroup(self, group: dist.ProcessGroup) -> "Hooked":
        """Give the state another process group. Returns the hook with a state that averages over it."""
        if self.can("process_group"):
            self.state.process_group = group
        is_group = self.state is None or isinstance(self.state, dist.ProcessGroup)
        return self._replace(state=group) if is_group else self

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the state, if the state has one of this name. Raises TypeError for a class."""
        if self.can(method):
            if isinstance(self.state, type):
                raise TypeError(f"{self.name} takes an object as its state, got {described(self.state)}")
            getattr(self.state, method)(*arguments)

    @property
    def step(self) -> int | None:
        """The number of the state's steps so far, if it counts them."""
        return getattr(self.state, "iter", None)

    @property
    def keep_undo(self) -> bool | None:
        """Whether the state's last step can be taken back; None for a state that can't take back any."""
        return getattr(self.state, "keep_undo", None)

    def undo(self, step: int | None, *, all_know: bool = False) -> None:
        """Take the state back to its step of this number, if it keeps what that needs; see undo_step.

        all_know: whether the ranks needn't compare in the next step who has called this.
        """
        if self.keep_undo:
            is_due = not self.state.is_compared or self.state.compared_in is None
            self.state.undo_step(step)
            if all_know and not is_due:
                self.state.compared_in = -1


# --- what hooks keep ---

Kept = TypeVar("Kept")


class KeptBuffers(Generic[Kept]):
    """What hooks keep from step to step beside a bucket's first parameter: one object per bucket and name.

    An object goes with its parameter, or when the parameters are arranged in other buckets. While its bucket
    is in flight, it is taken out: two buckets in flight never share one.

    by_parameter: a bucket's first parameter -> name -> (key, object).
    """

    def __init__(self) -> None:
        self.by_parameter: MutableMapping[torch.Tensor, dict[str, tuple[Any, Kept]]] = WeakIdKeyDictionary()

    def take(self, parameters: Sequence[torch.Tensor], name: str, key: Hashable) -> Kept | None:
        """Take out the object of the bucket with these parameters; None if there is none with this key.

        key: the size, device and so on that the object was made for.
        """
        if parameters:
            kept = self.by_parameter.get(parameters[0], {}).pop(name, None)
            if kept is not None and kept[0] == key:
                return kept[1]
        # Other buckets of these parameters may have left objects: the first step's one bucket, say.
        for parameter in parameters:
            self.by_parameter.get(parameter, {}).pop(name, None)
        return None

    def keep(self, first_parameter: torch.Tensor, name: str, key: Hashable, kept: Kept) -> None:
        """Keep an object that nothing reads any more for the bucket's next step."""
        self.by_parameter.setdefault(first_parameter, {})[name] = key, kept


_wires: KeptBuffers[torch.Tensor] = KeptBuffers()


def take_wire(bucket: dist.GradBucket, dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return a buffer of this dtype, as long as the bucket, and what to call when the bucket is averaged.

    On a CPU new memory costs a page fault per 4 KiB, so the call keeps the buffer for the bucket's next step.
    On CUDA torch's caching allocator keeps it, for the stream that is current here.
    """
    buffer = bucket.buffer()
    if has_streams(buffer.device):
        return torch.empty(buffer.numel(), dtype=dtype, device=buffer.device), lambda: None
    parameters = bucket.parameters()  # torch makes a list of them in every call
    name, key = str(dtype), (buffer.numel(), buffer.device)
    wire = _wires.take(parameters, name, key)
    if wire is None:
        wire = torch.empty(buffer.numel(), dtype=dtype, device=buffer.device)
    return wire, partial(_wires.keep, parameters[0], name, key, wire)
