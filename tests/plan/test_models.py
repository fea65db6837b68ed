"""The built-in models' parameters and operations, DDP's buckets, and models that users name."""

import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from gradcomp.plan.models import (
    BUCKET_CAP_BYTES,
    BUILT_IN_MODELS,
    FIRST_BUCKET_BYTES,
    Parameter,
    buckets_of,
    built_in_model,
    ddp_assignment,
    load_model,
)


@pytest.mark.parametrize(
    ("name", "num_parameters", "numel", "gflops"),
    [
        # Per image: 4.09 billion multiply-accumulates, according to torchvision's table of models.
        ("resnet50", 161, 25_557_032, 2 * 4.09),
        # Per token: two operations for every element of a layer's matrices, without the embeddings.
        ("bert-large", 391, 335_141_888, 2 * 0.302),
        ("gpt2-medium", 292, 354_823_168, 2 * 0.3534),
        ("llama-7b", 291, 6_738_415_616, 2 * 6.607),
        ("gpt", 52, 3_290_624, 2 * 0.003211),
        ("mlp", 6, 1_863_690, 2 * 0.0018616),
    ],
)
def test_models_have_the_known_sizes(name, num_parameters, numel, gflops):
    model = built_in_model(name)
    assert len(model.parameters) == num_parameters
    assert model.numel == numel
    assert model.forward_flops(3) == pytest.approx(3 * model.samples_per_item * gflops * 1e9, rel=2e-3)


@pytest.mark.parametrize("cap_mb", [0.5, 1, 25])
@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_buckets_are_those_of_ddp(name, cap_mb):
    shapes = built_in_model(name).shapes[::-1]
    cap_bytes = int(cap_mb * 2**20)
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    expected, _ = dist._compute_bucket_assignment_by_size(
        tensors, [min(FIRST_BUCKET_BYTES, cap_bytes), cap_bytes], [False] * len(tensors)
    )
    assert ddp_assignment([tensor.nbytes for tensor in tensors], cap_bytes) == expected


def test_buckets_are_ready_when_their_part_of_backward_is_done():
    """The last parameters come first. Shapes count by their elements, Parameters by their operations."""
    mib = (2**18,)
    by_elements = buckets_of([mib] * 4, cap_bytes=2 * 2**20)
    assert [bucket.ready_at for bucket in by_elements] == [0.25, 0.75, 1.0]
    by_work = buckets_of(
        [Parameter(mib), Parameter(mib, 1), Parameter(mib, 0), Parameter(mib, 3)], cap_bytes=2 * 2**20
    )
    assert [bucket.ready_at for bucket in by_work] == [0.75, 1.0, 1.0]
    assert buckets_of([]) == []
    assert sum(bucket.numel for bucket in buckets_of([(3, 5), (7,)], cap_bytes=BUCKET_CAP_BYTES)) == 22


# --- models of users ---

SOURCE = """
import torch
from torch import nn

not_callable = 3
shapes = lambda: [(4, 5), [6]]
module = lambda: nn.Linear(5, 4)
with_inputs = lambda: (nn.Linear(5, 4), torch.zeros(2, 5))
number = lambda: 7
text = lambda: ["ab"]
nothing = lambda: []
frozen = lambda: nn.Linear(5, 4).requires_grad_(False)
needs_argument = lambda x: x

def on_cpu_only():
    assert torch.get_default_device().type == "cpu"
    return nn.Linear(5, 4)

def huge():  # 4 TB on the CPU
    return nn.Linear(2**20, 2**20)
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_plan_model.py").write_text(textwrap.dedent(SOURCE))
    (tmp_path / "users_broken_model.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_plan_model"
    sys.modules.pop("users_plan_model", None)


def test_a_users_model_is_loaded(users_module):
    for name, shapes in (
        ("shapes", [(4, 5), (6,)]),
        ("module", [(4, 5), (4,)]),
        ("with_inputs", [(4, 5), (4,)]),
        ("on_cpu_only", [(4, 5), (4,)]),
        ("huge", [(2**20, 2**20), (2**20,)]),
    ):
        assert load_model(f"{users_module}:{name}").shapes == shapes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet51", "there is no model 'resnet51'; known are resnet50, bert-large"),
        ("users_plan_model:", "there is no model 'users_plan_model:'"),
        ("users_no_model:f", "module 'users_no_model' can't be imported: No module named"),
        ("users_broken_model:f", "module 'users_broken_model' fails: ZeroDivisionError"),
        ("users_plan_model:absent", "'absent' of module 'users_plan_model' is not there"),
        ("users_plan_model:not_callable", "'not_callable' of module 'users_plan_model' is not callable"),
        ("users_plan_model:needs_argument", "calling it without arguments fails: TypeError"),
        ("users_plan_model:number", "returned int; it must return an nn.Module"),
        ("users_plan_model:text", "returned list; it must return an nn.Module"),
        ("users_plan_model:nothing", "has no parameter with a gradient"),
        ("users_plan_model:frozen", "has no parameter with a gradient"),
    ],
)
def test_what_is_no_model_is_refused(users_module, name, message):
    with pytest.raises(ValueError, match=message):
        load_model(name)
