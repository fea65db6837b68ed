"""Launches: a kernel with its arguments, compiled once and launched in every step.

kernel[grid](...) binds the arguments, looks the kernel up among those compiled, and compares every constant
that the kernel refers to: 15 µs or more of Python per launch. A Stage does this once, and then calls the
compiled kernels. benchmarks/host_time.py measures it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from ..device import current_stream, has_streams, is_current, is_rocm, launching_on

MAX_REGISTERS = 255  # per thread

_logger = logging.getLogger("gradcomp.kernels")


def registers(num_warps: int, num_programs: int = 2) -> int:
    """Return the registers per thread with which this many programs fit a multiprocessor together.

    A launch must name the number: otherwise ptxas may take more, or spill to fit one program more.
    """
    return min(65536 // (num_programs * 32 * num_warps) // 8 * 8, MAX_REGISTERS)


@dataclass(frozen=True)
class Slot:
    """An argument that a launch gets by name each time it runs.

    name: the argument's name in Stage's call.
    example: what the kernel is compiled for: a tensor's dtype, or a number of the argument's type.
    alignment: bytes; tensors' addresses are multiples of it.
    """

    name: str
    example: torch.dtype | float
    alignment: int = 16  # Triton compiles pointers that are multiples of 16 bytes to wider accesses


class Launch:
    """One launch of a kernel.

    num_programs: the grid's size; 0 launches nothing. None: each launch gets it as a value, num_programs.
    arguments: the kernel's arguments that aren't constants, in its order; each may be a Slot.
    constants: the kernel's constants, and Triton's options.
    """

    def __init__(self, kernel: Any, num_programs: int | None, *arguments: Any, **constants: Any):
        self._kernel, self.num_programs = kernel, num_programs
        self._arguments, self._constants = arguments, constants
        if is_rocm():
            constants.pop("maxnreg", None)  # for which Triton raises KeyError there
        self.slots = [(i, value) for i, value in enumerate(arguments) if isinstance(value, Slot)]

    def __call__(self, **values: Any) -> None:
        """Launch by Triton's own launch. values: of the slots, by name."""
        if num_programs := values.get("num_programs", self.num_programs):
            arguments = list(self._arguments)
            for index, slot in self.slots:
                arguments[index] = values[slot.name]
            self._kernel[(num_programs,)](*arguments, **self._constants)

    def compile(self) -> bool:
        """Compile the kernel for the current device. Return whether run_compiled can launch it."""
        if not isinstance(self._kernel, JITFunction):
            return False  # interpreted, or recorded by a test
        arguments = [value.example if isinstance(value, Slot) else value for value in self._arguments]
        compiled = self._kernel.warmup(*arguments, grid=(self.num_programs or 1,), **self._constants)
        if is_rocm():
            # For a tensor in storage of over 2 GiB Triton compiles another kernel than for a Slot's example.
            return False
        if not isinstance(compiled, CompiledKernel):
            _note_slow_launches(f"this Triton's warmup returns a {type(compiled).__name__}")
            return False
        # Addresses instead of tensors, which Triton's launcher would ask for their addresses.
        addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        names = self._kernel.arg_names[len(arguments) :]
        self._bound = [*addresses, *(self._constants[name] for name in names)]
        self._run = compiled.run  # loads the kernel; launches it
        # The last three are None as without hooks that see launches.
        self._of_kernel = compiled.function, compiled.packed_metadata, None, None, None
        return True

    def run_compiled(self, values: dict[str, Any], stream: int) -> None:
        """Launch the compiled kernel on a stream, as Triton's own launch does after its look-up.

        values: of the slots, by name, with addresses for tensors.
        """
        bound = self._bound.copy()  # threads share the launches of casts and copies
        for index, slot in self.slots:
            bound[index] = values[slot.name]
        if num_programs := values.get("num_programs", self.num_programs):
            self._run(num_programs, 1, 1, stream, *self._of_kernel, *bound)


class Stage:
    """Launches that follow one another on a device. On one without streams, Triton launches them itself.

    device: "meta" for a stage that is only compiled.
    """

    def __init__(self, launches: Iterable[Launch], device: torch.device):
        self._device = device
        self._launches = [launch for launch in launches if launch.num_programs != 0]
        self._is_compiled = False
        self._tensors = {
            slot.name: (slot.example, slot.alignment)
            for launch in self._launches
            for _, slot in launch.slots
            if isinstance(slot.example, torch.dtype)
        }
        if has_streams(device):
            self.compile(device)

    def compile(self, device: torch.device) -> None:
        """Compile the kernels for a device, and launch the compiled kernels from now on."""
        with launching_on(device):
            are_compiled = [launch.compile() for launch in self._launches]
        self._is_compiled = all(are_compiled)

    def __call__(self, **values: torch.Tensor | float) -> None:
        """Launch on the current stream. values: of the slots, by name."""
        raw = self._raw(values) if self._is_compiled and is_current(self._device) else None
        if raw is not None:
            stream = current_stream()
            for launch in self._launches:
                launch.run_compiled(raw, stream)
            return
        with launching_on(self._device):
            for launch in self._launches:
                launch(**values)

    def _raw(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return the values with addresses for tensors; None if the compiled kernels can't take them."""
        runtime = triton.knobs.runtime
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
            if getattr(hook, "calls", hook):
                _note_slow_launches("a profiler's hooks see every launch")
                return None
        raw = values.copy()
        for name, (dtype, alignment) in self._tensors.items():
            tensor = values[name]
            raw[name] = address = tensor.data_ptr()
            if address % alignment or tensor.dtype != dtype:
                _note_slow_launches(
                    f"a {name} in {tensor.dtype} begins {address % alignment} bytes after "
                    f"a multiple of {alignment}"
                )
                return None
        return raw


@functools.cache  # one line per reason and process
def _note_slow_launches(reason: str) -> None:
    _logger.warning("Triton launches kernels itself, 15 µs or more each: %s", reason)
