"""The part of a hook's state that is saved: options, settings, progress, and what is kept of parameters."""

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.nodes import groups_of_mesh, require_ranks_per_node
from ..comm.process_group import joined_group, require_group
from . import checkpoint
from .checkpoint import PROGRESS, Settings, another_ranks_errors, owner_of, progress_of
from .compressor import Compressor
from .parameter_states import Entries, ParameterStates


class _Attribute:
    """A state's attribute that stands for a field of its settings or options. Assignment checks the value."""

    def __init__(self, is_option: bool) -> None:
        self._is_option = is_option

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None:
            return self
        return getattr(state.options if self._is_option else state.settings, self._name)

    def __set__(self, state: Any, value: Any) -> None:
        change = {self._name: value}
        if self._is_option:
            change = {"options": replace(state.options, **change)}
        state.change(replace(state.settings, **change))


def option() -> Any:
    """Return a class attribute that stands for the field of the same name in a state's options."""
    return _Attribute(is_option=True)


def setting() -> Any:
    """Return a class attribute that stands for the field of the same name in a state's settings."""
    return _Attribute(is_option=False)


class SavedState:
    """What every state keeps in checkpoints, pickles and copies; CompressorState has the steps."""

    min_start_iter = 2
    _default_ranks_per_node: int | str = 1
    _default_start_iter = 2
    # A subclass with one fixed compressor sets both: its pickled states hold plain types and name no class.
    _compressor: type[Compressor]
    _options_class: type

    start_iter: int = setting()
    random_seed: int = setting()
    compression_stats_logging_frequency: int = setting()

    iter: int
    total_numel_before_compression: int
    total_numel_after_compression: int
    next_stats_report: int

    def _reset(self, process_group: Any, settings: Settings) -> None:
        """Set all attributes to their values before the first step."""
        self._process_group, self._ranks_per_node = process_group, self._default_ranks_per_node
        self._settings = settings
        self._states = ParameterStates()
        self.next_stats_report = 0
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self._is_compared = self._was_loaded = self._is_resumed = False
        # The rank that saved the loaded errors, until this process's own rank is known.
        self._errors_of: dict[str, Any] | None = None

    # --- options ---

    @property
    def algorithm(self) -> str:
        """The algorithm's name in messages, log lines and checkpoints."""
        return self._compressor.__name__

    @property
    def options(self) -> Any:
        """The compressor's options."""
        return self._settings.options

    @property
    def settings(self) -> Settings:
        """The options, and the settings that every kind of state has."""
        return self._settings

    def change(self, settings: Settings) -> None:
        """Use other settings from now on. The next step compares the ranks again.

        Raises ValueError if compression would start too early for the options.
        """
        self._require_start(settings.start_iter, settings.options)
        if self.iter and (texts := checkpoint.changes(self._settings.by_name(), settings.by_name())):
            shown = ", ".join(texts)
            logger_of(self).info("%s: changed at step %s: %s.", self.algorithm, self.iter, shown)
        self._settings, self._is_compared = settings, False

    @property
    def process_group(self) -> Any:
        """The process group that averages; None for the default one. Assign to change it."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        if isinstance(group, DeviceMesh):
            group, self._ranks_per_node = groups_of_mesh(group)
        require_group(type(self).__name__, group)
        self._process_group, self._is_compared = group, False

    @property
    def ranks_per_node(self) -> int | str:
        """The number of ranks that share a network card, or "auto". Assign to change it."""
        return self._ranks_per_node

    @ranks_per_node.setter
    def ranks_per_node(self, value: int | str) -> None:
        self._ranks_per_node, self._is_compared = require_ranks_per_node(value), False

    def _require_start(self, start_iter: int, options: Any) -> None:
        """Raise ValueError if start_iter is too early for compression with these options."""
        if start_iter < self.min_start_iter:
            raise ValueError(
                f"start_iter is {start_iter}, but DDP rebuilds its buckets after the first step: at least "
                f"{self.min_start_iter}"
            )

    def compared_options(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name."""
        shared = {"start_iter": self.start_iter, "random_seed": self.random_seed}
        return {"compressor": self.algorithm, **shared, **checkpoint.compared(self.options)}

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the process group, in plain types and copied tensors.

        "version": the format's version.
        "algorithm": the compressor's name.
        "options": the compressor's options by name.
        Settings and progress: one entry each, by name.
        "errors_of": the rank that the errors belong to, {"rank", "world_size"}.
        "parameters": what is kept of each parameter, as in `state`.
        "num_parameters": the number of entries in "parameters".
        """
        saved = checkpoint.to_state_dict(
            self.algorithm, self._settings, progress_of(self), self._states.entries()
        )
        return {**saved, "errors_of": self._errors_of or owner_of(self.process_group)}

    @property
    def state(self) -> Entries:
        """What is kept of each parameter, copied: {name: {"error": [as the parameter], ...}}.

        The keys are the parameters' names, see number_parameters; without names, the place where a bucket
        first brought them. What belongs to a whole bucket has a tuple of all its parameters' keys as its key.
        Errors are in the gradients' unit; those of a complex parameter have a last dimension of 2.
        """
        return self._states.entries()

    def errors_of_buckets(self) -> dict[int, torch.Tensor]:
        """Return copies of this rank's errors by the index of their bucket, [numel]."""
        return self._states.errors_of_buckets()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict, including its options. The process group stays.

        Saved errors go to the parameters that they were saved for, whatever buckets these parameters are in.
        Errors that don't fit start at zero, with a warning. Another rank's errors are loaded, with a warning.
        So are other options and settings than this state was given: assign yours again after loading.

        Raises TypeError for anything but a state_dict; KeyError for missing or unknown keys; ValueError for
        an unknown version, another compressor, or any other value that doesn't fit. After an error the state
        is unchanged.
        """
        checked = self.checked(state_dict)
        default = Settings(start_iter=self._default_start_iter)
        loaded = checkpoint.settings_of(checked, self._options_class)
        if texts := checkpoint.replaced(self._settings, loaded, default):
            logger_of(self).warning(
                "%s: the checkpoint changes what this state was made with: %s. Its options count; to use "
                "yours, assign them after load_state_dict.",
                self.algorithm,
                ", ".join(texts),
            )
        self._load_checked(checked)
        self._warn_of_another_ranks_errors()

    def checked(self, state_dict: Any) -> dict[str, Any]:
        """Check a state_dict, and return it in plain types. Raises the errors of load_state_dict."""
        checked = checkpoint.checked(state_dict, self.algorithm, self._compressor, self._options_class)
        self._require_start(checked["start_iter"], self._options_class(**checked["options"]))
        return checked

    def _load_checked(self, checked: dict[str, Any]) -> None:
        """Continue from a checked state_dict. The next step compares the ranks again."""
        self._settings = checkpoint.settings_of(checked, self._options_class)
        self._states.load(checked["parameters"])
        for name in PROGRESS:
            setattr(self, name, checked[name])
        self._is_compared, self._was_loaded, self._is_resumed = False, True, True
        self._errors_of = checked["errors_of"] if checkpoint.has_errors(checked) else None

    def _contents(self) -> Any:
        """Return the contents of a pickle or a copy: everything except the process group."""
        nodes = {"ranks_per_node": self._ranks_per_node}
        if _has_one_compressor(type(self)):
            return {**self.state_dict(), **nodes}
        classes = {"compressor": self._compressor, "options_class": self._options_class}
        return {**classes, **nodes, "state_dict": self.state_dict()}

    def _restore(self, contents: Any, process_group: Any) -> None:
        """Set all attributes from _contents(). Raises the errors of load_state_dict."""
        if not _has_one_compressor(type(self)):
            self._compressor, self._options_class = contents["compressor"], contents["options_class"]
            contents = {**contents["state_dict"], "ranks_per_node": contents["ranks_per_node"]}
        ranks_per_node: Any = self._default_ranks_per_node
        if isinstance(contents, dict) and "ranks_per_node" in contents:
            contents = dict(contents)
            ranks_per_node = contents.pop("ranks_per_node")
        checked = self.checked(contents)
        self._reset(process_group, checkpoint.settings_of(checked, self._options_class))
        self._load_checked(checked)
        self._ranks_per_node = require_ranks_per_node(ranks_per_node)

    def __getstate__(self) -> Any:
        return self._contents()

    def __setstate__(self, contents: Any) -> None:
        # The group may still change, so the first compressed step checks that the errors are this rank's.
        self._restore(contents, joined_group(None) if dist.is_initialized() else None)
        logger_of(self).warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a different group "
            "is desired, please set `self.process_group` after %s state is loaded.",
            self.algorithm,
        )

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the state with all errors, for the same process group, but without its recorder."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied._restore(self._contents(), self.process_group)
        copied._states.keys.inherit(self._states.keys)
        return copied

    def _warn_of_another_ranks_errors(self, group: dist.ProcessGroup | None = None) -> None:
        """Warn if another rank saved the loaded errors. Does nothing while this process's rank is unknown."""
        group = group or joined_group(self.process_group)
        if self._errors_of is None or group is None:
            return
        warning = another_ranks_errors(self.algorithm, self._errors_of, group)
        self._errors_of = None
        if warning is not None:
            logger_of(self).warning(warning)


def logger_of(state: SavedState) -> logging.Logger:
    """Return the logger of the module that defines the state's class."""
    return logging.getLogger(type(state).__module__)


def _has_one_compressor(state_class: type[SavedState]) -> bool:
    return hasattr(state_class, "_compressor")
