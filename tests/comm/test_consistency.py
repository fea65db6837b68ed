"""Test how ranks compare values that must be equal: in one collective, and else an error on every rank."""

import pytest
import torch
import torch.distributed as dist

from gradcomp.comm.consistency import MESSAGE_BYTES, require_same_on_all_ranks
from tests.ranks import of_all_ranks


def compare(rank, values_of_rank):
    counted = []
    all_gather = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (counted.append(1), all_gather(*args, **kwargs))[1]
    try:
        require_same_on_all_ranks(
            "The hook", values_of_rank[rank], dist.group.WORLD, torch.device("cpu"), "Mend it."
        )
    except RuntimeError as error:
        return len(counted), str(error)
    return len(counted), ""


LONG = [["weight", [3, 4]]] * MESSAGE_BYTES


@pytest.mark.parametrize(
    ("values_of_rank", "collectives", "message"),
    [
        ([{"rank": 4, "rate": 2.0}] * 3, 1, ""),
        ([{"shapes": LONG}] * 3, 1, ""),
        (
            [{"rank": 4, "rate": 2.0}, {"rank": 8, "rate": 2.0}, {"rank": 4, "rate": 2.0}],
            2,
            "The hook differs between the ranks: rank is 4 on ranks 0, 2 and 8 on rank 1. Mend it.",
        ),
        (
            [{"dtype": torch.float32}, {"dtype": torch.float32}, {"dtype": torch.float16}],
            2,
            'dtype is "torch.float32" on ranks 0, 1 and "torch.float16" on rank 2',
        ),
        (
            [{"shapes": LONG}, {"shapes": LONG}, {"shapes": [*LONG[:-1], ["bias", [4]]]}],
            2,
            f'shapes[{MESSAGE_BYTES - 1}] is ["weight", [3, 4]] on ranks 0, 1 and ["bias", [4]] on rank 2',
        ),
        (
            [{"shapes": LONG}, {"shapes": LONG[1:]}, {"shapes": LONG}],
            2,
            f"the number of shapes is {MESSAGE_BYTES} on ranks 0, 2 and {MESSAGE_BYTES - 1} on rank 1",
        ),
        ([{"a": 1}, {"a": 1}, {"b": 1}], 2, "a is 1 on ranks 0, 1 and null on rank 2; b is null on"),
        ([{"epsilon": 0.0}, {"epsilon": float("nan")}, {"epsilon": 0.0}], 2, "NaN on rank 1"),
    ],
)
def test_a_difference_is_named_on_every_rank(run_ranks, values_of_rank, collectives, message):
    results = run_ranks(compare, 3, values_of_rank)
    assert [found for found, _ in results] == [collectives] * 3
    for _, text in results:
        assert message in text
        assert bool(text) == bool(message)


@pytest.mark.ranks(3)
def test_notes_may_differ(rank):
    group, device = dist.group.WORLD, torch.device("cpu")
    values, notes = {"a": 1}, {"CPU": ["AVX2", "AVX512", "AVX2"][rank]}
    expected = {"CPU": 'CPU is "AVX2" on ranks 0, 2 and "AVX512" on rank 1'}
    assert (
        of_all_ranks(require_same_on_all_ranks("The hook", values, group, device, "", notes=notes))
        == [expected] * 3
    )
