"""Gradient compression for data-parallel PyTorch."""

from . import hooks

__all__ = ["hooks"]
