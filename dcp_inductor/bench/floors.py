"""What no exchange can be faster than, on the same links: a flag, and the bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.distributed import _symmetric_memory as symm_mem

from dcp_inductor.bench.timing import world


@triton.jit
def _flag(mine, theirs, epoch):  # type: ignore[no-untyped-def]
    """Send this call's number to the peer, wait for the peer's."""
    mine = mine.to(tl.pointer_type(tl.int32))
    theirs = theirs.to(tl.pointer_type(tl.int32))
    number = tl.load(epoch) + 1
    tl.store(epoch, number)
    tl.store(theirs, number)
    spins = 0
    while (tl.load(mine, volatile=True) < number) & (spins < 100_000_000):
        spins += 1


@triton.jit
def push_kernel(source, theirs, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store ``words`` 32-bit words to the peer."""
    theirs = theirs.to(tl.pointer_type(tl.int32))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < words
    tl.store(theirs + place, tl.load(source + place, mask=inside), mask=inside)


class Floors:
    """The two things that no exchange can be faster than, on the same links."""

    def __init__(self, rank: int, n: int, max_bytes: int) -> None:
        self.buffer = symm_mem.empty(
            max_bytes + 256, dtype=torch.uint8, device=torch.device("cuda")
        ).zero_()
        handle = symm_mem.rendezvous(self.buffer, world().group_name)
        self.mine = handle.buffer_ptrs[rank]
        self.theirs = handle.buffer_ptrs[(rank + 1) % n]
        self.epoch = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.source = torch.zeros(max_bytes // 4, dtype=torch.int32, device="cuda")
        dist.barrier()

    def flag(self) -> None:
        """This rank's number to the next one, and the other neighbour's awaited."""
        _flag[(1,)](self.mine, self.theirs, self.epoch, num_warps=1)

    def push(self, num_bytes: int) -> None:
        """``num_bytes`` to the next rank, nothing awaited."""
        words = num_bytes // 4
        grid = (triton.cdiv(words, 1024),)
        push_kernel[grid](
            self.source, self.theirs + 256, words, BLOCK=1024, num_warps=8
        )
