"""The state of a hook with any compressor, and that hook."""

from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint import (
    PROGRESS,
    SETTINGS,
    as_dict,
    checked,
    has_errors,
    memories_of,
    to_state_dict,
)
from .compressor import Compressor
from .process_group import joined_group
from .state import CompressedAveraging

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


class CompressorState(CompressedAveraging):
    """What compress_hook is registered with: a compressor of your own, and all that it needs around it.

    compressor: a subclass of Compressor; called as compressor(bucket: BucketSpec, options) for every bucket.
    options: a frozen dataclass of plain values, which raises ValueError for what cannot be; None for a compressor without.
    process_group: None for the default one.
    start_iter: steps of plain all-reduce before compression starts; at least 2, because DDP rebuilds its buckets after the
        first step.
    random_seed: of what a compressor chooses at random; the same on all ranks.
    compression_stats_logging_frequency: steps between log lines with compression_stats().

    Raises TypeError for a compressor, options or a process group that are none, ValueError for a setting that cannot be.

    Checkpoints: state_dict() and load_state_dict(). Every rank has errors of its own: save one per rank to continue exactly,
    or consolidated_state_dict(state) for all ranks; per_rank_state_dict and load_from_dcp for torch.distributed.checkpoint.

    Example::

        state = CompressorState(TopK, TopKOptions(density=0.01))
        ddp_model.register_comm_hook(state, compress_hook)
    """

    def __init__(
        self,
        compressor: type[Compressor],
        options: Any = None,
        process_group: Any = None,
        *,
        start_iter: int = 2,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
    ):
        if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
            raise TypeError(f"CompressorState takes a subclass of Compressor, got {compressor!r}")
        if options is not None and (isinstance(options, type) or not _is_frozen(options)):
            raise TypeError(
                f"CompressorState takes a frozen dataclass or None as its options, got {options!r}"
            )
        settings = {
            "start_iter": start_iter,
            "random_seed": random_seed,
            "compression_stats_logging_frequency": compression_stats_logging_frequency,
        }
        if SETTINGS["start_iter"]("start_iter", start_iter) < 2:
            raise ValueError(
                f"start_iter is {start_iter}, but DDP rebuilds its buckets after the first step: at least 2"
            )
        super().__init__(process_group)
        self._compressor, self._options = compressor, options
        self._set({name: rule(name, settings[name]) for name, rule in SETTINGS.items()})

    @property
    def algorithm(self) -> str:
        return self._compressor.__name__

    @property
    def options(self) -> Any:
        """The compressor's options."""
        return self._options

    @property
    def start_iter(self) -> int:
        return self._start_iter

    def compared_options(self) -> dict[str, Any]:
        shared = {"start_iter": self.start_iter, "random_seed": self.random_seed}
        return {"compressor": self.algorithm, **shared, **as_dict(self._options)}

    def _set(self, settings: dict[str, int]) -> None:
        self._start_iter, self.random_seed = settings["start_iter"], settings["random_seed"]
        self.compression_stats_logging_frequency = settings["compression_stats_logging_frequency"]

    def state_dict(self) -> dict[str, Any]:
        """All but the process group, in plain types and tensors of its own.

        "version": of this format. "algorithm": the compressor's name. "options", and settings and progress by name. "buckets"
        maps a bucket's index to its "kind" (dtype and options), "shapes" and "parameters" (numbers, in the order in which the
        hook first saw them), and what the compressor's state() gave. "errors_of": whose errors they are, {"rank",
        "world_size"}. "contents": the indices in "buckets".
        """
        return to_state_dict(self, self._whose_errors(), self._memories.saved())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict, options included; the process group stays.

        The memory goes to the parameters that it was saved for, in whatever buckets a new model's first step brings them.

        Raises KeyError for a state_dict with missing or unknown keys, ValueError for one of an unknown version, of another
        compressor, or with anything that doesn't fit, TypeError for something else. Then the state is as it was.
        """
        self._take(self.checked(state_dict))
        self._warn_of_another_ranks_errors()

    def checked(self, state_dict: Any) -> dict[str, Any]:
        """A state_dict that may be loaded, in plain types. Raises what load_state_dict raises."""
        return checked(state_dict, self.algorithm, self._make_options)

    def _take(self, state_dict: dict[str, Any]) -> None:
        self._memories.load(memories_of(state_dict, self._make_options))
        self._options = self._make_options(state_dict["options"])
        self._set(state_dict)
        vars(self).update({name: state_dict[name] for name in PROGRESS})
        self._is_compared = False
        self._errors_of = state_dict["errors_of"] if has_errors(state_dict) else None

    def _make_options(self, values: dict[str, Any]) -> Any:
        if self._options is None and not values:
            return None
        if self._options is None:
            raise TypeError(f"{self.algorithm} has no options, got {', '.join(values)}")
        return type(self._options)(**values)

    def __getstate__(self) -> dict[str, Any]:
        return {"compressor": self._compressor, "options": self._options, "state_dict": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = joined_group(None) if dist.is_initialized() else None
        CompressorState.__init__(self, state["compressor"], state["options"], group)
        # The group may still be set to another: whose errors these are is asked in the first compressed step.
        self._take(self.checked(state["state_dict"]))


def _is_frozen(options: Any) -> bool:
    return is_dataclass(options) and bool(getattr(options, "__dataclass_params__").frozen)  # noqa: B009 not in stubs


def compress_hook(state: CompressorState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the state's compressor; in the first state.start_iter steps by a plain all-reduce.

    On the wire: what the compressor sends. On CUDA its work and collectives run on a side stream, in the order of the buckets.

    Raises TypeError for a state of another kind, for what is no bucket, and for one that is not floating-point.

    Example::

        ddp_model.register_comm_hook(CompressorState(TopK, TopKOptions(density=0.01)), compress_hook)
    """
    if not isinstance(state, CompressorState):
        raise TypeError(f"compress_hook takes a CompressorState as its state, got {state!r}")
    return state.average("compress_hook", bucket, state._compressor, state.options)
