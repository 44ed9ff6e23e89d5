"""Starts the ranks of the benchmark, one a GPU, and ends them whatever happens.

What a rank does is exchange.py's, the same that ``torchrun`` runs by hand.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from dcp_inductor.bench.results import Results
from dcp_inductor.bench.settings import BenchSettings
from dcp_inductor.errors import BadInput, DcpError

_LOG_LINES = 40
# torchrun needs a moment to end its ranks when it is told to leave.
_LEAVE_S = 30.0


class BenchFailed(DcpError, RuntimeError):
    """A rank failed, or the ranks took too long."""


def measure(settings: BenchSettings, console: Console) -> Results:
    """Run the ranks to their end. Raises BadInput, BenchFailed."""
    settings.check()
    check_machine(settings)
    with tempfile.TemporaryDirectory(prefix="dcp_inductor_bench_") as folder:
        path, log = Path(folder, "result.json"), Path(folder, "log")
        doing = f"measuring on {settings.num_ranks} GPUs"
        with console.status(doing):
            status = _run(command(settings, path), log, settings.timeout_s)
        if status != 0 or not path.exists():
            raise BenchFailed(_failure(status, log, settings))
        return Results.read(str(path))


def check_machine(settings: BenchSettings) -> None:
    """Raise BadInput unless this machine has what a measurement needs."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < settings.num_ranks:
        raise BadInput(
            f"A measurement between {settings.num_ranks} ranks was asked for, and this "
            f"process sees {num_gpus} GPUs. The exchange is measured between GPUs, one "
            "for each rank; CPU times would say nothing about it. Run it where there "
            "are as many GPUs, or show a stored result: --from FILE."
        )
    if importlib.util.find_spec("triton") is None:
        raise BadInput(
            "A measurement was asked for, and triton isn't installed; the fused kernel "
            "and the floors are Triton kernels. Install the triton of this torch."
        )


def command(settings: BenchSettings, path: Path) -> list[str]:
    """What starts all ranks; rank 0 writes the result to ``path``."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(settings.num_ranks)),
        *("-m", "dcp_inductor.bench.exchange", "--json", str(path)),
        *("--heads-per-rank", *map(str, settings.heads_per_rank)),
        *("--batches", *map(str, settings.batches)),
    ]


def _run(arguments: list[str], log: Path, timeout_s: float) -> int | None:
    """The exit status; None if time ran out. No rank is left, by Ctrl-C neither."""
    with (
        log.open("wb") as file,
        subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _failure(status: int | None, log: Path, settings: BenchSettings) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    how = (
        f"took more than {settings.timeout_s:g} s; --timeout waits longer"
        if status is None
        else f"left with exit status {status}"
    )
    return (
        f"The {settings.num_ranks} ranks of the benchmark {how}. All were ended. What "
        "they said last:\n\n" + "\n".join(lines)
    )
