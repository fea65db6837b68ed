"""The properties that check_hook checks: what claims each, and the workloads that are searched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from gradcomp.testing import properties
from gradcomp.testing.claims import Claims
from gradcomp.testing.drawn import Drawn
from gradcomp.testing.properties.failure import NonFiniteFailure
from gradcomp.testing.ranks import RankError
from gradcomp.testing.workload import Workload

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A property, and the way it is searched for a counter-example.

    check: the property.
    unclaimed(claims): the reason why it doesn't apply, or "".
    workloads(drawn): the strategies that draw its workloads.
    measure: the name of what it returns. worst: chooses the worse of two such values.
    fraction: the fraction of max_examples to try, less than 1 for expensive properties.
    explains: the exceptions that other properties raise if this one fails.
    listed(drawn): workloads that are tried besides the drawn ones.
    """

    check: Callable[..., Any]
    unclaimed: Callable[[Claims], str] = lambda claims: ""
    workloads: Callable[[Drawn], Sequence[SearchStrategy[Workload]]] = lambda drawn: [drawn.any()]
    measure: str = ""
    worst: Callable[[float, float], float] = max
    fraction: float = 1.0
    explains: tuple[type[AssertionError], ...] = ()
    listed: Callable[[Drawn], Iterable[Workload]] = lambda drawn: ()

    @property
    def name(self) -> str:
        return self.check.__name__


def _of_lossy(claims: Claims) -> str:
    return "" if claims.is_lossy else "averages"


def _of_state(claims: Claims) -> str:
    return "" if claims.error_feedback else _of_lossy(claims) or "no error feedback"


CASES = (
    Case(
        properties.completes,
        workloads=lambda drawn: [drawn.any(extra_steps=2), drawn.rearranged()],
        explains=(RankError,),
    ),
    Case(properties.finite_in_finite_out, measure="up to", explains=(NonFiniteFailure,)),
    Case(properties.replicas_identical, listed=lambda drawn: drawn.long()),
    Case(properties.deterministic),
    Case(
        properties.averages,
        lambda claims: "lossy" if claims.is_lossy and not (claims.start or claims.exact_shapes) else "",
        listed=lambda drawn: [*drawn.various(), *drawn.long()],
        measure="error / tolerance ≤",
    ),
    Case(
        properties.zero_stays_zero,
        lambda claims: "" if claims.keeps_zeros else "mixes elements",
        lambda drawn: [drawn.any(masked=0.5)],
        listed=lambda drawn: [*drawn.various(masked=0.5), *drawn.long(masked=0.5)],
    ),
    Case(
        properties.exact_up_to_rank,
        lambda claims: _of_lossy(claims) or ("" if claims.exact_rank else "exact for no rank"),
        listed=lambda drawn: [*drawn.odd(), *drawn.various()],
        measure="error / tolerance ≤",
    ),
    Case(
        properties.contraction,
        lambda claims: _of_lossy(claims) or ("no contraction" if claims.contraction is None else ""),
        listed=lambda drawn: [*drawn.odd(), *drawn.various(), *drawn.long()],
        measure="δ ≥",
        worst=min,
    ),
    Case(
        properties.error_feedback_identity,
        lambda claims: _of_state(claims) or ("" if claims.errors_of else "errors can't be read"),
        listed=lambda drawn: [*drawn.various(), *drawn.long()],
        measure="error / tolerance ≤",
    ),
    Case(
        properties.held_back_comes_out,
        _of_state,
        lambda drawn: drawn.flushed(),
        "still held at the end ≤",
        fraction=0.5,
        listed=lambda drawn: drawn.long(noise=0.0, zero_steps=16),
    ),
    Case(
        properties.no_error_where_exact,
        lambda claims: (
            _of_state(claims) or ("" if claims.errors_of and claims.exact_shapes else "no exact shapes")
        ),
    ),
    Case(
        properties.unbiased,
        lambda claims: "" if claims.unbiased else _of_lossy(claims) or "biased",
        lambda drawn: [drawn.small()],
        "t ≤",
        fraction=0.3,
        listed=lambda drawn: [*drawn.probed(), *drawn.long()],
    ),
    Case(
        properties.scale_equivariant,
        lambda claims: "" if claims.scale_equivariant else "not equivariant",
        measure="difference / tolerance ≤",
    ),
    Case(
        properties.rank_permutation,
        lambda claims: "" if claims.rank_symmetric else "not symmetric",
        measure="difference / tolerance ≤",
    ),
    Case(
        properties.bucket_insensitive,
        lambda claims: "" if claims.bucket_insensitive else "depends on buckets",
        measure="difference / tolerance ≤",
    ),
    Case(
        properties.nonfinite_seen_by_all,
        workloads=lambda drawn: [drawn.poisoned()],
        listed=lambda drawn: drawn.every_poison(),
    ),
    Case(
        properties.checkpoint_round_trip,
        lambda claims: "" if claims.checkpoint else "no state that can be saved",
        lambda drawn: [drawn.any(extra_steps=4)],
    ),
    Case(
        properties.bounded_memory,
        lambda claims: "" if claims.memory is not None else "no state",
        measure="state / gradients ≤",
    ),
)
