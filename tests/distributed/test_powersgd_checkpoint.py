"""PowerSGD's state: saved, loaded, resumed bitwise, taken over from torch, logged and counted."""

import copy
import io
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.distributed.powersgd_oracle import (
    Bucket,
    compressed,
    positions,
    random_gradient,
    relative,
)
from tests.distributed.ranks import device_of_rank, run_ranks
from tests.distributed.test_default_hooks import Net, backward

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "checkpoint.py"
START = 2
SHAPES = ((64, 48), (7,), (40, 90), (64, 48), (3, 3))
LOGGER = "gradcomp.hooks.powerSGD_hook"
# A mean of errors, rounded to float32 once. Measured 3e-8; ten times as much for a step behind it.
MEAN_ERROR = 1e-6
HOOKS = {
    "powerSGD": powerSGD_hook.powerSGD_hook,
    "batched": powerSGD_hook.batched_powerSGD_hook,
    "fp16 around powerSGD": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "bf16 around powerSGD": default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
}


class Messages(logging.Handler):
    """What a logger said while in this context, as "LEVEL text"."""

    def __init__(self, name: str = LOGGER):
        super().__init__()
        self.lines, self._logger = [], logging.getLogger(name)

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def __enter__(self):
        self._level, self._propagate = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self.lines

    def __exit__(self, *_):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        self._logger.propagate = self._propagate


def reload(value):
    """Through torch.save and torch.load with its safe default."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def equal(one, other):
    """Of nested lists, dicts, tensors and plain values; tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def new_state(**options):
    return powerSGD_hook.PowerSGDState(
        **({"process_group": None, "matrix_approximation_rank": 2, "start_powerSGD_iter": START} | options)
    )


def run_steps(state, rank, steps, shapes=SHAPES, hook="powerSGD", dtype=torch.float32):
    buckets = [Bucket(random_gradient(shapes, rank, step, dtype), shapes) for step in steps]
    return [HOOKS[hook](state, bucket).wait() for bucket in buckets]


# Saved and loaded.


def save_in_every_way(rank, options, hook, dtype):
    """A state after some steps, and its copies: the outputs and states after two more steps of each."""
    state = new_state(**options)
    run_steps(state, rank, range(START + 3), hook=hook, dtype=dtype)
    with Messages() as said:
        loaded_state = new_state(start_powerSGD_iter=50)
        loaded_state.load_state_dict(reload(state.state_dict()))
        twice = new_state()
        # Saved again before any bucket has come by.
        twice.load_state_dict(reload(loaded_state.state_dict()))
    assert said[2:] == [], "only the two configurations"
    with Messages():
        copies = [reload(state), pickle.loads(pickle.dumps(state)), copy.deepcopy(state), loaded_state, twice]
    outcomes = []
    for each in [state, *copies]:
        assert each.process_group in (None, dist.group.WORLD)
        before = each.state_dict()
        outputs = run_steps(each, rank, [50, 51], hook=hook, dtype=dtype)
        outcomes.append((before, outputs, each.state_dict()))
    return outcomes


@pytest.mark.parametrize(
    "options",
    [{}, {"warm_start": False}, {"use_error_feedback": False}, {"orthogonalization_epsilon": 1e-8}],
    ids=str,
)
@pytest.mark.parametrize("hook", list(HOOKS))
def test_a_loaded_state_continues_bitwise(hook, options):
    for original, *copies in run_ranks(save_in_every_way, 2, options, hook, torch.float32):
        for each in copies:
            assert equal(each, original)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_loaded_state_continues_bitwise_in_other_dtypes(dtype):
    for original, *copies in run_ranks(save_in_every_way, 2, {}, "powerSGD", dtype):
        for each in copies:
            assert equal(each, original)


def save_after_low_rank(rank):
    """The copies of a state that has seen gradients of rank 1 only: some of its directions may be zero."""
    state = new_state(matrix_approximation_rank=4, use_error_feedback=False)
    shape = [(64, 48)]
    for step in range(START + 3):
        generator = torch.Generator().manual_seed(step)
        column, row = torch.randn(64, 1, generator=generator), torch.randn(1, 48, generator=generator)
        powerSGD_hook.powerSGD_hook(state, Bucket((column @ row).flatten(), shape)).wait()
    with Messages():
        other = reload(state)
    return [run_steps(each, rank, range(50, 54), shape) for each in (state, other)]


def test_a_loaded_state_continues_bitwise_after_gradients_of_low_rank():
    for original, loaded in run_ranks(save_after_low_rank, 2):
        assert equal(original, loaded)


def test_hooks_are_saved_by_name():
    for hook in (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook):
        assert reload({"comm_hook": hook})["comm_hook"] is hook


def test_importing_gradcomp_is_enough(tmp_path):
    """In a fresh process: import gradcomp, then torch.load with its safe default."""
    with Messages():
        state = {"comm_hook": powerSGD_hook.powerSGD_hook, "comm_hook_state": new_state(random_seed=5)}
        torch.save(state, tmp_path / "checkpoint.pt")
    program = (
        "import sys, torch, gradcomp; state = torch.load(sys.argv[1]); "
        "print(state['comm_hook'].__name__, state['comm_hook_state'].random_seed)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "checkpoint.pt")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["powerSGD_hook", "5"], result.stderr


def state_dicts_own_their_tensors(rank):
    state = new_state()
    run_steps(state, rank, range(START + 2))
    saved = state.state_dict()
    kept = copy.deepcopy(saved)
    other = new_state()
    other.load_state_dict(saved)
    unused = other.state_dict()
    run_steps(state, rank, [50, 51])
    run_steps(other, rank, [60, 61])
    return equal(saved, kept), equal(unused, kept)


def test_a_state_dict_is_not_changed_by_later_steps():
    assert run_ranks(state_dicts_own_their_tensors, 1) == [(True, True)]


def test_load_state_dict_names_what_is_missing():
    state_dict = new_state().state_dict()
    del state_dict["min_compression_rate"]
    with pytest.raises(KeyError, match="min_compression_rate"):
        new_state().load_state_dict(state_dict)


def test_constructor_arguments_are_saved():
    options = {
        "matrix_approximation_rank": 3,
        "start_powerSGD_iter": 17,
        "min_compression_rate": 1.5,
        "use_error_feedback": False,
        "warm_start": False,
        "orthogonalization_epsilon": 1e-7,
        "random_seed": 9,
        "compression_stats_logging_frequency": 11,
        "batch_tensors_with_same_shape": True,
    }
    with Messages():
        loaded = reload(powerSGD_hook.PowerSGDState(None, **options))
    assert {name: getattr(loaded, name) for name in options} == options


# The process group.


def load_with_groups(rank):
    group = dist.new_group([0, 1])
    state = new_state(process_group=group)
    with Messages() as on_saving:
        file = io.BytesIO()
        torch.save({"comm_hook": powerSGD_hook.powerSGD_hook, "comm_hook_state": state}, file)
    with Messages() as on_loading:
        file.seek(0)
        loaded = torch.load(file)["comm_hook_state"]
    kept = new_state(process_group=group)
    kept.load_state_dict(state.state_dict())
    return (
        on_saving,
        on_loading,
        "process_group" in state.state_dict(),
        state.process_group is group,
        loaded.process_group is dist.group.WORLD,
        kept.process_group is group,
    )


def test_the_process_group_is_left_out():
    """One warning when saved and one when loaded, which sets the default group; state_dict() needs none."""
    for on_saving, on_loading, *facts in run_ranks(load_with_groups, 2):
        assert on_saving == [
            "WARNING NOTE: Process group is not serializable and excluded from a saved state."
        ]
        assert len(on_loading) == 1
        assert on_loading[0].startswith(
            "WARNING NOTE: Process group will be set to a default group (i.e. the world size)."
        )
        assert facts == [False, True, True, True]


def test_loading_without_a_process_group():
    """To look at a checkpoint, or to load it before init_process_group: the default group, when there is one."""
    assert not dist.is_initialized()
    with Messages():
        assert reload(new_state()).process_group is None


# Resuming.


class Alike(nn.Sequential):
    """Layers of one shape, all in one bucket, which DDP turns round after the first step."""

    def __init__(self, unused):
        super().__init__(nn.Flatten(), *(nn.Linear(64, 64, bias=False) for _ in range(5)))


def make_trainer(rank, hook, state, net, options):
    torch.manual_seed(1)
    unused = options.get("find_unused_parameters", False)
    cap = 0.02 if net is Net else 1
    model = DistributedDataParallel(net(unused).to(device_of_rank()), bucket_cap_mb=cap, **options)
    indices = []

    def recorded(state, bucket):
        indices.append(bucket.index())
        return HOOKS[hook](state, bucket)

    model.register_comm_hook(state, recorded)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), indices


def continue_training(rank, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        backward(model, rank, step)
        optimizer.step()


def parameters_of(model):
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def interrupt(rank, hook, options, warm_up, net=Net, after=6):
    """Train 12 steps; then the last ones again from this rank's checkpoint. The parameters of both."""
    state = new_state()
    model, optimizer, indices = make_trainer(rank, hook, state, net, options)
    continue_training(rank, model, optimizer, range(after))
    with Messages():
        checkpoint = {
            "model": copy.deepcopy(model.state_dict()),
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "comm_hook_state": state,
        }
        file = io.BytesIO()
        torch.save(checkpoint, file)
    continue_training(rank, model, optimizer, range(after, 12))
    with Messages():
        file.seek(0)
        checkpoint = torch.load(file)
    resumed_state = checkpoint["comm_hook_state"]
    if warm_up:
        saved, resumed_state = resumed_state.state_dict(), new_state()
    resumed, resumed_optimizer, _ = make_trainer(rank, hook, resumed_state, net, options)
    if warm_up:
        # One step for DDP to arrange its buckets, which it does once.
        continue_training(rank, resumed, resumed_optimizer, [0])
        resumed(torch.zeros(1, 1, 8, 8, device=device_of_rank()))
        resumed_state.load_state_dict(saved)
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    with Messages() as said:
        continue_training(rank, resumed, resumed_optimizer, range(after, 12))
    afresh = [line for line in said if "afresh" in line]
    return max(indices) + 1, afresh, parameters_of(model), parameters_of(resumed)


def assert_resumed(ranks, num_buckets=5):
    for buckets, afresh, uninterrupted, resumed in ranks:
        assert buckets >= num_buckets
        assert afresh == []
        assert torch.equal(uninterrupted, ranks[0][2])
        assert torch.equal(resumed, ranks[0][3])
        assert torch.equal(resumed, uninterrupted)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("hook", list(HOOKS))
def test_resuming_is_bitwise(hook, world_size):
    """A new DDP model and the checkpoint: DDP puts all gradients in one bucket in the new model's first step."""
    assert_resumed(run_ranks(interrupt, world_size, hook, {}, False))


@pytest.mark.parametrize("after", [1, START, START + 1])
def test_resuming_is_bitwise_around_the_first_compressed_step(after):
    """The buckets are remembered before there is anything to remember in them."""
    assert_resumed(run_ranks(interrupt, 2, "powerSGD", {}, False, Net, after))


@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_resuming_finds_layers_of_one_shape(hook):
    """Their gradients come in another order in the first step, and nothing shows in the shapes."""
    assert_resumed(run_ranks(interrupt, 2, hook, {}, False, Alike), num_buckets=1)


@pytest.mark.parametrize("hook", list(HOOKS))
def test_resuming_is_bitwise_with_buckets_that_stay(hook):
    """With find_unused_parameters DDP never rearranges its buckets."""
    assert_resumed(run_ranks(interrupt, 2, hook, {"find_unused_parameters": True}, False))


@pytest.mark.parametrize("hook", list(HOOKS))
def test_resuming_is_bitwise_after_a_warm_up_step(hook):
    """load_state_dict once DDP has arranged its buckets."""
    assert_resumed(run_ranks(interrupt, 2, hook, {}, True))


# Another world size.


def collect_state_dicts(rank):
    state = new_state()
    run_steps(state, rank, range(START + 4))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state.state_dict())
    return gathered


def continue_with(rank, state_dict):
    state = new_state()
    state.load_state_dict(state_dict)
    gradient = random_gradient(SHAPES, rank, 99)
    with Messages() as said:
        output = powerSGD_hook.powerSGD_hook(state, Bucket(gradient.clone(), SHAPES)).wait()
    return gradient, output, state.state_dict()["buckets"][0]["error"], said


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_another_world_size(before, after):
    """The mean of the errors, which the training still owes, is the same before and after."""
    state_dicts = run_ranks(collect_state_dicts, before)[0]
    owed = torch.stack([each["buckets"][0]["error"].double() for each in state_dicts]).mean(0)
    merged = powerSGD_hook.average_errors(state_dicts)
    assert relative(merged["buckets"][0]["error"], owed) <= MEAN_ERROR
    assert equal(merged["buckets"][0]["directions"], state_dicts[0]["buckets"][0]["directions"])
    assert merged.keys() == state_dicts[0].keys()
    ranks = run_ranks(continue_with, after, reload(merged))
    mean = torch.stack([gradient.double() for gradient, *_ in ranks]).mean(0)
    errors = torch.stack([error.double() for *_, error, _ in ranks]).mean(0)
    for _, output, _, said in ranks:
        assert said == []
        assert torch.equal(output, ranks[0][1])
        assert relative(output.double() + errors, mean + owed) <= 10 * MEAN_ERROR


def test_average_errors_of_nothing():
    with pytest.raises(ValueError, match="takes the state_dicts of all ranks, got none"):
        powerSGD_hook.average_errors([])


def test_average_errors_leaves_its_arguments():
    state_dicts = run_ranks(collect_state_dicts, 2)[0]
    kept = copy.deepcopy(state_dicts)
    powerSGD_hook.average_errors(state_dicts)
    assert equal(state_dicts, kept)


# From torch's state.


def take_over(rank, saved):
    """From torch's state or its file: hyperparameters, progress, and the next steps."""
    theirs = torch_powersgd.PowerSGDState(
        None, 2, START, min_compression_rate=1.5, orthogonalization_epsilon=1e-9
    )
    for step in range(START + 3):
        bucket = Bucket(random_gradient(SHAPES, rank, step), SHAPES)
        torch_powersgd.powerSGD_hook(theirs, bucket).wait()
    ours = powerSGD_hook.from_torch(pickle.loads(pickle.dumps(theirs)) if saved else copy.deepcopy(theirs))
    facts = [(getattr(ours, name), getattr(theirs, name)) for name in COMMON]
    again = new_state()
    again.load_state_dict(reload(ours.state_dict()))
    with Messages() as said:
        outputs = [run_steps(each, rank, [50, 51]) for each in (ours, again)]
    gradient = random_gradient(SHAPES, rank, 50)
    expected = torch_powersgd.powerSGD_hook(theirs, Bucket(gradient, SHAPES)).wait()
    return facts, said, outputs, expected


COMMON = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback"),
    *("warm_start", "orthogonalization_epsilon", "compression_stats_logging_frequency"),
    *("batch_tensors_with_same_shape", "iter", "next_stats_report"),
    *("total_numel_before_compression", "total_numel_after_compression"),
)


@pytest.mark.parametrize("saved", [False, True])
def test_from_torch(saved):
    for facts, said, outputs, expected in run_ranks(take_over, 2, saved):
        assert all(ours == theirs for ours, theirs in facts)
        assert said == []
        assert equal(*outputs), "not the same through a state_dict"
        assert relative(outputs[0][0], expected) <= 10 * MEAN_ERROR


def from_torch_twice(rank):
    """Torch overwrites its Q in place: what was taken over must not change with it."""
    theirs = torch_powersgd.PowerSGDState(None, 2, START)
    for step in range(START + 3):
        torch_powersgd.powerSGD_hook(theirs, Bucket(random_gradient(SHAPES, rank, step), SHAPES)).wait()
    alone = powerSGD_hook.from_torch(copy.deepcopy(theirs))
    shared = powerSGD_hook.from_torch(theirs)
    torch_powersgd.powerSGD_hook(theirs, Bucket(random_gradient(SHAPES, rank, 77), SHAPES)).wait()
    return [run_steps(each, rank, [50]) for each in (alone, shared)]


def test_from_torch_copies():
    for alone, shared in run_ranks(from_torch_twice, 1):
        assert equal(alone, shared)


# A changed layout.


OTHER_SHAPES = ((64, 48), (40, 90), (7,))


def change_layouts(rank):
    """Lines that two buckets log when the first one's layout changes, and the outputs of a fresh state."""
    state, fresh = new_state(), new_state()
    plan = {
        state: [(START + 2, SHAPES, SHAPES), (3, OTHER_SHAPES, SHAPES)],
        fresh: [(START, OTHER_SHAPES, SHAPES), (2, OTHER_SHAPES, SHAPES)],
    }
    said, outputs = {}, {}
    for each, phases in plan.items():
        with Messages() as lines:
            for phase, (steps, *bucket_shapes) in enumerate(phases):
                for step in range(steps):
                    for index, shapes in enumerate(bucket_shapes):
                        gradient = random_gradient(shapes, rank, 100 * phase + step)
                        bucket = Bucket(gradient, shapes, index, index == 1)
                        output = powerSGD_hook.powerSGD_hook(each, bucket).wait()
                        if phase == 1 and index == 0:
                            outputs.setdefault(each, []).append((gradient.clone(), output))
        said[each] = [line for line in lines if "layout" in line]
    saved = state.state_dict()["buckets"]
    return said[state], said[fresh], outputs[state], [saved[0]["error"], saved[1]["error"]]


def test_a_changed_layout_starts_that_bucket_afresh():
    ranks = run_ranks(change_layouts, 2)
    for said, not_said, outputs, errors in ranks:
        assert said == ["WARNING PowerSGD: bucket 0 has another layout now: its memory starts afresh."]
        assert not_said == []
        assert all(output.isfinite().all() for _, output in outputs)
        assert errors[0].numel() == outputs[0][1].numel()
        assert errors[1].any()


def load_another_layout(rank):
    state = new_state()
    run_steps(state, rank, range(START + 2))
    other = new_state()
    other.load_state_dict(state.state_dict())
    with Messages() as said:
        outputs = run_steps(other, rank, [50, 51], OTHER_SHAPES)
    return said, outputs, random_gradient(OTHER_SHAPES, rank, 50), other.state_dict()["buckets"][0]["error"]


def test_a_checkpoint_of_another_layout_starts_afresh():
    for said, outputs, _, error in run_ranks(load_another_layout, 2):
        assert said == [
            "WARNING PowerSGD: bucket 0 has another layout than its checkpoint: its memory starts afresh."
        ]
        assert all(output.any() and output.isfinite().all() for output in outputs)
        assert error.numel() == outputs[0].numel()


def change_rank(rank):
    """A user may raise the rank between steps: the factors no longer fit."""
    state = new_state()
    run_steps(state, rank, range(START + 2))
    state.matrix_approximation_rank = 4
    with Messages() as said:
        (output,) = run_steps(state, rank, [50])
    return [line for line in said if "layout" in line], torch.linalg.matrix_rank(
        output[: 64 * 48].view(64, 48)
    )


def test_a_changed_rank_starts_afresh():
    for said, found in run_ranks(change_rank, 1):
        assert len(said) == 1
        assert found == 4


# Arguments.


@pytest.mark.parametrize(
    ("error_feedback", "warm_start"), [(True, True), (True, False), (False, True)], ids=str
)
@pytest.mark.parametrize("start", [1, 0, -3])
def test_compression_that_starts_too_early(error_feedback, warm_start, start):
    options = {
        "start_powerSGD_iter": start,
        "use_error_feedback": error_feedback,
        "warm_start": warm_start,
    }
    message = (
        r"Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
        r"because PowerSGD can only be applied after the first two iterations in DDP\."
    )
    for module in (torch_powersgd, powerSGD_hook):
        with pytest.raises(ValueError, match=message):
            module.PowerSGDState(None, **options)
    with pytest.raises(ValueError, match=rf"{message} Got {start}\."):
        powerSGD_hook.PowerSGDState(None, **options)
    neither = options | {"use_error_feedback": False, "warm_start": False}
    assert powerSGD_hook.PowerSGDState(None, **neither).start_powerSGD_iter == start


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one(rank):
    with pytest.raises(ValueError, match=f"matrix_approximation_rank is {rank}, but must be at least 1"):
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank)


def test_defaults_and_positions_of_arguments_are_torchs():
    arguments = (None, 3, 5, 1.5, False, False, 1e-6, 4, 0, True)
    for given in (arguments[:1], arguments):
        ours, theirs = powerSGD_hook.PowerSGDState(*given), torch_powersgd.PowerSGDState(*given)
        for name in ("process_group", *COMMON):
            assert getattr(ours, name) == getattr(theirs, name), name


# Numbers and log lines.


def count(rank, name, hook_name, options, steps):
    """compression_stats after every step of two buckets, and what was logged at INFO."""
    module = {"gradcomp": powerSGD_hook, "torch": torch_powersgd}[name]
    with Messages(module.__name__) as said:
        state = module.PowerSGDState(None, **options)
        stats = []
        for step in range(steps):
            for index, shapes in enumerate((SHAPES, OTHER_SHAPES)):
                bucket = Bucket(random_gradient(shapes, rank, step), shapes, index, index == 1)
                getattr(module, hook_name)(state, bucket).wait()
            stats.append((state.iter, state.compression_stats()))
    return stats, [line for line in said if "Compression stats" in line]


@pytest.mark.parametrize("rank", [1, 2, 32])
def test_compression_stats_are_torchs(rank):
    """The numbers, the line, and when it comes: in the first compressed step, then every third."""
    options = {
        "matrix_approximation_rank": rank,
        "start_powerSGD_iter": START,
        "compression_stats_logging_frequency": 3,
    }
    ours, theirs = (
        run_ranks(count, 1, name, "powerSGD_hook", options, 10)[0] for name in ("gradcomp", "torch")
    )
    assert ours == theirs
    stats, lines = ours
    assert stats[START - 1] == (START, (0, 0, 0))
    assert stats[-1][1][0] > 1 or rank == 32
    assert [line.split(",")[0] for line in lines] == [
        f"INFO Compression stats: iter {step}" for step in (2, 5, 8)
    ]


def test_compression_stats_of_the_batched_hook():
    """Two factors of the side of the square, as torch counts (it counts before it fails)."""
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START}
    ((stats, _),) = run_ranks(count, 1, "gradcomp", "batched_powerSGD_hook", options, START + 1)
    before = [64 * 48 + 7 + 40 * 90 + 64 * 48 + 9, 64 * 48 + 40 * 90 + 7]
    sides = [99, 82]
    assert stats[-1][1][1:] == (sum(before), sum(2 * 2 * side for side in sides))


def test_the_configuration_and_the_start_are_logged_once():
    lines = run_ranks(log_everything, 1)[0]
    assert lines[0].startswith("INFO PowerSGD config: matrix_approximation_rank = 2; ")
    for name in COMMON[:8]:
        assert f"{name} = " in lines[0]
    assert [line for line in lines if "Start" in line] == [
        f"INFO Start to apply PowerSGD after {START} iterations."
    ]


def log_everything(rank):
    with Messages() as said:
        state = new_state()
        for step in range(START + 3):
            for index in (0, 1):
                bucket = Bucket(random_gradient(SHAPES, rank, step), SHAPES, index, index == 1)
                powerSGD_hook.powerSGD_hook(state, bucket).wait()
    return said


def memory_of_tensors_not_compressed(rank):
    state = new_state()
    run_steps(state, rank, range(START + 3))
    return state.state_dict()["buckets"][0]


def test_what_a_state_dict_holds():
    """As documented: errors where something is compressed, and one Q [cols, rank] per matrix, by shape."""
    first, second = run_ranks(memory_of_tensors_not_compressed, 2)
    mask = positions(SHAPES, compressed(SHAPES, 2))
    for bucket in (first, second):
        assert bucket["error"][mask].any()
        assert not bucket["error"][~mask].any()
        assert [tuple(each.shape) for each in bucket["directions"]] == [(48, 2), (48, 2), (90, 2)]
    assert equal(first["directions"], second["directions"])
    assert not torch.equal(first["error"], second["error"])


# The documentation's example.


def run_example(source, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(source)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, check=False
    )


def test_the_documentations_example(tmp_path):
    """With gradcomp's import it runs; with torch's, torch.load refuses it."""
    source = EXAMPLE.read_text()
    ours = "from gradcomp.hooks import"
    assert source.count(ours) == 1
    result = run_example(source, tmp_path)
    assert result.returncode == 0, result.stderr
    theirs = source.replace(ours, "from torch.distributed.algorithms.ddp_comm_hooks import")
    result = run_example(theirs, tmp_path)
    assert result.returncode != 0
    assert "UnpicklingError: Weights only load failed" in result.stderr
