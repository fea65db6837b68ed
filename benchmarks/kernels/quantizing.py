"""The stages of the quantized all-reduce, each by itself: quantize, average, dequantize.

The rank is the first of 8. In average it receives the same codes from all others. Providers:

gradcomp   the operation: one launch; on CPU in plain torch.
torch      the same formulas, one operation of torch after another. torch.quantize_per_channel takes scales
           that are known already, has no error feedback and no 4 bits.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from benchmarks.harness import (
    Case,
    Setup,
    WrongResultError,
    elementwise_error,
    frobenius_error,
    rounding_error,
)
from gradcomp import ops
from gradcomp.compress.quantized_all_reduce import Codes, zeros_of
from gradcomp.cpu.quantize import LARGEST_CODE
from gradcomp.layout import BlockLayout

WORLD_SIZE, RANK, BLOCK_SIZE = 8, 0, 128
# By bits: the norm of what rounding loses of normally distributed values, over theirs.
MAX_LOSS = {4: 0.13, 8: 0.01}
# How far codes and errors together may be from what was quantized, over its norm: rounding in fp32.
MAX_MISSING = 1e-6
SECONDS = 0.5  # of a case: there are many

Encoded = tuple[torch.Tensor, torch.Tensor]  # codes [blocks, bytes], scales [blocks]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    sizes = [(torch.float32, mib) for mib in ((1, 25) if quick else (1, 25, 100))]
    for dtype, mib in (*sizes, (torch.bfloat16, 25)):
        numel = mib * 2**20 // dtype.itemsize
        for bits in (4, 8):
            for stage, num_bytes in _bytes_per_element(bits, dtype.itemsize).items():
                is_exact = stage == "dequantize"
                yield Case(
                    stage,
                    label=f"{mib} MiB, {bits} bits, W={WORLD_SIZE}",
                    dtype=str(dtype).removeprefix("torch."),
                    num_bytes=round(numel * num_bytes),
                    max_error=rounding_error(dtype) if is_exact else MAX_LOSS[bits],
                    baseline="torch",
                    build=partial(_build, stage, numel, bits, dtype, device),
                    error_of=elementwise_error if is_exact else frobenius_error,
                    seconds=SECONDS,
                    num_elements=numel,
                )


def _bytes_per_element(bits: int, itemsize: int) -> dict[str, float]:
    """Return what each stage must move per element of the bucket. Errors are in fp32."""
    encoded = bits / 8 + 2 / BLOCK_SIZE
    return {
        "quantize": itemsize + (4 + 4) + encoded,
        # In one shard: what the other ranks sent, the mean, and the error twice.
        "average": (WORLD_SIZE * encoded + (4 + 4)) / WORLD_SIZE,
        "dequantize": encoded + itemsize,
    }


class _Problem:
    """A bucket, its codes, and what the stages start from, for both providers."""

    def __init__(self, numel: int, bits: int, dtype: torch.dtype, device: torch.device):
        self.bits, layout = bits, BlockLayout([(numel // 1024, 1024)], BLOCK_SIZE, WORLD_SIZE)
        self.error = zeros_of(layout, dtype, device, WORLD_SIZE)
        self.codes = codes = Codes(layout, dtype, device, self.error, bits=bits, uncompressed_dtype=None)
        self.decode = ops.decoder(layout, dtype, device, bits=bits)
        self.own = slice(RANK * layout.shard_numel, (RANK + 1) * layout.shard_numel)
        self._code_section, self._scale_section, _ = layout.sections(bits, dtype.itemsize)[0]
        self._code_bytes = layout.code_bytes(bits)
        self.bucket = torch.randn(numel, device=device).to(dtype)
        self.out = torch.empty_like(self.bucket)
        self._errors_before = 0.1 * torch.randn(numel, device=device)
        # All that a step computes, for the later stages to begin with.
        self.restore()
        codes.encode(self.bucket, RANK)
        self.own_values = self.error[self.own].clone()
        codes.received.copy_(codes.payload[RANK + 1].expand_as(codes.received))
        codes.add(codes.mean, RANK)
        codes.payload.copy_(codes.mean.expand_as(codes.payload))
        self.sent = [self.encoded(each) for each in codes.received[1:]]
        self.means = [self.encoded(each) for each in codes.payload.clone()]
        self.restore()

    def restore(self) -> None:
        """Bring back the errors before quantize."""
        self.error.copy_(self._errors_before)

    def encoded(self, payload: torch.Tensor) -> Encoded:
        """Return the codes and scales in a shard's payload."""
        codes = payload[self._code_section].view(-1, self._code_bytes)
        return codes, payload[self._scale_section].view(torch.bfloat16)

    def quantize(self, values: torch.Tensor) -> tuple[Encoded, torch.Tensor]:
        """Quantize values in torch's operations; return codes and scales, and what they stand for."""
        blocks, limit = values.view(-1, BLOCK_SIZE), LARGEST_CODE[self.bits]
        scales = (blocks.abs().amax(1, keepdim=True) / limit).bfloat16()
        rounded = (blocks / scales).round_().clamp_(-limit, limit)
        codes = rounded.to(torch.int8).view(torch.uint8)
        if self.bits == 4:
            codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        return (codes, scales.view(-1)), (rounded * scales).view(-1)

    def dequantize(self, encoded: Encoded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what codes and scales stand for, in torch's operations."""
        codes, scales = encoded
        if self.bits == 4:
            codes = (torch.stack([codes << 4, codes], 2).view(torch.int8) >> 4).view(len(codes), -1)
        return (codes.view(torch.int8).to(dtype) * scales.to(dtype)[:, None]).view(-1)

    def expected(self, encoded: Iterable[Encoded]) -> torch.Tensor:
        """Return what shards stand for, in float64."""
        return torch.cat([self.dequantize(each, torch.float64) for each in encoded])


def _build(stage: str, numel: int, bits: int, dtype: torch.dtype, device: torch.device) -> Setup:
    build = {"quantize": _quantizing, "average": _averaging, "dequantize": _dequantizing}[stage]
    return build(_Problem(numel, bits, dtype, device))


def _quantizing(problem: _Problem) -> Setup:
    codes, bucket = problem.codes, problem.bucket
    # All but this rank's own shard, the first one, which isn't quantized.
    sent = slice(problem.own.stop, None)
    values = (problem.error.double() + bucket)[sent]

    def gradcomp() -> Iterable[torch.Tensor]:
        codes.encode(bucket, RANK)
        return results(lambda: map(problem.encoded, codes.payload[1:]), problem.error[sent])

    def with_torch() -> Iterable[torch.Tensor]:
        total = (problem.error + bucket)[sent]
        encoded, decoded = problem.quantize(total)
        return results(lambda: [encoded], total - decoded)

    def results(encoded: Callable[[], Iterable[Encoded]], error: torch.Tensor) -> Iterator[torch.Tensor]:
        decoded = problem.expected(encoded())
        _require_nothing_lost(decoded + error, values)
        yield decoded

    providers = {"gradcomp": gradcomp, "torch": with_torch}
    return Setup(providers, lambda: [values], restore=lambda _: problem.restore())


def _averaging(problem: _Problem) -> Setup:
    codes, own = problem.codes, problem.own
    total = torch.stack([problem.expected([each]) for each in problem.sent]).sum(0)
    total += problem.own_values

    def restore(_: str) -> None:
        problem.error[own] = problem.own_values

    def gradcomp() -> Iterable[torch.Tensor]:
        codes.add(codes.mean, RANK)
        return results(problem.encoded(codes.mean), problem.error[own])

    def with_torch() -> Iterable[torch.Tensor]:
        mean = problem.own_values.clone()
        for each in problem.sent:
            mean += problem.dequantize(each)
        mean /= WORLD_SIZE
        encoded, decoded = problem.quantize(mean)
        return results(encoded, (mean - decoded) * WORLD_SIZE)

    def results(encoded: Encoded, lost: torch.Tensor) -> Iterator[torch.Tensor]:
        decoded = problem.expected([encoded])
        _require_nothing_lost(decoded * WORLD_SIZE + lost, total)
        yield decoded

    providers = {"gradcomp": gradcomp, "torch": with_torch}
    return Setup(providers, lambda: [total / WORLD_SIZE], restore=restore)


def _dequantizing(problem: _Problem) -> Setup:
    def gradcomp() -> list[torch.Tensor]:
        problem.decode(payload=problem.codes.payload, buffer=problem.out)
        return [problem.out]

    def with_torch() -> list[torch.Tensor]:
        for part, encoded in zip(problem.out.chunk(WORLD_SIZE), problem.means, strict=True):
            part.copy_(problem.dequantize(encoded))
        return [problem.out]

    return Setup(
        {"gradcomp": gradcomp, "torch": with_torch},
        lambda: [problem.expected(problem.means)],
        outputs=[problem.out],
    )


def _require_nothing_lost(kept: torch.Tensor, values: torch.Tensor) -> None:
    """Raise WrongResultError unless codes and errors together are what was quantized. Runs in checks only."""
    missing = frobenius_error(kept, values)
    if not missing <= MAX_MISSING:
        raise WrongResultError(f"codes and errors together are off by {missing:.3g} of what was quantized")
