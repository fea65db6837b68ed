"""The exceptions of a run in which a rank fails."""

from __future__ import annotations


class RankError(AssertionError):
    """A rank raised, died, or waits for ever; the message has the rank, the line and the traceback."""


class CollectiveMismatch(RankError):  # noqa: N818 its name says what went wrong
    """The ranks disagree on a collective; the message holds what each issued, and the line that issued it."""
