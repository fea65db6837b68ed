"""The Reducer's error messages: what happened, to which parameter, and the likely causes."""

from __future__ import annotations

from collections.abc import Sequence


def marked_twice(name: str) -> str:
    return (
        f"Expected to mark a variable ready only once: parameter {name} became ready twice in one backward. "
        "Likely causes: the parameter is used outside of the forward that was prepared; several backward "
        "passes of one forward, each of which reaches a part of the model (add the losses up and call "
        "backward once, or let the wrapper have find_unused_parameters=True); several backward passes in one "
        "step (call all but the last in no_sync()); reentrant activation checkpointing of the same "
        "parameters; an exception that broke off the backward before this one, after which the next one "
        "starts at zero. If the graph is the same in every step, static_graph=True allows it"
    )


def graph_changed(name: str, num_uses: int) -> str:
    return (
        f"Your training graph has changed in this iteration: parameter {name} was used {num_uses} times in "
        "the first one. With static_graph=True every iteration must use the same parameters as often"
    )


def unfinished(names: Sequence[str], missing: Sequence[int], rank: int) -> str:
    if not missing:
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. Backward "
            "reached all parameters, but did not come to its end: an exception broke it off"
        )
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. Backward did "
        f"not reach {len(missing)} parameters: {', '.join(names[index] for index in missing)}. Likely "
        "causes: the loss does not depend on all outputs, or not all `forward` function outputs participate "
        "in calculating loss; a branch left layers out; parameters were frozen or replaced after "
        "construction. If that is meant, enable unused parameter detection by passing the keyword argument "
        f"`find_unused_parameters=True`. Parameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, missing))}"
    )


def converted(names: Sequence[str]) -> str:
    return (
        f"{_some(names)} no longer where gradients are averaged: autograd accumulates theirs elsewhere since "
        "they were moved or converted (.to(), .double(), .cuda(), other .data). Give the module its dtype "
        "and device before it is wrapped, and before a Reducer is constructed"
    )


def not_averaged_parameters(names: Sequence[str]) -> str:
    return (
        f"{_some(names)} not averaged, and have gradients of this rank's own: they were added, replaced or "
        "unfrozen (requires_grad_, load_state_dict(assign=True), a new layer) after the module was wrapped. "
        "Wrap the module again after such a change; for parameters that are meant to stay each rank's own, "
        "call DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names) before"
    )


def averaged_twice(name: str, theirs: Sequence[int], ours: Sequence[int]) -> str:
    return (
        f"parameter {name} is being averaged by two Reducers in one backward, over the ranks {list(theirs)} "
        f"and {list(ours)}: its .grad can't be both means. Likely cause: an earlier Reducer or wrapper was "
        "kept. Call close() on that Reducer (on a wrapper's reducer: ddp.reducer.close()), or delete it"
    )


def stepped_in_backward(names: Sequence[str]) -> str:
    return (
        f"{_some(names)} changed, or without a gradient, when backward ends, before the ranks' mean was "
        "there. Likely cause: an optimizer that steps in register_post_accumulate_grad_hook or in torch's "
        "_apply_optimizer_in_backward, with this rank's gradient. Step after backward(), when .grad is the "
        "mean; gradcomp.DistributedDataParallel steps optimizers of _apply_optimizer_in_backward at the "
        "right time, if they are attached before the forward"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"parameters {shown} are"


def other_group(hook: str, ranks: Sequence[int], expected: Sequence[int]) -> str:
    return (
        f"the communication hook {hook} averages over the ranks {list(ranks)}, but the parameters are "
        f"averaged over {list(expected)}. Give the hook's state the process group that "
        "DistributedDataParallel or the Reducer has; None means the default group"
    )


COMPILED_AUTOGRAD = (
    "compiled autograd (torch._dynamo.config.compiled_autograd) runs this backward, and does not tell a "
    "Reducer when it ends. Set torch._dynamo.config.compiled_autograd = False, or call backward() outside of "
    "the function that torch.compile compiles: forwards are compiled all the same. For a compiled backward "
    "use torch's DistributedDataParallel with torch._dynamo.config.optimize_ddp = 'python_reducer', where "
    "allreduce_hook, fp16_compress_hook and bf16_compress_hook of gradcomp run"
)
STATIC_NOT_PREPARED = (
    "static_graph=True and a backward within another one (reentrant activation checkpointing), but "
    "prepare_for_backward(outputs) was not called: call it with the forward's outputs before the first "
    "backward, or use checkpoint(..., use_reentrant=False)"
)
NOT_PREPARED = (
    "find_unused_parameters=True, but prepare_for_backward(outputs) was not called: call it with the "
    "forward's outputs before every backward"
)
