"""Fixtures for tests that run hooks."""

import pytest

import gradcomp.ops


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run hooks in plain torch, not under Triton's interpreter."""
    monkeypatch.setattr(gradcomp.ops, "_INTERPRETED", False)
