"""Test saving and loading PowerSGD's state: complete, without process group, for other world sizes."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative
from tests.hooks.powersgd_runs import (
    FEW_SHAPES,
    RESUMED,
    START,
    Messages,
    equal,
    new_state,
    reload,
    run_steps,
)
from tests.kept import directions_in, error_in
from tests.programs import run_python
from tests.ranks import simulate
from tests.tolerances import MEAN_ERROR

EXAMPLE = Path(__file__).with_name("documented_checkpoint.py")


def save_in_every_way(rank, options, hook, dtype):
    """Copy a state in every way after some steps.

    Returns (state_dict, outputs of two more steps, state_dict after them) of the state and of each copy.
    """
    state = new_state(**options)
    run_steps(state, rank, range(START + 3), hook=hook, dtype=dtype)
    with Messages() as said:
        loaded_state = new_state(start_powerSGD_iter=50)
        loaded_state.load_state_dict(reload(state.state_dict()))
        twice = new_state()
        # The loaded state is saved again before it has seen any bucket.
        twice.load_state_dict(reload(loaded_state.state_dict()))
    changed = {text for text in said if "PowerSGD config" not in text}  # simulated ranks share the log
    assert any(f"start_iter from 50 to {START}" in text for text in changed)
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
@pytest.mark.parametrize("hook", RESUMED)
def test_a_loaded_state_continues_bitwise(hook, options):
    for original, *copies in simulate(save_in_every_way, 2, options, hook, torch.float32):
        for each in copies:
            assert equal(each, original)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_loaded_state_continues_bitwise_in_other_dtypes(dtype):
    for original, *copies in simulate(save_in_every_way, 2, {}, "powerSGD", dtype):
        for each in copies:
            assert equal(each, original)


@pytest.mark.simulated_ranks(2)
def test_a_loaded_state_continues_bitwise_after_gradients_of_low_rank(rank):
    """Copy a state that has seen gradients of rank 1 only. Some of its directions may be zero."""
    state = new_state(matrix_approximation_rank=4, use_error_feedback=False)
    shape = [(64, 48)]
    for step in range(START + 3):
        generator = torch.Generator().manual_seed(step)
        column, row = torch.randn(64, 1, generator=generator), torch.randn(1, 48, generator=generator)
        powerSGD_hook.powerSGD_hook(state, Bucket((column @ row).flatten(), shape)).wait()
    with Messages():
        other = reload(state)
    original, loaded = [run_steps(each, rank, range(50, 54), shape) for each in (state, other)]
    assert equal(original, loaded)


def test_hooks_are_saved_by_name():
    modules = (default_hooks, debugging_hooks, powerSGD_hook)
    hooks = [getattr(module, name) for module in modules for name in module.__all__ if name.endswith("_hook")]
    assert len(hooks) == 6
    for hook in hooks:
        assert reload({"comm_hook": hook})["comm_hook"] is hook


def save_with_numbers_of_numpys(rank, given):
    state = new_state(**given)
    run_steps(state, rank, range(START + 1))
    with Messages():
        return reload({"state": state})["state"]


def test_a_state_made_with_numbers_of_numpys_loads():
    numpy = pytest.importorskip("numpy")
    given = {"matrix_approximation_rank": numpy.int64(3), "min_compression_rate": numpy.float64(1.5)}
    (state,) = simulate(save_with_numbers_of_numpys, 1, given | {"random_seed": numpy.int64(7)})
    assert (state.matrix_approximation_rank, state.min_compression_rate, state.random_seed) == (3, 1.5, 7)


def test_importing_gradcomp_is_enough(tmp_path):
    """In a fresh process that imports gradcomp, torch.load reads a state with its safe default."""
    with Messages():
        state = {"comm_hook": powerSGD_hook.powerSGD_hook, "comm_hook_state": new_state(random_seed=5)}
        torch.save(state, tmp_path / "checkpoint.pt")
    program = (
        "import sys, torch, gradcomp; state = torch.load(sys.argv[1]); "
        "print(state['comm_hook'].__name__, state['comm_hook_state'].random_seed)"
    )
    result = run_python("-c", program, tmp_path / "checkpoint.pt")
    assert result.stdout.split() == ["powerSGD_hook", "5"], result.stderr


@pytest.mark.simulated_ranks(1)
def test_a_state_dict_is_not_changed_by_later_steps(rank):
    state = new_state()
    run_steps(state, rank, range(START + 2))
    saved = state.state_dict()
    kept = copy.deepcopy(saved)
    other = new_state()
    other.load_state_dict(saved)
    unused = other.state_dict()
    run_steps(state, rank, [50, 51])
    run_steps(other, rank, [60, 61])
    assert (equal(saved, kept), equal(unused, kept)) == (True, True)


def test_load_state_dict_names_what_is_missing():
    state_dict = new_state().state_dict()
    del state_dict["options"]["min_compression_rate"]
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


@pytest.mark.ranks(2)
def test_the_process_group_is_left_out(rank):
    """Saving warns once. Loading sets the default group, and warns once. state_dict() does not warn."""
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
    on_saving, on_loading, *facts = (
        on_saving,
        on_loading,
        "process_group" in state.state_dict(),
        state.process_group is group,
        loaded.process_group is dist.group.WORLD,
        kept.process_group is group,
    )
    assert on_saving == ["WARNING NOTE: Process group is not serializable and excluded from a saved state."]
    assert len(on_loading) == 1
    assert on_loading[0].startswith(
        "WARNING NOTE: Process group will be set to a default group (i.e. the world size)."
    )
    assert facts == [False, True, True, True]


def test_loading_without_a_process_group():
    """A state loaded before init_process_group, for example to inspect it, has no process group."""
    assert not dist.is_initialized()
    with Messages():
        assert reload(new_state()).process_group is None


def collect_state_dicts(rank):
    state = new_state()
    run_steps(state, rank, range(START + 4))
    return state.state_dict()


def continue_with(rank, state_dict):
    state = new_state()
    state.load_state_dict(state_dict)
    gradient = random_gradient(FEW_SHAPES, rank, 99)
    with Messages() as said:
        output = powerSGD_hook.powerSGD_hook(state, Bucket(gradient.clone(), FEW_SHAPES)).wait()
    return gradient, output, error_in(state), said


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_another_world_size(run_ranks, before, after):
    """The change keeps the mean of the errors."""
    state_dicts = simulate(collect_state_dicts, before)
    owed = torch.stack([error_in(each).double() for each in state_dicts]).mean(0)
    merged = powerSGD_hook.average_errors(state_dicts)
    assert relative(error_in(merged), owed) <= MEAN_ERROR
    assert equal(directions_in(merged), directions_in(state_dicts[0]))
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
    with Messages():
        one = new_state().state_dict()
    with pytest.raises(ValueError, match=r"number 0 has {'step': 0, .* and number 1 has {'step': 3, "):
        powerSGD_hook.average_errors([one, {**one, "iter": 3}])
    with pytest.raises(TypeError, match=r"expected what state_dict\(\) gives, got PowerSGDState"):
        powerSGD_hook.average_errors([new_state(), new_state()])


def test_average_errors_leaves_its_arguments():
    state_dicts = simulate(collect_state_dicts, 2)
    kept = copy.deepcopy(state_dicts)
    powerSGD_hook.average_errors(state_dicts)
    assert equal(state_dicts, kept)


def run_example(source, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(source)
    return run_python(path, TMPDIR=str(tmp_path))


def test_the_documentations_example(tmp_path):
    """The example runs with gradcomp's import; with torch's, torch.load refuses the state."""
    source = EXAMPLE.read_text()
    ours = "from gradcomp.hooks import"
    assert source.count(ours) == 1
    result = run_example(source, tmp_path)
    assert result.returncode == 0, result.stderr
    theirs = source.replace(ours, "from torch.distributed.algorithms.ddp_comm_hooks import")
    result = run_example(theirs, tmp_path)
    assert result.returncode != 0
    assert "UnpicklingError: Weights only load failed" in result.stderr
