"""The hooks by name: int4, powersgd:8 (rank 8), powersgd:8:int8 (rank 8, int8 factors), int4 hierarchical.

auto_hook's candidates, the commands plan and bench, docs/accuracy.md and the benchmarks use these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gradcomp.comm.bucket import Hook
from gradcomp.comm.nodes import AUTO
from gradcomp.compress.all_reduced import AllReducedCompressor, AllReducedOptions
from gradcomp.compress.compressor import Compressor
from gradcomp.compress.powersgd import PowerSGDCompressor, PowerSGDOptions
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.compress.state import CompressorState, compress_hook

from . import default_hooks
from .powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from .quantization_hooks import QuantizationState, quantization_hook

Options = AllReducedOptions | QuantizedOptions | PowerSGDOptions
COMPRESSORS: dict[type[Options], type[Compressor]] = {
    AllReducedOptions: AllReducedCompressor,
    QuantizedOptions: QuantizedCompressor,
    PowerSGDOptions: PowerSGDCompressor,
}
HOOKS: dict[str, Options] = {
    "none": AllReducedOptions(),  # what averages without a hook
    "allreduce": AllReducedOptions(),
    "bf16": AllReducedOptions(torch.bfloat16),
    "fp16": AllReducedOptions(torch.float16),
    "int8": QuantizedOptions(8),
    "int4": QuantizedOptions(4),
    "int4:64": QuantizedOptions(4, block_size=64),
}
# PowerSGD's names go on with its rank, the dtype of its factors, and the bits of the steps before it starts.
POWERSGD = {"powersgd": PowerSGDOptions(), "batched": PowerSGDOptions(square=True)}
FACTORS: dict[str, dict[str, torch.dtype]] = {
    "": {},
    "bf16": {"factor_dtype": torch.bfloat16},
    "fp16": {"factor_dtype": torch.float16},
    "int8": {"factor_dtype": torch.int8, "uncompressed_dtype": torch.bfloat16},
}
START_BITS = {"": None, "start4": 4, "start8": 8}
HIERARCHICAL = " hierarchical"  # the end of a name
# The hooks that plan lists.
NAMES = (
    *("none", "bf16", "fp16", "int8", "int4"),
    *(f"powersgd:{rank}{factors}" for rank in (16, 8, 4, 1) for factors in ("", ":bf16", ":int8")),
)
_STATELESS: dict[torch.dtype | None, Hook] = {
    None: default_hooks.allreduce_hook,
    torch.bfloat16: default_hooks.bf16_compress_hook,
    torch.float16: default_hooks.fp16_compress_hook,
}
# The hooks' costs in validation loss of the small GPT, in nats, as docs/accuracy.md has them.
COSTS = {
    **dict.fromkeys(("none", "allreduce", "fp16", "int8"), 0.0),
    "int4": 0.004,
    "powersgd:16": 0.002,
    "powersgd:8": 0.032,
    "powersgd:4": 0.083,
    "powersgd:8:bf16": 0.027,
    "powersgd:16:int8": 0.006,
    "powersgd:8:int8": 0.032,
    "powersgd:4:int8": 0.087,
}
# From benchmarks/results/accuracy_2_ranks.jsonl, 4 seeds.
COSTS_ON_2_RANKS = {"bf16": 0.0, "powersgd:2": 0.152, "powersgd:1": 0.268}


@dataclass(frozen=True)
class NamedHook:
    """A hook with its options.

    options: of its compressor.
    is_hierarchical: whether gradients or factors are summed exactly within a node, and sent between nodes by
        one rank each. Otherwise the hook is flat: ranks exchange codes with all others, or in a ring.
    """

    name: str
    options: Options
    is_hierarchical: bool = False

    @classmethod
    def named(cls, name: str) -> NamedHook:
        """Return the flat hook of this name: one of HOOKS, or PowerSGD of any rank.

        Raises ValueError for an unknown name.
        """
        if name in HOOKS:
            return cls(name, HOOKS[name])
        family, *given = name.split(":")
        rank, factors, start = [*given, "", "", ""][:3]
        is_known = family in POWERSGD and len(given) <= 3 and factors in FACTORS and start in START_BITS
        if not (is_known and rank.isdecimal() and int(rank)):
            powersgd = f"RANK[:{'|'.join(filter(None, FACTORS))}[:{'|'.join(filter(None, START_BITS))}]]"
            known = ", ".join([*HOOKS, *(f"{each}:{powersgd}" for each in POWERSGD)])
            raise ValueError(f"there is no hook {name!r}; known are {known}")
        options: dict[str, Any] = {"start_bits": START_BITS[start], **FACTORS[factors]}
        return cls(name, replace(POWERSGD[family], matrix_approximation_rank=int(rank), **options))

    @classmethod
    def form_named(cls, name: str) -> NamedHook:
        """Return the hook of this name, in its hierarchical form if the name ends so; see `named`."""
        flat = cls.named(name.removesuffix(HIERARCHICAL))
        return replace(flat, name=name, is_hierarchical=name != flat.name)

    @property
    def compressor(self) -> type[Compressor]:
        return COMPRESSORS[type(self.options)]

    @property
    def has_codes(self) -> bool:
        """Whether the hook exchanges codes: int8, int4, and PowerSGD's int8 factors."""
        if isinstance(self.options, PowerSGDOptions):
            return self.options.is_quantized
        return isinstance(self.options, QuantizedOptions)

    def state_and_hook(self, start_iter: int, ranks_per_node: int | str = AUTO) -> tuple[Any, Hook]:
        """Return a new state for the default group (None for a flat hook without one), and the hook.

        start_iter: the plain steps before a state compresses.
        ranks_per_node: of the state.
        """
        options = self.options
        given: dict[str, Any] = {"start_iter": start_iter, "ranks_per_node": ranks_per_node}
        if isinstance(options, AllReducedOptions):
            if not self.is_hierarchical:
                return None, _STATELESS[options.wire_dtype]
            return CompressorState(self.compressor, options, **given), compress_hook
        if isinstance(options, QuantizedOptions):
            return QuantizationState(None, options.bits, options.block_size, **given), quantization_hook
        given = asdict(options) | {"start_powerSGD_iter": start_iter, "ranks_per_node": ranks_per_node}
        hook = batched_powerSGD_hook if given.pop("square") else powerSGD_hook
        return PowerSGDState(None, **given), hook

    @property
    def cost(self) -> float | None:
        """The hook's cost in accuracy, in nats; None if neither the hook nor a similar one was measured.

        A hierarchical hook, which was not measured, is assumed to cost as much as flat. It sums fewer codes.
        Similar to PowerSGD is PowerSGD of equal rank with int8 factors, the coarsest, or else with fp32.
        """
        costs, name = COSTS | COSTS_ON_2_RANKS, self.name.removesuffix(HIERARCHICAL)
        family, rank, *_ = [*name.split(":"), ""]
        similar = (name, f"{family}:{rank}:int8", f"{family}:{rank}")
        return next((costs[each] for each in similar if each in costs), None)


def forms_of(hooks: Iterable[NamedHook], *, has_nodes: bool, is_gloo: bool) -> Iterator[NamedHook]:
    """Yield hooks. If has_nodes, each is preceded by its hierarchical form, if it has one."""
    for hook in hooks:
        # On NCCL, buckets that aren't codes are all-reduced in rings, which go node by node already.
        if has_nodes and (is_gloo or hook.has_codes):
            yield NamedHook.form_named(hook.name + HIERARCHICAL)
        yield hook
