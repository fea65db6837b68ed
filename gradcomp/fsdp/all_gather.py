"""Compression of FSDP2's all-gather: the weights that every rank computes with."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.comm.nodes import AUTO, nodes_in, require_ranks_per_node
from gradcomp.compress.all_gather import GatherWork, gather_layout, gather_plan
from gradcomp.layout.blocks import BlockLayout
from gradcomp.rules import BLOCK_SIZE, WEIGHT_BITS, described

from .checks import checked_groups, require_agreement, require_default, require_methods
from .param_groups import ParamGroup

_WHOSE = "compress_all_gather"


class CompressedAllGather:
    """The all-gather of one parameter group, with the methods of torch's AllGather.

    exact: the positions of the group's parameters that are gathered exactly.
    ranks_per_node: of shard_group; 1 without nodes.
    plans: shared by the groups of a model, which gather in turns.

    Gathers exactly, as torch does: what isn't the group's parameters in one floating-point dtype, as with
    fsdp_pre_all_gather, and what was dequantized in forward and then sharded over fewer ranks
    (reshard_after_forward=2). To quantize that again would round twice, and forward and backward would
    compute with different weights.
    """

    def __init__(
        self,
        param_group: ParamGroup,
        exact: set[int],
        bits: int,
        block_size: int,
        ranks_per_node: int,
        plans: dict[Any, Any],
    ):
        self.param_group, self._gather_exactly = param_group, param_group.all_gather
        self._bits, self._ranks_per_node, self._plans = bits, ranks_per_node, plans
        assert param_group.shard_group is not None
        self._shapes = [each.shape for each in param_group.placeholders]
        self._arguments = exact, block_size, param_group.shard_group.size(), ranks_per_node
        self.layout: BlockLayout = gather_layout(self._shapes, *self._arguments)

    @torch.inference_mode(False)
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an output, uninitialized."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the dequantized shards of all ranks to output_tensor.

        input_tensor: [n], this rank's padded parameters, one after another; a view of output_tensor.
        output_tensor: [ranks · n], in the same dtype.
        async_op: return a Work, whose wait() dequantizes. Otherwise the current stream does it.
        """
        if not self._compresses(input_tensor):
            exact: dist.Work | None = self._gather_exactly(output_tensor, input_tensor, group, async_op)
            return exact
        name = f"the weights of {self.param_group.name}"
        plan = self._plan(output_tensor)
        work = GatherWork(plan, input_tensor, output_tensor, group, self._ranks_per_node, name)
        if async_op:
            return work
        work.wait()
        return None

    def _compresses(self, shard: torch.Tensor) -> bool:
        group, dtype = self.param_group, shard.dtype
        return (
            self.compresses(dtype)
            and shard.numel() * group.shard_group.size() == self.layout.numel
            and not group.is_resharded
        )

    def compresses(self, dtype: torch.dtype) -> bool:
        """Return whether parameters in this dtype are sent in fewer bytes."""
        is_shorter = dtype.is_floating_point and dtype.itemsize * 8 > self._bits
        return is_shorter and bool(self.layout.quantized) and not self.param_group.has_extensions

    def _plan(self, output: torch.Tensor) -> Any:
        key = tuple(self._shapes), tuple(sorted(self._arguments[0])), *self._arguments[1:], output.dtype
        if key not in self._plans:
            self._plans[key] = gather_plan(self.layout, self._bits, output.dtype, output.device)
        return self._plans[key]


def compress_all_gather(
    model: nn.Module,
    bits: int = 8,
    block_size: int = 128,
    *,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    ranks_per_node: int | str = AUTO,
) -> None:
    """Send the weights of a model that FSDP2 shards in 8 bits when they are all-gathered.

    Each rank quantizes its shard, with one scale for each block. All ranks, the owner too, compute with what
    is dequantized, so forward and backward have the same weights on every rank. The optimizer's shards stay
    exact, so nothing is lost from step to step, and no errors are kept.

    Vectors and tensors whose shards are smaller than a block are gathered exactly, in the same message.

    model: after fully_shard, called for the model itself, too.
    bits: 8, or 16: bfloat16. In a param_dtype of 16 bits, 16 changes nothing.
    block_size: elements that share a scale; even, at most 4096.
    ignored: modules and parameters that are gathered exactly, such as embeddings.
    ranks_per_node: the number of ranks that share a network card; see QuantizationState.

    Call it on every rank, before training.

    Raises TypeError or ValueError for arguments that don't fit, for a model that is not sharded and for a
    second call; RuntimeError, on every rank, if the ranks differ.

    Example::

        fully_shard(model)
        compress_all_gather(model, ignored=[model.embed])
    """
    install_all_gather(model, WEIGHT_BITS("bits", bits), block_size, ignored, ranks_per_node)


def install_all_gather(
    model: nn.Module,
    bits: int,
    block_size: int,
    ignored: Iterable[nn.Module | nn.Parameter],
    ranks_per_node: int | str,
) -> list[CompressedAllGather]:
    """Do what compress_all_gather does, also with 4 bits. Returns the all-gathers, one per parameter group."""
    block_size, per_node = BLOCK_SIZE("block_size", block_size), require_ranks_per_node(ranks_per_node)
    groups = checked_groups(_WHOSE, model)
    require_methods(_WHOSE, "set_custom_all_gather")
    require_default(_WHOSE, groups, "all_gather")
    exact = sorted(_names_of(model, ignored))
    options = {"bits": bits, "block_size": block_size, "ignored": exact}
    require_agreement(_WHOSE, groups, groups[0].replicate_group, options)
    plans: dict[Any, Any] = {}
    nodes: dict[dist.ProcessGroup, int] = {}
    gathers = []
    for group in groups:
        shards = group.shard_group
        assert shards is not None
        if shards not in nodes:
            found = nodes_in(_WHOSE, per_node, shards, group.device)
            nodes[shards] = found.ranks_per_node if found else 1
        positions = {index for index, name in enumerate(group.names(model)) if name in exact}
        gather = CompressedAllGather(group, positions, bits, block_size, nodes[shards], plans)
        group.module.set_custom_all_gather(gather)
        gathers.append(gather)
    return gathers


def _names_of(model: nn.Module, ignored: Iterable[Any]) -> set[str]:
    """Return the names of parameters. Raises TypeError, or ValueError for parameters of another model."""
    if isinstance(ignored, nn.Module | torch.Tensor | str):
        raise TypeError(f"{_WHOSE} takes a list of modules and parameters as ignored, got {described(ignored)}")
    ids = set()
    for each in ignored:
        if not isinstance(each, nn.Module | nn.Parameter):
            raise TypeError(f"{_WHOSE}: ignored has {described(each)}, but takes modules and parameters")
        ids |= {id(parameter) for parameter in (each.parameters() if isinstance(each, nn.Module) else [each])}
    named = list(model.named_parameters(remove_duplicate=False))
    if unknown := ids - {id(parameter) for _, parameter in named}:
        raise ValueError(
            f"{_WHOSE}: {len(unknown)} parameters in ignored aren't the model's. Likely cause: they were taken "
            "before fully_shard, which makes new ones"
        )
    return {name for name, parameter in named if id(parameter) in ids}
