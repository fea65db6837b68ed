"""Programs that tests start."""

import os


def users_environment(**changes: str) -> dict[str, str]:
    """This process's environment without Triton's interpreter, which a user's process doesn't have either."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changes
