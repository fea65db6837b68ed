"""All-reduces of codes, flat and hierarchical: means, errors, left-out tensors, checkpoints, bytes."""

import io
import os
from contextlib import redirect_stderr
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradcomp import testing
from gradcomp.comm.nodes import nodes_of
from gradcomp.comm.pipeline import run_through
from gradcomp.comm.process_group import kept_of
from gradcomp.compress import BucketSpec, powersgd
from gradcomp.compress.checkpoint import average_errors
from gradcomp.compress.powersgd import PowerSGDCompressor, PowerSGDOptions
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.hooks import AutoState, QuantizationState, auto_hook, quantization_hook
from gradcomp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from gradcomp.testing import RankError, check_hook, claims_of
from tests.depth import everyday, mixed
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative
from tests.hooks.powersgd_runs import reload
from tests.kept import error_in
from tests.tolerances import QUANTIZED_IDENTITY

SHAPES = [(40, 30), (17,), (8, 3, 5), (1,), (3, 2), (7, 9)]
# Blocks have 16 elements, so that pieces and shards cut blocks, and the last blocks are padded.
EXACT = [slice(1200, 1217), slice(1337, 1344)]
LOSS = {4: 0.2, 8: 0.02, 16: 0.005}
BITS = pytest.mark.parametrize("bits", [4, 8])
# (world size, ranks per node)
NODES = [(4, 2), (6, 3), (6, 2), (4, 4), (3, 1), (1, 1)]

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(autouse=True)
def small_wires_hierarchically(monkeypatch):
    monkeypatch.setattr(powersgd, "LEAST_HIERARCHICAL_BYTES", 0)


def state_of(bits, ranks_per_node, **options):
    return QuantizationState(bits=bits, block_size=16, ranks_per_node=ranks_per_node, **options)


def take_step(state, rank, step, dtype=torch.float32, hook=quantization_hook):
    gradient = random_gradient(SHAPES, rank, step, dtype)
    return gradient, hook(state, Bucket(gradient.clone(), SHAPES)).wait()


def steps_of(rank, group, bits, ranks_per_node, dtype, num_steps=1):
    state = state_of(bits, ranks_per_node)
    return [take_step(state, rank, step, dtype) for step in range(num_steps)], state.state_dict()


@pytest.mark.parametrize(
    ("bits", "nodes", "dtype"),
    mixed([4, 8, 16], NODES, [torch.float32, torch.float64, torch.bfloat16, torch.float16], together=2),
    ids=str,
)
def test_the_mean(bits, nodes, dtype):
    world_size, ranks_per_node = nodes
    results = testing.run_ranks(steps_of, world_size, bits, ranks_per_node, dtype)
    gradients = torch.stack([steps[0][0].double() for steps, _ in results])
    mean, outputs = gradients.mean(0), [steps[0][1] for steps, _ in results]
    for output in outputs:
        assert output.dtype == dtype
        assert torch.equal(output, outputs[0])
    assert relative(outputs[0], mean) < LOSS[bits]
    for part in EXACT if bits != 16 else []:
        assert torch.allclose(
            outputs[0][part].double(), mean[part], rtol=2 * torch.finfo(dtype).eps, atol=1e-7
        )


def continued(rank, group, bits, ranks_per_node, saved, num_steps=6):
    """Take steps, after loading `saved` if given; return (Σ inputs, Σ outputs, state_dict)."""
    state = state_of(bits, ranks_per_node)
    if saved is not None:
        state.load_state_dict(reload(saved[rank] if isinstance(saved, list) else saved))
    steps = [take_step(state, rank, step) for step in range(state.iter, state.iter + num_steps)]
    inputs, outputs = (sum(each.double() for each in column) for column in zip(*steps, strict=True))
    return inputs, outputs, state.state_dict()


def means(runs):
    inputs, errors = (
        torch.stack(each).double().mean(0)
        for each in zip(*[(run[0], error_in(run[2])) for run in runs], strict=True)
    )
    return inputs, errors


@BITS
@pytest.mark.parametrize(("world_size", "ranks_per_node"), NODES)
def test_what_is_lost_comes_back(bits, world_size, ranks_per_node):
    runs = testing.run_ranks(continued, world_size, bits, ranks_per_node, None)
    inputs, errors = means(runs)
    assert relative(runs[0][1] + errors, inputs) < 1e-6
    assert errors.norm() > 0
    for run in runs:
        # A rank keeps errors of its own piece alone: whole shards of the 88 blocks.
        assert (error_in(run[2]) != 0).sum() <= -(-88 // world_size) * (world_size // ranks_per_node) * 16


@pytest.mark.parametrize(
    ("bits", "before", "after"), mixed([4, 8], [(4, 1), (4, 2), (6, 3)], [(4, 1), (4, 4), (6, 2)], together=2)
)
def test_errors_go_on_with_other_nodes(bits, before, after):
    """Resume from a merged checkpoint; with an equal number of ranks, also from the ranks' own ones."""
    runs = testing.run_ranks(continued, before[0], bits, before[1], None)
    _, errors = means(runs)
    merged = average_errors([run[2] for run in runs], state_of(bits, 1).checked)
    assert relative(error_in(merged), errors) < 1e-6
    for saved in [merged, *([[run[2] for run in runs]] if before[0] == after[0] else [])]:
        resumed = testing.run_ranks(continued, after[0], bits, after[1], saved)
        inputs, after_errors = means(resumed)
        assert relative(resumed[0][1] + after_errors, inputs + errors) < 1e-6


# Properties of errors, replicas and states: what nodes change. The others are checked deep.
HELD = (
    *("completes", "replicas_identical", "held_back_comes_out"),
    *("nonfinite_seen_by_all", "checkpoint_round_trip", "bounded_memory"),
)


@pytest.mark.parametrize("bits", everyday([4], [4, 8]))
def test_every_property_of_the_kit(bits):
    flat = claims_of(quantization_hook, lambda group: QuantizationState(group, bits, block_size=16))
    report = check_hook(
        quantization_hook,
        lambda group: QuantizationState(group, bits, block_size=16, ranks_per_node=2),
        world_size=4,
        max_examples=everyday(2, 4),
        claims=flat,
        only=everyday(("averages", *HELD), ()),
    )
    report.raise_if_failed()
    assert {name for name, verdict in report.verdicts.items() if verdict.outcome == "holds"} >= set(HELD)


def powersgd_state(group):
    return PowerSGDState(group, 2, 2, 1, factor_dtype=torch.int8, start_bits=8, ranks_per_node=2)


def test_every_property_of_the_kit_with_powersgds_int8_factors():
    options = {"max_examples": everyday(1, 3), "only": everyday(("averages", *HELD), ())}
    check_hook(powerSGD_hook, powersgd_state, world_size=4, **options).raise_if_failed()


def factor_steps(rank, group, ranks_per_node, factor_dtype):
    state = PowerSGDState(group, 2, 2, 1, factor_dtype=factor_dtype, ranks_per_node=ranks_per_node)
    return [take_step(state, rank, step, hook=powerSGD_hook)[1] for step in range(6)]


@pytest.mark.parametrize(
    ("nodes", "factors"),
    mixed(NODES[:4], [(None, 1e-5), (torch.float16, 0.01), (torch.bfloat16, 0.05)]),
    ids=str,
)
def test_factors_are_averaged_as_without_nodes(nodes, factors):
    (world_size, ranks_per_node), (factor_dtype, bound) = nodes, factors
    hierarchical = testing.run_ranks(factor_steps, world_size, ranks_per_node, factor_dtype)
    flat = testing.run_ranks(factor_steps, world_size, 1, factor_dtype)
    for outputs in hierarchical:
        assert all(torch.equal(one, other) for one, other in zip(outputs, hierarchical[0], strict=True))
    for one, other in zip(hierarchical[0], flat[0], strict=True):
        assert relative(one, other.double()) < bound


LARGE = [(300, 400), (17,)]


def sent_between_nodes(rank, group, ranks_per_node, kind):
    """Return the bytes that a rank's groups sent in a step: (within the node, between nodes)."""
    if kind == "int4":
        state, hook = state_of(4, ranks_per_node), quantization_hook
    else:
        dtype = torch.int8 if kind == "int8 factors" else None
        state = PowerSGDState(group, 16, 2, 1, factor_dtype=dtype, ranks_per_node=ranks_per_node)
        hook = powerSGD_hook
    for step in range(3):
        hook(state, Bucket(random_gradient(LARGE, rank, step), LARGE)).wait()
    groups = [group]
    if ranks_per_node > 1:
        nodes = nodes_of(group, ranks_per_node)
        groups = [nodes.within, nodes.between]
    before = [each.sent_bytes for each in groups]
    hook(state, Bucket(random_gradient(LARGE, rank, 3), LARGE)).wait()
    return [each.sent_bytes - already for each, already in zip(groups, before, strict=True)]


@pytest.mark.parametrize("kind", ["int4", "int8 factors", "factors"])
def test_a_node_sends_what_one_rank_would(kind):
    one_per_node = sum(sent[0] for sent in testing.run_ranks(sent_between_nodes, 2, 1, kind))
    for ranks_per_node in (2, 3):
        sent = testing.run_ranks(sent_between_nodes, 2 * ranks_per_node, ranks_per_node, kind)
        assert sum(each[1] for each in sent) <= 1.25 * one_per_node  # shards of few blocks are padded


def test_small_wires_of_factors_go_without_nodes(monkeypatch):
    monkeypatch.setattr(powersgd, "LEAST_HIERARCHICAL_BYTES", 2**18)
    assert testing.run_ranks(sent_between_nodes, 4, 2, "factors") == [[0, 0]] * 4


# The compressor, its options, and the ranks of a node before and after a resume.
COMPRESSORS = {
    "int8 flat": (QuantizedCompressor, QuantizedOptions(8, 16), 1, 1),
    "int4": (QuantizedCompressor, QuantizedOptions(4, 16), 2, 2),
    "int4, flat before": (QuantizedCompressor, QuantizedOptions(4, 16), 1, 2),
    "factors": (PowerSGDCompressor, PowerSGDOptions(2, 1.0), 2, 2),
}


def skip_a_layer(rank, group, kind, users):
    """Take two steps, resume, and take one in which only the ranks `users` use the first tensor.

    Returns (error before that step, gradient, output, error after it).
    """
    compressor_class, options, *nodes = COMPRESSORS[kind]
    spec = BucketSpec(tuple(SHAPES), torch.float32, torch.device("cpu"), group.size(), seed=0)
    first, compressor = (
        compressor_class(replace(spec, ranks_per_node=node, place=rank % node), options) for node in nodes
    )
    for step in range(2):
        run_through(first.reduce(flat := random_gradient(SHAPES, rank, step), flat, group, step))
    compressor.load(before := first.state())
    flat = random_gradient(SHAPES, rank, 3)
    flat[:1200] *= rank in users
    gradient, unused = flat.clone(), [] if rank in users else [0]
    run_through(compressor.reduce(flat, flat, group, 3, unused))
    return before["error"], gradient, flat, compressor.state()["error"]


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("users", [[], [0], [1, 2], [0, 1, 2, 3]])
def test_a_layer_that_some_ranks_skip(kind, users):
    """The layer's errors stay if no rank uses it. The average plus the mean error always loses nothing."""
    befores, gradients, outputs, afters = (
        torch.stack(each).double()
        for each in zip(*testing.run_ranks(skip_a_layer, 4, kind, users), strict=True)
    )
    first, second = slice(0, 1200), slice(1217, 1337)
    if not users:
        assert not outputs[:, first].any()
        assert torch.equal(afters[:, first], befores[:, first])
    whole = outputs[0] + afters.mean(0)
    assert relative(whole[:1200], gradients.mean(0)[:1200] + befores.mean(0)[:1200]) < 1e-6
    assert not torch.equal(afters[:, second], befores[:, second])


def steps_on_kernels(rank, bits):
    return steps_of(rank, None, bits, 2, torch.float32, 3)


@BITS
def test_kernels_hierarchical(run_ranks, bits):
    ranks = run_ranks(steps_on_kernels, 4, bits, interpret=True)
    inputs = torch.stack([torch.stack([step[0] for step in steps]) for steps, _ in ranks]).double().mean(0)
    outputs = torch.stack([step[1] for step in ranks[0][0]]).double()
    for steps, _ in ranks:
        assert torch.equal(torch.stack([step[1] for step in steps]).double(), outputs)
    assert relative(outputs[0], inputs[0]) < LOSS[bits]
    error = torch.stack([error_in(saved) for _, saved in ranks]).double().mean(0)
    assert relative(outputs.sum(0) + error, inputs.sum(0)) < QUANTIZED_IDENTITY[torch.float32]


def launched_by_torchrun(rank, local_world_size, places):
    os.environ |= {"LOCAL_WORLD_SIZE": str(local_world_size), "LOCAL_RANK": places[rank]}
    state = QuantizationState(bits=4, block_size=16)
    with redirect_stderr(io.StringIO()) as text:
        output = take_step(state, rank, 0)[1]
    return output, state._place.ranks_per_node, text.getvalue()


@pytest.mark.parametrize(
    ("local_world_size", "places", "expected"),
    [(2, "0101", 2), (2, "0011", 1), (4, "0123", 1), (1, "0101", 1)],
)
def test_auto_takes_torchruns_nodes(run_ranks, local_world_size, places, expected):
    results = run_ranks(launched_by_torchrun, 4, local_world_size, places)
    assert [ranks_per_node for _, ranks_per_node, _ in results] == [expected] * 4
    assert all(torch.equal(output, results[0][0]) for output, *_ in results)
    said, *of_others = [text for *_, text in results]
    assert ("per step and node, between 2 nodes of 2 ranks" in said) == (expected == 2)
    assert of_others == [""] * 3


UNEVEN = {
    ("2", "2", "1"): "2 on ranks 0, 1 and 1 on rank 2",
    ("1", "2", "2"): "1 on rank 0 and 2 on ranks 1, 2",
    ("2", "2", ""): "2 on ranks 0, 1 and null on rank 2",
    ("2", "2", "2"): "2, which does not divide 3 ranks",  # a rank of torchrun's has not joined the group
}


def uneven(rank):
    """Average on uneven nodes with several hooks, twice; return the averages, and what the rank says."""
    found = []
    for sizes in UNEVEN:
        os.environ |= {"LOCAL_WORLD_SIZE": sizes[rank], "LOCAL_RANK": str(rank % 2)}
        kept_of(dist.group.WORLD).clear()
        states = [QuantizationState(bits=8), PowerSGDState(None, start_powerSGD_iter=2), AutoState()]
        hooks = [quantization_hook, powerSGD_hook, auto_hook]
        with redirect_stderr(io.StringIO()) as text:
            pairs = list(zip(states, hooks, strict=True))
            outputs = [take_step(state, rank, 0, hook=hook)[1] for state, hook in pairs * 2]
        lines = [line for line in text.getvalue().splitlines() if "without nodes" in line]
        found.append((torch.stack(outputs), lines))
    return found


def test_uneven_nodes_are_averaged_flat(run_ranks):
    on_ranks = run_ranks(uneven, 3)
    mean = sum(random_gradient(SHAPES, rank, 0, torch.float32) for rank in range(3)) / 3
    for text, *cases in zip(UNEVEN.values(), *on_ranks, strict=True):
        (_, lines), *others = cases
        assert lines == [
            f"gradcomp: quantization_hook's state averages without nodes: LOCAL_WORLD_SIZE is {text}"
        ]
        for outputs, _ in cases:
            assert torch.equal(outputs, cases[0][0])
            assert max(relative(each, mean.double()) for each in outputs) < LOSS[8]
        assert [said for _, said in others] == [[], []]


def test_ranks_that_do_not_fill_the_last_node():
    with pytest.raises(
        RankError, match="ranks_per_node is 2, but 3 ranks don't fill such nodes: node 1 would have 1"
    ):
        testing.run_ranks(steps_of, 3, 4, 2, torch.float32)


def on_a_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    state = QuantizationState(mesh, bits=4, block_size=16)
    return [take_step(each, rank, 0)[1] for each in (state, state_of(4, 2))], state.ranks_per_node


def test_a_mesh_as_process_group(run_ranks):
    for (by_mesh, by_number), ranks_per_node in run_ranks(on_a_mesh, 4):
        assert ranks_per_node == 2
        assert torch.equal(by_mesh, by_number)


def on_other_nodes(rank):
    """Take steps on nodes 0 1 and 2 3, then on nodes 0 2 and 1 3. Return the sums of inputs and outputs."""
    state, steps = state_of(4, 2), []
    with pytest.raises(
        ValueError, match=r"list the ranks of each node in one order, got \[\[0, 1\], \[3, 2\]\]"
    ):
        state.process_group = DeviceMesh("cpu", [[0, 1], [3, 2]])
    for step in range(6):
        if step == 3:
            state.process_group = DeviceMesh("cpu", [[0, 2], [1, 3]])
        if step == 4:
            QuantizationState(DeviceMesh("cpu", [[0, 1], [2, 3]]))  # changes nothing for the other state
        steps.append(take_step(state, rank, step))
    inputs, outputs = (sum(each.double() for each in column) for column in zip(*steps, strict=True))
    return inputs, outputs, state.state_dict()


def test_errors_follow_to_other_nodes_of_as_many_ranks(run_ranks):
    runs = run_ranks(on_other_nodes, 4)
    inputs, errors = means(runs)
    assert relative(runs[0][1] + errors, inputs) < 1e-6


def after_groups_of_some(rank):
    """Take steps on nodes of ranks 0 and 1 of three, of which rank 0 has joined more groups before."""
    lists = [0, 2], [0, 1], [0, 1], [0, 1]
    _, *groups = (dist.new_group(ranks, timeout=timedelta(seconds=20)) for ranks in lists)
    if rank == 2:
        DeviceMesh("cpu", [[0, 1]])
        return
    by_number = take_step(state_of(4, 2, process_group=groups[0]), rank, 0)[1]
    for group in groups[:2]:  # there are as many as before the nodes' groups
        dist.destroy_process_group(group)
    assert torch.equal(take_step(state_of(4, 2, process_group=groups[2]), rank, 0)[1], by_number)
    mesh, device = DeviceMesh("cpu", [[0, 1]]), torch.device("cuda", 0)
    dist.group.WORLD.bound_device_id = device
    state = QuantizationState(mesh, bits=4, block_size=16)
    # A bound group of NCCL's would be split from the default one, which waits for rank 2.
    assert (state.process_group.bound_device_id, dist.group.WORLD.bound_device_id) == (None, device)
    assert torch.equal(take_step(state, rank, 0)[1], by_number)


def test_ranks_that_have_joined_different_numbers_of_groups(run_ranks):
    run_ranks(after_groups_of_some, 3)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "all", None])
def test_a_number_of_ranks_that_makes_no_sense(value):
    state = QuantizationState()
    with pytest.raises(ValueError, match="must be 'auto' or a whole number of 1 or more"):
        state.ranks_per_node = value
    assert state.ranks_per_node == "auto"
