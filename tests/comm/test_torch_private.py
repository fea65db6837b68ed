"""Test that gradcomp is imported without each of torch's private names, and says what is lost."""

import importlib
import logging
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradcomp
from gradcomp.comm import exchange, nodes, process_group, torch_private
from gradcomp.compress import agreement
from gradcomp.frameworks import CommHook
from gradcomp.fsdp import compress_reduce_scatter, param_groups
from gradcomp.hooks.default_hooks import average_traced
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.reducer.models import run_cases


class Gone:
    """An attribute that can't be read while hides is True, in place of one that torch sets on each object."""

    hides = True

    def __init__(self, name):
        self.name = name

    def __get__(self, owner, _):
        if Gone.hides or self.name not in vars(owner):
            raise AttributeError
        return vars(owner)[self.name]

    def __set__(self, owner, value):
        vars(owner)[self.name] = value


def train():
    """Train with the wrapper, through nearly all names: what it notices is said before backward ends."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    ddp = gradcomp.DistributedDataParallel(model, find_unused_parameters=True)
    ddp(torch.ones(2, 2)).sum().backward()


def ignore():
    gradcomp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(nn.Linear(2, 2), ["bias"])


def take_over():
    agreement.take_over(QuantizationState(None), 0, dist.group.WORLD)


def follow():
    CommHook(QuantizationState(None), quantization_hook).follow(torch.amp.GradScaler("cpu"))


def all_reduce_traced():
    average_traced((torch.ones(2), None), dist.group.WORLD, None)


def look_at_the_group():
    process_group.timeout_of(dist.group.WORLD)
    process_group.require_group("a test", dist.group.WORLD)


def make_groups_of_nodes():
    nodes._new_group([0], [dist.group.WORLD])


def post_ahead():
    exchange.enable_record_function(True)


def shard():
    """Compress a model of FSDP2."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with mock.patch.object(Gone, "hides", False):
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    compress_reduce_scatter(model, QuantizationState(None))
    importlib.reload(param_groups).param_groups_of(model)[0].units(torch.float32)


FSDP = "torch.distributed.fsdp._fully_shard"
OPTIMIZERS = "torch.distributed.optim.apply_optimizer_in_backward"
USES = {
    "torch._C._current_graph_task_id": train,
    "torch._C._current_autograd_node": train,
    "torch.autograd.Variable": train,
    "torch.autograd._unsafe_preserve_version_counter": train,
    "torch.autograd._enable_record_function": post_ahead,
    "torch.utils._pytree.tree_flatten": train,
    "torch.utils._pytree.tree_unflatten": train,
    "torch.utils._pytree.tree_map_only": take_over,
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model": ignore,
    "torch.nn.Module._ddp_params_and_buffers_to_ignore": train,
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": train,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": train,
    "torch.Tensor._post_accumulate_grad_hooks": train,
    f"{OPTIMIZERS}._apply_optimizer_in_backward": train,
    f"{OPTIMIZERS}.param_to_optim_hook_handle_map": train,
    "torch.distributed.algorithms.join.Joinable._join_config": train,
    "torch.amp.GradScaler._per_optimizer_states": follow,
    "torch.distributed._functional_collectives.all_reduce": all_reduce_traced,
    "torch.distributed.distributed_c10d._World.pg_names": make_groups_of_nodes,
    "torch.distributed.ProcessGroup._device_types": look_at_the_group,
    "torch.distributed.ProcessGroup._get_backend": look_at_the_group,
    "torch._C._distributed_c10d.Backend.Options._timeout": look_at_the_group,
    f"{FSDP}._fsdp_collectives._get_gradient_divide_factors": shard,
    **{f"{FSDP}._fsdp_param_group.FSDPParamGroup.{name}": shard for name in param_groups._OF_GROUPS},
    f"{FSDP}._fsdp_param_group.FSDPParamGroup._reduce_scatter_process_group": shard,
    f"{FSDP}._fsdp_common.FSDPMeshInfo.shard_process_group": shard,
    f"{FSDP}._fsdp_common.DDPMeshInfo.replicate_process_group": shard,
    **{f"{FSDP}._fsdp_param.FSDPParam.{name}": shard for name in param_groups._OF_PARAMETERS[:-1]},
    **{f"{FSDP}._fsdp_state.FSDPState.{name}": shard for name in (*param_groups._ENDS[:1], "_state_ctx")},
}


def said_without(rank, name, use):
    """Do something without one of torch's names; return the name, and the warnings and errors."""
    importlib.import_module(OPTIMIZERS)
    said, where = [], name.rpartition(".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Logger, "warning", lambda _, text, *values: said.append(text % values))
        remove(patch, name)
        patch.delitem(sys.modules, torch_private.__name__)
        found = vars(importlib.import_module(torch_private.__name__))
        for module in [each for title, each in sys.modules.items() if title.startswith("gradcomp")]:
            for alias in vars(module).keys() & found.keys():
                if vars(module)[alias] is vars(torch_private)[alias]:
                    patch.setattr(module, alias, found[alias])
        patch.setattr(process_group, "torch_private", sys.modules[torch_private.__name__])
        try:
            use()
        except Exception as error:
            said.append(f"{error} {error.__cause__}")
    return where[2], [text for text in said if where[2] in text and torch.__version__ in text], said


def remove(patch, name):
    try:
        patch.delattr(name)
    except (AttributeError, TypeError):  # torch sets it on objects, or in C
        patch.setattr(name, Gone(name.rpartition(".")[2]), raising=False)


def test_what_is_lost_without_a_name_is_said(run_ranks):
    (results,) = run_ranks(run_cases, 1, said_without, list(USES.items()))
    assert [each for each in results if not each[1]] == []


def imported_without(rank):
    with pytest.MonkeyPatch.context() as patch:
        for name in USES:
            remove(patch, name)
        for module in [each for each in sys.modules if each.partition(".")[0] == "gradcomp"]:
            patch.delitem(sys.modules, module)
        return importlib.import_module("gradcomp").__name__


def test_gradcomp_is_imported_without_any(run_ranks):
    assert run_ranks(imported_without, 1) == ["gradcomp"]
