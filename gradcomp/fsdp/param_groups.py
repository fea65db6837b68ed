"""FSDP2's parameter groups, and the gradients that a group has reduced, which torch has no public names for.

All private names of torch that the package uses are here, as read in torch 2.11 to 2.15.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradcomp.comm.torch_private import function_of, require_names

# The methods of an FSDP module's state that end a backward. The second one is for
# set_manual_backward_finalization, since torch 2.15.
_ENDS = ("_root_post_backward_final_callback", "finalize_backward")
_CALLER_MAY_END = hasattr(FSDPModule, "set_manual_backward_finalization")
_get_gradient_divide_factors = function_of(
    "distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors"
)
_OF_GROUPS = (
    *("device", "mesh_info", "mp_policy", "fsdp_params", "post_backward"),
    *("_all_reduce_hook", "all_reduce_grads", "gradient_divide_factor", "force_sum_reduction_for_comms"),
    *("_reduce_scatter_comm", "_all_gather_comm", "is_sharded_post_forward"),
)
_OF_PARAMETERS = (
    *("_module_info", "_orig_size", "fsdp_placement", "is_dtensor", "padded_sharded_param_size"),
    *("sharded_param", "unsharded_accumulated_grad", "_sharded_local_tensor"),
)


class Collective:
    """The method that torch's AllGather and ReduceScatter share."""

    @torch.inference_mode(False)
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an input or output, uninitialized."""
        return torch.empty(*size, dtype=dtype, device=device)


class ParamGroup:
    """The parameters of an FSDP module: FSDP2 reduces their gradients together, in one flat tensor.

    has_hook, all_gather: as found: whether an all-reduce hook is installed, and torch's AllGather.
    has_dtensors: whether a parameter was a DTensor before it was sharded.
    device: where the gradients are reduced.
    shard_group: the process group over which the parameters are sharded; None if they are not.
    reduce_scatter_group: the process group that reduce-scatters: shard_group or one with the same ranks.
    replicate_group: the process group in which FSDP2 averages over replicas, as on a 2-D mesh; None without.
    placeholders: a meta tensor for every parameter, in the padded shape of its local gradient in the reduced
        tensor. A shard's last rows may be padding; on some ranks, all rows.
    whole_placeholders: a meta tensor for every parameter, of which a row of the reduce-scatter's input has an
        equal part of the first dimension. It has the parameter's shape, if that is sharded by its first
        dimension. Otherwise torch stacks the shards: [ranks · rows, columns of a shard].
    """

    def __init__(self, name: str, module: Any, group: Any):
        require_names(group, *_OF_GROUPS)
        require_names(type(group), "_reduce_scatter_process_group")
        for each in group.fsdp_params:
            require_names(each, *_OF_PARAMETERS)
        self.name, self.module, self._group = name, module, group
        self.has_hook, self.all_gather = group._all_reduce_hook is not None, group._all_gather_comm
        self.has_dtensors = any(each.is_dtensor for each in group.fsdp_params)
        self.device, mesh = torch.device(group.device), group.mesh_info
        require_names(mesh, "shard_mesh_dim", "replicate_mesh_dim")
        shards, replicates = mesh.shard_mesh_dim is not None, mesh.replicate_mesh_dim is not None
        require_names(mesh, *["shard_process_group"] * shards, *["replicate_process_group"] * replicates)
        self.shard_group: Any = mesh.shard_process_group if shards else None  # checked_groups refuses None
        self.replicate_group: dist.ProcessGroup | None = mesh.replicate_process_group if replicates else None
        self.reduce_scatter_group: Any = self.shard_group and group._reduce_scatter_process_group
        self.placeholders: list[torch.Tensor] = []
        self.whole_placeholders: list[torch.Tensor] = []
        for each in group.fsdp_params:
            size, whole = each.padded_sharded_param_size, each._orig_size
            if self.shard_group is not None and each.fsdp_placement.dim != 0:
                whole = size[0] * self.shard_group.size(), *size[1:]
            dtype = each.sharded_param.dtype
            self.placeholders.append(torch.empty(size, dtype=dtype, device="meta"))
            self.whole_placeholders.append(torch.empty(whole, dtype=dtype, device="meta"))
        # The positions of the parameters in the reduce-scatter under way, and those that have been confirmed.
        self._reduced: list[int] | None = None
        self._confirmed: list[int] | None = None

    def names(self, model: nn.Module) -> list[str]:
        """Return the parameters' names in model.named_parameters(). Raises ValueError if one has left it."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        modules = set(map(id, model.modules()))
        places = [parameter._module_info for parameter in self._group.fsdp_params]
        for place in places:
            if id(place.module) not in modules:
                raise ValueError(
                    f"{self.name} shards the {place.param_name} of a {type(place.module).__name__} that is "
                    "no module of the model. Likely cause: it was replaced or wrapped after fully_shard"
                )
        return [names[id(getattr(place.module, place.param_name))] for place in places]

    @property
    def shards(self) -> list[torch.Tensor]:
        """The sharded parameters, which optimizers change."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def averages_now(self) -> bool:
        """False after set_requires_all_reduce(False)."""
        return bool(self._group.all_reduce_grads)

    @property
    def divide_factor(self) -> float | None:
        """The factor set with set_gradient_divide_factor; None if it was not called."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    def units(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the factors that gradients have (in the reduce-scatter, in all-reduce hooks).

        An all-reduce hook gets the mean over the shards, multiplied by the second factor.

        dtype: in which FSDP2 reduces; in float16 a part of its division comes before the reduction.
        """
        scatter, factor = self._group._reduce_scatter_process_group, self.divide_factor
        options = self.device.type, factor, self._group.force_sum_reduction_for_comms
        before, _, op, _ = _get_gradient_divide_factors(scatter, self.replicate_group, dtype, *options)
        unit, size = 1 / (before or 1.0), scatter.size()
        if size > 1 and op == dist.ReduceOp.AVG:
            return unit, unit
        return unit, unit * size / ((factor or 1.0) if size == 1 or op != dist.ReduceOp.SUM else 1.0)

    def custom(self, kind: str) -> str | None:
        """Return the class of a collective other than torch's default; None without one.

        kind: "reduce_scatter" or "all_gather".
        """
        name = type(getattr(self._group, f"_{kind}_comm")).__name__
        return None if name.startswith("Default") else name

    @property
    def is_resharded(self) -> bool:
        """True between forward and backward if the parameters are sharded over fewer ranks then."""
        return bool(self._group.is_sharded_post_forward)

    @property
    def has_extensions(self) -> bool:
        """True if a parameter's tensor has fsdp_pre_all_gather, which returns the tensors to gather."""
        parameters = self._group.fsdp_params
        return any(hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in parameters)

    @property
    def gathered_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which the parameters are gathered."""
        chosen, own = self._group.mp_policy.param_dtype, (each.dtype for each in self.shards)
        return {chosen if chosen and each.is_floating_point else each for each in own}

    def install(self, hook: Callable[[torch.Tensor], None], forget: Callable[[], None]) -> None:
        """Install an all-reduce hook. From now on `reduced` returns the placeholders of its gradients.

        forget: called by FSDP2's reset_iter_state(), which gives a failed backward's gradients up.
        """
        self._note_gradients()
        self.module.set_all_reduce_hook(hook)
        if hasattr(FSDPModule, "reset_iter_state"):  # since torch 2.13
            reset = self._group._reset_iter_state

            def forgetting() -> None:
                forget()
                reset()

            self._group._reset_iter_state = forgetting

    def install_reduce_scatter(self, function: Any) -> None:
        """Install a ReduceScatter that sums, and note from now on which gradients it has, for `reduced`."""
        self._note_gradients()
        if self.reduce_scatter_group.size() > 1:  # alone, torch would divide by a factor twice
            self.module.set_force_sum_reduction_for_comms(True)
        self.module.set_custom_reduce_scatter(function)

    def _note_gradients(self) -> None:
        post_backward, parameters = self._group.post_backward, self._group.fsdp_params

        def noting_gradients(*unused: Any) -> None:
            # torch 2.15 sorts a reduced tensor's parameters by the dtypes of their gradients.
            order = getattr(self._group, "_reduce_scatter_param_indices", None) or range(len(parameters))
            self._reduced = [index for index in order if self._will_be_reduced(parameters[index])]
            is_new = self._reduced != self._confirmed
            before = [each.sharded_param.grad for each in parameters if is_new]
            post_backward(*unused)
            if is_new:
                self._confirm(before, [each.sharded_param.grad for each in parameters])

        self._group.post_backward = noting_gradients

    def _confirm(self, before: list[Any], after: list[Any]) -> None:
        """Raise RuntimeError unless parameters got new gradients as expected, one after another."""
        new = [i for i, each in enumerate(after) if each is not None and each is not before[i]]
        order = [index for index in self._reduced or () if index in new]
        shards = [each for index in order if (each := after[index].to_local()).numel()]
        places = [(each.untyped_storage().data_ptr(), each.storage_offset()) for each in shards]
        if len(order) < len(new) or any(
            one[0] == other[0] and one > other for one, other in pairwise(places)
        ):
            raise RuntimeError(
                f"FSDP2 reduced the gradients of {self.name} in another order than expected, or others. "
                f"Likely cause: gradcomp.fsdp doesn't know torch {torch.__version__}"
            )
        if order == self._reduced:
            self._confirmed = order

    def reduced(self, output: torch.Tensor, *, whole: bool = False) -> list[torch.Tensor]:
        """Return the (whole) placeholders of the gradients in a reduced tensor, in the tensor's order.

        Raises RuntimeError if together the gradients are not as long as the tensor.
        """
        order = self._reduced or ()
        numel = sum(self.placeholders[index].numel() for index in order)
        if self._reduced is None or numel != output.numel():
            raise RuntimeError(
                f"FSDP2 reduced {output.numel()} elements of {self.name}, but its gradients have {numel}. "
                f"Likely cause: gradcomp.fsdp doesn't know torch {torch.__version__}"
            )
        return [(self.whole_placeholders if whole else self.placeholders)[index] for index in order]

    def _will_be_reduced(self, parameter: Any) -> bool:
        """Return whether a parameter has a gradient, of this backward or accumulated in earlier ones."""
        if not hasattr(parameter, "_unsharded_param"):
            return False  # its module has never run
        unsharded = parameter.unsharded_param
        if unsharded.grad is not None or parameter.unsharded_accumulated_grad is not None:
            return True
        # After set_reduce_scatter_unused_params(True), since torch 2.13.
        return bool(getattr(self._group, "reduce_scatter_unused_params", False) and unsharded.requires_grad)


def param_groups_of(model: nn.Module) -> list[ParamGroup]:
    """Return the parameter groups of a model in the order of its modules.

    Raises ValueError for a module with several groups, for which torch has no hooks.
    """
    found: dict[int, ParamGroup] = {}
    for name, module, state in _states_of(model):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 knows one group at most
            require_names(state, "_fsdp_param_group")
            groups = list(filter(None, [state._fsdp_param_group]))
        if len(groups) > 1:
            raise ValueError(
                f"{name} has {len(groups)} parameter groups, sharded over several meshes by its "
                "shard_placement_fn; torch offers all-reduce hooks for modules with one group only. Apply "
                "fully_shard to the parts with another mesh as modules of their own"
            )
        for group in groups:
            # Modules that were given to fully_shard in one list have one group.
            found.setdefault(id(group), ParamGroup(name, module, group))
    return list(found.values())


def call_after_backward(model: nn.Module, function: Callable[[], None]) -> None:
    """Call a function at the end of every backward of the model, when all gradients have been reduced."""
    for state in {id(state): state for _, _, state in _states_of(model)}.values():
        for name in _ENDS[: 2 if _CALLER_MAY_END else 1]:
            require_names(state, name, "_state_ctx")
            setattr(state, name, partial(_end, name, getattr(state, name), state, function))


def _end(
    name: str, end: Callable[..., None], state: Any, function: Callable[[], None], **options: Any
) -> None:
    is_manual = _CALLER_MAY_END and state._state_ctx.manual_backward_finalization_active
    end(**options)
    if not is_manual or name == "finalize_backward":
        function()


def _states_of(model: nn.Module) -> Iterator[tuple[str, FSDPModule, Any]]:
    """Yield (name, module, torch's state) of every FSDP module."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name or "the model", module, module._get_fsdp_state()
