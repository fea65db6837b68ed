"""gradcomp.DistributedDataParallel beside torch's: every scenario runs with both, and both have to end alike."""

import collections
import copy
import dataclasses
import inspect
import io
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradcomp
from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.distributed.ranks import run_ranks
from tests.distributed.reducer_models import CAP_MB, MLP, MODELS, Branches, ConvNet, loss_of
from tests.tolerances import average

CLASSES = {"torch": TorchDDP, "gradcomp": gradcomp.DistributedDataParallel}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}


def run_quietly(scenario, cls, rank, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        return scenario(cls, rank, *arguments)


def on_both(rank, scenario, *arguments):
    return {name: run_quietly(scenario, cls, rank, *arguments) for name, cls in CLASSES.items()}


def assert_alike(scenario, world_size, *arguments, exact=True):
    """The scenario's results with both classes, by rank: equal, or tensors within the rounding of a sum."""
    ranks = run_ranks(on_both, world_size, scenario, *arguments)
    for results in ranks:
        _compare(results["gradcomp"], results["torch"], world_size, exact)
    return [results["gradcomp"] for results in ranks]


def _compare(ours, theirs, world_size, exact):
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if exact:
            assert torch.equal(ours, theirs)
        else:
            bound = 10 * average(torch.float32, world_size, theirs.abs().max())
            assert (ours - theirs).abs().max() <= bound
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            _compare(ours[key], theirs[key], world_size, exact)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _compare(one, other, world_size, exact)
    else:
        assert ours == theirs


def batch_of(model, rank, step):
    return model.batch(torch.Generator().manual_seed(1000 * rank + step))


def flat(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def gradients(model):
    def dense(gradient):
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    return [None if p.grad is None else dense(p.grad).clone() for p in model.parameters()]


def train(cls, rank, name, options, hook=None, steps=5):
    """The gradients of every step; the parameters and buffers at the end. Ranks start from different weights."""
    torch.manual_seed(rank)
    model = MODELS[name]()
    ddp = cls(model, bucket_cap_mb=CAP_MB, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        results.append(gradients(model))
        optimizer.step()
    return results, ddp.state_dict()


GRID = [
    *((model, {}) for model in ("MLP", "ConvNet", "Transformer", "Embeddings")),
    *((model, UNUSED) for model in ("MLP", "ConvNet", "Branches", "Embeddings")),
    *((model, STATIC) for model in ("MLP", "Repeated", "Transformer")),
    *((model, VIEW) for model in ("ConvNet", "Transformer")),
    ("Branches", UNUSED | VIEW),
    ("Repeated", STATIC | VIEW),
    ("Repeated", STATIC | UNUSED),
    ("ConvNet", {"broadcast_buffers": False}),
]


@pytest.mark.parametrize(("model", "options"), GRID, ids=str)
def test_training(model, options):
    ranks = assert_alike(train, 2, model, options)
    names = [
        name for name in ranks[0][1] if "running" not in name or options.get("broadcast_buffers") is not False
    ]
    assert all(torch.equal(ranks[0][1][name], ranks[1][1][name]) for name in names if "running" not in name)


@pytest.mark.parametrize("model", ["MLP", "Transformer"])
def test_training_on_three_ranks(model):
    assert_alike(train, 3, model, {}, None, 2, exact=False)


@pytest.mark.parametrize("hook", [default_hooks.fp16_compress_hook, default_hooks.allreduce_hook])
def test_training_with_hooks(hook):
    assert_alike(train, 2, "MLP", {}, hook)


# Construction.


def construct(cls, rank, make, options):
    try:
        cls(make(), **options)
    except Exception as error:
        return type(error).__name__, re.sub(r"DistributedDataParallel\([^)]*\)", "", str(error))
    return None


def frozen():
    return MLP().requires_grad_(False)


def lazy():
    return nn.LazyLinear(3)


def mixed_devices():
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (frozen, {}),
        (lazy, {}),
        (mixed_devices, {}),
        (MLP, {"device_ids": [0]}),
        (MLP, {"output_device": 1}),
        (MLP, {"device_ids": [0, 1]}),
    ],
)
def test_what_the_constructor_refuses(make, options):
    ((kind, message),) = assert_alike(construct, 1, make, options)
    assert kind in ("RuntimeError", "ValueError")
    assert message


@pytest.mark.parametrize(
    ("option", "value", "alternative"),
    [
        ("mixed_precision", object(), "torch.autocast"),
        ("delay_all_reduce_named_params", [], "Reducer"),
        ("bucket_cap_mb_list", [1, 2], "bucket_cap_mb"),
    ],
)
def test_options_not_taken_name_an_alternative(option, value, alternative):
    with pytest.raises(NotImplementedError, match=f"has no {option}: use .*{alternative}"):
        gradcomp.DistributedDataParallel(MLP(), **{option: value})


def groups_and_meshes(cls, rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    results = []
    for options in ({"device_mesh": mesh}, {"process_group": dist.new_group([0, 1])}):
        torch.manual_seed(rank)
        model = MLP()
        ddp = cls(model, **options)
        loss_of(ddp(batch_of(model, rank, 0))).backward()
        results.append(gradients(model))
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arguments"):
        cls(MLP(), device_mesh=mesh, process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported,"):
        cls(MLP(), device_mesh=dist.device_mesh.init_device_mesh("cpu", (2, 1)))
    return results


def test_process_groups_and_meshes():
    assert_alike(groups_and_meshes, 2)


def ignoring(cls, rank):
    """Parameters and buffers to ignore stay the rank's own."""
    torch.manual_seed(rank)
    model = ConvNet()
    model._ddp_params_and_buffers_to_ignore = ["head.weight", "body.1.running_mean"]
    ddp = cls(model)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    return (
        model.head.weight.detach().clone(),
        model.body[1].running_mean.clone(),
        gradients(model),
        flat(model),
    )


def test_parameters_to_ignore():
    first, second = assert_alike(ignoring, 2)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def without_init_sync(cls, rank):
    torch.manual_seed(rank)
    model = MLP()
    before = flat(model)
    cls(model, init_sync=False)
    return torch.equal(before, flat(model))


def test_init_sync_off():
    assert assert_alike(without_init_sync, 2) == [True, True]


# Forward and backward.


@dataclasses.dataclass
class Outputs:
    first: torch.Tensor
    rest: list


Pair = collections.namedtuple("Pair", ["x", "y"])


class Nested(nn.Module):
    """Takes and gives nested containers; a branch of its outputs may stay out of the loss."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, pair, *, extra, kind):
        first, second = self.one(pair.x), self.two(extra["y"][0])
        return {
            "dict": {"a": first, "b": [second, 3, None]},
            "namedtuple": Pair(first, second),
            "dataclass": Outputs(first, [second]),
        }[kind]


def nested(cls, rank, kind, part, options):
    torch.manual_seed(0)
    model = Nested()
    ddp = cls(model, **options)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    outputs = ddp(Pair(x, None), extra={"y": [2 * x]}, kind=kind)
    assert type(outputs).__name__ == {"dict": "dict", "namedtuple": "Pair", "dataclass": "Outputs"}[kind]
    first = {"dict": lambda o: o["a"], "namedtuple": lambda o: o.x, "dataclass": lambda o: o.first}[kind](
        outputs
    )
    second = {"dict": lambda o: o["b"][0], "namedtuple": lambda o: o.y, "dataclass": lambda o: o.rest[0]}[
        kind
    ](outputs)
    loss = first.square().sum() + (second.sum() if part == "all" else 0.0)
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("kind", ["dict", "namedtuple", "dataclass"])
@pytest.mark.parametrize(("part", "options"), [("all", {}), ("all", UNUSED)], ids=str)
def test_nested_inputs_and_outputs(kind, part, options):
    assert_alike(nested, 2, kind, part, options)


@pytest.mark.parametrize("kind", ["dict", "namedtuple"])
def test_outputs_that_the_loss_leaves_out(kind):
    """With find_unused_parameters their parameters keep their gradients: None."""
    for results in assert_alike(nested, 2, kind, "first", UNUSED):
        assert [gradient is None for gradient in results] == [False, False, True, True]


def unfinished(cls, rank, debug):
    model = Branches()
    ddp = cls(model)
    loss_of(ddp(torch.ones(2, 12))).backward()
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(2, 12))
    return str(caught.value)


def messages_of_unfinished(rank):
    return on_both(rank, unfinished, False)


def test_an_unfinished_reduction_is_told_at_the_next_forward():
    for messages in run_ranks(messages_of_unfinished, 2):
        for message in messages.values():
            for part in (
                "Expected to have finished reduction in the prior iteration",
                "passing the keyword argument `find_unused_parameters=True`",
                "`forward` function outputs participate in calculating loss",
                "Parameter indices which did not receive grad for rank ",
            ):
                assert part in message
        numbers = [message.rsplit(":", 1)[1].split() for message in messages.values()]
        assert sorted(numbers[1]) == sorted(word for word in numbers[0] if word.isdigit())


def accumulate(cls, rank, options, inside):
    """Two forwards without synchronisation, then one with; or the backward outside of no_sync."""
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model, **options)
    results = []
    for step in range(2):
        with ddp.no_sync(), ddp.no_sync():
            loss = loss_of(ddp(batch_of(model, rank, 10 * step)))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append(gradients(model))
        loss_of(ddp(batch_of(model, rank, 10 * step + 1))).backward()
        results.append(gradients(model))
        with pytest.raises(ZeroDivisionError), ddp.no_sync():
            raise ZeroDivisionError
        ddp.zero_grad()
    return results


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("options", [{}, VIEW, UNUSED], ids=str)
def test_no_sync(options, inside):
    first, second = assert_alike(accumulate, 2, options, inside)
    assert not torch.equal(first[0][0], second[0][0])
    assert torch.equal(first[1][0], second[1][0])


def two_backwards(cls, rank):
    """A step's backward in two calls; a second backward of the same graph; a double backward."""
    torch.manual_seed(0)
    model = Nested()
    ddp = cls(model)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    outputs = ddp(Pair(x, None), extra={"y": [x]}, kind="namedtuple")
    outputs.x.sum().backward()
    outputs.y.square().sum().backward(retain_graph=True)
    results = [gradients(model)]
    outputs.y.square().sum().backward()
    results.append(gradients(model))
    return results


def test_backward_in_several_calls():
    assert_alike(two_backwards, 2)


def gradients_of_gradients(cls, rank):
    """A penalty on the gradients of this rank."""
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model)
    loss = loss_of(ddp(batch_of(model, rank, 1)))
    grads = torch.autograd.grad(loss, list(ddp.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in grads)).backward()
    return gradients(ddp)


def test_gradients_of_gradients():
    assert_alike(gradients_of_gradients, 2)


def create_graph(rank):
    """torch's raises in this version."""
    torch.manual_seed(0)
    model = MLP()
    ddp = gradcomp.DistributedDataParallel(model)
    results = []
    for keep in (False, True, True):
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle
            loss_of(ddp(batch_of(model, rank, 0))).backward(create_graph=keep)
        results.append([gradient.detach() for gradient in gradients(model)])
    ddp.zero_grad()
    return results


def test_create_graph():
    for plain, *kept in run_ranks(create_graph, 2):
        for gradients_ in kept:
            assert all(torch.equal(one, other) for one, other in zip(plain, gradients_, strict=True))


def freeze_later(cls, rank):
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model, **UNUSED)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    model[0].requires_grad_(False)
    ddp.zero_grad()
    loss_of(ddp(batch_of(model, rank, 1))).backward()
    return gradients(model)


def test_parameters_frozen_later():
    assert_alike(freeze_later, 2)


def complex_model(cls, rank):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.complex64)
    ddp = cls(model)
    x = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(rank))
    ddp(x).abs().sum().backward()
    return gradients(model)


def test_complex_parameters():
    assert_alike(complex_model, 2)


def evaluate_on_one_rank(cls, rank):
    model = ConvNet()
    ddp = cls(model)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    model.eval()
    if rank == 0:
        with torch.no_grad():
            ddp.module(batch_of(model, rank, 1))
    model.train()
    ddp.zero_grad()
    loss_of(ddp(batch_of(model, 0, 2))).backward()
    return len(gradients(model))


def test_evaluation_of_the_module_on_one_rank():
    assert_alike(evaluate_on_one_rank, 2)


# Buffers.


def reassigned_buffers(cls, rank, options):
    torch.manual_seed(0)
    model = ConvNet()
    ddp = cls(model, **options)
    results = []
    for step in range(3):
        model.body[1].register_buffer("running_mean", torch.full((8,), float(10 * rank + step)))
        ddp.zero_grad()
        loss_of(ddp(batch_of(model, 0, step))).backward()
        results.append(model.body[1].running_mean.clone())
    return results


@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": False}], ids=str)
def test_buffers_come_from_rank_0_in_every_forward(options):
    first, second = assert_alike(reassigned_buffers, 2, options)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other) == (not options)


def buffers_at_construction(cls, rank, options):
    model = ConvNet()
    model.body[1].running_mean.fill_(rank + 1.0)
    if "forward_sync_buffers" not in inspect.signature(TorchDDP).parameters and cls is TorchDDP:
        options = {}  # an older torch, which has this under no name
    cls(model, **options)
    return model.body[1].running_mean.clone()


@pytest.mark.parametrize(
    "options", [{}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}], ids=str
)
def test_buffers_at_construction(options):
    """broadcast_buffers=False leaves them alone from the start; forward_sync_buffers=False, only later."""
    first, second = assert_alike(buffers_at_construction, 2, options)
    assert torch.equal(first, second) == ("broadcast_buffers" not in options)


# Serialisation.


def serialise(cls, rank, how):
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model, bucket_cap_mb=CAP_MB)
    loss_of(ddp(batch_of(model, rank, 0))).backward()
    if how == "deepcopy":
        other = copy.deepcopy(ddp)
    else:
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    other.zero_grad()
    loss_of(other(batch_of(model, rank, 1))).backward()
    return gradients(other), list(other.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_average(how):
    first, second = assert_alike(serialise, 2, how)
    assert torch.equal(first[0][0], second[0][0])
    assert first[1][0] == "module.0.weight"


def interchange(rank):
    """A state_dict of torch's DDP loads into ours, and the other way round."""
    torch.manual_seed(0)
    theirs, ours = TorchDDP(ConvNet()), gradcomp.DistributedDataParallel(ConvNet())
    ours.load_state_dict(theirs.state_dict())
    same = torch.equal(flat(ours), flat(theirs))
    with torch.no_grad():
        for param in ours.parameters():
            param.mul_(2)
    theirs.load_state_dict(ours.state_dict())
    return same, torch.equal(flat(ours), flat(theirs)), ours.train() is ours


def test_state_dicts_are_interchangeable():
    assert run_ranks(interchange, 1) == [(True, True, True)]


def other_group(rank):
    ddp = gradcomp.DistributedDataParallel(MLP(), process_group=dist.new_group([0]))
    with pytest.raises(
        RuntimeError, match="DDP Pickling/Unpickling are only supported when using DDP with the default"
    ):
        copy.deepcopy(ddp)


def test_copies_need_the_default_group():
    run_ranks(other_group, 1)


# Uneven inputs.


def uneven(cls, rank, divide, options):
    """Rank 0 has two inputs, rank 1 five."""
    torch.manual_seed(0)
    model = MLP() if not options else Branches()
    ddp = cls(model, bucket_cap_mb=CAP_MB, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            loss_of(ddp(batch_of(model, rank, step))).backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("options", [{}, UNUSED], ids=str)
def test_join(divide, options):
    first, second = assert_alike(uneven, 2, divide, options)
    assert torch.equal(first, second)


def join_in_both_ways(cls, rank):
    """A join that divides by the ranks that are left, and then one that divides by all."""
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model)
    results = []
    for divide_by_all in (False, True):
        with ddp.join(divide_by_initial_world_size=divide_by_all):
            for step in range(1 + 2 * rank):
                ddp.zero_grad()
                loss_of(ddp(batch_of(model, rank, step))).backward()
                results.append(gradients(model))
    return results


def test_one_join_leaves_the_next_ones_mean_alone():
    assert_alike(join_in_both_ways, 2)


def throw_early(cls, rank):
    model = MLP()
    ddp = cls(model)
    try:
        with ddp.join(throw_on_early_termination=True):
            for step in range(2 + rank):
                loss_of(ddp(batch_of(model, rank, step))).backward()
    except RuntimeError as error:
        return str(error)
    return None


def test_join_that_ends_when_one_rank_ends():
    for message in assert_alike(throw_early, 2):
        assert "exhausted" in message


# Hooks.


def refuse_hooks(cls, rank):
    messages = []

    def wrong_bucket(state, bucket: int):
        pass

    def wrong_return(state, bucket) -> int:
        pass

    def other_name(state, buckets):
        pass

    for hook in ("text", wrong_bucket, wrong_return, other_name):
        ddp = cls(MLP())
        with pytest.raises((TypeError, ValueError, KeyError)) as caught:
            ddp.register_comm_hook(None, hook)
        messages.append((type(caught.value).__name__, str(caught.value)))
    ddp = cls(MLP())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return messages


def test_hooks_that_are_refused():
    assert_alike(refuse_hooks, 1)


def raise_in_hook(cls, rank):
    def hook(state, bucket):
        raise ZeroDivisionError("in the hook")

    model = MLP()
    ddp = cls(model)
    ddp.register_comm_hook(None, hook)
    with pytest.raises(Exception, match="in the hook"):
        loss_of(ddp(batch_of(model, rank, 0))).backward()
    return True


def test_an_exception_in_a_hook_surfaces_from_backward():
    assert_alike(raise_in_hook, 1)


def with_power_sgd(cls, rank, hook_name):
    torch.manual_seed(0)
    model = MLP()
    ddp = cls(model)
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, 2, 2), getattr(powerSGD_hook, hook_name))
    results = []
    for step in range(5):
        ddp.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        results.append(gradients(model))
    return results


@pytest.mark.parametrize("hook", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_power_sgd_has_the_same_result(hook):
    """In one bucket, which both arrange alike."""
    assert_alike(with_power_sgd, 2, hook)


def optimizers_in_backward(rank, inside):
    """torch's own needs an accelerator for this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit, on import
        from torch.distributed.optim import _apply_optimizer_in_backward
    torch.manual_seed(0)
    model = MLP()
    if inside:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = gradcomp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(ddp(batch_of(model, rank, step))).backward()
        if not inside:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def test_optimizers_in_backward():
    """They step once their parameters have been averaged."""
    first, second = run_ranks(optimizers_in_backward, 2, True)
    assert torch.equal(first, second)
    assert torch.equal(first, run_ranks(optimizers_in_backward, 2, False)[0])


def set_static_graph(cls, rank):
    torch.manual_seed(0)
    model = MODELS["Repeated"]()
    ddp = cls(model)
    ddp._set_static_graph()
    results = []
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        results.append(gradients(model))
    return results


def test_set_static_graph():
    assert_alike(set_static_graph, 2)


def static_graph_and_checkpoints(rank):
    """torch's stops averaging when its module is saved and loaded in mid-training; ours must not."""
    torch.manual_seed(rank)
    model = MLP()
    ddp = gradcomp.DistributedDataParallel(model, static_graph=True)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        if step == 1:
            ddp = copy.deepcopy(ddp)
    return gradients(ddp)


def test_a_static_graph_survives_a_copy():
    first, second = run_ranks(static_graph_and_checkpoints, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x


def reentrant(cls, rank, options):
    torch.manual_seed(0)
    model = Reentrant()
    ddp = cls(model, bucket_cap_mb=0.001, **options)
    results = []
    for step in range(3):
        ddp.zero_grad()
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * rank + step)).requires_grad_()
        ddp(x).square().sum().backward()
        results.append(gradients(model))
    return results


@pytest.mark.parametrize("options", [{}, STATIC], ids=str)
def test_reentrant_checkpointing(options):
    assert_alike(reentrant, 2, options)
