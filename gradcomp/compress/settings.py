"""The options and settings of a hook's state."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..comm.nodes import RANKS_PER_NODE, groups_of_mesh
from ..comm.process_group import require_group
from ..rules import FREQUENCY, SEED, WHOLE, check_fields, checked_field
from .compressor import Compressor


@dataclass(frozen=True)
class Settings:
    """A state's options, and the settings that every state has; see CompressorState.

    Raises ValueError for an invalid value.
    """

    options: Any = None
    start_iter: int = checked_field(2, WHOLE)
    random_seed: int = checked_field(0, SEED)
    compression_stats_logging_frequency: int = checked_field(10_000, FREQUENCY)

    def __post_init__(self) -> None:
        check_fields(self)

    def common(self) -> dict[str, Any]:
        """Return the settings that every state has, by name."""
        return {name: getattr(self, name) for name in SETTINGS}

    def by_name(self) -> dict[str, Any]:
        """Return the options and settings by name."""
        return {**as_dict(self.options), **self.common()}


SETTINGS = [each.name for each in fields(Settings) if each.name != "options"]


def fields_of(options: Any) -> tuple[Any, ...]:
    """Return the fields of a compressor's options, or of their class; none for None."""
    return fields(options) if is_dataclass(options) else ()


def as_dict(options: Any) -> dict[str, Any]:
    """Return a compressor's options by name."""
    return {each.name: getattr(options, each.name) for each in fields_of(options)}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return texts such as "bits from 8 to 4" for the values that differ."""
    return [
        f"{name} from {value!r} to {after[name]!r}" for name, value in before.items() if after[name] != value
    ]


class _Attribute:
    """A state's attribute that stands for the field of this name in its settings, or else in its options.

    Assignment checks the value.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None:
            return self
        return getattr(state.settings if self._name in SETTINGS else state.options, self._name)

    def __set__(self, state: Any, value: Any) -> None:
        change = {self._name: value}
        if self._name not in SETTINGS:
            change = {"options": replace(state.options, **change)}
        state.change(replace(state.settings, **change))


option: Callable[[], Any] = _Attribute  # Any: the attribute has the field's type


class _Assigned:
    """An attribute that assigning checks. It lies in the instance, where steps read it without a call.

    assign: the method that checks a value and puts it there.
    """

    def __init__(self, assign: Callable[[Any, Any], None]):
        self._assign, self.__doc__ = assign, assign.__doc__

    def __set__(self, state: Any, value: Any) -> None:
        self._assign(state, value)


assigned: Callable[[Callable[[Any, Any], None]], Any] = _Assigned  # Any: the attribute has its value's type


class ConfiguredState:
    """A state's options, settings, process group and nodes. Assigning to an attribute checks the value."""

    min_start_iter = 2
    _default_ranks_per_node: int | str = 1
    _default_start_iter = 2
    # A subclass with one fixed compressor sets both: its pickled states hold plain types and name no class.
    _compressor: type[Compressor]
    _options_class: type

    start_iter: int = option()
    random_seed: int = option()
    compression_stats_logging_frequency: int = option()

    iter: int
    settings: Settings  # change() assigns them
    # True if a step has compared the ranks since options or group changed or a checkpoint was loaded.
    is_compared: bool = False
    # The last step of which buckets were compared; None if the next bucket must be.
    compared_in: int | None = None

    @property
    def algorithm(self) -> str:
        """The algorithm's name in messages, log lines and checkpoints."""
        return self._compressor.__name__

    @property
    def options(self) -> Any:
        """The compressor's options."""
        return self.settings.options

    def change(self, settings: Settings) -> None:
        """Use other settings from now on. The next step compares the ranks again.

        Raises ValueError if compression would start too early for the options.
        """
        self._require_start(settings.start_iter, settings.options)
        if self.iter and (texts := changes(self.settings.by_name(), settings.by_name())):
            shown = ", ".join(texts)
            logger_of(self).info("%s: changed at step %s: %s.", self.algorithm, self.iter, shown)
        self.settings = settings
        self._expect_comparison()

    def _expect_comparison(self) -> None:
        """Compare the ranks again in the next step."""
        self.is_compared, self.compared_in = False, None

    @assigned
    def process_group(self, group: Any) -> None:
        """The process group that averages; None for the default one. Assign to change it."""
        ranks_per_node = self.ranks_per_node
        if isinstance(group, DeviceMesh):
            group, ranks_per_node = groups_of_mesh(group)
        require_group(type(self).__name__, group)
        vars(self).update(process_group=group, ranks_per_node=ranks_per_node)
        self._expect_comparison()

    @assigned
    def ranks_per_node(self, value: int | str) -> None:
        """The number of ranks that share a network card, or "auto". Assign to change it."""
        vars(self).update(ranks_per_node=RANKS_PER_NODE("ranks_per_node", value))
        self._expect_comparison()

    def _require_start(self, start_iter: int, options: Any) -> None:
        """Raise ValueError if start_iter is too early for compression with these options."""
        if start_iter < self.min_start_iter:
            why = ", as DDP rebuilds its buckets after the first step" * (self.min_start_iter > 0)
            raise ValueError(f"start_iter is {start_iter}, but must be at least {self.min_start_iter}{why}")

    def compared_options(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name."""
        shared = {"start_iter": self.start_iter, "random_seed": self.random_seed}
        compared = {
            each.name: getattr(self.options, each.name) for each in fields_of(self.options) if each.compare
        }
        return {"compressor": self.algorithm, **shared, **compared}


def logger_of(state: ConfiguredState) -> logging.Logger:
    """Return the logger of the module that defines the state's class."""
    return logging.getLogger(type(state).__module__)
