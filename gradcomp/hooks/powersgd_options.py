"""PowerSGD's options: their names, the values that each accepts, and the constraints between them.

The constructor, assignments to a state's attributes, checkpoints and the comparison between ranks all use
this table.
"""

from collections.abc import Mapping
from typing import Any

import torch

from gradcomp.rules import (
    BITS,
    EPSILON,
    FACTOR_DTYPE,
    FLAG,
    FREQUENCY,
    RANK,
    RATE,
    SEED,
    UNCOMPRESSED_DTYPE,
    WHOLE,
)

OPTIONS = {
    "matrix_approximation_rank": RANK,
    "start_powerSGD_iter": WHOLE,
    "min_compression_rate": RATE,
    "use_error_feedback": FLAG,
    "warm_start": FLAG,
    "orthogonalization_epsilon": EPSILON,
    "random_seed": SEED,
    "compression_stats_logging_frequency": FREQUENCY,
    "batch_tensors_with_same_shape": FLAG,
    "factor_dtype": FACTOR_DTYPE,
    "uncompressed_dtype": UNCOMPRESSED_DTYPE,
    "start_bits": BITS,
}
# The options that torch's state does not have.
NOT_TORCHS = ("random_seed", "factor_dtype", "uncompressed_dtype", "start_bits")


def checked_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a mapping, as they are stored. Raises ValueError for one that isn't accepted."""
    checked = {name: rule(name, values[name]) for name, rule in OPTIONS.items()}
    start = checked["start_powerSGD_iter"]
    if (checked["use_error_feedback"] or checked["warm_start"]) and start <= 1:
        raise ValueError(
            "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
            "because PowerSGD can only be applied after the first two iterations in DDP. "
            f"Got {start}."
        )
    if checked["uncompressed_dtype"] is not None and checked["factor_dtype"] != torch.int8:
        raise ValueError(
            f"uncompressed_dtype is {checked['uncompressed_dtype']}, which goes with factor_dtype=torch.int8 "
            f"only, but factor_dtype is {checked['factor_dtype']}: what isn't compressed is sent in that, too"
        )
    return checked


def options_of(state: Any) -> dict[str, Any]:
    """Return a state's options by name, in the order of the table."""
    return {name: getattr(state, name) for name in OPTIONS}
