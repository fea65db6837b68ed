"""The ways to average gradients that are compared, by name:

none, int4, powersgd:8:int8  a hook of gradcomp/hooks/named_hooks.py; with :flat at the end, without nodes
noop, auto                   a hook that averages nothing; auto_hook
torch:fp16                   torch's own hook
alone                        every rank trains by itself
local:20:int4:delay=5        local steps, see LocalOptions
fsdp2:int8:int4              FSDP2, see weights_and_gradients
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from benchmarks.training.wire import is_simulated
from gradcomp.comm.nodes import AUTO as TORCHRUNS
from gradcomp.fsdp import compress_reduce_scatter
from gradcomp.fsdp.all_gather import all_gathers
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from gradcomp.hooks.debugging_hooks import noop_hook
from gradcomp.hooks.named_hooks import NamedHook
from gradcomp.hooks.quantization_hooks import QuantizationState
from gradcomp.local_steps import LocalSteps

TORCHS = {"fp32": None, "bf16": torch.bfloat16}
BITS = {"16bit": 16, "int8": 8, "int4": 4}


def weights_and_gradients(name: str) -> tuple[str, str]:
    """Return the two parts of a name. Raises ValueError for another name.

    Weights are gathered in fp32, in bf16 (torch's param_dtype), or by gradcomp in int8 or int4. Gradients are
    reduce-scattered in fp32, in bf16 (torch's reduce_dtype), or by gradcomp in 16bit, int8 or int4.
    """
    weights, _, gradients = name.partition(":")
    for each, known in ((weights, [*TORCHS, "int8", "int4"]), (gradients, [*TORCHS, *BITS])):
        if each not in known:
            raise ValueError(f"{each!r} is none of {', '.join(known)}")
    return weights, gradients


def shard(net: nn.Module, name: str, start_iter: int = 0) -> None:
    """Shard a net over all ranks, each layer or block by itself.

    name: see weights_and_gradients. start_iter: the first step whose gradients gradcomp compresses.
    """
    weights, gradients = weights_and_gradients(name)
    dtypes = {"param_dtype": TORCHS.get(weights), "reduce_dtype": TORCHS.get(gradients) or torch.float32}
    policy: Any = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32)
    for layer in (net if isinstance(net, nn.Sequential) else net.get_submodule("blocks")).children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**dtypes))
    fully_shard(net, mp_policy=policy)
    if gradients in BITS:
        compress_reduce_scatter(net, QuantizationState(bits=BITS[gradients], start_iter=start_iter))
    if weights in BITS:
        for each in all_gathers(net, BITS[weights], 128, (), TORCHRUNS):
            each.param_group.module.set_custom_all_gather(each)


def unsharded(net: nn.Module) -> list[torch.Tensor]:
    """Return the weights that a rank computes with, as copies."""
    modules = [each for each in net.modules() if isinstance(each, FSDPModule)]
    for module in modules:
        module.unshard()
    found = [parameter.detach().float().clone() for parameter in net.parameters()]
    for module in modules:
        module.reshard()
    return found


ALONE, AUTO, NOOP, TORCHS_FP16 = "alone", "auto", "noop", "torch:fp16"
LOCAL, SHARDED = "local:", "fsdp2:"  # beginnings of names
FLAT = ":flat"


@dataclass(frozen=True)
class LocalOptions:
    """The settings of local steps: LocalSteps' arguments of these names, and the pseudo-gradients' hook.

    outer: learning rate and Nesterov's momentum of the outer SGD. to: exchanges become rarer as the square of
    the (inner) learning rate falls, up to ``to`` steps from one to the next; 0 for no change.
    """

    every: int
    hook: str = "none"
    delay: int = 0
    to: int = 0
    outer: tuple[float, float] = (1.0, 0.0)

    @classmethod
    def named(cls, name: str) -> "LocalOptions":
        """Return the settings of a run such as "local:20:int4:delay=5" or "local:20:outer=0.7/0.9".

        Raises ValueError for another name.
        """
        every, *rest = name.removeprefix(LOCAL).split(":")
        if not every.isdecimal() or not int(every):
            raise ValueError(f"local: {every!r} is not a number of local steps")
        given = dict(each.split("=", 1) for each in rest if "=" in each)
        hook = ":".join(each for each in rest if "=" not in each) or "none"
        NamedHook.named(hook)
        if unknown := set(given) - {"delay", "to", "outer"}:
            raise ValueError(f"local: there is no setting {min(unknown)!r}; known are delay, to, outer")
        learning_rate, _, momentum = given.pop("outer", "1/0").partition("/")
        numbers = {key: int(value) for key, value in given.items()}
        return cls(int(every), hook, **numbers, outer=(float(learning_rate), float(momentum or 0)))

    def apply(self, net: nn.Module) -> LocalSteps:
        start_iter = 2 if "powersgd" in self.hook else 0  # as early as the hook can
        state, hook = NamedHook.named(self.hook).state_and_hook(start_iter)
        learning_rate, momentum = self.outer
        outer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=momentum, nesterov=momentum > 0)
        return LocalSteps(net, outer, self.every, hook, state, delay=self.delay)


def check_name(name: str) -> None:
    """Raise ValueError unless it is the name of a way to average."""
    if name.startswith(LOCAL):
        LocalOptions.named(name)
    elif name.startswith(SHARDED):
        weights_and_gradients(name.removeprefix(SHARDED))
    elif name not in (ALONE, AUTO, NOOP, TORCHS_FP16):
        NamedHook.named(name.removesuffix(FLAT))


def split_rate(name: str) -> tuple[str, float | None]:
    """Return a hook's name without ":lr=..." at its end, and that learning rate."""
    name, has_rate, rate = name.partition(":lr=")
    return name, float(rate) if has_rate else None


@dataclass
class Averaged:
    """A model with a way to average its gradients.

    net: the module. FSDP2 replaces its parameters: make the optimizer afterwards.
    start_iter: the steps before a hook compresses.
    auto_options: of auto_hook's state.
    model: what a step calls.
    """

    net: nn.Module
    name: str
    start_iter: int
    bucket_cap_mb: float | None = None
    auto_options: dict[str, Any] = field(default_factory=dict)
    model: Any = field(init=False)
    local: LocalSteps | None = field(init=False, default=None)
    auto: AutoState | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.model = self.net
        if self.name.startswith(LOCAL):
            self.local_options = LocalOptions.named(self.name)
            self.local = self.local_options.apply(self.net)
        elif self.name.startswith(SHARDED):
            if is_simulated():
                raise ValueError(f"{self.name}: FSDP2 needs processes, without --simulated-ranks")
            shard(self.net, self.name.removeprefix(SHARDED), self.start_iter)
        elif self.name != ALONE:
            # torch's waits in C++, where no other simulated rank can go on.
            wrapper: Any = gradcomp.DistributedDataParallel if is_simulated() else DistributedDataParallel
            self.model = wrapper(self.net, bucket_cap_mb=self.bucket_cap_mb)
            self._register()

    def _register(self) -> None:
        if self.name == AUTO:
            self.auto = AutoState(**self.auto_options)
            self.model.register_comm_hook(self.auto, auto_hook)
        elif self.name == NOOP:
            self.model.register_comm_hook(None, noop_hook)
        elif self.name == TORCHS_FP16:
            self.model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        elif self.name != "none":
            ranks_per_node = 1 if self.name.endswith(FLAT) else TORCHRUNS
            hook = NamedHook.named(self.name.removesuffix(FLAT))
            self.model.register_comm_hook(*hook.state_and_hook(self.start_iter, ranks_per_node))

    def end_step(self, number: int, num_steps: int) -> None:
        """Call it after the optimizer's step of this number, from 1 to num_steps."""
        if self.local is None:
            return
        options = self.local_options
        if options.to:
            # The learning rate falls linearly. Gu et al., "A Quadratic Synchronization Rule for Distributed
            # Deep Learning", 2024.
            every = options.every * (num_steps / (num_steps - number + 1)) ** 2
            self.local.every = min(int(every), options.to)
        if number == num_steps:
            self.local.join()
        else:
            self.local.step()

    def weights(self) -> list[torch.Tensor]:
        """Return the weights that this rank computes with."""
        if self.name.startswith(SHARDED):
            return unsharded(self.net)
        return list(self.net.parameters())
