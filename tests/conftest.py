"""Without a GPU, the kernels run under Triton's interpreter: chosen here, before anything imports Triton."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: on the GPU if there is one, else interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
