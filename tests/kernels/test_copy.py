"""flatten, unflatten and the casts: the Triton kernels and plain torch against float64."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomp import ops
from gradcomp.cpu import copy as cpu
from gradcomp.kernels import cast as cast_kernel
from gradcomp.kernels import flatten as flatten_kernel
from gradcomp.layout import FlatLayout
from tests.tolerances import SMALLEST, scaled_copy

TASKS = Path("/proc/self/task")  # the process's threads, on Linux
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BLOCK = flatten_kernel.BLOCK
# Empty, a scalar, one row, one column, primes, and one element around a block's end.
AWKWARD = [(0,), (), (1, 7), (7, 1), (31, 37), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (2, 0, 3), (5, 3, 2, 2)]


def in_plain_torch(name: str) -> Callable[..., object]:
    """An operation of ops.py that computes in plain torch, as on a CPU without Triton's interpreter."""

    def operation(*args: object, **kwargs: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "runs_triton", lambda device: False)
            return getattr(ops, name)(*args, **kwargs)

    return operation


def implementations(name: str) -> list[Callable[..., object]]:
    return [pytest.param(getattr(ops, name), id="triton"), pytest.param(in_plain_torch(name), id="torch")]


def tensors_of(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes
    ]


def concatenated(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The oracle: row-major concatenation in float64."""
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


def assert_scaled_copy(result: torch.Tensor, source: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    """result, in its dtype, is scale · source (given in float64, once of this dtype) but for rounding."""
    expected = scale * source
    bound = scaled_copy(dtype, result.dtype) * expected.abs() + SMALLEST[result.dtype]
    error = (result.double() - expected).abs()
    worst = int((error - bound).argmax()) if error.numel() else 0
    assert bool((error <= bound).all()), f"element {worst}: {result[worst]}, expected {expected[worst]}"


def poisoned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((numel,), math.nan, dtype=dtype, device=device)


@pytest.mark.parametrize("result_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("flatten", implementations("flatten"))
def test_flatten_gathers_scales_and_converts(flatten, dtype, result_dtype, device):
    tensors = tensors_of(AWKWARD, dtype, device)
    layout = FlatLayout(AWKWARD)
    out = poisoned(layout.numel, result_dtype, device)
    flatten(tensors, layout, out=out, scale=1 / 3)
    assert_scaled_copy(out, concatenated(tensors), 1 / 3, dtype)


@pytest.mark.parametrize("result_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("unflatten", implementations("unflatten"))
def test_unflatten_scatters_scales_and_converts(unflatten, dtype, result_dtype, device):
    layout = FlatLayout(AWKWARD)
    flat = tensors_of([(layout.numel,)], dtype, device)[0]
    out = [torch.full(shape, math.nan, dtype=result_dtype, device=device) for shape in AWKWARD]
    unflatten(flat, layout, out=out, scale=-1 / 3)
    result = torch.cat([tensor.reshape(-1) for tensor in out])
    assert_scaled_copy(result, flat.double(), -1 / 3, dtype)


def strided_views(device: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    base = torch.arange(4 * BLOCK, dtype=dtype, device=device)
    return [
        base[:91].view(7, 13).t(),
        base[5:105:3],
        base[1 : BLOCK + 1],  # contiguous, but on 4 bytes only
        base[: 2 * 3 * 4 * 5].view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        base[3 : 3 + 2 * BLOCK].view(2, BLOCK)[:, ::2],
    ]


@pytest.mark.parametrize("flatten", implementations("flatten"))
def test_flatten_takes_strided_and_unaligned_tensors(flatten, device):
    tensors = [*strided_views(device), torch.ones(1, device=device).expand(17)]
    layout = FlatLayout([tensor.shape for tensor in tensors])
    out = poisoned(layout.numel, torch.float32, device)
    flatten(tensors, layout, out=out)
    assert torch.equal(out.double(), concatenated(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unflatten", implementations("unflatten"))
def test_unflatten_writes_strided_and_unaligned_tensors(unflatten, dtype, device):
    shapes = [view.shape for view in strided_views(device)]
    layout = FlatLayout(shapes)
    flat = torch.randn(layout.numel, device=device)
    # A fresh view each, so that none overwrites another; what surrounds a view must stay as it was.
    for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        view = strided_views(device, dtype)[index]
        around = view._base if view._base is not None else view
        before = around.clone()
        unflatten(flat[offset : offset + numel], FlatLayout([shapes[index]]), out=[view], scale=0.5)
        expected = (flat[offset : offset + numel] * 0.5).to(dtype)
        assert torch.equal(view.reshape(-1), expected)
        untouched = torch.full_like(around, True, dtype=torch.bool)
        untouched.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        assert torch.equal(around[untouched], before[untouched])


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8),
    dtype=st.sampled_from(FLOATS),
    lead=st.integers(0, 9),
)
def test_flatten_then_unflatten_is_the_identity(shapes, dtype, lead):
    """Any list of shapes, in a buffer at any alignment."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    """The second step's gradients lie elsewhere: the kept table must not remember the first ones."""
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


def test_one_launch_whatever_the_number_of_tensors(monkeypatch, device):
    launches = []
    kernel = flatten_kernel._flatten_kernel

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(flatten_kernel, "_flatten_kernel", Counting())
    for count in (1, 8, 60):
        launches.clear()
        tensors = tensors_of([(3, 5)] * count, torch.float32, device)
        layout = FlatLayout([(3, 5)] * count)
        ops.flatten(tensors, layout, out=poisoned(layout.numel, torch.float16, device), scale=0.5)
        assert launches == [(count,)]


def test_offsets_beyond_2_to_the_31(device):
    """One tile of five elements at the far end of a buffer of more than 2³¹ elements."""
    start = 2**31 + 3
    flat = torch.empty(start + 5, dtype=torch.float16, device=device)
    source = torch.arange(1, 6, dtype=torch.float16, device=device)
    tables = flatten_kernel.FlattenTables([(0, 0, start, 5)], 1, device)
    flatten_kernel.flatten([source], tables, out=flat, scale=2.0)
    assert flat[start:].tolist() == [2, 4, 6, 8, 10]
    back = torch.zeros(5, dtype=torch.float16, device=device)
    flatten_kernel.unflatten(flat, tables, out=[back], scale=0.5)
    assert torch.equal(back, source)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 13, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_compress_and_decompress(numel, dtype, half, device):
    (buffer,) = tensors_of([(numel,)], dtype, device)
    before = buffer.clone()
    wire = poisoned(numel, half, device)
    assert ops.compress_cast(buffer, out=wire, scale=1 / 3) is wire
    assert_scaled_copy(wire, buffer.double(), 1 / 3, dtype)
    assert torch.equal(buffer, before)
    if dtype != torch.float64:  # torch converts fp64 to 16 bits by way of fp32
        reference = torch.empty_like(wire)
        cpu.cast(buffer, out=reference, scale=1 / 3)
        assert torch.equal(wire, reference), "kernel and plain torch differ in a bit"
    result = poisoned(numel, dtype, device)
    assert ops.decompress_cast(wire, out=result) is result
    assert torch.equal(result, wire.to(dtype))


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads in /proc")
def test_decompressing_on_a_backends_thread_starts_no_threads():
    wire = torch.randn(2**20).half()

    def threads_started(decompress) -> int:
        out = torch.empty(2**20)

        def run() -> int:
            before = len(list(TASKS.iterdir()))
            decompress(wire, out)
            return len(list(TASKS.iterdir())) - before

        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(run).result()
        assert torch.equal(out, wire.float())
        return started

    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert threads_started(lambda wire, out: cpu.decompress(wire, out=out)) == 0
        assert threads_started(lambda wire, out: out.copy_(wire)) > 0, "torch starts none either"
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("cast", [ops.compress_cast, cpu.cast], ids=["triton", "torch"])
def test_compress_divides_before_it_rounds(cast, device):
    """torch's `.to(float16).div_(2)` makes 80,000 infinite, though half of it fits; and it rounds twice."""
    tiny = 2.0**-24  # the smallest float16
    buffer = torch.tensor([80_000.0, -120_000.0, 1.4 * tiny], device=device)
    assert buffer.to(torch.float16).div_(2).tolist() == [math.inf, -math.inf, 0.0]
    wire = poisoned(3, torch.float16, device)
    cast(buffer, out=wire, scale=0.5)
    assert wire.tolist() == [40_000.0, -60_000.0, tiny]


@pytest.mark.parametrize("cast", [ops.compress_cast, cpu.cast], ids=["triton", "torch"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy's, in the interpreter
def test_compress_keeps_what_is_not_finite(cast, half, device):
    buffer = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, 0.0, -0.0], device=device)
    wire = torch.zeros(6, dtype=half, device=device)
    cast(buffer, out=wire, scale=0.25)
    assert wire[:2].tolist() == [math.inf, -math.inf]
    assert wire[2].isnan()
    assert wire[3].isinf().item() == (half == torch.float16)
    assert torch.copysign(torch.ones(2, device=device), wire[4:].float()).tolist() == [1, -1]


def test_cast_unaligned(device):
    base = torch.randn(2 * BLOCK + 2, device=device)
    wire = poisoned(2 * BLOCK + 2, torch.bfloat16, device)
    ops.compress_cast(base[1:-1], out=wire[1:-1])
    assert torch.equal(wire[1:-1], base[1:-1].bfloat16())
    assert wire[[0, -1]].isnan().all()


def test_cast_offsets_beyond_2_to_the_31(monkeypatch, device):
    """The last of more than 2³¹ elements. Interpreted, only the last program of the grid runs."""
    numel = 2**31 + 3
    src = torch.empty(numel, dtype=torch.float16, device=device)
    out = torch.empty(numel, dtype=torch.bfloat16, device=device)
    src[-3:] = torch.tensor([1.0, -2.0, 3.0])
    if device.type == "cpu":
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        last = (numel - 1) // cast_kernel.BLOCK
        set_grid_dim = builder.set_grid_dim
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (last, 0, 0))
        )
        monkeypatch.setattr(cast_kernel.triton, "cdiv", lambda numel, block: 1)
        monkeypatch.setattr(builder, "set_grid_dim", lambda x, y, z: set_grid_dim(last + 1, 1, 1))
    cast_kernel.cast(src, out=out, scale=2.0)
    assert out[-3:].tolist() == [2, -4, 6]


def test_bad_arguments_are_named(device):
    layout = FlatLayout([(2, 3), (4,)])
    tensors = tensors_of([(2, 3), (4,)], torch.float32, device)
    out = torch.empty(10, device=device)
    cases = [
        (lambda: ops.flatten(tensors[:1], layout, out=out), ValueError, "2 tensors, 10 elements.*got 1 tensors"),
        (lambda: ops.flatten(tensors[::-1], layout, out=out), ValueError, r"tensor 0 has shape \(4,\), .*\(2, 3\)"),
        (lambda: ops.flatten(tensors, layout, out=out[:9]), ValueError, r"shape \(10,\).*got shape \(9,\)"),
        (lambda: ops.flatten([tensors[0], tensors[1].half()], layout, out=out), TypeError, "tensor 1 is torch.float16"),
        (lambda: ops.flatten(tensors, layout, out=out.long()), TypeError, "got torch.int64"),
        (lambda: ops.flatten(tensors, layout, out=out.to("meta")), ValueError, "on .* and on meta"),
        (lambda: ops.unflatten(out, layout, out=tensors[:1]), ValueError, "unflatten.*got 1 tensors"),
        (lambda: ops.compress_cast(out, out=out), TypeError, "float16 or bfloat16, but out is torch.float32"),
        (lambda: ops.compress_cast(out.long(), out=out.half()), TypeError, "compress_cast.*got torch.int64"),
        (lambda: ops.compress_cast(out, out=out[:9].half()), ValueError, "10 elements do not fit an out of 9"),
        (lambda: ops.compress_cast(out[::2], out=out[:5].half()), ValueError, r"contiguous.*strides \(2,\)"),
        (lambda: ops.decompress_cast(out.half().to("meta"), out=out), ValueError, "on meta and on"),
    ]  # fmt: skip
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_gradients_that_require_grad_are_only_data(device):
    """With create_graph=True a gradient is part of a graph; copying it must not be."""
    tensors = [torch.ones(3, device=device, requires_grad=True)]
    out = ops.flatten(tensors, FlatLayout([(3,)]), out=torch.empty(3, device=device), scale=0.5)
    assert not out.requires_grad
