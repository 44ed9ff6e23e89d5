"""Starts the ranks, listens to them, and ends them whatever happens.

What a rank does is worker.py's. Each rank has a pipe of its own to the parent: a shared
queue has a lock, which a rank that is killed can take along.

NOTE [endings]
- A rank that fails says so and stays, a rank that dies closes its pipe: the first such
  thing ends the demo. Where a rank died, its peers may fail of that: the dead one is
  named.
- Ranks wait for each other, so one that hangs silences all: silence of all of them for
  ``timeout_s`` ends the demo and names what each was doing.
- However the parent leaves, by Ctrl-C too, it kills each rank's process group and waits
  for it. A parent that is killed itself takes the ranks along (worker.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
from rich.console import Console

from dcp_inductor.config import Config
from dcp_inductor.demo import show, worker
from dcp_inductor.demo.judge import problems
from dcp_inductor.demo.messages import Failure, Message, Progress, RankRecord
from dcp_inductor.demo.settings import DemoSettings
from dcp_inductor.errors import BadInput, DcpError

_GRACE_S = 1.0
_LEAVE_S = 10.0
_LOG_LINES = 20

Target = Callable[[worker.Task, Connection], None]


class DemoFailed(DcpError, RuntimeError):
    """A rank failed, died or hung."""


def run_demo(settings: DemoSettings, console: Console) -> int:
    """Run and show it. 0: all is right; 1: something isn't, and the screen says what.

    Raises BadInput for settings that can't be run here, DemoFailed for a rank that
    doesn't get to its end.
    """
    settings.check()
    # What is missed is on the screen, and no reason to stop.
    config = replace(Config.from_env(), on_miss="log")
    device_type = choose_device(settings)
    show.plan(console, settings, device_type)
    with show.progress(console, settings) as listen:
        records = run_ranks(settings, config, device_type, listen)
    found = problems(settings, config, records)
    show.result(console, settings, records, found)
    return 1 if found else 0


def choose_device(settings: DemoSettings) -> str:
    """``cpu`` or ``cuda``: for auto, CUDA if each rank gets a GPU of its own."""
    num_gpus = torch.cuda.device_count()
    enough = num_gpus >= settings.num_ranks
    if settings.device == "cuda" and not enough:
        raise BadInput(
            f"--device cuda for {settings.num_ranks} ranks was asked for, and this "
            f"process sees {num_gpus} GPUs; NCCL needs one for each rank. Pass "
            f"{f'--ranks {num_gpus} or ' if num_gpus else ''}--device cpu."
        )
    if settings.device == "auto":
        return "cuda" if enough else "cpu"
    return settings.device


def run_ranks(
    settings: DemoSettings,
    config: Config,
    device_type: str,
    listen: Callable[[Progress], None],
    target: Target = worker.main,
) -> list[RankRecord]:
    """Run ``target`` on every rank; their records, by rank. Raises DemoFailed."""
    with tempfile.TemporaryDirectory(prefix="dcp_inductor_demo_") as folder:
        logs = Path(settings.logs or folder)
        logs.mkdir(parents=True, exist_ok=True)
        tasks = [
            worker.Task(
                rank,
                settings,
                config,
                device_type,
                store=str(Path(folder, "store")),
                log=str(logs / f"rank{rank}.log"),
            )
            for rank in range(settings.num_ranks)
        ]
        with _started(tasks, target) as ranks:
            return _collect(ranks, settings.timeout_s, listen)


@dataclass
class _Rank:
    """A started rank, as the parent sees it."""

    task: worker.Task
    process: SpawnProcess
    connection: Connection
    doing: str = "starting"

    def hear(self) -> Message:
        """The next message; a closed pipe is a Failure."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, ConnectionError):
            return self._death()
        if isinstance(message, Progress):
            self.doing = message.doing
        if isinstance(message, Failure):
            return replace(message, detail=self._log_tail())
        return message

    def _death(self) -> Failure:
        self.process.join(_GRACE_S)
        how = _ending(self.process.exitcode)
        return Failure(
            self.task.rank, f"{how} while {self.doing}", self._log_tail(), died=True
        )

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = Path(self.task.log).read_text(errors="replace").splitlines()
            return "\n".join(lines[-_LOG_LINES:])
        return ""

    def end(self) -> None:
        """Kill it and all that it started, and wait until it's gone."""
        pid = self.process.pid
        assert pid is not None, "it was started"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe"
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"left with exit status {exit_code}"


@contextlib.contextmanager
def _started(tasks: list[worker.Task], target: Target) -> Iterator[list[_Rank]]:
    """The ranks, running; none is left when the block is."""
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    try:
        for task in tasks:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=target, args=(task, theirs), name=f"rank {task.rank}"
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(task, process, ours))
        yield ranks
        for rank in ranks:
            rank.process.join(_LEAVE_S)
    finally:
        for rank in ranks:
            rank.end()


def _collect(
    ranks: list[_Rank], timeout_s: float, listen: Callable[[Progress], None]
) -> list[RankRecord]:
    """Listen until every rank has sent its record, NOTE [endings]."""
    waiting = list(ranks)
    records: dict[int, RankRecord] = {}
    while waiting:
        heard = _hear_some(waiting, timeout_s)
        if not heard:
            raise _hung(waiting, timeout_s)
        failures = [message for message in heard if isinstance(message, Failure)]
        if failures:
            raise _failed(failures, waiting)
        for message in heard:
            if isinstance(message, Progress):
                listen(message)
            elif isinstance(message, RankRecord):
                records[message.rank] = message
        waiting = [rank for rank in waiting if rank.task.rank not in records]
    return [records[rank] for rank in sorted(records)]


def _hear_some(waiting: list[_Rank], timeout_s: float) -> list[Message]:
    """A message of each rank that has one, or [] after ``timeout_s`` of silence."""
    by_connection = {rank.connection: rank for rank in waiting}
    ready = wait(list(by_connection), timeout_s)
    return [
        rank.hear() for connection, rank in by_connection.items() if connection in ready
    ]


def _failed(failures: list[Failure], waiting: list[_Rank]) -> DemoFailed:
    """Names the cause among all failures of the next moment: a death, or the first."""
    failures = list(failures)
    until = time.monotonic() + _GRACE_S
    while (left_s := until - time.monotonic()) > 0:
        gone = {failure.rank for failure in failures}
        alive = [rank for rank in waiting if rank.task.rank not in gone]
        if not alive:
            break
        heard = _hear_some(alive, left_s)
        failures += [message for message in heard if isinstance(message, Failure)]
    cause = next((failure for failure in failures if failure.died), failures[0])
    detail = f"\n\n{cause.detail.rstrip()}" if cause.detail else ""
    verb = "" if cause.died else "failed: "
    return DemoFailed(
        f"Rank {cause.rank} {verb}{cause.error}. All ranks were ended; --logs DIR "
        f"keeps what each printed.{detail}"
    )


def _hung(waiting: list[_Rank], timeout_s: float) -> DemoFailed:
    doing = "; ".join(f"rank {rank.task.rank}: {rank.doing}" for rank in waiting)
    return DemoFailed(
        f"No rank made a step for {timeout_s:g} s ({doing}). All ranks were ended. On "
        "a slow machine pass a longer --timeout."
    )
