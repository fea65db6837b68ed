"""Compare the bytes that benchmarks/reduce_scatter_bytes.py counts with payloads computed by hand."""

import pytest

from benchmarks.reduce_scatter_bytes import (
    CLUSTERS,
    HOOKS,
    Cluster,
    all_reduce_bytes,
    error_bytes,
    reduce_scatter_bytes,
    table,
)
from tests.programs import ROOT, run_module

SHAPES = [(1001, 512), (1001,)]  # 126 rows in each of 8 shards
MATRIX, VECTOR = 126 * 512, 126  # elements in a shard
PAYLOAD = MATRIX + 2 * MATRIX // 128 + 8 + 4 * VECTOR + 8  # a shard's in int8; sections begin on 16 bytes


def test_what_leaves_a_node():
    ranks, nodes = Cluster(1, 8, 1, by_nodes=False), Cluster(1, 2, 4, by_nodes=True)
    flat = nodes._replace(by_nodes=False)
    for cluster in (ranks, nodes, flat):
        assert reduce_scatter_bytes("none", SHAPES, cluster) == 4 * 7 * (MATRIX + VECTOR)
        assert reduce_scatter_bytes("bf16", SHAPES, cluster) == 2 * 7 * (MATRIX + VECTOR)
        assert all_reduce_bytes("int8", SHAPES, cluster) == 0
    # A rank sends its codes of 7 shards; a node those of the other node's 4; flat, each rank sends these.
    assert reduce_scatter_bytes("int8", SHAPES, ranks) == pytest.approx(7 * PAYLOAD, rel=1e-3)
    assert reduce_scatter_bytes("int8", SHAPES, nodes) == pytest.approx(4 * PAYLOAD, rel=1e-3)
    assert reduce_scatter_bytes("int8", SHAPES, flat) == pytest.approx(4 * 4 * PAYLOAD, rel=1e-3)
    # Four bits save nearly half.
    assert reduce_scatter_bytes("int4", SHAPES, ranks) == pytest.approx(7 * (PAYLOAD - MATRIX / 2), rel=1e-3)


def test_what_leaves_a_replica():
    cluster = Cluster(2, 1, 8, by_nodes=False)
    assert reduce_scatter_bytes("int8", SHAPES, cluster) == 0
    assert all_reduce_bytes("none", SHAPES, cluster) == 8 * 4 * (MATRIX + VECTOR)
    assert all_reduce_bytes("int8", SHAPES, cluster) == pytest.approx(8 * PAYLOAD, rel=0.01)


def test_errors():
    assert error_bytes(SHAPES, Cluster(1, 8, 1, by_nodes=False)) == 4 * 8 * MATRIX
    assert error_bytes(SHAPES, Cluster(1, 2, 4, by_nodes=True)) == 4 * 2 * MATRIX
    assert error_bytes(SHAPES, Cluster(2, 1, 8, by_nodes=False)) == 4 * (MATRIX + VECTOR)


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "fsdp.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for name, *cells in table("llama-7b")[1:]:
        expected = " | ".join(cells).replace(" (1.0×)", "")
        assert any(expected in row for row in rows), f"{name}: {expected}"


def test_the_command():
    lines = run_module("benchmarks.reduce_scatter_bytes", "--model", "gpt2-medium").stdout.splitlines()
    assert lines[2].split() == [*HOOKS, "errors"]
    assert [line[:44].strip() for line in lines[3:]] == list(map(str, CLUSTERS))
