"""Test the order of the work that hooks enqueue on CUDA's streams, on a stub of CUDA in another process."""

import pytest

from tests.programs import found_by, needs_stub_cuda

pytestmark = needs_stub_cuda


@pytest.fixture(scope="module")
def traced():
    return found_by("-m", "tests.comm.traced_hooks")


def test_no_hook_has_work_out_of_order(traced):
    assert {name: found["problems"] for name, found in traced["hooks"].items() if found["problems"]} == {}


def test_no_caller_of_hooks_has_work_out_of_order(traced):
    assert len(traced["callers"]) == 24
    assert {name: found for name, found in traced["callers"].items() if found} == {}


def test_buckets_are_compressed_while_others_are_on_the_wire(traced):
    assert [name for name, found in traced["hooks"].items() if not found["overlaps"]] == ["noop_hook"]


def test_collectives_have_the_pipelines_order(traced):
    exchanges = traced["hooks"]["quantization_hook int4"]["collectives"]
    a, b = "all_to_all_single", "all_gather"
    assert exchanges == [a, a, b, a, b, a, b, b]
    assert traced["hooks"]["powerSGD_hook"]["collectives"] == ["all_reduce"] * 8


def test_every_planted_mistake_is_found(traced):
    assert len(traced["mistakes"]) == 8
    assert [name for name, found in traced["mistakes"].items() if not found] == []
