"""Check that one file decides what runs on CUDA: device.py."""

import ast

from tests.house.imports import PACKAGE, sources_of

DECIDES = "gradcomp.device"
# These ask for other reasons: torch's rules for device_ids; the rank simulator imports nothing of gradcomp.
ASKS_ITSELF = {"gradcomp.parallel.module", "gradcomp.testing.ranks.collectives"}


def asks_whether_cuda(source: str) -> bool:
    """Return whether the code compares something with "cuda", or asks a tensor for is_cuda."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            return True
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(isinstance(each, ast.Constant) and each.value == "cuda" for each in operands):
                return True
    return False


def test_one_file_decides_what_runs_on_cuda():
    asking = {name for name, source in sources_of(PACKAGE).items() if asks_whether_cuda(source)}
    assert asking - ASKS_ITSELF == {DECIDES}


def test_a_decision_elsewhere_is_found():
    assert asks_whether_cuda('if tensor.device.type != "cuda":\n    pass')
    assert asks_whether_cuda("wait = wire.is_cuda")
    assert not asks_whether_cuda('device = torch.device("cuda", 0)')
