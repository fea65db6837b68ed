"""What goes wrong on a rank."""

from __future__ import annotations


class RankError(AssertionError):
    """A rank raised, died, or waits for what never comes; the message says which, where, and its traceback."""


class CollectiveMismatch(RankError):  # noqa: N818 what went wrong, not that it did
    """Ranks disagree on a collective; the message has what each issued, and the line that issued it."""
