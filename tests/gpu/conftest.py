"""One process group over the ranks that torchrun started, one GPU each.

torchrun --nproc-per-node 2 -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def ranks():
    """(rank, number of ranks), with NCCL initialised. Needs torchrun."""
    if "LOCAL_RANK" not in os.environ or int(os.environ["WORLD_SIZE"]) < 2:
        pytest.skip("needs torchrun with at least two ranks")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl",
            timeout=timedelta(seconds=60),
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
    yield dist.get_rank(), dist.get_world_size()
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
