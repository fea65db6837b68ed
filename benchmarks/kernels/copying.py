"""Cast a bucket to 16 bits with 1/W fused, and back; gather gradients into one buffer, and scatter them.

Providers of casts:

gradcomp        one pass each way.
torch           what torch's fp16 and bf16 hooks do: .to(dtype).div_(W), and .copy_().

To gather, with 1/W fused, and to scatter, a call handles all buckets of a model, one after another, as a
training step does; on CPU, and with --quick, one of its buckets:

gradcomp        one launch per bucket.
torch_ddp       what DDP's reducer does: one kernel per parameter. The reducer's loop is in C++, this
                one in Python, so its host time is only an upper bound.
torch_foreach   torch._foreach_copy_, then one multiplication of the buffer.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks import models
from benchmarks.harness import Case, Setup, rounding_error
from gradcomp import ops
from gradcomp.layout import FlatLayout

WORLD_SIZE = 6  # not a power of two, so that divisions round


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
                build=partial(_casting, numel, dtype, device, compresses=True),
            )
            yield describe(
                "decompress_cast",
                dtype=f"{wire}->float32",
                max_error=0.0,  # every 16-bit value is an fp32 value
                build=partial(_casting, numel, dtype, device, compresses=False),
            )
    small = quick or device.type == "cpu"
    for model in models.MODELS:
        for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
            bucket_shapes = [models.one_bucket(model, dtype)] if small else models.buckets(model, dtype)
            num_elements = sum(map(models.num_elements, bucket_shapes))
            describe = partial(
                Case,
                label=f"{model}, {len(bucket_shapes)} buckets" if not small else f"{model}, 1 bucket",
                dtype=str(dtype).removeprefix("torch."),
                num_bytes=2 * num_elements * dtype.itemsize,
                min_launches=len(bucket_shapes),
                max_error=rounding_error(dtype),
                baseline="torch_ddp",
            )
            for name in ("flatten", "unflatten"):
                build = partial(_copying, bucket_shapes, dtype, device, gathers=name == "flatten")
                yield describe(name, build=build)


def _casting(numel: int, dtype: torch.dtype, device: torch.device, *, compresses: bool) -> Setup:
    source, out = torch.randn(numel, device=device), torch.empty(numel, dtype=dtype, device=device)
    scale, torchs = 1 / WORLD_SIZE, lambda: [source.to(dtype).div_(WORLD_SIZE)]
    if not compresses:
        source, out = source.to(dtype), torch.empty_like(source)
        scale, torchs = 1.0, lambda: [out.copy_(source)]
    return Setup(
        providers={"gradcomp": lambda: [ops.cast(source, out=out, scale=scale)], "torch": torchs},
        reference=lambda: [source.double() * scale],
        outputs=[out],
    )


class Bucket:
    """A bucket's gradients, allocated one by one as autograd does it, and the buffer that gathers them."""

    def __init__(self, shapes: Sequence[models.Shape], dtype: torch.dtype, device: torch.device):
        self.layout = FlatLayout(shapes)
        self.gradients = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
        self.buffer = torch.randn(self.layout.numel, dtype=dtype, device=device)
        numels = [gradient.numel() for gradient in self.gradients]
        self.views = [part.view(shape) for part, shape in zip(self.buffer.split(numels), shapes, strict=True)]


def _copying(
    bucket_shapes: list[list[models.Shape]], dtype: torch.dtype, device: torch.device, gathers: bool
) -> Setup:
    buckets = [Bucket(shapes, dtype, device) for shapes in bucket_shapes]
    outputs = [bucket.buffer for bucket in buckets]
    if not gathers:
        outputs = [gradient for bucket in buckets for gradient in bucket.gradients]

    def gradcomp() -> list[torch.Tensor]:
        for bucket in buckets:
            if gathers:
                ops.flatten(bucket.gradients, bucket.layout, out=bucket.buffer, scale=1 / WORLD_SIZE)
            else:
                ops.unflatten(bucket.buffer, bucket.layout, out=bucket.gradients)
        return outputs

    def torch_ddp() -> list[torch.Tensor]:
        for bucket in buckets:
            pairs = zip(bucket.gradients, bucket.views, strict=True)
            if gathers:
                for gradient, view in pairs:
                    torch.mul(gradient, 1 / WORLD_SIZE, out=view)
            else:
                for gradient, view in pairs:
                    gradient.copy_(view)
        return outputs

    def torch_foreach() -> list[torch.Tensor]:
        for bucket in buckets:
            if gathers:
                torch._foreach_copy_(bucket.views, bucket.gradients)
                bucket.buffer.mul_(1 / WORLD_SIZE)
            else:
                torch._foreach_copy_(bucket.gradients, bucket.views)
        return outputs

    def reference() -> Iterator[torch.Tensor]:
        for bucket in buckets:
            if gathers:
                yield torch.cat([gradient.double().view(-1) for gradient in bucket.gradients]) / WORLD_SIZE
            else:
                yield from (view.double() for view in bucket.views)

    providers = {"gradcomp": gradcomp, "torch_ddp": torch_ddp, "torch_foreach": torch_foreach}
    return Setup(providers, reference, outputs=outputs)
