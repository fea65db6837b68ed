"""Check that every tensor names its dtype and device: torch's defaults are the user's."""

import ast

from torch.utils._device import _device_constructors

from tests.house.imports import PACKAGE, sources_of

# What torch.set_default_device reaches.
FACTORIES = {f"torch.{each.__name__}" for each in _device_constructors()}


def unnamed(source: str) -> list[str]:
    """Return the calls of tensor factories that leave dtype or device to torch's defaults, with lines."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) in FACTORIES]
    found = [call for call in made if not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}]
    return [f"line {call.lineno}: {ast.unparse(call)}" for call in found]


def test_every_tensor_names_its_dtype_and_device():
    assert {name: calls for name, source in sources_of(PACKAGE).items() if (calls := unnamed(source))} == {}


def test_a_default_is_found():
    assert unnamed('torch.zeros(3, dtype=kind, device=place)\nx.new_zeros(3)\nself.tensor("a")') == []
    for call in ("torch.zeros(3, dtype=wide)", "torch.tensor([1], device='cpu')", "torch.arange(3)"):
        assert unnamed(f"sum({call})") == [f"line 1: {call}"]
