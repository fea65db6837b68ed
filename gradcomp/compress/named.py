"""Hooks by name: int4, powersgd:8 (rank 8), powersgd:8:int8 (rank 8, int8 factors), int4 by nodes.

docs/accuracy.md, `python -m gradcomp plan` and `bench`, and AutoState use these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .all_reduced import AllReducedCompressor, AllReducedOptions
from .compressor import Compressor
from .powersgd import PowerSGDCompressor, PowerSGDOptions
from .quantized import QuantizedCompressor, QuantizedOptions

if TYPE_CHECKING:
    from typing_extensions import Self  # torch needs this package, so it is there

RANKS = (16, 8, 4, 1)
FACTOR_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
BITS = {"int8": 8, "int4": 4}
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BY_NODES = " by nodes"  # the end of a name
NAMES = (
    *("none", *WIRE_DTYPES, *BITS),
    *(f"powersgd:{rank}{factors}" for rank in RANKS for factors in ("", ":bf16", ":int8")),
)


@dataclass(frozen=True)
class NamedHook:
    """A hook with its options.

    bits: the bits of a quantized all-reduce; None for other hooks.
    rank: PowerSGD's rank; None for other hooks.
    wire_dtype: dtype of a 16-bit all-reduce, or of PowerSGD's factors; None for the gradients' dtype.
    is_by_nodes: whether gradients or factors are summed exactly within a node, and sent between nodes by one
        rank each. Otherwise the hook is flat: every rank exchanges codes with every other rank, or a ring
        goes through all ranks.
    """

    name: str
    bits: int | None = None
    rank: int | None = None
    wire_dtype: torch.dtype | None = None
    is_by_nodes: bool = False

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the hook of this name: one of NAMES, or PowerSGD of any rank.

        Raises ValueError for an unknown name.
        """
        if name in ("none", *WIRE_DTYPES):
            return cls(name, wire_dtype=WIRE_DTYPES.get(name))
        if name in BITS:
            return cls(name, bits=BITS[name])
        family, _, rest = name.partition(":")
        rank, _, factors = rest.partition(":")
        if family == "powersgd" and rank.isdecimal() and int(rank) > 0 and factors in ("", *FACTOR_DTYPES):
            return cls(name, rank=int(rank), wire_dtype=FACTOR_DTYPES.get(factors))
        known = "none, bf16, fp16, int8, int4, and powersgd:RANK, powersgd:RANK:bf16, powersgd:RANK:int8"
        raise ValueError(f"there is no hook {name!r}; known are {known}")

    @classmethod
    def form_named(cls, name: str) -> Self:
        """Return the hook of this name; its form by nodes if the name ends with BY_NODES.

        Raises ValueError for an unknown name, and for a hook that can't be by nodes.
        """
        flat = cls.named(name.removesuffix(BY_NODES))
        return flat.by_nodes() if name.endswith(BY_NODES) else flat

    @property
    def is_compressing(self) -> bool:
        return (self.bits, self.rank, self.wire_dtype) != (None, None, None)

    @property
    def is_quantized(self) -> bool:
        """Whether the hook exchanges codes: int8, int4, and PowerSGD's int8 factors."""
        return self.bits is not None or self.wire_dtype == torch.int8

    @property
    def has_state(self) -> bool:
        return (self.bits, self.rank) != (None, None)

    def has_form_by_nodes(self, *, is_gloo: bool) -> bool:
        """Return whether the hook can be by nodes on a backend.

        On NCCL, factors that aren't codes are all-reduced in rings, which go node by node already.
        """
        return self.is_quantized or (is_gloo and self.rank is not None)

    @property
    def is_16_bit(self) -> bool:
        return self.rank is None and self.wire_dtype in WIRE_DTYPES.values()

    @property
    def flat_name(self) -> str:
        """The name of this hook's flat form, by which times and costs in accuracy are known."""
        return self.name.removesuffix(BY_NODES)

    def by_nodes(self) -> Self:
        """Return this hook by nodes. Raises ValueError for a hook without a state."""
        if not self.has_state:
            raise ValueError(f"{self.name} can't be by nodes; hooks with a state can, such as int4")
        return replace(self, name=self.flat_name + BY_NODES, is_by_nodes=True)

    @property
    def powersgd_options(self) -> PowerSGDOptions:
        """PowerSGDState's defaults, with this rank and dtype of factors."""
        assert self.rank is not None
        return PowerSGDOptions(
            self.rank,
            factor_dtype=self.wire_dtype,
            uncompressed_dtype=torch.bfloat16 if self.wire_dtype == torch.int8 else None,
        )

    def compressor(self) -> tuple[type[Compressor], Any]:
        """Return the compressor of the hook's state, and its options."""
        if self.rank is not None:
            return PowerSGDCompressor, self.powersgd_options
        if self.bits is not None:
            return QuantizedCompressor, QuantizedOptions(self.bits)
        return AllReducedCompressor, AllReducedOptions(self.wire_dtype)


def forms_of(hooks: Iterable[NamedHook], *, has_nodes: bool, is_gloo: bool) -> Iterator[NamedHook]:
    """Yield hooks. If has_nodes, each is followed by its form by nodes, if it has one."""
    for hook in hooks:
        yield hook
        if has_nodes and hook.has_form_by_nodes(is_gloo=is_gloo):
            yield hook.by_nodes()
