"""What one rank does: join, build, compile twice, decode, compare.

Starting and ending it is run.py's. A rank is a process in a process group of its own,
with all that it starts (C++ compilers), so that the parent can end them together.

NOTE [no cache]
A graph that comes from the FX graph cache never passes the pass, which then has nothing
to tell: both runs are compiled without that cache. Compiled C++ is cached all the same.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dcp_inductor
from dcp_inductor.config import Config
from dcp_inductor.demo.accuracy import judge_run
from dcp_inductor.demo.messages import (
    Accuracy,
    Failure,
    Progress,
    RankRecord,
    RunRecord,
)
from dcp_inductor.demo.model import Decoder, first_tokens, new_caches
from dcp_inductor.demo.settings import DTYPES, DemoSettings
from dcp_inductor.report import GraphReport

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# The parent watches for ranks that hang, and knows better which one it is.
_NEVER = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Task:
    """What a rank is started with. device_type: cpu or cuda. log: its output's file."""

    rank: int
    settings: DemoSettings
    config: Config
    device_type: str
    store: str
    log: str


def main(task: Task, connection: Connection) -> None:
    """Do it all and send a RankRecord; or send a Failure and wait to be ended."""
    os.setsid()
    _print_to(task.log)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        connection.send(Worker(task, connection).run())
    except Exception as error:
        traceback.print_exc()
        what, *_ = f"{type(error).__name__}: {error}".splitlines()
        connection.send(Failure(task.rank, what))
        # Leaving would make the peers fail as well, and hide which one was first.
        threading.Event().wait()


def _print_to(path: str) -> None:
    """Send this process's output, and that of what it starts, to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    faulthandler.enable()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by run.py"
    parent.join()
    os.killpg(0, signal.SIGKILL)


class Worker:
    """The work of one rank, told to the parent piece by piece."""

    def __init__(self, task: Task, connection: Connection) -> None:
        self.task = task
        self.settings = task.settings
        self.connection = connection
        self.device = torch.device(task.device_type, 0 if _is_cpu(task) else task.rank)
        self.dtype: torch.dtype = getattr(torch, DTYPES[task.settings.dtype])
        self.done = 0

    @torch.no_grad()
    def run(self) -> RankRecord:
        self._tell("joining the others")
        self._join()
        self._tell("drawing the weights")
        settings, rank = self.settings, self.task.rank
        decoder = Decoder(settings, rank, settings.num_ranks)
        decoder = decoder.to(self.device, self.dtype)
        self._reserve()
        graphs: list[GraphReport] = []
        fusion_pass = dcp_inductor.DcpFusionPass(self.task.config, graphs.append)
        self._tell("compiling without the pass")
        plain = self._compiled("compiled", decoder, {})
        self._tell("compiling with the pass")
        options = {"post_grad_custom_pre_pass": fusion_pass}
        fused = self._compiled("compiled with the pass", decoder, options)
        self._decode(plain, fused)
        self._tell("comparing with one rank" if rank == 0 else "waiting for rank 0")
        record = self._record(plain, fused, tuple(graphs))
        self._leave()
        return record

    def _tell(self, doing: str) -> None:
        total = 5 + self.settings.num_steps
        self.connection.send(Progress(self.task.rank, self.done, total, doing))
        self.done += 1

    def _join(self) -> None:
        settings = self.settings
        if _is_cpu(self.task):
            torch.set_num_threads(max(1, _num_cores() // settings.num_ranks))
        else:
            torch.cuda.set_device(self.device)
        # A pool of compile processes costs more than it saves on so small a model.
        torch._inductor.config.compile_threads = 1
        dist.init_process_group(
            _BACKENDS[self.task.device_type],
            store=dist.FileStore(self.task.store, settings.num_ranks),
            rank=self.task.rank,
            world_size=settings.num_ranks,
            timeout=_NEVER,
            device_id=None if _is_cpu(self.task) else self.device,
        )

    def _reserve(self) -> None:
        """Make the fused op's workspace, where this version has one."""
        reserve = getattr(dcp_inductor, "reserve", None)
        if reserve is None or _is_cpu(self.task) or self.settings.num_ranks == 1:
            return
        shape = self.settings.shape
        reserve(
            dist.group.WORLD,
            max_tokens=self.settings.batch_size,
            num_heads=shape.num_heads,
            head_dim=shape.latent_dim,
            dtype=self.dtype,
        )

    def _leave(self) -> None:
        """Together: gloo aborts a rank whose peer closes while it still sends."""
        dist.barrier()
        dist.destroy_process_group()

    def _compiled(self, name: str, decoder: Decoder, options: dict[str, Any]) -> _Run:
        """The decoder, compiled; its first call is made on a state of its own."""
        step = torch.compile(
            decoder,
            fullgraph=True,
            dynamic=False,
            options={"fx_graph_cache": False, **options},  # NOTE [no cache]
        )
        self._new_run(name, step).advance()
        return self._new_run(name, step)

    def _new_run(self, name: str, step: Callable[..., Any]) -> _Run:
        settings, device = self.settings, self.device
        return _Run(
            name,
            step,
            new_caches(settings, settings.num_ranks, self.dtype, device),
            torch.zeros((), dtype=torch.int64, device=device),
            first_tokens(settings).to(device),
        )

    def _decode(self, plain: _Run, fused: _Run) -> None:
        """Both runs step by step in turn, so that both meet the same disturbances."""
        for step in range(self.settings.num_steps):
            self._tell(f"step {step + 1} of {self.settings.num_steps}")
            for run in (plain, fused) if step % 2 == 0 else (fused, plain):
                run.advance()

    def _record(
        self, plain: _Run, fused: _Run, graphs: tuple[GraphReport, ...]
    ) -> RankRecord:
        first = self.task.rank == 0
        return RankRecord(
            self.task.rank,
            _device_name(self.device),
            _BACKENDS[self.task.device_type],
            plain.record((), self._accuracy(plain) if first else None),
            fused.record(graphs, self._accuracy(fused) if first else None),
        )

    def _accuracy(self, run: _Run) -> Accuracy:
        tokens, logits = torch.stack(run.tokens), torch.stack(run.logits)
        return judge_run(self.settings, tokens, logits, self.dtype)


@dataclass
class _Run:
    """A decoder's state, and what it gave: a tensor ``[B]`` and ``[B, V]`` a step."""

    name: str
    step: Callable[..., Any]
    caches: list[Tensor]
    position: Tensor
    next_tokens: Tensor
    tokens: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def advance(self) -> None:
        """One step, timed."""
        _wait_for(self.position.device)
        start = time.perf_counter()
        self.next_tokens, logits = self.step(
            self.next_tokens, self.caches, self.position
        )
        _wait_for(self.position.device)
        self.step_ms.append((time.perf_counter() - start) * 1e3)
        self.position += 1
        self.tokens.append(self.next_tokens)
        self.logits.append(logits)

    def record(
        self, graphs: tuple[GraphReport, ...], accuracy: Accuracy | None
    ) -> RunRecord:
        tokens = tuple(tuple(step.tolist()) for step in self.tokens)
        return RunRecord(self.name, tokens, tuple(self.step_ms), graphs, accuracy)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_cpu(task: Task) -> bool:
    return task.device_type == "cpu"


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {_num_cores()} cores"
