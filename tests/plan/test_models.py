"""Test DDP's buckets, and models from users' functions."""

import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from benchmarks import models
from gradcomp.plan import FIRST_BUCKET_BYTES, buckets_of, load_shapes


@pytest.mark.parametrize("cap_mb", [0.5, 1, 25])
@pytest.mark.parametrize("name", models.MODELS)
def test_buckets_are_those_of_ddp(name, cap_mb):
    shapes, cap_bytes = list(models.MODELS[name]()), int(cap_mb * 2**20)
    tensors = [torch.empty(shape, device="meta") for shape in reversed(shapes)]
    expected, _ = dist._compute_bucket_assignment_by_size(
        tensors, [min(FIRST_BUCKET_BYTES, cap_bytes), cap_bytes], [False] * len(tensors)
    )
    found = buckets_of(shapes, cap_bytes=cap_bytes)
    assert found == [[tuple(tensors[index].shape) for index in indices] for indices in expected]


def test_small_buckets():
    assert buckets_of([]) == []
    assert buckets_of([(3, 5), (7,)]) == [[(7,), (3, 5)]]
    mib = (2**18,)
    assert [len(bucket) for bucket in buckets_of([mib] * 4, cap_bytes=2 * 2**20)] == [1, 2, 1]
    assert [len(bucket) for bucket in buckets_of([mib] * 4, itemsize=2, cap_bytes=2 * 2**20)] == [2, 2]


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
lazy = lambda: nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(3))
negative = lambda: [(4, -5)]
too_large = lambda: [(2**70,)]


def lazy_with_input():
    module = lazy()
    module(torch.empty(2, 5))
    return module


def mixed():
    module = nn.Sequential(nn.Linear(5, 4).bfloat16(), nn.Linear(4, 3).double(), nn.Linear(3, 2))
    module[2].weight = nn.Parameter(torch.empty(2, 3, dtype=torch.complex64))
    module[2].bias.requires_grad_(False)
    module.register_parameter("count", nn.Parameter(torch.empty(9, dtype=torch.int32), requires_grad=False))
    return module

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
    (tmp_path / "users_script.py").write_text("import sys; sys.exit('usage: users_script FILE')")
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
        ("lazy_with_input", [(4, 5), (4,), (3, 4), (3,)]),
    ):
        assert load_shapes(f"{users_module}:{name}") == [(shape, torch.float32) for shape in shapes]


def test_every_parameter_has_its_dtype(users_module):
    """A complex one is real in hooks, with a last dimension of 2. Frozen parameters have no gradients."""
    bf16, fp64, fp32 = torch.bfloat16, torch.float64, torch.float32
    assert load_shapes(f"{users_module}:mixed") == [
        *[((4, 5), bf16), ((4,), bf16), ((3, 4), fp64), ((3,), fp64), ((2, 3, 2), fp32)]
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet51", "model 'resnet51' is not module:callable"),
        ("users_plan_model:", "'' of module 'users_plan_model' is not there"),
        ("users_no_model:f", "module 'users_no_model' fails: ModuleNotFoundError"),
        ("users_broken_model:f", "module 'users_broken_model' fails: ZeroDivisionError"),
        ("users_script:f", "module 'users_script' fails: SystemExit: usage: users_script FILE"),
        ("users_plan_model:absent", "'absent' of module 'users_plan_model' is not there"),
        ("users_plan_model:not_callable", "'not_callable' of module 'users_plan_model' is not callable"),
        ("users_plan_model:needs_argument", "calling it without arguments fails: TypeError"),
        ("users_plan_model:number", "returned int; it must return an nn.Module"),
        ("users_plan_model:text", "returned list; it must return an nn.Module"),
        ("users_plan_model:nothing", "has no parameter with a gradient"),
        ("users_plan_model:frozen", "has no parameter with a gradient"),
        ("users_plan_model:lazy", r"lazy parameter '1\.weight' has no shape: run a forward first"),
        ("users_plan_model:negative", "returned list; it must return an nn.Module"),
        ("users_plan_model:too_large", "returned list; it must return an nn.Module"),
    ],
)
def test_what_is_no_model_is_refused(users_module, name, message):
    with pytest.raises(ValueError, match=message):
        load_shapes(name)
