"""Compression of FSDP2's all-gather: the weights that every rank computes with."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradcomp.comm.nodes import AUTO, nodes_in, require_ranks_per_node
from gradcomp.comm.torch_private import require_names
from gradcomp.compress.all_gather import GatherWork, ShardGather
from gradcomp.rules import BLOCK_SIZE, WEIGHT_BITS, described

from .checks import checked_groups, require_agreement, require_default
from .param_groups import Collective, ParamGroup

_WHOSE = "compress_all_gather"


class CompressedAllGather(Collective):
    """The all-gather of one parameter group, with the methods of torch's AllGather.

    gather: of the group's shards.

    Torch's all-gather gathers two sorts of tensors exactly: those that aren't shards in one floating-point
    dtype (with fsdp_pre_all_gather, or of several dtypes), and weights that forward has dequantized and
    sharded over fewer ranks (reshard_after_forward=2), so that backward computes with the same ones.
    """

    def __init__(self, param_group: ParamGroup, gather: ShardGather):
        self.param_group, self.gather, self._gather_exactly = param_group, gather, param_group.all_gather

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
        async_op: return a Work. Its wait() dequantizes. Otherwise the current stream dequantizes.
        """
        group_of_params, numel = self.param_group, self.gather.layout.numel
        if (
            not self.compresses({input_tensor.dtype})
            or output_tensor.numel() != numel
            or group_of_params.is_resharded
        ):
            exact: dist.Work | None = self._gather_exactly(output_tensor, input_tensor, group, async_op)
            return exact
        name = f"the weights of {group_of_params.name}"
        work = GatherWork(self.gather, input_tensor, output_tensor, group, name)
        if async_op:
            return work
        work.wait()
        return None

    def compresses(self, dtypes: set[torch.dtype]) -> bool:
        """Return whether parameters in these dtypes are sent in fewer bytes."""
        is_one = len(dtypes) == 1 and not self.param_group.has_extensions
        return is_one and all(map(self.gather.compresses, dtypes))


def compress_all_gather(
    model: nn.Module,
    bits: int = 8,
    block_size: int = 128,
    *,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    ranks_per_node: int | str = AUTO,
) -> None:
    """Send the weights of a model that FSDP2 shards in 8 bits when they are all-gathered.

    Each rank quantizes its shard, with one scale for each block. All ranks, the owner too, compute with the
    dequantized weights. The optimizer's shards stay exact, so no errors are kept. Vectors, and tensors with
    shards smaller than a block, are gathered exactly in the same message.

    model: after fully_shard, called for the model itself, too.
    bits: 8. For bfloat16 use torch's MixedPrecisionPolicy(param_dtype=torch.bfloat16).
    block_size: elements that share a scale; even, at most 4096.
    ignored: modules and parameters that are gathered exactly, such as embeddings.
    ranks_per_node: the number of ranks that share a network card; see QuantizationState.

    Call it on every rank, before training.

    Raises TypeError or ValueError for arguments that don't fit, for a model that is not sharded and for a
    second call; RuntimeError, on every rank, if the ranks differ.
    """
    for each in all_gathers(model, WEIGHT_BITS("bits", bits), block_size, ignored, ranks_per_node):
        each.param_group.install_all_gather(each)


def all_gathers(
    model: nn.Module,
    bits: int,
    block_size: int,
    ignored: Iterable[nn.Module | nn.Parameter],
    ranks_per_node: int | str,
) -> list[CompressedAllGather]:
    """Return each parameter group's all-gather, also with 4 bits. Raises compress_all_gather's errors."""
    block_size, per_node = BLOCK_SIZE("block_size", block_size), require_ranks_per_node(ranks_per_node)
    groups = checked_groups(_WHOSE, model)
    require_names(FSDPModule, "set_custom_all_gather")
    require_default(_WHOSE, groups, "all_gather")
    exact = sorted(_names_of(model, ignored))
    options = {"bits": bits, "block_size": block_size, "ranks_per_node": per_node, "ignored": exact}
    require_agreement(_WHOSE, groups, groups[0].replicate_group, options)
    nodes: dict[dist.ProcessGroup, int] = {}
    gathers: dict[Any, ShardGather] = {}  # groups of equal shapes share one
    found = []
    for group in groups:
        shards = group.shard_group
        assert shards is not None
        if shards not in nodes:
            of_group = nodes_in(_WHOSE, per_node, shards, group.device)
            nodes[shards] = of_group.ranks_per_node if of_group else 1
        shapes = tuple(tuple(each.shape) for each in group.placeholders)
        positions = tuple(index for index, name in enumerate(group.names(model)) if name in exact)
        key = shapes, positions, shards.size(), nodes[shards]
        if key not in gathers:
            gathers[key] = ShardGather(*key, bits, block_size)
        found.append(CompressedAllGather(group, gathers[key]))
    return found


def _names_of(model: nn.Module, ignored: Iterable[Any]) -> set[str]:
    """Return the names of parameters. Raises TypeError, or ValueError for parameters of another model."""
    if isinstance(ignored, nn.Module | torch.Tensor | str) or not isinstance(ignored, Iterable):
        raise TypeError(
            f"{_WHOSE} takes a list of modules and parameters as ignored, got {described(ignored)}"
        )
    ids = set()
    for each in ignored:
        if not isinstance(each, nn.Module | nn.Parameter):
            raise TypeError(f"{_WHOSE}: ignored has {described(each)}, but takes modules and parameters")
        ids |= {id(parameter) for parameter in (each.parameters() if isinstance(each, nn.Module) else [each])}
    named = list(model.named_parameters(remove_duplicate=False))
    if unknown := ids - {id(parameter) for _, parameter in named}:
        raise ValueError(
            f"{_WHOSE}: {len(unknown)} parameters in ignored aren't the model's. Likely cause: they were "
            "taken before fully_shard, which makes new ones"
        )
    return {name for name, parameter in named if id(parameter) in ids}
