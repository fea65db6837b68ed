"""Test that states count steps, also if no bucket says that it is the last."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradcomp
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from tests.depth import mixed

SIZE, STEPS = 40, 5
TORCH, OURS = nn.parallel.DistributedDataParallel, gradcomp.DistributedDataParallel
KINDS = {
    "int4": (lambda: QuantizationState(bits=4), quantization_hook),
    "PowerSGD": (lambda: PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook),
    "int8 factors": (
        lambda: PowerSGDState(None, 2, start_powerSGD_iter=2, factor_dtype=torch.int8, start_bits=8),
        powerSGD_hook,
    ),
}


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE).bfloat16()

    def forward(self, x):
        return self.second(self.first(x).bfloat16()).float()


class Heads(nn.Module):
    """This model never uses its first layer. That layer's gradients are in the last bucket."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x):
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return x


class Checkpointed(Heads):
    """Every layer runs a backward of its own, nested in the model's backward."""

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x


class Towers(Heads):
    """This model has two outputs. Each comes from two layers."""

    def forward(self, x):
        first, second, third, fourth = self.layers
        return second(first(x).tanh()), fourth(third(x).tanh())


def train(rank, make_model, options, libraries):
    """Train with every kind of state on every library.

    Returns for each: the step counts, is_compared, the compression rate, whether the ranks' gradients are
    equal, and how many elements they have.
    """
    found = []
    for library in libraries:
        for make, hook in KINDS.values():
            torch.manual_seed(0)
            ddp, state = library(make_model(), **options), make()
            ddp.register_comm_hook(state, hook)
            counted = []
            for step in range(STEPS):
                ddp.zero_grad()
                x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(10 * step + rank))
                outputs = ddp(x.requires_grad_())
                for output in outputs if isinstance(outputs, tuple) else [outputs]:
                    output.square().sum().backward()
                counted.append(state.iter)
            flat = torch.cat([p.grad.flatten().double() for p in ddp.parameters() if p.grad is not None])
            gathered = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(gathered, flat)
            rate = state.compression_stats()[0]
            found.append((counted, state.is_compared, rate, torch.equal(*gathered), len(flat)))
    return found


@pytest.mark.parametrize(
    ("make_model", "options", "libraries"),
    [
        (TwoDtypes, {"static_graph": True}, (TORCH, OURS)),
        (Checkpointed, {"bucket_cap_mb": 0.006}, (TORCH,)),
        (Towers, {"bucket_cap_mb": 0.006}, (TORCH,)),
        (
            Heads,
            {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.006},
            (TORCH, OURS),
        ),
    ],
    ids=["a static graph", "reentrant checkpoints", "two backwards", "an unused last bucket"],
)
def test_every_step_counts_once(run_ranks, make_model, options, libraries):
    """Nothing hangs, though in a static graph's first step torch calls no hook or callback once it waits."""
    for results in run_ranks(train, 2, make_model, options, libraries):
        for counted, is_compared, rate, is_equal, numel in results:
            assert counted == list(range(1, STEPS + 1))
            assert (is_compared, is_equal) == (True, True)
            assert rate > 1.5
            assert numel >= 2 * SIZE * SIZE


class Branches(Heads):
    """Every forward uses one layer, in a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))

    def forward(self, x, number):
        return self.layers[number](x)


def branches_in_turn(rank, library, options):
    """Return the counts after steps of one branch each; and by undo_step's arguments, what one step of
    another branch has left once it is taken back: the count, and whether all errors are as before.
    """
    torch.manual_seed(0)
    state = QuantizationState(bits=4)
    state.keep_undo, counted, undone = True, [], []
    ddp = library(Branches(), bucket_cap_mb=0.001, find_unused_parameters=True, **options)
    state.number_parameters(ddp.module.named_parameters())
    ddp.register_comm_hook(state, quantization_hook)

    def backward(number):
        ddp(torch.full((4, SIZE), rank + 0.1 * number), number).square().sum().backward()

    for step in range(2 * STEPS):
        ddp.zero_grad()
        backward(-step % 4)
        counted.append(state.iter)
    for arguments in ((), (2 * STEPS,)):
        before = state.state
        ddp.zero_grad()
        backward(2 * STEPS % 4)
        state.undo_step(*arguments)
        same = [torch.equal(each["error"], before[key]["error"]) for key, each in state.state.items()]
        undone.append((state.iter, all(same)))
    for number in (3, 2):  # in one step, as nobody zeroes the gradients: torch's DDP tells no more
        between = state.iter
        backward(number)
    refusal = ""
    if state.iter == between:
        with pytest.raises(RuntimeError, match="the step had begun in an earlier backward") as error:
            state.undo_step(between)
        refusal = str(error.value)
    return counted, undone, refusal


@pytest.mark.parametrize(("library", "as_view"), mixed([TORCH, OURS], [False, True]))
def test_branches_in_turn_are_steps_of_their_own(run_ranks, library, as_view):
    options = {"skip_all_reduce_unused_params": True, "gradient_as_bucket_view": as_view}
    for counted, undone, refusal in run_ranks(branches_in_turn, 2, library, options):
        assert counted == list(range(1, 2 * STEPS + 1))
        assert undone == [(2 * STEPS, True)] * 2
        assert bool(refusal) == (library is TORCH)


def undo_models(rank, is_one_backward):
    """Return the counts and whether errors are as before, for two models' steps that are taken back:
    both models', and the second one's alone, after the first one's optimizer has stepped.
    """
    torch.manual_seed(0)
    state = QuantizationState(bits=4)
    state.keep_undo = True
    models = [nn.Linear(SIZE, SIZE) for _ in range(2)]
    state.number_parameters(nn.ModuleList(models).named_parameters())
    ddps = [TORCH(model) for model in models]
    for ddp in ddps:
        ddp.register_comm_hook(state, quantization_hook)

    def step(steps_first=False):
        for model in models:
            model.zero_grad()
        losses = [ddp(torch.full((4, SIZE), rank + 1.0)).square().sum() for ddp in ddps]
        if is_one_backward:
            sum(losses).backward()
            return state.iter - 1
        losses[0].backward()
        if steps_first:
            torch.optim.SGD(models[0].parameters(), 0.01).step()
        before = state.iter
        losses[1].backward()
        return before

    for _ in range(3):
        step()
    found = []
    for arguments in ((), (state.iter,)):
        kept = state.state
        step()
        state.undo_step(*arguments)
        same = [torch.equal(each["error"], kept[key]["error"]) for key, each in state.state.items()]
        found.append((state.iter, all(same)))
    before = step(steps_first=True)
    state.undo_step(*([before] if is_one_backward else []))
    found.append(state.iter)
    step()
    step()
    with pytest.raises(RuntimeError, match=r"no backward to take back since step 7, of 11"):
        state.undo_step(7)  # the errors before that step are kept no longer
    return found


@pytest.mark.parametrize("is_one_backward", [True, False], ids=["one backward", "two backwards"])
def test_undo_step_takes_back_all_models_that_have_not_stepped(run_ranks, is_one_backward):
    for found in run_ranks(undo_models, 2, is_one_backward):
        assert found == [(6, True), (6, True), 7]


def undo_alone(rank):
    state = QuantizationState(dist.new_group([0, 1], timeout=timedelta(seconds=5)), start_iter=1)
    state.keep_undo, parameter = True, nn.Parameter(torch.empty(SIZE, SIZE))

    def average():
        state.average("hook", GradBucket(0, torch.ones(SIZE * SIZE), [parameter], True)).wait()

    average()
    average()
    if rank == 0:
        state.undo_step()
    with pytest.raises(RuntimeError) as error:
        average()
    return str(error.value)


def test_undo_step_on_one_rank_alone_is_found_in_the_next_step(run_ranks):
    first, second = run_ranks(undo_alone, 2)
    assert "only some ranks have changed an option, loaded a checkpoint or called undo_step" in first
    assert "rank 1 of 2 could not average bucket 0" in second


def average_one(state, index, parameter, is_last=False):
    quantization_hook(state, GradBucket(index, torch.ones(parameter.numel()), [parameter], is_last)).wait()


def changed_between_steps(rank):
    """Take steps that no bucket ends, and change something before each; return the messages of the next."""
    parameters = [torch.zeros(256, 2), torch.zeros(3)]
    messages = []
    for name, values in (("random_seed", (0, 1)), ("ranks_per_node", (1, 2)), ("start_iter", (5, 6))):
        state = QuantizationState(None, start_iter=1)
        for _ in range(3):
            for index, parameter in enumerate(parameters):
                average_one(state, index, parameter)
        setattr(state, name, values[rank])
        assert not state.is_compared
        with pytest.raises(RuntimeError) as raised:
            average_one(state, 0, parameters[0])
        messages.append(str(raised.value))
        setattr(state, name, values[0])
        for step in range(2):
            average_one(state, 0, parameters[0])
            assert state.is_compared == (step > 0)
    return messages


def test_a_change_between_two_steps_is_compared_although_no_bucket_ends_a_step(run_ranks):
    for seed, nodes, start in run_ranks(changed_between_steps, 2):
        assert "random_seed is 0 on rank 0 and 1 on rank 1" in seed
        assert "averages without nodes) is 1 on rank 0 and 2 on rank 1" in nodes
        assert "start_iter is 5 on rank 0 and 6 on rank 1" in start
