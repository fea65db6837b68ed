"""Compare flatten and unflatten, in Triton and plain torch, with float64; test all copies' arguments."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomp import ops
from gradcomp.kernels import flatten as flatten_kernel
from gradcomp.layout import FlatLayout
from tests.depth import everyday
from tests.kernels.copies import BLOCK, FLOATS, assert_scaled_copy, poisoned, tensors_of

# Empty, a scalar, one row, one column, primes, and one element around a block's end.
AWKWARD = [(0,), (), (1, 7), (7, 1), (31, 37), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (2, 0, 3), (5, 3, 2, 2)]


@pytest.fixture(params=["triton", "torch"])
def arithmetic(request, monkeypatch):
    """Let the operations of ops.py compute on the kernels, or in plain torch, as without the interpreter."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "runs_triton", lambda device: False)


def concatenated(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the expected buffer: the tensors' row-major concatenation in float64."""
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


@pytest.mark.parametrize("result_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("arithmetic")
def test_copies_are_scaled_and_converted(dtype, result_dtype, device):
    tensors = tensors_of(AWKWARD, dtype, device)
    layout = FlatLayout(AWKWARD)
    flat = poisoned(layout.numel, result_dtype, device)
    ops.flatten(tensors, layout, out=flat, scale=1 / 3)
    assert_scaled_copy(flat, concatenated(tensors), 1 / 3, dtype)
    out = [torch.full(shape, math.nan, dtype=dtype, device=device) for shape in AWKWARD]
    ops.unflatten(flat, layout, out=out, scale=-3.0)
    assert_scaled_copy(torch.cat([each.reshape(-1) for each in out]), flat.double(), -3.0, result_dtype)


def strided_views(device: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    base = torch.arange(4 * BLOCK, dtype=dtype, device=device)
    return [
        base[:91].view(7, 13).t(),
        base[5:105:3],
        base[1 : BLOCK + 1],  # contiguous, but aligned to 4 bytes only
        base[: 2 * 3 * 4 * 5].view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        base[3 : 3 + 2 * BLOCK].view(2, BLOCK)[:, ::2],
    ]


@pytest.mark.usefixtures("arithmetic")
def test_flatten_takes_strided_and_unaligned_tensors(device):
    tensors = [*strided_views(device), torch.ones(1, device=device).expand(17)]
    layout = FlatLayout([tensor.shape for tensor in tensors])
    out = poisoned(layout.numel, torch.float32, device)
    ops.flatten(tensors, layout, out=out)
    assert torch.equal(out.double(), concatenated(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("arithmetic")
def test_unflatten_writes_strided_and_unaligned_tensors(dtype, device):
    shapes = [view.shape for view in strided_views(device)]
    layout = FlatLayout(shapes)
    flat = torch.randn(layout.numel, device=device)
    # Each tensor is a view of a buffer of its own. Elements around a view must not change.
    for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        view = strided_views(device, dtype)[index]
        around = view._base if view._base is not None else view
        before = around.clone()
        ops.unflatten(flat[offset : offset + numel], FlatLayout([shapes[index]]), out=[view], scale=0.5)
        assert torch.equal(view.reshape(-1), (flat[offset : offset + numel] * 0.5).to(dtype))
        untouched = torch.full_like(around, True, dtype=torch.bool)
        untouched.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        assert torch.equal(around[untouched], before[untouched])


@pytest.mark.smallest
@settings(max_examples=everyday(25, 500))
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8),
    dtype=st.sampled_from(FLOATS),
    lead=st.integers(0, 9),
)
def test_flatten_then_unflatten_is_the_identity(shapes, dtype, lead, device):
    """It is the identity for any list of shapes, in a buffer of any alignment."""
    tensors = tensors_of(shapes, dtype, device)
    layout = FlatLayout(shapes)
    storage = poisoned(lead + layout.numel + 1, dtype, device)
    flat = storage[lead : lead + layout.numel]
    ops.flatten(tensors, layout, out=flat)
    assert storage[:lead].isnan().all(), "wrote before the buffer"
    assert storage[-1].isnan(), "wrote behind the buffer"
    out = [torch.full_like(tensor, math.nan) for tensor in tensors]
    ops.unflatten(flat, layout, out=out)
    assert all(torch.equal(result, tensor) for result, tensor in zip(out, tensors, strict=True))


def test_tables_follow_the_tensors_addresses(device):
    """The second step's gradients lie elsewhere: the table kept from the first step must not be used."""
    layout = FlatLayout([(5,), (BLOCK + 3,)])
    out = poisoned(layout.numel, torch.float32, device)
    kept = []
    for step in range(3):
        kept.append([torch.full(shape, float(step), device=device) for shape in layout.shapes])
        ops.flatten(kept[-1], layout, out=out)
        assert out.eq(step).all()


def test_pointers_are_sent_only_when_they_change(device):
    tensors = tensors_of([(3,), (4,)], torch.float32, device)
    tables = flatten_kernel.FlattenTables([(0, 0, 0, 3), (1, 0, 3, 4)], 2, device)
    first = tables.pointers(tensors)
    version = first._version
    assert tables.pointers(tensors)._version == version
    assert tables.pointers(tensors[::-1])._version == version + 1
    assert first.tolist() == [tensors[1].data_ptr(), tensors[0].data_ptr()]


def test_threads_have_tables_of_their_own(device):
    layout = FlatLayout([(3,)])
    own = ops._tables_of(layout, device)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ops._tables_of, layout, device).result() is not own


def test_one_launch_whatever_the_number_of_tensors(monkeypatch, device):
    launches = []
    kernel = flatten_kernel._flatten_kernel

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(flatten_kernel, "_flatten_kernel", Counting())
    monkeypatch.setattr(flatten_kernel, "copy_of", flatten_kernel.copy_of.__wrapped__)
    for count in (1, 8, 60):
        launches.clear()
        tensors = tensors_of([(3, 5)] * count, torch.float32, device)
        layout = FlatLayout([(3, 5)] * count)
        ops.flatten(tensors, layout, out=poisoned(layout.numel, torch.float16, device), scale=0.5)
        assert launches == [(count,)]


def test_offsets_beyond_2_to_the_31(device):
    """Copy one tile of five elements at the far end of a buffer of more than 2³¹ elements."""
    start = 2**31 + 3
    flat = torch.empty(start + 5, dtype=torch.float16, device=device)
    source = torch.arange(1, 6, dtype=torch.float16, device=device)
    tables = flatten_kernel.FlattenTables([(0, 0, start, 5)], 1, device)
    flatten_kernel.copy([source], tables, flat, scale=2.0)
    assert flat[start:].tolist() == [2, 4, 6, 8, 10]
    back = torch.zeros(5, dtype=torch.float16, device=device)
    flatten_kernel.copy([back], tables, flat, scale=0.5, to_flat=False)
    assert torch.equal(back, source)


def test_bad_arguments_are_named(device):
    layout = FlatLayout([(2, 3), (4,)])
    tensors = tensors_of([(2, 3), (4,)], torch.float32, device)
    out = torch.empty(10, device=device)
    other = [tensors[0], tensors[1].half()]
    cases = [
        (lambda: ops.flatten(tensors[:1], layout, out=out), "ValueError.*layout of 2 tensors got 1"),
        (lambda: ops.flatten(tensors[::-1], layout, out=out), r"ValueError.* shape \(4,\), .*\(2, 3\)"),
        (lambda: ops.flatten(tensors, layout, out=out[:9]), r"ValueError.*\(10,\).*got shape \(9,\)"),
        (lambda: ops.flatten(other, layout, out=out), "TypeError.*one dtype.*torch.float16"),
        (lambda: ops.flatten(tensors, layout, out=out.long()), "TypeError.*a buffer of torch.int64"),
        (lambda: ops.flatten(tensors, layout, out=out.to("meta")), "ValueError.*on .* the buffer on meta"),
        (lambda: ops.unflatten(out, layout, out=tensors[:1]), "ValueError.*unflatten.*2 tensors got 1"),
        (lambda: ops.cast(out.long(), out=out.half()), "TypeError.*cast takes.*torch.int64"),
        (lambda: ops.cast(out, out=out[:9].half()), "ValueError.*10 elements .* an out of 9"),
        (lambda: ops.cast(out[::2], out=out[:5].half()), r"ValueError.*contig.*strides \(2,\)"),
        (lambda: ops.cast(out.half().to("meta"), out=out), "ValueError.*on meta and on"),
    ]
    for call, message in cases:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert re.match(message, repr(caught.value), re.DOTALL), caught.value


def test_gradients_that_require_grad_are_only_data(device):
    """With create_graph=True a gradient is part of a graph. The copy must not be part of it."""
    tensors = [torch.ones(3, device=device, requires_grad=True)]
    out = ops.flatten(tensors, FlatLayout([(3,)]), out=torch.empty(3, device=device), scale=0.5)
    assert not out.requires_grad
