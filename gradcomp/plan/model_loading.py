"""The model that an option names: one of the built-in ones, or what a function of the user's returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .models import BUILT_IN_MODELS, Model, Parameter, built_in_model


def load_model(name: str) -> Model:
    """Return the model of this name.

    name: one of BUILT_IN_MODELS, or module:callable, where the callable takes no argument and returns an
    nn.Module, a tuple that begins with one, or a list of shapes. It is called on the meta device, where
    parameters need no memory; where that doesn't work, on the CPU.

    Raises ValueError for anything else.
    """
    if name in BUILT_IN_MODELS:
        return built_in_model(name)
    function = load_callable(name)
    try:
        with torch.device("meta"):
            made = function()
    except Exception:
        made = called(function, name)
    return Model(name, tuple(Parameter(shape) for shape in shapes_of(made, name)))


def load_callable(name: str) -> Callable[[], Any]:
    """Return the callable that `module:callable` names. Raises ValueError if there is none."""
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(
            f"there is no model {name!r}; known are {', '.join(BUILT_IN_MODELS)}, and module:callable for a "
            "function of yours"
        )
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"model {name!r}: module {module!r} can't be imported: {error}") from error
    except Exception as error:
        raise ValueError(f"model {name!r}: module {module!r} fails: {_in_words(error)}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        what = "not callable" if hasattr(found, attribute) else "not there"
        raise ValueError(f"model {name!r}: {attribute!r} of module {module!r} is {what}")
    checked: Callable[[], Any] = function
    return checked


def called(function: Callable[[], Any], name: str) -> Any:
    """Return what the function returns. Raises ValueError if it raises."""
    try:
        return function()
    except Exception as error:
        raise ValueError(f"model {name!r}: calling it without arguments fails: {_in_words(error)}") from error


def shapes_of(made: Any, name: str) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters with gradients. Raises ValueError for what isn't a model."""
    module = made[0] if isinstance(made, tuple) and made and isinstance(made[0], nn.Module) else made
    if isinstance(module, nn.Module):
        shapes = [tuple(each.shape) for each in module.parameters() if each.requires_grad]
    elif _are_shapes(made):
        shapes = [tuple(shape) for shape in made]
    else:
        raise ValueError(
            f"model {name!r} returned {type(made).__name__}; it has to return an nn.Module, a tuple that "
            "begins with one, or a list of shapes"
        )
    if not shapes:
        raise ValueError(f"model {name!r} has no parameter with a gradient")
    return shapes


def _are_shapes(made: Any) -> bool:
    return isinstance(made, Sequence) and all(
        isinstance(shape, Sequence)
        and not isinstance(shape, str)
        and all(type(length) is int and length > 0 for length in shape)
        for shape in made
    )


def _in_words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
