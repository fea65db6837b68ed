"""Launch kernels: once as Triton does, or again and again without what Triton does each time.

kernel[grid](...) binds the arguments, looks them up among what it has compiled, and compares every constant
that the kernel refers to: 15 µs or more of Python. A Stage does this once: it notes what its launchers
launch, has it compiled, and then calls what was compiled. benchmarks/host_time.py measures it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

ALIGNMENT = 16  # bytes; kernels are compiled for pointers that are multiples of it, and for others
MAX_REGISTERS = 255  # that a thread can have


def launch(kernel: Any, num_programs: int) -> Callable[..., None]:
    """Return a function that launches a kernel with the given arguments, or notes it for a Stage.

    Arguments that are no constants are given by position, constants and options by keyword.
    """

    def run(*arguments: Any, **constants: Any) -> None:
        launched = Launch(kernel, num_programs, arguments, constants)
        if _noted.launches is None:
            launched()
        else:
            _noted.launches.append(launched)

    return run


def registers(num_warps: int, num_programs: int = 2) -> int:
    """Return how many registers a thread may take so that these programs fit a multiprocessor together.

    A launch has to say so: otherwise ptxas may take more, or spill to fit one program more.
    """
    return min(65536 // (num_programs * 32 * num_warps) // 8 * 8, MAX_REGISTERS)


class Stage:
    """Launches that follow one another, with everything bound but a buffer and a number.

    launchers(buffer, number): calls functions that launch through launch(). It is called once, with
    stand-ins, which have to reach the kernels as they are.
    dtype: the buffer's. number_type: float or int; the kernel annotates the number's type, and isn't
    specialized on its value.
    """

    def __init__(
        self,
        launchers: Callable[[torch.Tensor, Any], None],
        dtype: torch.dtype,
        number_type: type[float] | type[int],
    ) -> None:
        # Both are recognized by their identity, so the number has to be an object of its own.
        buffer, number = torch.empty(1, dtype=dtype, device="meta"), number_type("1000")
        if _noted.launches is not None:
            raise RuntimeError("a Stage's launchers made another Stage")
        self._launches: list[Launch] = []
        _noted.launches = self._launches
        try:
            launchers(buffer, number)
        finally:
            _noted.launches = None
        self._stand_ins = (buffer, number)
        self._dtype = dtype

    def compile(self) -> None:
        """Compile the kernels for the current device, and launch what was compiled from now on."""
        for each in self._launches:
            each.compile(self._stand_ins)

    def __call__(self, buffer: torch.Tensor, number: float) -> None:
        """Launch on the current device and stream."""
        address = buffer.data_ptr()
        is_usual = address % ALIGNMENT == 0 and buffer.dtype == self._dtype and not _is_observed()
        for each in self._launches:
            if is_usual and each.is_compiled:
                each.run_compiled(address, number)
            else:
                each(self._stand_ins, (buffer, number))


class _Noted(threading.local):
    """What the Stage that this thread is making has noted so far."""

    launches: "list[Launch] | None" = None


_noted = _Noted()


class Launch:
    """One launch of a kernel."""

    def __init__(
        self, kernel: Any, num_programs: int, arguments: Sequence[Any], constants: dict[str, Any]
    ) -> None:
        self._kernel, self._num_programs = kernel, num_programs
        self._arguments, self._constants = tuple(arguments), constants
        self._run: Callable[..., None] | None = None
        self._bound: list[Any] = []
        self._positions: list[tuple[int, bool]] = []

    def __call__(self, stand_ins: Sequence[Any] = (), given: Sequence[Any] = ()) -> None:
        """Launch as Triton does, with what is given in the stand-ins' places."""
        arguments = list(self._arguments)
        for stand_in, value in zip(stand_ins, given, strict=True):
            arguments = [value if argument is stand_in else argument for argument in arguments]
        self._kernel[(self._num_programs,)](*arguments, **self._constants)

    @property
    def is_compiled(self) -> bool:
        return self._run is not None

    def compile(self, stand_ins: Sequence[Any]) -> None:
        """Compile it, and keep what was compiled, unless Triton gives nothing that can be kept."""
        if not isinstance(self._kernel, JITFunction) or self._kernel.pre_run_hooks:
            return  # interpreted, or recorded by a test
        compiled = self._kernel.warmup(*self._arguments, grid=(self._num_programs,), **self._constants)
        names = self._kernel.arg_names[len(self._arguments) :]
        tensors = [argument for argument in self._arguments if isinstance(argument, torch.Tensor)]
        if (
            not isinstance(compiled, CompiledKernel)
            or any(name not in self._constants for name in names)
            or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors)
        ):
            return
        buffer, number = stand_ins
        self._positions = [
            (index, argument is buffer)
            for index, argument in enumerate(self._arguments)
            if argument is buffer or argument is number
        ]
        # Addresses instead of tensors, which the launcher would ask for theirs.
        addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in self._arguments]
        self._bound = [*addresses, *(self._constants[name] for name in names)]
        self._run = compiled[self._num_programs, 1, 1]

    def run_compiled(self, address: int, number: float) -> None:
        """Launch what was compiled, with the buffer's address and the number in their stand-ins' places."""
        assert self._run is not None
        for index, is_buffer in self._positions:
            self._bound[index] = address if is_buffer else number
        self._run(*self._bound)


def _is_observed() -> bool:
    """Return whether a profiler has installed hooks for launches, which get more of Triton's own launch."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)
