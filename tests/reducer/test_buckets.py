"""Test how parameters are assigned to buckets, and where each is stored in its bucket."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.comm.bucket import GradBucket
from gradcomp.reducer.bucket import Bucket, assign_buckets


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.float64])),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 240),
    st.integers(1, 240),
)
def test_buckets_are_those_of_torchs_ddp(tensors, first_cap, cap):
    """A hook sees equal buckets on both, so the state that it keeps per bucket fits both."""
    tensors = [torch.empty(numel, dtype=dtype) for numel, dtype in tensors]
    ours = assign_buckets(
        [each.nbytes for each in tensors], [each.dtype for each in tensors], (first_cap, cap)
    )
    theirs, _ = dist._compute_bucket_assignment_by_size(
        tensors, [first_cap, cap], [False] * len(tensors), list(range(len(tensors)))
    )
    assert sorted(ours) == sorted(theirs)  # torch's leave the last buckets of several dtypes in no order
    assert [bucket[-1] for bucket in ours] == sorted(bucket[-1] for bucket in ours)


def parameters():
    """Return parameters that are contiguous, channels-last, empty, 0-dim, transposed, and one with gaps."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(3, 5, generator=generator),
        torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(0, 4, generator=generator),
        torch.randn((), generator=generator),
        torch.randn(4, 6, generator=generator).t(),
        torch.randn(5, 8, generator=generator)[:, ::2],
    ]
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def bucket_of(params, **options):
    return Bucket(range(len(params)), params, [f"name {i}" for i in range(len(params))], **options)


def gradients(params):
    return [torch.randn_like(param) for param in params]


def test_views_have_their_parameters_strides():
    params = parameters()
    bucket = bucket_of(params)
    for param, view in zip(params[:5], bucket.views, strict=False):
        assert view.stride() == param.stride()
    assert bucket.views[5].is_contiguous()
    assert bucket.buffer.numel() == sum(param.numel() for param in params)
    pointers = [view.data_ptr() for view in bucket.views if view.numel()]
    assert pointers == sorted(set(pointers))


@pytest.fixture(params=[True, False], ids=["kernels", "no kernels"])
def has_kernels(request, monkeypatch):
    """Run with Triton's interpreter, and without it, in plain torch."""
    if not request.param:
        monkeypatch.setattr("gradcomp.ops.runs_triton", lambda device: False)
    return request.param


@pytest.mark.parametrize("missing", [(), (1,), (0, 4), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("aliased", [(), (3,), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize("single_numel", [0, 16, 1 << 13])
def test_fill_gathers_scales_and_fills_up_with_zeros(
    missing, aliased, scale, single_numel, has_kernels, monkeypatch
):
    monkeypatch.setattr("gradcomp.cpu.copy.SINGLE_NUMEL", single_numel)
    params = parameters()
    bucket = bucket_of(params)
    bucket.buffer.fill_(7.0)
    expected = []
    for i, (param, gradient) in enumerate(zip(params, gradients(params), strict=True)):
        if i in missing:
            expected.append(torch.zeros_like(gradient))
            continue
        expected.append(scale * gradient)
        if i in aliased:
            bucket.views[i].copy_(gradient)
            gradient = bucket.views[i]
        param.grad = gradient
    bucket.fill(scale)
    for view, value in zip(bucket.views, expected, strict=True):
        assert torch.equal(view, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fill_rounds_the_scaled_gradient_once(dtype, has_kernels):
    """This holds in and outside the bucket, although torch's _foreach_mul_ on CPU rounds the factor, too."""
    params = [torch.nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(4)]
    bucket = bucket_of(params)
    values = [torch.randn(64, dtype=dtype) for _ in params]
    for param, view, value in zip(params, bucket.views, values, strict=True):
        param.grad = value.clone()
        if param is params[1] or param is params[2]:
            param.grad = view.copy_(value)
    bucket.fill(1 / 3)
    for view, value in zip(bucket.views, values, strict=True):
        assert torch.equal(view, (value.double() / 3).to(dtype))


def test_fill_is_one_flatten(monkeypatch):
    """With kernels, one launch fills a bucket."""
    calls = []
    monkeypatch.setattr("gradcomp.ops.runs_triton", lambda device: True)
    monkeypatch.setattr("gradcomp.ops.flatten", lambda tensors, *_, **__: calls.append(len(tensors)))
    params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(7)]
    bucket = bucket_of(params)
    for param in params:
        param.grad = torch.randn(4, 4)
    bucket.fill(0.5)
    assert calls == [7]


def test_gradients_keep_their_memory_or_become_views(has_kernels):
    params = parameters()
    bucket = bucket_of(params)
    kept = torch.zeros_like(params[0])
    params[0].grad = kept
    bucket.buffer.copy_(torch.randn(bucket.buffer.numel()))
    bucket.write_back()
    assert params[0].grad is kept
    for param, view in zip(params, bucket.views, strict=True):
        assert torch.equal(param.grad, view)
        assert not view.numel() or param.grad.data_ptr() != view.data_ptr()
    bucket = bucket_of(params)
    bucket.write_back(as_view=True)
    assert all(param.grad.is_set_to(view) for param, view in zip(params, bucket.views, strict=True))


def test_grad_bucket_has_torchs_methods():
    theirs = {name for name in dir(torch.distributed.GradBucket) if not name.startswith("_")}
    assert theirs == {name for name in dir(GradBucket) if not name.startswith("_")}
    params = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    bucket = GradBucket(2, torch.arange(10.0), params, True)
    assert (bucket.index(), bucket.is_last()) == (2, True)
    assert [gradient.shape for gradient in bucket.gradients()] == [(2, 3), (4,)]
    bucket.set_buffer(torch.arange(10.0, dtype=torch.float16))
    assert bucket.buffer().dtype == torch.float16
    assert bucket.gradients()[1].tolist() == [6, 7, 8, 9]
    assert bucket.parameters()[1] is params[1]
