"""A hook for any compressor, and its state."""

from dataclasses import is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..rules import described
from .checkpoint import SETTINGS, as_dict, checked, has_errors, memories_of, to_state_dict
from .compressor import Compressor
from .state import CompressedAveraging


class CompressorState(CompressedAveraging):
    """The state that compress_hook is registered with: your own compressor, and all that it needs around it.

    compressor: a subclass of Compressor, called as compressor(bucket: BucketSpec, options) for every bucket.
    options: a frozen dataclass of plain values, which raises ValueError for invalid ones; None for a
        compressor without options.
    process_group: None for the default one.
    start_iter: steps of plain all-reduce before compression starts; at least 2, because DDP rebuilds its
        buckets after the first step.
    random_seed: the seed for a compressor's random choices; the same on all ranks.
    compression_stats_logging_frequency: steps between log lines with compression_stats().

    Raises TypeError for arguments of other types, ValueError for an invalid setting.

    Checkpoints: state_dict() and load_state_dict(). Every rank has its own errors: save one per rank to
    continue exactly, or consolidated_state_dict(state) for all ranks; per_rank_state_dict and load_from_dcp
    for torch.distributed.checkpoint.

    Example::

        state = CompressorState(TopK, TopKOptions(density=0.01))
        ddp_model.register_comm_hook(state, compress_hook)
    """

    min_start_iter = 2

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
        if SETTINGS["start_iter"]("start_iter", start_iter) < self.min_start_iter:
            raise ValueError(
                f"start_iter is {start_iter}, but DDP rebuilds its buckets after the first step: at least "
                f"{self.min_start_iter}"
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

    @property
    def _is_same_on_all_processors(self) -> bool:
        return self._compressor.is_same_on_all_processors

    def compared_options(self) -> dict[str, Any]:
        shared = {"start_iter": self.start_iter, "random_seed": self.random_seed}
        return {"compressor": self.algorithm, **shared, **as_dict(self._options)}

    def _set(self, settings: dict[str, int]) -> None:
        self._start_iter, self.random_seed = settings["start_iter"], settings["random_seed"]
        self.compression_stats_logging_frequency = settings["compression_stats_logging_frequency"]

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the process group, in plain types and tensors of its own.

        "version": the format's version. "algorithm": the compressor's name. "options": its options. Settings
        and progress by name. "buckets": maps a bucket's index to its "kind" (dtype and options), "shapes",
        "parameters" (indices), and the entries of the compressor's state(). "parameters": "names" by index,
        and "first_buckets", the indices and shapes of parameters without a name. "errors_of": whose errors
        they are, {"rank", "world_size"}. "contents": the indices in "buckets".
        """
        return to_state_dict(self, self._whose_errors(), *self._memories.saved())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict, options included; the process group stays.

        The memory goes to the parameters that it was saved for, in whatever buckets a new model's first step
        has them.

        Raises KeyError for a state_dict with missing or unknown keys, ValueError for one of an unknown
        version, of another compressor, or with anything that doesn't fit, TypeError for anything but a
        state_dict. The state is unchanged then.
        """
        self._take(self.checked(state_dict))
        self._warn_of_another_ranks_errors()

    def checked(self, state_dict: Any) -> dict[str, Any]:
        """Return a state_dict that may be loaded, in plain types. Raises what load_state_dict raises."""
        return checked(state_dict, self.algorithm, self._make_options)

    def _take(self, state_dict: dict[str, Any]) -> None:
        self._memories.load(state_dict["parameters"], memories_of(state_dict, self._make_options))
        self._options = self._make_options(state_dict["options"])
        self._set(state_dict)
        self._set_progress(state_dict)
        self._errors_of = state_dict["errors_of"] if has_errors(state_dict) else None

    def _make_options(self, values: dict[str, Any]) -> Any:
        if self._options is None and not values:
            return None
        if self._options is None:
            raise TypeError(f"{self.algorithm} has no options, got {', '.join(values)}")
        return type(self._options)(**values)

    def _contents(self) -> dict[str, Any]:
        return {"compressor": self._compressor, "options": self._options, "state_dict": self.state_dict()}

    def _restore(self, contents: dict[str, Any], process_group: Any) -> None:
        CompressorState.__init__(self, contents["compressor"], contents["options"], process_group)
        self._take(self.checked(contents["state_dict"]))


def _is_frozen(options: Any) -> bool:
    """Return whether options are a frozen dataclass."""
    # Stubs don't have __dataclass_params__, hence getattr.
    return is_dataclass(options) and bool(getattr(options, "__dataclass_params__").frozen)  # noqa: B009


def compress_hook(state: CompressorState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the state's compressor; plainly in the first state.start_iter steps.

    On the wire: what the compressor sends. On CUDA its work and collectives run on a side stream, in bucket
    order.

    Raises TypeError for another state than a CompressorState, for anything but a bucket, and for a bucket
    that is not floating-point.

    Example::

        ddp_model.register_comm_hook(CompressorState(TopK, TopKOptions(density=0.01)), compress_hook)
    """
    if not isinstance(state, CompressorState):
        raise TypeError(f"compress_hook takes a CompressorState as its state, got {described(state)}")
    return state.average("compress_hook", bucket, state._compressor, state.options)
