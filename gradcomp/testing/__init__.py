"""Property-test gradient compression: check_hook(my_hook, make_state) makes a report (docs/testing.md)."""

try:
    import hypothesis as hypothesis
except ImportError as error:
    raise ImportError("gradcomp.testing needs Hypothesis: pip install hypothesis") from error

from gradcomp.testing import properties, strategies
from gradcomp.testing.check import Failure, Report, Verdict, check_hook
from gradcomp.testing.claims import Claims, Tolerance, claims_of
from gradcomp.testing.comparison import Comparison, compare
from gradcomp.testing.properties.subject import NonFiniteFailure, PropertyFailure
from gradcomp.testing.ranks import CollectiveMismatch, RankError, run_ranks
from gradcomp.testing.run import Run, run_hook
from gradcomp.testing.workload import RecordedWorkload, Workload

__all__ = [
    "Claims",
    "CollectiveMismatch",
    "Comparison",
    "Failure",
    "NonFiniteFailure",
    "PropertyFailure",
    "RankError",
    "RecordedWorkload",
    "Report",
    "Run",
    "Tolerance",
    "Verdict",
    "Workload",
    "check_hook",
    "claims_of",
    "compare",
    "properties",
    "run_hook",
    "run_ranks",
    "strategies",
]
