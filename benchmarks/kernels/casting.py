"""Cast a bucket to 16 bits with 1/W fused, and back. Providers:

gradcomp   one pass each way.
torch      what torch's fp16 and bf16 hooks do: .to(dtype).div_(W), and .copy_().
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.harness import Case, Setup, rounding_error
from gradcomp import ops

WORLD_SIZE = 6  # not a power of two, so that the division rounds


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for mib in (1, 25) if quick else (1, 25, 100):
        numel = mib * 2**20 // 4
        for dtype in (torch.float16, torch.bfloat16):
            describe = partial(Case, label=f"{mib} MiB", num_bytes=numel * (4 + 2), baseline="torch")
            wire = str(dtype).removeprefix("torch.")
            yield describe(
                "compress_cast",
                dtype=f"float32->{wire}",
                max_error=rounding_error(dtype),
                build=partial(_compressing, numel, dtype, device),
            )
            yield describe(
                "decompress_cast",
                dtype=f"{wire}->float32",
                max_error=0.0,  # every 16-bit value is an fp32 value
                build=partial(_decompressing, numel, dtype, device),
            )


def _compressing(numel: int, dtype: torch.dtype, device: torch.device) -> Setup:
    buffer = torch.randn(numel, device=device)
    out = torch.empty(numel, dtype=dtype, device=device)
    return Setup(
        providers={
            "gradcomp": lambda: [ops.compress_cast(buffer, out=out, scale=1 / WORLD_SIZE)],
            "torch": lambda: [buffer.to(dtype).div_(WORLD_SIZE)],
        },
        reference=lambda: [buffer.double() / WORLD_SIZE],
        outputs=[out],
    )


def _decompressing(numel: int, dtype: torch.dtype, device: torch.device) -> Setup:
    compressed = torch.randn(numel, device=device).to(dtype)
    out = torch.empty(numel, device=device)
    return Setup(
        providers={
            "gradcomp": lambda: [ops.decompress_cast(compressed, out=out)],
            "torch": lambda: [out.copy_(compressed)],
        },
        reference=lambda: [compressed.double()],
        outputs=[out],
    )
