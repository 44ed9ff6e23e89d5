"""The kernel's CPU twin: N forked ranks over shared memory, in Triton's interpreter.

Run as a script by test_kernel_twin.py with TRITON_INTERPRET=1, for the interpreter
patches triton.language for the whole process. Receives Jobs on stdin, sends Results on
stdout; imports torch and Triton once and forks the ranks of each job.

Axes: N ranks, B tokens, H heads before the exchange, h = H / N after it, D head dim.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import random
import struct
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import IO, Any

import torch
from torch import Tensor

from dcp_inductor.merge import LseMode
from dcp_inductor.runtime.kernels import (
    STATUS_WORDS,
    Failure,
    SlotGeometry,
    initialise,
    read_failure,
)


@dataclass(frozen=True)
class Call:
    """One exchange: partial_o ``[N, B, H, D]``, partial_lse ``[N, B, H]``, all ranks.

    tags: one a rank; a single one stands for all.
    """

    partial_o: Tensor
    partial_lse: Tensor
    lse_mode: LseMode = "base2"
    return_lse: bool = True
    tags: tuple[int, ...] = (7,)
    max_programs: int = 1


@dataclass(frozen=True)
class Job:
    """Calls in order on one slot.

    absent: ranks that never come. slow: ranks that stop for a while between reading a
    row and emptying its place. skew_s: random wait before a call. widths: tokens that
    each rank passes by mistake, or none for all of them.
    """

    cp_size: int
    slot_rows: int
    calls: list[Call]
    absent: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    spin_limit: int = 1 << 40
    skew_s: float = 0.0
    timeout_s: float = 60.0
    widths: tuple[int, ...] = ()

    @property
    def geometry(self) -> SlotGeometry:
        partial_o = self.calls[0].partial_o
        return SlotGeometry(
            self.cp_size, self.slot_rows, partial_o.shape[-1], partial_o.dtype
        )


@dataclass
class Result:
    """By call and rank: out ``[B, h, D]`` and LSE ``[B, h]``; by rank: the rest.

    late: ranks that had to be ended. unread: words of the slots that hold a message.
    """

    outs: list[list[Tensor]] = field(default_factory=list)
    lses: list[list[Tensor]] = field(default_factory=list)
    failures: list[Failure | None] = field(default_factory=list)
    epochs: list[list[int]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    unread: int = 0
    wall_s: float = 0.0


def send(stream: IO[bytes], message: object) -> None:
    """torch.save with its length before it: pickle can't carry float8 tensors."""
    body = io.BytesIO()
    torch.save(message, body)
    stream.write(struct.pack("q", body.tell()) + body.getvalue())
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message; EOFError at the end of the stream."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise EOFError
    body = stream.read(struct.unpack("q", prefix)[0])
    return torch.load(io.BytesIO(body), weights_only=False)


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that forked processes share, at a page boundary."""
    count = max(1, torch.Size(shape).numel())
    memory = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)[:count].view(shape)


def stop_before_clearing(seconds: float) -> None:
    """Make this process a rank that reads early and clears late."""
    from dcp_inductor.runtime.kernels import protocol

    await_messages = protocol.await_messages

    def await_then_sleep(*args: Any) -> Any:
        seen = await_messages(*args)
        time.sleep(seconds)
        return seen

    protocol.await_messages = await_then_sleep


class Twin:
    """The shared memory of a job and what one rank does with it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        size, geometry = job.cp_size, job.geometry
        self.buffers = shared((size, -(-geometry.total_bytes // 64) * 64), torch.uint8)
        for buffer in self.buffers:
            initialise(buffer, geometry)
        self.peers = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.epochs = shared((size, geometry.rows), torch.int32)
        self.status = shared((size, STATUS_WORDS), torch.int32)
        self.outs, self.lses = [], []
        for call in job.calls:
            tokens, heads, dim = call.partial_o.shape[1:]
            rows = (size, tokens, heads // size)
            self.outs.append(shared((*rows, dim), call.partial_o.dtype))
            self.lses.append(shared(rows, torch.float32).fill_(-123.0))

    def run_rank(self, rank: int, start: Barrier) -> None:
        from dcp_inductor.runtime.kernels.exchange import Launch

        if rank in self.job.slow:
            stop_before_clearing(0.2)
        wait = random.Random(rank)
        start.wait(30)
        for index, call in enumerate(self.job.calls):
            time.sleep(wait.random() * self.job.skew_s)
            tokens = self.job.widths[rank] if self.job.widths else None
            partials = call.partial_o[rank][:tokens], call.partial_lse[rank][:tokens]
            launch = Launch(
                *partials,
                peers=self.peers,
                epochs=self.epochs[rank],
                status=self.status[rank],
                geometry=self.job.geometry,
                rank=rank,
                lse_mode=call.lse_mode,
                spin_limit_ns=self.job.spin_limit,
                max_programs=call.max_programs,
            )
            launch(
                *partials,
                self.outs[index][rank][:tokens],
                self.lses[index][rank][:tokens] if call.return_lse else None,
                call.tags[rank % len(call.tags)],
            )

    def result(self, late: list[int], wall_s: float) -> Result:
        fresh = torch.empty_like(self.buffers)
        for buffer in fresh:
            initialise(buffer, self.job.geometry)
        used = self.job.geometry.total_bytes
        return Result(
            outs=[[out.clone() for out in call] for call in self.outs],
            lses=[[lse.clone() for lse in call] for call in self.lses],
            failures=[read_failure(status) for status in self.status],
            epochs=self.epochs.tolist(),
            late=late,
            unread=int((fresh[:, :used] != self.buffers[:, :used]).sum()),
            wall_s=wall_s,
        )


def run(job: Job) -> Result:
    """Fork the ranks that come, wait for them, end those that don't finish in time."""
    twin = Twin(job)
    fork = multiprocessing.get_context("fork")
    began = time.monotonic()
    start = fork.Barrier(job.cp_size - len(job.absent))
    ranks = {
        rank: fork.Process(target=twin.run_rank, args=(rank, start), daemon=True)
        for rank in range(job.cp_size)
        if rank not in job.absent
    }
    for process in ranks.values():
        process.start()
    for process in ranks.values():
        process.join(max(0.0, began + job.timeout_s - time.monotonic()))
    late = [rank for rank, process in ranks.items() if process.exitcode != 0]
    for rank in late:
        ranks[rank].kill()
        ranks[rank].join(5)
    return twin.result(late, time.monotonic() - began)


def main() -> None:
    torch.set_num_threads(1)
    import dcp_inductor.runtime.kernels.exchange  # noqa: F401 (once, before forking)

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    while True:
        try:
            job = receive(sys.stdin.buffer)
        except EOFError:
            return
        send(answers, run(job))


if __name__ == "__main__":
    # Pickles name this module as the tests import it.
    import twin_worker

    twin_worker.main()
