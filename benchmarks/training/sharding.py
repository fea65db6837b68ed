"""Models that FSDP2 shards, with and without compression, by name: "WEIGHTS:GRADIENTS".

WEIGHTS are gathered in fp32, in bf16 (torch's param_dtype), or by gradcomp in int8 or int4. GRADIENTS
are reduce-scattered in fp32, in bf16 (torch's reduce_dtype), or by gradcomp in 16bit, int8 or int4.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gradcomp.comm.nodes import AUTO
from gradcomp.fsdp import compress_reduce_scatter
from gradcomp.fsdp.all_gather import all_gathers
from gradcomp.hooks.quantization_hooks import QuantizationState

TORCHS = {"fp32": None, "bf16": torch.bfloat16}
BITS = {"16bit": 16, "int8": 8, "int4": 4}


def parse(name: str) -> tuple[str, str]:
    """Return (weights, gradients) of a name. Raises ValueError for another name."""
    weights, _, gradients = name.partition(":")
    for each, known in ((weights, [*TORCHS, "int8", "int4"]), (gradients, [*TORCHS, *BITS])):
        if each not in known:
            raise ValueError(f"{each!r} is none of {', '.join(known)}")
    return weights, gradients


def shard(net: nn.Module, name: str, start_iter: int = 0) -> nn.Module:
    """Shard a net over all ranks, each layer or block by itself.

    name: the module's. start_iter: the first step whose gradients gradcomp compresses.
    """
    weights, gradients = parse(name)
    dtypes = {"param_dtype": TORCHS.get(weights), "reduce_dtype": TORCHS.get(gradients) or torch.float32}
    policy: Any = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32)
    layers = net if isinstance(net, nn.Sequential) else net.get_submodule("blocks")
    for layer in layers.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**dtypes))
    fully_shard(net, mp_policy=policy)
    if gradients in BITS:
        compress_reduce_scatter(net, QuantizationState(bits=BITS[gradients], start_iter=start_iter))
    if weights in BITS:
        for each in all_gathers(net, BITS[weights], 128, (), AUTO):
            each.param_group.install_all_gather(each)
    return net


def unsharded(net: nn.Module) -> list[torch.Tensor]:
    """Return the weights that a rank computes with, as copies."""
    modules = [each for each in net.modules() if isinstance(each, FSDPModule)]
    for module in modules:
        module.unshard()
    found = [parameter.detach().float().clone() for parameter in net.parameters()]
    for module in modules:
        module.reshard()
    return found
