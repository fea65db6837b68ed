"""The properties of gradient compression, one function each; docs/testing.md has them in a table.

    property(hook, make_state, workload, *, claims=None, ranks="simulated") -> measured value, or None

    claims: the hook's claims; by default claims_of(hook, make_state) infers them.
    ranks: "simulated", or "gloo" for real processes.

Returns None without a check if the hook doesn't claim the property.

Raises PropertyFailure if the property fails on this workload: the message has the expected and the actual
value, and the rank, step and tensor. Raises RankError if the hook doesn't finish.
"""

from .subject import Property

# In the order in which they are checked: a property that explains others comes before these.
# isort: off
from .robustness import completes as completes
from .robustness import finite_in_finite_out as finite_in_finite_out
from .robustness import replicas_identical as replicas_identical
from .robustness import deterministic as deterministic
from .robustness import stays_in_its_group as stays_in_its_group
from .robustness import random_state_kept as random_state_kept
from .robustness import same_in_processes as same_in_processes
from .accuracy import averages as averages
from .accuracy import zero_stays_zero as zero_stays_zero
from .accuracy import exact_up_to_rank as exact_up_to_rank
from .accuracy import contraction as contraction
from .memory import held_back_comes_out as held_back_comes_out
from .memory import tracks_the_mean as tracks_the_mean
from .memory import no_error_where_exact as no_error_where_exact
from .accuracy import unbiased as unbiased
from .accuracy import variance as variance
from .robustness import scale_equivariant as scale_equivariant
from .robustness import rank_permutation as rank_permutation
from .robustness import bucket_insensitive as bucket_insensitive
from .robustness import nonfinite_seen_by_all as nonfinite_seen_by_all
from .memory import checkpoint_round_trip as checkpoint_round_trip
from .memory import bounded_memory as bounded_memory

__all__ = [name for name, each in globals().items() if isinstance(each, Property)]
