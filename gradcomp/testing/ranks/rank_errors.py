"""The exceptions of a run in which a rank fails."""

from __future__ import annotations


class RankError(AssertionError):
    """A rank raised, died, or waits for something that never happens; the message says which rank, where, and its traceback."""


class CollectiveMismatch(RankError):  # noqa: N818 its name says what went wrong
    """The ranks disagree on a collective; the message holds what each issued, and the line that issued it."""
