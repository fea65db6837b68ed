"""PowerSGD: all-reduce two thin factors of every gradient matrix instead of the matrix.

Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``. docs/powersgd.md has the algorithm
as implemented, and how it differs from torch's.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.bucket import require_bucket
from gradcomp.compress import consolidation
from gradcomp.compress.checkpoint import PROGRESS
from gradcomp.compress.consolidation import consolidated_state_dict, load_from_dcp, per_rank_state_dict
from gradcomp.compress.powersgd import LowRankCompressor, start_compressor
from gradcomp.rules import described

from . import powersgd_checkpoint, powersgd_from_torch
from .powersgd_options import NOT_TORCHS, OPTIONS
from .powersgd_state import PowerSGDState

__all__ = [
    "PowerSGDState",
    "average_errors",
    "batched_powerSGD_hook",
    "consolidated_state_dict",
    "from_torch",
    "load_from_dcp",
    "per_rank_state_dict",
    "powerSGD_hook",
]


def powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's matrices through factors of low rank, everything else exactly.

    For the first ``state.start_powerSGD_iter`` steps, allreduce_hook. Then, with M [n, m] a gradient seen as
    a matrix (its first dimension against the others), r the rank and W the world size:

    1. M ← gradient + error. 2. P ← M Q. 3. All-reduce P and, in the same collective, the tensors that are
    vectors or not worth compressing. 4. Orthonormalize P. 5. Q ← Mᵀ P. 6. All-reduce Q. 7. gradient ← P Qᵀ;
    error ← M − P Qᵀ.

    On the wire: two collectives, (n + m) · r elements per matrix, in the bucket's dtype. State: the error (as
    much memory as the compressed gradients) and the factors, per bucket. Source: Vogels, Karimireddy and
    Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.

    A step with inf or NaN gives inf or NaN on every rank; the matrices it touched start afresh in the next.
    On CUDA there are seven kernel launches per bucket and step, eleven with int8 factors, and nothing waits
    for the host.

    To read the algorithm first, see `power_sgd` in gradcomp/testing/simple.py: 33 lines of plain torch.

    Raises TypeError for any state but a PowerSGDState, and for any bucket but a floating-point one.

    Example::

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    """
    return _low_rank_hook("powerSGD_hook", state, bucket, square=False)


def batched_powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the whole bucket through factors of low rank, as one square matrix padded with zeros.

    The steps of powerSGD_hook with one matrix per bucket, biases included. It sends less than powerSGD_hook
    and loses more: a bucket cut into rows of equal length has little of its layers' structure. Prefer
    powerSGD_hook, which costs no more here.

    Raises TypeError for any state but a PowerSGDState, and for any bucket but a floating-point one.

    Example::

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
        ddp_model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    """
    return _low_rank_hook("batched_powerSGD_hook", state, bucket, square=True)


def _low_rank_hook(
    name: str, state: PowerSGDState, bucket: dist.GradBucket, square: bool
) -> torch.futures.Future[torch.Tensor]:
    require_bucket(name, bucket)
    if not isinstance(state, PowerSGDState):
        hint = ": from_torch converts torch's" if hasattr(state, "q_memory_dict") else ""
        raise TypeError(f"{name} takes a gradcomp PowerSGDState as its state, got {described(state)}{hint}")
    make, later = (
        (start_compressor, LowRankCompressor) if state.is_quantized_start else (LowRankCompressor, None)
    )
    return state.average(name, bucket, make, state.compressor_options(square=square), later)


def average_errors(state_dicts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the state_dicts of all ranks of a run into one, for every rank of a run with any number of ranks.

    Its errors are the mean of the ranks' errors, so the mean in the new run is the same. state_dicts: a list,
    or an iterator that loads one after another; each is needed only until the next.

    Raises ValueError for an empty list and for state_dicts of different steps or buckets, and what
    load_state_dict raises for any other misfit.
    """
    return consolidation.average_errors(state_dicts, powersgd_checkpoint.checked)


def from_torch(state: Any, *, wait_for_buckets: bool = True) -> PowerSGDState:
    """Make a PowerSGDState that continues from torch's: hyperparameters, progress, errors and factors.

    state: a torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState, as loaded by
    ``torch.load(..., weights_only=False)``. Its errors of uncompressed tensors are dropped, because those
    tensors are averaged exactly here.
    wait_for_buckets: torch identifies its memories by bucket index only, and DDP arranges a new model's
    buckets after its first step. So that step is a plain all-reduce, and the memories go to the buckets of
    the next one.
    False: the first step's buckets are torch's already, as in your own training loop.

    Raises TypeError for anything else.
    """
    if not hasattr(state, "q_memory_dict"):
        raise TypeError(f"from_torch takes a PowerSGDState of torch's, got {type(state).__name__}")
    names = set(OPTIONS) - set(NOT_TORCHS)
    ours = PowerSGDState(state.process_group, **{name: getattr(state, name) for name in names})
    for name, rule in PROGRESS.items():
        setattr(ours, name, rule(name, getattr(state, name)))
    ours._from_torch = powersgd_from_torch.memories_of(state)
    ours._waits_for_buckets = wait_for_buckets
    return ours
