"""Choose the device that tests compute on, and let torch's PowerSGD work there, without importing Triton."""

import torch


def device_of_rank() -> torch.device:
    """Return a rank's device: its GPU on NCCL, the first GPU on gloo, or the CPU without a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def let_torchs_power_sgd_have_cpu_buckets() -> None:
    """Let torch's hook average CPU buckets also if a GPU is visible.

    The hook passes the bucket's device to torch.cuda.synchronize, which raises an error for the CPU.
    """
    synchronize = torch.cuda.synchronize
    if torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: (
            None if getattr(device, "type", "cuda") == "cpu" else synchronize(device)
        )
