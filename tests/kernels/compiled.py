"""Compile every kernel ahead of time, with no GPU, and read the machine code.

`python -m tests.kernels.compiled 90` calls every launcher below as the library does, and records the
launches. It compiles the kernels for these launches for sm_90. It prints the worst variant of each kernel:
registers, spilled bytes, shared memory, programs that fit a multiprocessor.
`python -m tests.kernels.compiled gfx942` does so for an AMD GPU, with the launches of a ROCm installation.

--json: print all variants, and their memory instructions.
--every: compile for each dtype and rank, not only for the selection that the tests have time for. This takes
    five minutes.

It runs in another process than the tests, because the test process holds interpreted kernels. A new kernel's
launcher must be called in launches() or quantized_launches(). test_compiled.py fails if it is missing.
"""

import importlib
import json
import pkgutil
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import gradcomp.kernels
from gradcomp.kernels import flatten
from gradcomp.kernels.powersgd.plan import PowerSGDPlan
from gradcomp.kernels.quantize import kernels as quantize
from gradcomp.layout import MAX_BLOCK_SIZE, BlockLayout, PowerSGDLayout

ARCHITECTURES = (80, 90, 100)
# Shared memory of a multiprocessor in KiB. On CUDA every program takes one KiB more than it asks for.
SHARED_KIB = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
SHARED_KIB_OF_AMD = {"gfx90a": 64, "gfx942": 64, "gfx950": 160}
# Triton sets these for a pointer that is aligned to 16 bytes and, on AMD, in storage of up to 2 GiB.
POINTERS = {"cuda": [["tt.divisibility", 16]], "hip": [["tt.divisibility", 16], ["tt.pointer_range", 32]]}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
TYPE_NAMES = {FP64: "fp64", FP32: "fp32", FP16: "fp16", BF16: "bf16", torch.int64: "i64"}
TYPE_NAMES |= {torch.int32: "i32", torch.uint8: "u8"}
# Matrices with tiles aligned to 16 bytes, and a vector.
SHAPES = [(256, 512), (512,), (512, 256)]
# PowerSGD's (dtype, rank, error feedback) that the tests compile: most cases with a variant that once
# spilled, and some other cases.
POWERSGD = [
    *((FP32, rank, True) for rank in (1, 2, 4, 8, 16, 32, 96)),
    *((BF16, rank, True) for rank in (4, 16, 32)),
    *((FP64, rank, True) for rank in (1, 16, 32, 64)),
    (FP32, 4, False),
    (BF16, 32, False),
]
# The tests compile fewer cases for AMD's GPUs, to save time.
POWERSGD_ON_AMD = [case for case in POWERSGD if case[1] not in (2, 16)]
# The quantized all-reduce's (dtype, bits, block size, world size, error feedback) that the tests compile.
QUANTIZED = [
    *((dtype, bits, 128, 8, True) for dtype, bits in product((FP32, BF16, FP64), (4, 8))),
    *((FP32, 4, block_size, world_size, True) for block_size, world_size in ((6, 3), (256, 1), (128, 2))),
    (FP32, 4, 128, 3, False),
    (FP16, 8, 16, 1, True),
    *((dtype, bits, MAX_BLOCK_SIZE, 8, True) for dtype, bits in product((FP32, FP64), (4, 8))),
    (FP32, 4, MAX_BLOCK_SIZE - 2, 3, True),
    # The average of these cases once spilled.
    (FP32, 4, 2048, 12, True),
    (FP64, 4, MAX_BLOCK_SIZE, 3, True),
]
EVERY = list(product((FP32, BF16, FP16, FP64), (1, 2, 4, 8, 16, 32, 64, 96), (True, False)))


@dataclass(frozen=True, eq=False)
class Variant:
    """One way in which a launcher launches a kernel."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def source(self, backend: str) -> ASTSource:
        constants = {p.name: self.arguments[p.name] for p in self.kernel.params if p.is_constexpr}
        signature: dict[str, str] = {}
        attributes = {}
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{TYPE_NAMES[value.dtype]}"
                aligned = not parameter.do_not_specialize_on_alignment
                hints = [each for each in POINTERS[backend] if aligned or each[0] != "tt.divisibility"]
                if hints:
                    attributes[parameter.num,] = hints
            else:
                signature[parameter.name] = parameter.annotation_type
        return ASTSource(self.kernel, signature, constants, attributes)


class Recorder:
    """A stand-in for a kernel that notes a launch instead of launching."""

    def __init__(self, kernel: Any, launched: list[tuple[Any, dict[str, Any], dict[str, Any]]]):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*positional: Any, **keywords: Any) -> None:
            names = [parameter.name for parameter in self.kernel.params]
            arguments = dict(zip(names, positional, strict=False))
            arguments |= {name: keywords.pop(name) for name in list(keywords) if name in names}
            self.launched.append((self.kernel, arguments, keywords))

        return launch


def launches(powersgd: Iterable[tuple[torch.dtype, int, bool]]) -> Iterator[str]:
    """Call launchers, and yield a name for each group of calls. Groups differ in dtypes, ranks or options."""
    for source, result in [
        *((FP32, half) for half in (FP16, BF16)),
        *((half, FP32) for half in (FP16, BF16)),
        *((dtype, dtype) for dtype in (FP64, FP32, FP16, BF16)),
        (FP64, BF16),
    ]:
        flatten.cast(torch.zeros(1, dtype=source), out=torch.zeros(1, dtype=result))
        yield f"{TYPE_NAMES[source]}->{TYPE_NAMES[result]}"
    tables = flatten.FlattenTables([(0, 0, 0, 1)], 1, torch.device("cpu"))
    for tensor, flat in [
        (FP32, FP32),
        (FP32, BF16),
        (FP32, FP16),
        (BF16, BF16),
        (FP64, FP64),
        (BF16, FP32),
        (FP16, FP32),
    ]:
        tensors, buffer = [torch.zeros(1, dtype=tensor)], torch.zeros(1, dtype=flat)
        flatten.copy(tensors, tables, buffer)
        yield f"{TYPE_NAMES[tensor]}->{TYPE_NAMES[flat]}"
        flatten.copy(tensors, tables, buffer, to_flat=False)
        yield f"{TYPE_NAMES[tensor]}<-{TYPE_NAMES[flat]}"
    for dtype, rank, feedback in powersgd:
        layout = PowerSGDLayout(SHAPES, rank, 1)
        options = {"error_feedback": feedback, "warm_start": feedback, "epsilon": 0.0, "seed": 0}
        plan = PowerSGDPlan(layout, dtype, torch.device("cpu"), **options)
        buffer = torch.zeros(layout.numel, dtype=dtype)
        plan.project(buffer, 1.0)
        plan.back_project(buffer, 1.0)
        plan.reconstruct(buffer, 0)
        yield f"{TYPE_NAMES[dtype]} r={rank}{'' if feedback else ' plain'}"
        if feedback:
            options["epsilon"] = 1e-8
            plan = PowerSGDPlan(layout, dtype, torch.device("cpu"), **options)
            plan.take_scratch()
            plan.back_project(buffer, 1.0)
            yield f"{TYPE_NAMES[dtype]} r={rank} epsilon"


def quantized_launches(cases: Iterable[tuple[torch.dtype, int, int, int, bool]]) -> Iterator[str]:
    """Call the launchers of the quantized all-reduce, and yield a name for each case."""
    cpu, of_bytes, numbers = torch.device("cpu"), torch.zeros(1, dtype=torch.uint8), {"rank": 0}
    for dtype, bits, block_size, world_size, feedback in cases:
        whole, row = (BlockLayout([(block_size, 4), (3,)], block_size, ranks) for ranks in (world_size, 1))
        options = {"bits": bits, "error_feedback": feedback, "num_payloads": world_size}
        buffer, kept = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.promote_types(dtype, FP32))
        numbers |= {"kept": kept, "received": of_bytes}
        encode = quantize.encoder(whole, dtype, cpu, bits=bits, error_feedback=feedback)
        encode(buffer=buffer, payload=of_bytes, **numbers)
        adder = partial(quantize.adder, dtype=dtype, device=cpu, **options)
        adder(whole.piece(1), in_codes=True, has_own=True)(out=of_bytes, **numbers)
        quantize.decoder(whole, dtype, cpu, bits=bits)(payload=of_bytes, buffer=buffer)
        adder(row, in_codes=False, has_own=True, divisor=1.0)(out=buffer, **numbers)
        adder(row, in_codes=False, has_own=False)(out=buffer, **numbers)
        case = f"size={block_size} W={world_size}{'' if feedback else ' plain'}"
        yield f"{TYPE_NAMES[dtype]} bits={bits} {case}"
    # Between 4 nodes of 3 ranks, whose gradients are multiplied by 1/4, and summed within the node in dtype.
    numbers["kept"] = torch.zeros(1)
    for bits, dtype in product((4, 8), (FP32, BF16, FP16)):
        layout, buffer = BlockLayout([(128, 4), (3,)], 128, 4), torch.zeros(1, dtype=dtype)
        options = {"bits": bits, "uncompressed_dtype": FP32, "averages_dtype": FP32, "error_feedback": True}
        quantize.encoder(layout, dtype, cpu, **options)(buffer=buffer, payload=of_bytes, **numbers)
        options |= {"num_payloads": 4, "divisor": 3.0, "in_codes": True, "has_own": True}
        quantize.adder(layout.piece(1), dtype, cpu, **options)(out=of_bytes, **numbers)
        yield f"{TYPE_NAMES[dtype]} bits={bits} hierarchical"
    # Weights.
    for dtype in (FP32, BF16, FP16):
        layout, buffer = BlockLayout([(128, 4), (3,)], 128, 1), torch.zeros(1, dtype=dtype)
        quantize.encoder(layout, dtype, cpu, bits=8)(buffer=buffer, payload=of_bytes, **numbers)
        quantize.decoder(layout, dtype, cpu, bits=8)(payload=of_bytes, buffer=buffer)
        yield f"{TYPE_NAMES[dtype]} bits=8 gathers"


def variants(powersgd: Iterable[tuple[torch.dtype, int, bool]] = POWERSGD) -> list[Variant]:
    """Return every distinct launch of launches(powersgd) and quantized_launches(QUANTIZED)."""
    launched: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    for module in kernel_modules():
        for name, kernel in vars(module).copy().items():
            if is_kernel(name):
                setattr(module, name, Recorder(kernel, launched))
    found: dict[str, Variant] = {}
    for group in chain(launches(powersgd), quantized_launches(QUANTIZED)):
        for kernel, arguments, options in launched:
            tensors = [TYPE_NAMES[value.dtype] for value in arguments.values() if torch.is_tensor(value)]
            constants = [str(arguments[p.name]) for p in kernel.params if p.is_constexpr]
            same = f"{kernel.__name__} {tensors} {constants} {options}"
            if same not in found:
                name = f"{kernel.__name__}[{group}]"
                taken = sum(variant.name.startswith(name) for variant in found.values())
                name += f" {taken + 1}" * bool(taken)
                found[same] = Variant(name, kernel, arguments, options)
        launched.clear()
    return list(found.values())


def kernel_modules() -> list[Any]:
    found = pkgutil.walk_packages(gradcomp.kernels.__path__, "gradcomp.kernels.")
    return [importlib.import_module(module.name) for module in found]


def is_kernel(name: str) -> bool:
    return name.startswith("_") and name.endswith("_kernel")


def compile_for(variants: Iterable[Variant], architecture: int) -> dict[str, dict[str, Any]]:
    """Compile each variant; return its registers, shared memory, instructions etc., by the variant's name."""
    target = GPUTarget("cuda", architecture, 32)
    compiled = {
        each: triton.compile(each.source("cuda"), target=target, options=each.options) for each in variants
    }
    memory = accesses([code_of(kernel.asm["cubin"]) for kernel in compiled.values()], architecture)
    return {
        variant.name: facts_of(variant, kernel, of_kernel, architecture)
        for (variant, kernel), of_kernel in zip(compiled.items(), memory, strict=True)
    }


def facts_of(variant: Variant, compiled: Any, memory: Counter[str], architecture: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _run("cuobjdump", "-res-usage", cubin.name)
    constants = {p.name: variant.arguments[p.name] for p in variant.kernel.params if p.is_constexpr}
    itemsize = next(pointers_of(variant)).dtype.itemsize
    tile_bytes = constants.get("BLOCK_ROWS", 0) * constants.get("BLOCK_COLS", 0) * itemsize
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    # Registers are allocated in units of eight.
    of_program = -(-registers // 8) * 8 * 32 * compiled.metadata.num_warps
    shared = int(compiled.metadata.shared)
    return {
        "kernel": variant.kernel.__name__,
        "itemsize": itemsize,
        "rank": constants.get("RANK", 0),
        "constants": {name: value for name, value in constants.items() if isinstance(value, int)},
        "shared_bytes": shared,
        "programs": min(65536 // of_program, SHARED_KIB[architecture] * 1024 // (shared + 1024)),
        "num_warps": compiled.metadata.num_warps,
        # How many 128-bit accesses of a thread move a tile of the gradient, or of the error memory, once.
        "accesses_per_tile": tile_bytes // (compiled.metadata.num_warps * 32 * 16),
        "registers": registers,
        "spilled_bytes": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "memory": memory,
    }


def compile_for_amd(variants: Iterable[Variant], architecture: str) -> dict[str, dict[str, Any]]:
    """Compile each variant for an AMD GPU; return registers, shared memory etc., by the variant's name."""
    target = GPUTarget("hip", architecture, 64)
    return {
        each.name: facts_on_amd(
            each, triton.compile(each.source("hip"), target=target, options=each.options), architecture
        )
        for each in variants
    }


def facts_on_amd(variant: Variant, compiled: Any, architecture: str) -> dict[str, Any]:
    assembly, num_warps = compiled.asm["amdgcn"], compiled.metadata.num_warps
    found = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", assembly, re.M)}
    # Each of the four SIMDs of a compute unit has 512 registers per lane, for up to 8 wavefronts.
    resident = 4 * min(512 // (-(-found["vgpr_count"] // 8) * 8), 8)
    shared = int(compiled.metadata.shared)
    return {
        "kernel": variant.kernel.__name__,
        "itemsize": next(pointers_of(variant)).dtype.itemsize,
        "rank": variant.arguments.get("RANK", 0),
        # Whether the launch does more than add up partial sums.
        "stores": variant.arguments.get("STORES", True),
        "shared_bytes": shared,
        "programs": min(resident // num_warps, SHARED_KIB_OF_AMD[architecture] * 1024 // max(shared, 1)),
        "num_threads": found["max_flat_workgroup_size"],
        "registers": found["vgpr_count"],
        # Vector registers and local arrays. Scalar registers are spilled to vector registers, not to memory.
        "spilled_bytes": max(found["private_segment_fixed_size"], 4 * found["vgpr_spill_count"]),
        "spilled_scalars": found["sgpr_spill_count"],
        "products": Counter(re.findall(r"\bv_mfma_\w+", assembly)),
        "atomics": Counter(re.findall(r"\b(?:global|flat|buffer)_atomic_\w+", assembly)),
    }


def pointers_of(variant: Variant) -> Iterator[torch.Tensor]:
    """Return the tensors that a variant is launched with."""
    return (value for value in variant.arguments.values() if torch.is_tensor(value))


def table(report: dict[str, dict[str, Any]]) -> str:
    """Format the worst values of each kernel's variants in a report of compile_for."""
    lines = [
        f"{'kernel':33}{'variants':>9}{'registers':>11}{'spilled B':>11}{'shared B':>10}{'programs':>10}"
    ]
    for kernel in sorted({facts["kernel"] for facts in report.values()}):
        of_kernel = [facts for facts in report.values() if facts["kernel"] == kernel]
        registers, spilled, shared = (
            max(facts[name] for facts in of_kernel) for name in ("registers", "spilled_bytes", "shared_bytes")
        )
        programs = min(facts["programs"] for facts in of_kernel)
        lines.append(f"{kernel:33}{len(of_kernel):9}{registers:11}{spilled:11}{shared:10}{programs:10}")
    return "\n".join(lines)


def code_of(cubin: bytes) -> bytes:
    """Return a kernel's machine code: the one section .text.<kernel> of a cubin, an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, num_entries, names_index = struct.unpack_from("<HHH", cubin, 58)
    # For each section: the position of its name, its type, flags, address, position and size.
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(num_entries)]
    names_at = sections[names_index][4]
    (code,) = (
        cubin[at : at + size]
        for name, _, _, _, at, size in sections
        if cubin.startswith(b".text.", names_at + name)
    )
    return code


def accesses(codes: Sequence[bytes], architecture: int) -> list[Counter[str]]:
    """Count each code's accesses to memory by instruction. One nvdisasm reads all, as it starts slowly."""
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(b"".join(codes))
        binary.flush()
        feature = "a" if architecture >= 90 else ""
        listing = _run("nvdisasm", "--binary", f"SM{architecture}{feature}", "-ndf", binary.name)
    ends = list(accumulate(map(len, codes)))
    found: list[Counter[str]] = [Counter() for _ in codes]
    pattern = r"^\s*/\*([0-9a-f]+)\*/.*\b((?:LDG|LDGSTS|STG|LDL|STL)\b[.\w]*)"
    for address, instruction in re.findall(pattern, listing, re.M):
        found[bisect(ends, int(address, 16))][instruction] += 1
    return found


def _run(binary: str, *arguments: str) -> str:
    command = [str(BINARIES / binary), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    architecture, every = sys.argv[1], EVERY if "--every" in sys.argv else None
    if architecture in SHARED_KIB_OF_AMD:
        torch.version.hip = "stands for ROCm"  # launchers choose options and products as on ROCm
        report = compile_for_amd(variants(every or POWERSGD_ON_AMD), architecture)
    else:
        report = compile_for(variants(every or POWERSGD), int(architecture))
    print(json.dumps(report) if "--json" in sys.argv else table(report))
