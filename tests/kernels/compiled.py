"""Compiles every kernel ahead of time, with no GPU, and reads the machine code.

`python -m tests.kernels.compiled 90` compiles each Variant below for sm_90 and prints, as JSON, its
registers, spilled bytes and memory instructions. It runs in a process of its own because the test process
holds interpreted kernels. A new kernel needs an entry in variants(): test_compiled.py says so if it is missing.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradcomp.kernels import cast, flatten

ARCHITECTURES = (80, 90, 100)
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Variant:
    """One way in which a launcher calls a kernel: argument types, constants, launch options."""

    label: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    options: dict[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": False})

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__}[{self.label}]"


TYPES = {"fp64": tl.float64, "fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


def variants() -> Iterator[Variant]:
    for source, result in [
        *(("fp32", half) for half in ("fp16", "bf16")),
        *((half, "fp32") for half in ("fp16", "bf16")),
        *((kind, kind) for kind in TYPES),
        ("fp64", "bf16"),
    ]:
        yield Variant(
            f"{source}->{result}",
            cast._cast_kernel,
            {"src_ptr": f"*{source}", "dst_ptr": f"*{result}", "numel": "i64", "scale": "fp64"},
            {"BLOCK": cast.BLOCK},
            cast.NUM_WARPS,
        )
    for tensor, flat in [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp64", "fp64")]:
        for to_flat in (True, False):
            yield Variant(
                f"{tensor} {'->' if to_flat else '<-'} {flat}",
                flatten._flatten_kernel,
                {"pointers_ptr": "*i64", "tiles_ptr": "*i64", "flat_ptr": f"*{flat}", "scale": "fp64"},
                {"TENSOR_TYPE": TYPES[tensor], "TO_FLAT": to_flat, "BLOCK": flatten.BLOCK},
                flatten.NUM_WARPS,
            )


def compile_for(variant: Variant, architecture: int) -> dict[str, Any]:
    signature = variant.signature | dict.fromkeys(variant.constants, "constexpr")
    compiled = triton.compile(
        ASTSource(variant.kernel, signature, variant.constants),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.num_warps, **variant.options},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _run("cuobjdump", "-res-usage", cubin.name)
        assembly = _run("nvdisasm", cubin.name)
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spilled_bytes": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "memory": Counter(re.findall(r"\b(?:LDG|STG|LDL|STL)\b[.\w]*", assembly)),
    }


def _run(binary: str, *arguments: str) -> str:
    command = [str(BINARIES / binary), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print(json.dumps({variant.name: compile_for(variant, int(sys.argv[1])) for variant in variants()}))
