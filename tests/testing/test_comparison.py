"""Tests of compare: its numbers against arithmetic by hand and theory, its table, its errors."""

import csv
import io
import math
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook
from gradcomp.testing import RecordedWorkload, Workload, claims_of, compare
from gradcomp.testing.__main__ import main
from gradcomp.testing.claims import VARIANCE_OF_ONE
from tests.programs import refusal
from tests.testing import compressors
from tests.testing.averaging import done
from tests.tolerances import ONE_STEP

pytestmark = pytest.mark.usefixtures("plain_torch")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def first_half(process_group, bucket):
    """Average the first half of a bucket, and set the second half to zero."""
    buffer = bucket.buffer()
    half = buffer[: buffer.numel() // 2]
    dist.all_reduce(half.div_(process_group.size()), group=process_group)
    buffer[half.numel() :] = 0
    return done(buffer)


HALF = [("half", first_half, None)]


def test_by_hand():
    """The means are [3, 4 | 0, 12] and [[0, 0], [0, 5]]: 25 of 169 and 0 of 25 of their energy is kept."""
    ranks = [
        [torch.tensor([3.0, 8, 0, 0]), torch.tensor([[0.0, 0], [0, 10]])],
        [torch.tensor([3.0, 0, 0, 24]), torch.zeros(2, 2)],
    ]
    given = RecordedWorkload.of([ranks] * 2, [[0], [1]])
    whole, vector, matrix = compare(HALF, given, by_bucket=True).rows
    assert (vector["gradients"], vector["hook"], vector["bytes/element"]) == ("[4]", "half", 2)
    assert vector["error"] == vector["summed"] == pytest.approx(12 / 13)
    assert vector["cosine"] == pytest.approx(5 / 13)
    assert [vector["energy"], vector["δ"]] == pytest.approx([25 / 169] * 2)
    assert (vector["ω"], vector["ω ±"]) == (0, 0)
    assert (matrix["gradients"], matrix["error"], matrix["energy"]) == ("[2, 2]", 1, 0)
    assert math.isnan(matrix["cosine"])
    assert (whole["gradients"], whole["energy"]) == ("workload", pytest.approx(25 / 194))
    # In one bucket, the first tensor is kept entirely and the second not at all.
    (together,) = compare(HALF, RecordedWorkload.of([ranks])).rows
    assert together["energy"] == pytest.approx(169 / 194)


def test_the_table_and_csv(capsys):
    names = ["tests.testing.compressors:hook,tests.testing.compressors:UnbiasedRandomK"]
    assert main(["compare", *names, "--steps", "3", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["gradients"] for row in rows] == ["flat", "low_rank", "power_law", "clustered", "ties"]
    table = str(compare(HALF, [torch.tensor([3.0, 4, 0, 12])], steps=1))
    assert table.splitlines() == [
        "gradients  hook  bytes/element  summed  error  cosine  energy      δ  δ ±  ω  ω ±",
        "given      half              2   0.923  0.923   0.385   0.148  0.148    0  0    0",
    ]


def test_the_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    table = compare(HALF, (tensor for tensor in (normal(4), None)), steps=1)  # any iterable
    table.plot(tmp_path / "errors.svg")
    assert "<svg" in (tmp_path / "errors.svg").read_text()
    names = ["tests.testing.averaging:first_element_lost", "--steps", "1", "--plot"]
    assert "Format 'foo' is not supported" in refusal(capsys, main, ["compare", *names, "errors.foo"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install 'gradcomp\\[plot\\]'"):
        table.plot(tmp_path / "errors.svg")


def test_hooks_that_do_not_compress():
    hooks = [("exact", default_hooks.allreduce_hook, None), ("fp16", default_hooks.fp16_compress_hook, None)]
    exact, rounded = compare(hooks, [normal(20, 30), torch.zeros(3)], world_size=4).rows
    assert (exact["error"], exact["bytes/element"], rounded["bytes/element"]) == (0, 4, 2)
    assert 0 < rounded["error"] < 2**-11
    apart = RecordedWorkload.of([[[normal(4)], [-normal(4)]]])
    (nothing,) = compare([("noop", debugging_hooks.noop_hook, None)], apart).rows
    assert nothing["error"] == math.inf


@pytest.mark.parametrize("module", [powerSGD_hook, torch_powersgd], ids=["gradcomp", "torch"])
def test_powersgd_from_its_first_compressed_step(module):
    """The 1,000 plain steps are skipped. Rank 2 is kept entirely, and more in part."""
    hooks = [("rank 2", module.powerSGD_hook, partial(module.PowerSGDState, matrix_approximation_rank=2))]
    gradients = [normal(64, 2) @ normal(2, 48), normal(40, 30, seed=1), normal(7)]
    _, low, full, vector = compare(hooks, gradients, steps=2, by_bucket=True).rows
    assert max(low["error"], vector["error"]) <= ONE_STEP
    assert 0 < full["δ"] < 0.3
    sent = [4 * 2 * (64 + 48) / (64 * 48), 4 * 2 * (40 + 30) / (40 * 30), 4]
    assert [each["bytes/element"] for each in (low, full, vector)] == pytest.approx(sent)


def test_error_feedback_makes_good_and_variance_is_measured():
    """Random k of n have the ω that claims_of finds; error feedback with top-k has a δ of at least k / n."""
    makers = [compressors.TopK, compressors.UnbiasedRandomK]
    hooks = [(each.__name__, compressors.hook, each) for each in makers]
    top_k, random_k = compare(hooks, Workload(((16, 16),), steps=64, noise=1.0)).rows
    assert top_k["summed"] < 0.1 < top_k["error"]
    assert 0.25 <= top_k["δ"] < 1
    assert math.isnan(top_k["ω"])
    assert random_k["ω"] == pytest.approx(claims_of(*hooks[1][1:]).variance / VARIANCE_OF_ONE, rel=0.1)
    assert random_k["ω ±"] < 0.3


def test_what_is_refused():
    for hooks, gradients, message in ((HALF, [], "no gradients"), ([], [normal(2)], "no hooks")):
        with pytest.raises(ValueError, match=message):
            compare(hooks, gradients)
