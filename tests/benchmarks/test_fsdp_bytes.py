"""Compare the bytes that benchmarks/fsdp_bytes.py counts with payloads computed by hand."""

import pytest

from benchmarks import fsdp_bytes
from tests.programs import run_module

SHAPES = [(1001, 512), (1001,)]  # 126 rows in each of 8 shards


def test_what_is_sent():
    numel = 8 * (126 * 512 + 126)
    assert fsdp_bytes.shard_shapes(SHAPES, 8) == [(126, 512), (126,)]
    # Each of 2 replicas sends its buffer once; each of 4 sends it one and a half times.
    assert fsdp_bytes.bytes_sent("none", SHAPES, 8, 2) == 4 * numel
    assert fsdp_bytes.bytes_sent("none", SHAPES, 8, 4) == 6 * numel
    # P of each shard, with the bias, and Q.
    assert fsdp_bytes.bytes_sent("powersgd:4", SHAPES, 8, 2) == 8 * 4 * (126 * 4 + 126 + 512 * 4)
    # A byte per element of the matrix, two for each of its 504 blocks of 128, and the bias exactly.
    assert fsdp_bytes.bytes_sent("int8", SHAPES, 8, 2) == pytest.approx(
        8 * (126 * 512 + 2 * 504 + 4 * 126), rel=0.01
    )


def test_the_command():
    run = run_module("benchmarks.fsdp_bytes", "--model", "gpt2-medium", "--shards", "1", "8")
    lines = run.stdout.splitlines()
    assert lines[0] == "gpt2-medium, 2 replicas, reduced in fp32: sent by a replica per step"
    assert [line.split()[0] for line in lines[3:]] == list(fsdp_bytes.HOOKS)
    assert lines[3].split("none")[1].split() == ["1,419", "MB", "(1.0×)"] * 2
    assert (
        "needs shards and at least 2 replicas"
        in run_module("benchmarks.fsdp_bytes", "--replicas", "1").stdout
    )
