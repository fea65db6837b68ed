"""The properties of gradient compression, one function each; docs/testing.md has them in a table.

    property(hook, make_state, workload, *, claims=None, ranks="simulated") -> measured value, or None

    claims: the hook's claims; by default claims_of(hook, make_state) infers them.
    ranks: "simulated", or "gloo" for real processes.

Returns None without a check if the hook doesn't claim the property.

Raises PropertyFailure if the property fails on this workload: the message has the expected and the actual
value, and the rank, step and tensor. Raises RankError if the hook doesn't finish.
"""

from .accuracy import averages, contraction, exact_up_to_rank, unbiased, variance, zero_stays_zero
from .memory import (
    bounded_memory,
    checkpoint_round_trip,
    held_back_comes_out,
    no_error_where_exact,
    tracks_the_mean,
)
from .robustness import (
    bucket_insensitive,
    completes,
    deterministic,
    finite_in_finite_out,
    nonfinite_seen_by_all,
    random_state_kept,
    rank_permutation,
    replicas_identical,
    same_in_processes,
    scale_equivariant,
    stays_in_its_group,
)

# In the order in which they are checked: a property that explains others comes before these.
__all__ = [  # noqa: RUF022
    "completes",
    "finite_in_finite_out",
    "replicas_identical",
    "deterministic",
    "stays_in_its_group",
    "random_state_kept",
    "same_in_processes",
    "averages",
    "zero_stays_zero",
    "exact_up_to_rank",
    "contraction",
    "held_back_comes_out",
    "tracks_the_mean",
    "no_error_where_exact",
    "unbiased",
    "variance",
    "scale_equivariant",
    "rank_permutation",
    "bucket_insensitive",
    "nonfinite_seen_by_all",
    "checkpoint_round_trip",
    "bounded_memory",
]
