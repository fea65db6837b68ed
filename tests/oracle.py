"""Reference implementations of every hook in float64, for all ranks at once, in the papers' notation.

They share no code with the kernels, gradcomp.cpu or gradcomp.layout. Gradients are [rank][index]: for every
rank a list of tensors. Averages are [index], in float64.

    allreduce_hook                              mean
    fp16_compress_hook, bf16_compress_hook      sixteen_bit_mean
    powerSGD_hook                               PowerSGDOracle, after start_powerSGD_iter steps of mean
    batched_powerSGD_hook                       BatchedPowerSGDOracle, likewise
    quantization_hook                           QuantizedOracle, after start_iter steps of mean
    quantization_perchannel_hook, ..pertensor.. QuantizedOracle of the bucket as a row, without feedback
    fp16_compress_wrapper(hook)                 the hook's oracle, with `rounded` gradients
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

Gradients = Sequence[Sequence[torch.Tensor]]
Shape = Sequence[int]

# A direction whose norm is at most this fraction of the largest is a rounding error of float64.
VANISHING = 1e-12


def mean(gradients: Gradients) -> list[torch.Tensor]:
    """Compute (1/W) Σ_w g_w over W ranks. allreduce_hook computes it, every other hook approximates it."""
    return [torch.stack([_wide(g) for g in of_ranks]).mean(0) for of_ranks in zip(*gradients, strict=True)]


def sixteen_bit_mean(gradients: Gradients, dtype: torch.dtype) -> list[torch.Tensor]:
    """Compute the average of fp16_compress_hook (torch.float16) or bf16_compress_hook (torch.bfloat16).

    Every rank divides by W and rounds once to the dtype. The sum is formed in the dtype, in rank order.

    With two ranks the hook has the same bits. With more, a backend may add in another order, and the hook
    rounds 1 / W to float32.
    """
    return [
        _wide(functools.reduce(torch.add, [(_wide(g) / len(gradients)).to(dtype) for g in of_ranks]))
        for of_ranks in zip(*gradients, strict=True)
    ]


def rounded(gradients: Gradients, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Round gradients to the dtype in which fp16_compress_wrapper or bf16_compress_wrapper passes them on.

    The wrapper doesn't divide them first: in float16, values beyond ±65504 become infinite. The wrapped hook
    rounds to this dtype wherever it would round to the bucket's dtype; its oracle doesn't.
    """
    return [[g.to(dtype) for g in of_rank] for of_rank in gradients]


class PowerSGDOracle:
    """PowerSGD: algorithms 1 and 2 of Vogels, Karimireddy and Jaggi (NeurIPS 2019), tensor by tensor.

    shapes: the tensors' shapes. A tensor of two or more dimensions is a matrix M [n, m], its first dimension
        against the others. It is compressed if (n + m) · r · min_compression_rate < n · m, where
        r = min(n, m, rank). All other tensors are averaged exactly.

    compressed: the indices of the compressed tensors. Tensors with equal n and m are next to each other.
    qs: for each compressed tensor the Q [m, r] on which the next step projects. Only its span matters. None
        before the first step, and before every step without warm start: then `step` needs its argument qs.
    errors: [rank][index], float64: each rank's gradient + last error, minus the average. None, for zeros,
        before the first step. Always zero for uncompressed tensors and without error feedback.

    To continue from a hook's state, assign to qs and errors.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        rank: int = 1,
        min_compression_rate: float = 2,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
    ):
        self.shapes = [tuple(shape) for shape in shapes]
        self.error_feedback, self.warm_start = error_feedback, warm_start
        groups: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(self.shapes):
            if len(shape) > 1:
                n, m = matrix_shape(shape)
                if (n + m) * min(n, m, rank) * min_compression_rate < n * m:
                    groups.setdefault((n, m), []).append(index)
        self.compressed = [index for group in groups.values() for index in group]
        self.qs: list[torch.Tensor] | None = None
        self.errors: list[list[torch.Tensor]] | None = None

    def step(self, gradients: Gradients, qs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run one step of all ranks and return the averages.

        qs: replaces the Q kept from the last step.

        The hooks replace a vanishing direction, as of a zero gradient, by a random one, and reset Q and error
        after a gradient of inf or NaN. The oracle does neither.

        Raises ValueError if there is no Q.
        """
        qs = self.qs if qs is None else qs
        if qs is None:
            raise ValueError("no Q to project on: give qs in the first step, and without warm start in each")
        if self.errors is None:
            zeros = [torch.zeros(shape, dtype=torch.float64) for shape in self.shapes]
            self.errors = [list(zeros) for _ in gradients]
        averages, new_qs = mean(gradients), []
        for index, q in zip(self.compressed, qs, strict=True):
            shape = self.shapes[index]
            matrices = [
                (_wide(gradient[index]) + error[index]).reshape(matrix_shape(shape))
                for gradient, error in zip(gradients, self.errors, strict=True)
            ]
            average, new_q = powersgd_average(matrices, q)
            averages[index] = average.view(shape)
            new_qs.append(new_q)
            if self.error_feedback:
                for error, matrix in zip(self.errors, matrices, strict=True):
                    error[index] = (matrix - average).view(shape)
        self.qs = new_qs if self.warm_start else None
        return averages


class BatchedPowerSGDOracle(PowerSGDOracle):
    """The oracle of batched_powerSGD_hook: PowerSGD of a whole bucket as one zero-padded square matrix.

    shapes: the shapes of the bucket's tensors, in the bucket's order.
    qs: a list of one Q [side, r].
    errors: for every rank a list of one error [side, side]. Elements behind the bucket's end are zero: there
        P Qᵀ is dropped, as it belongs to no gradient.
    """

    def __init__(
        self, shapes: Sequence[Shape], rank: int = 1, *, error_feedback: bool = True, warm_start: bool = True
    ):
        self.bucket_shapes = [tuple(shape) for shape in shapes]
        self.numel = sum(map(math.prod, self.bucket_shapes))
        side = math.ceil(math.sqrt(self.numel))
        super().__init__([(side, side)], rank, 0, error_feedback=error_feedback, warm_start=warm_start)

    def step(self, gradients: Gradients, qs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        (average,) = super().step([[self.square(of_rank)] for of_rank in gradients], qs)
        for (error,) in self.errors or ():
            error.view(-1)[self.numel :] = 0
        return split(average.view(-1)[: self.numel], self.bucket_shapes)

    def square(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Arrange the bucket's tensors, or its flat buffer, as the square matrix."""
        square = torch.zeros(self.shapes[0], dtype=torch.float64)
        square.view(-1)[: self.numel] = torch.cat([tensor.flatten() for tensor in tensors])
        return square


class QuantizedOracle:
    """The quantized all-reduce with error feedback, tensor by tensor.

    shapes: the tensors' shapes. A tensor of two or more dimensions with at least block_size elements is
        quantized in blocks, the last block padded with zeros. All other tensors are averaged exactly.

    Rank i owns the i-th of W shards: all tensors' blocks, in their order, are divided evenly among the ranks.
    The errors e_r are zeros at first. In a step, M_r = g_r + e_r. In a block that rank i owns

        T = M_i + Σ quantized(M_r) of the other ranks        then e_r = M_r − quantized(M_r)
        average = quantized(T / W)                           then e_i = T − W · average

    In one exchange nobody owns a block: T = Σ quantized(M_r) of all ranks, and average = T / W.

    is_one_exchange: None for what the hooks do without a delay: True between two ranks.

    errors: [rank][index], float64, the e_r. None, for zeros, before the first step.

    To continue from a hook's state, assign to errors.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        bits: int = 4,
        block_size: int = 128,
        *,
        error_feedback: bool = True,
        is_one_exchange: bool | None = None,
    ):
        self.shapes, self.is_one_exchange = [tuple(shape) for shape in shapes], is_one_exchange
        self.bits, self.block_size, self.error_feedback = bits, block_size, error_feedback
        self.quantized = [
            index
            for index, shape in enumerate(self.shapes)
            if len(shape) > 1 and math.prod(shape) >= block_size
        ]
        self.errors: list[list[torch.Tensor]] | None = None

    def step(self, gradients: Gradients) -> list[torch.Tensor]:
        """Run one step of all ranks and return the averages.

        The hooks keep the errors of a tensor that no rank's backward has used. The oracle knows none.
        """
        world_size, averages = len(gradients), mean(gradients)
        if self.errors is None:
            zeros = [torch.zeros(shape, dtype=torch.float64) for shape in self.shapes]
            self.errors = [list(zeros) for _ in gradients]
        num_blocks = [-(-math.prod(self.shapes[index]) // self.block_size) for index in self.quantized]
        owners = torch.arange(sum(num_blocks)) // max(1, -(-sum(num_blocks) // world_size))
        is_one_exchange = world_size == 2 if self.is_one_exchange is None else self.is_one_exchange
        if is_one_exchange:
            owners.fill_(-1)
        for index, owner in zip(self.quantized, owners.split(num_blocks), strict=True):
            sent, lost, is_own = [], [], [(owner == rank)[:, None] for rank in range(world_size)]
            for gradient, error, own in zip(gradients, self.errors, is_own, strict=True):
                matrix = self._blocks(_wide(gradient[index]) + error[index])
                sent.append(torch.where(own, matrix, quantized(matrix, self.bits)))
                lost.append(matrix - sent[-1])
            total = torch.stack(sent).sum(0)
            average = total / world_size
            if not is_one_exchange:
                average = quantized(average, self.bits)
            averages[index] = self._tensor(average, index)
            for error, own, senders in zip(self.errors, is_own, lost, strict=True):
                blocks = torch.where(own, total - world_size * average, senders)
                # Zero without error feedback, and where an element isn't finite.
                kept = torch.where(blocks.isfinite(), blocks, 0.0) * self.error_feedback
                error[index] = self._tensor(kept, index)
        return averages

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        padding = -tensor.numel() % self.block_size
        return torch.nn.functional.pad(tensor.flatten(), (0, padding)).view(-1, self.block_size)

    def _tensor(self, blocks: torch.Tensor, index: int) -> torch.Tensor:
        return blocks.flatten()[: math.prod(self.shapes[index])].view(self.shapes[index])


def quantized(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Round blocks [num_blocks, size] to multiples of one bf16 scale each, at 8 or 4 bits.

    The scale is the block's largest absolute value / L, rounded up; L is 127 at 8 bits and 7 at 4 bits.
    A block with inf or NaN becomes NaN. The limits of a dtype's range are not modeled.
    """
    is_finite = blocks.isfinite().all(1, keepdim=True)
    finite = torch.where(is_finite, blocks, 0.0)
    exact = finite.abs().amax(1, keepdim=True) / (127 if bits == 8 else 7)
    nearest = exact.to(torch.bfloat16)
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    scale = torch.where(nearest < exact, above, nearest).double()
    return torch.where(is_finite, (finite / scale.where(scale > 0, 1.0)).round() * scale, torch.nan)


def powersgd_average(matrices: Sequence[torch.Tensor], q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute algorithm 1 of Vogels et al. 2019 from every rank's M [n, m] and a Q [m, r], q.

    Returns P Qᵀ [n, m] and the new Q [m, r].

    Let M̄ be the mean of the M. Then P Qᵀ = P Pᵀ M̄ is M̄ projected on the span of M̄ q. So P Qᵀ depends on
    the span of q, but not on the basis P. ‖M̄ − P Qᵀ‖ ≤ ‖M̄‖. An M̄ of rank r or less is reproduced exactly,
    unless a part of it is orthogonal to q.
    """
    directions = basis(q)
    (p,) = mean([[matrix @ directions] for matrix in matrices])  # the first all-reduce
    p = basis(p)
    (new_q,) = mean([[matrix.mT @ p] for matrix in matrices])  # the second
    return p @ new_q.mT, new_q


def basis(columns: torch.Tensor) -> torch.Tensor:
    """Compute an orthonormal basis of the columns' span in float64.

    The basis is [n, r], or narrower if columns are linearly dependent. It is NaN if an element isn't finite.
    """
    columns = columns.double()
    if not columns.isfinite().all():
        return torch.full_like(columns, torch.nan)
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    orthonormal: torch.Tensor = left[:, values > VANISHING * values[:1]]
    return orthonormal


def projector(columns: torch.Tensor) -> torch.Tensor:
    """Compute the projector [n, n] onto the span of columns [n, r]; every basis of the span has the same."""
    orthonormal = basis(columns)
    return orthonormal @ orthonormal.mT


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return (n, m) of a gradient seen as a matrix, its first dimension against the others."""
    return shape[0], math.prod(shape[1:])


def split(flat: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Split a bucket's flat buffer into its tensors."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
