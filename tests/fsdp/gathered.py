"""Torch's all-gather of weights that each rank rounds before it: what compress_all_gather must equal."""

import math
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

LARGEST_CODE, LARGEST_IN_BF16 = 127, torch.finfo(torch.bfloat16).max


def rounded(values, block_size):
    """Quantize and dequantize a flat tensor: to 8 bits with a scale for each block."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    blocks = pad(wide, (0, -len(values) % block_size)).view(-1, block_size)
    least = (blocks.abs().amax(1, keepdim=True) / LARGEST_CODE).float()
    scale = least.bfloat16()
    scale = torch.where(scale < least, scale.nextafter(torch.full_like(scale, math.inf)), scale)
    scale = torch.where(least <= LARGEST_IN_BF16, scale, math.nan).to(wide.dtype)
    codes = (blocks * scale.reciprocal()).round().masked_fill(scale == 0, 0.0)
    top = torch.finfo(values.dtype).max
    return (codes * scale).clamp(-top, top).flatten()[: len(values)].to(values.dtype)


def group_of(module):
    """Return torch's parameter group of an FSDP module; None without parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        return state._fsdp_param_group
    return groups[0] if groups else None


class RoundedAllGather:
    """The all-gather of an FSDP module. It rounds each shard's matrices of at least a block.

    ignored: modules and parameters that are gathered exactly.

    num_rounded: all-gathers so far in which rounding changed the shard.
    """

    def __init__(self, module, block_size, ignored=()):
        group = group_of(module)
        self._torchs, self._size = group._all_gather_comm, group.mesh_info.shard_process_group.size()
        self._parameters, self._block_size = group.fsdp_params, block_size
        parameters = [each.parameters() if isinstance(each, nn.Module) else [each] for each in ignored]
        self._ignored = {id(each) for each in chain.from_iterable(parameters)}
        self.num_rounded = 0

    def allocate(self, *arguments, **options):
        return self._torchs.allocate(*arguments, **options)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        sent = input_tensor
        if self._rounds(sent.dtype) and group.size() == self._size:
            shards = sent.split([each.padded_sharded_param_size.numel() for each in self._parameters])
            sent = torch.cat([self._rounded(*each) for each in zip(shards, self._parameters, strict=True)])
            self.num_rounded += not torch.equal(sent, input_tensor)
        return self._torchs(output_tensor, sent, group, async_op)

    def _rounds(self, dtype):
        if any(hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in self._parameters):
            return False
        return dtype.is_floating_point

    def _rounded(self, shard, parameter):
        is_exact = len(parameter.padded_sharded_param_size) < 2 or len(shard) < self._block_size
        if is_exact or id(parameter.sharded_param) in self._ignored:
            return shard
        return rounded(shard, self._block_size)


def round_all_gathers(model, block_size, ignored=()):
    """Install RoundedAllGather in every FSDP module. Returns them."""
    installed = {}
    for module in model.modules():
        group = group_of(module) if isinstance(module, FSDPModule) else None
        if group is not None and id(group) not in installed:
            installed[id(group)] = RoundedAllGather(module, block_size, ignored)
            module.set_custom_all_gather(installed[id(group)])
    return list(installed.values())
