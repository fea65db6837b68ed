"""What the Reducer says when a step goes wrong: what happened, to which parameter, and the likely causes."""

from __future__ import annotations

from collections.abc import Sequence


def marked_twice(name: str) -> str:
    return (
        f"Expected to mark a variable ready only once: parameter {name} became ready twice in one backward. Likely "
        "causes: the parameter is used outside of the forward that was prepared; several backward passes in one step "
        "(call all but the last in no_sync()); reentrant activation checkpointing of the same parameters; an exception "
        "that broke off the backward before this one, after which the next one starts afresh. If the graph is the same "
        "in every step, static_graph=True allows it"
    )


def graph_changed(name: str, num_uses: int) -> str:
    return (
        f"Your training graph has changed in this iteration: parameter {name} was used {num_uses} times in the first "
        "one. With static_graph=True every iteration has to use the same parameters as often"
    )


def unfinished(names: Sequence[str], missing: Sequence[int], rank: int) -> str:
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. Backward did not reach "
        f"{len(missing)} parameters: {', '.join(names[number] for number in missing)}. Likely causes: the loss does "
        "not depend on all outputs, or not all `forward` function outputs participate in calculating loss; a branch "
        "left layers out. If that is meant, enable unused parameter detection by passing the keyword argument "
        "`find_unused_parameters=True`. Parameter indices which did not receive grad for rank "
        f"{rank}: {' '.join(map(str, missing))}"
    )


def not_averaged(index: int, rank: int, error: Exception) -> str:
    return (
        f"rank {rank} could not average bucket {index}: {error}. If nothing is wrong on this rank, another one has ended, "
        "raised an error, or left this backward out"
    )


STATIC_NOT_PREPARED = (
    "static_graph=True and a backward within another one (reentrant activation checkpointing), but "
    "prepare_for_backward(outputs) was not called: call it with the forward's outputs before the first backward, or use "
    "checkpoint(..., use_reentrant=False)"
)
NOT_PREPARED = (
    "find_unused_parameters=True, but prepare_for_backward(outputs) was not called: call it with the forward's outputs "
    "before every backward"
)
