"""DDP communication hooks under the names of ``torch.distributed.algorithms.ddp_comm_hooks``."""
