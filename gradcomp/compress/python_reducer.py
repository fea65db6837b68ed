"""Hooks within torch's python_reducer, which calls them while compiled autograd traces a backward.

There is no bucket: torch's DDP gives a hook (gradient, parameter), and does not look at the result. Inductor
puts the collectives of several gradients together.
"""

from typing import Any

import torch
import torch.distributed as dist

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


def is_traced_gradient(bucket: Any) -> bool:
    """Return whether a hook is being traced with a gradient and its parameter in a bucket's place.

    Only then: a file that torch.load reads may call hooks with tuples of its choice.
    """
    return isinstance(bucket, tuple) and torch.compiler.is_compiling()


def average_traced(bucket: Any, group: dist.ProcessGroup, dtype: torch.dtype | None) -> Any:
    """Average the gradient in place, on the wire in this dtype or its own; of traceable operations alone."""
    # Imported late, as torch does: it takes long.
    from torch.distributed._functional_collectives import all_reduce

    gradient: torch.Tensor = bucket[0]
    wire = gradient * (1 / group.size())
    return gradient.copy_(all_reduce(wire if dtype is None else wire.to(dtype), "sum", group))
