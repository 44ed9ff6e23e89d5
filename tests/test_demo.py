"""``dcp-inductor demo`` and ``explain``, run as a user would; and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import dcp_inductor
from dcp_inductor.config import Config
from dcp_inductor.demo import exchange, worker
from dcp_inductor.demo.accuracy import compare
from dcp_inductor.demo.judge import problems
from dcp_inductor.demo.messages import Accuracy, Progress, RankRecord, RunRecord
from dcp_inductor.demo.run import DemoFailed, run_ranks
from dcp_inductor.demo.settings import DemoSettings
from dcp_inductor.report import Finding, GraphReport

ROOT = Path(dcp_inductor.__file__).parents[1]
SMALL = ("--layers", "1", "--steps", "4", "--device", "cpu")
SMALL_SETTINGS = DemoSettings(num_layers=1, num_steps=4, device="cpu")

EXAMPLES = """
import torch
import torch.distributed as dist
from dcp_inductor.demo.exchange import exchange

PARTIALS = (torch.randn(4, 16, 8), torch.randn(4, 16))

def merged():
    return lambda o, lse: exchange(o, lse, dist.get_world_size(), "base2"), PARTIALS

def summed():
    def fn(o, lse):
        received = torch.empty_like(o)
        dist.all_to_all_single(received, o * lse[..., None])
        return received.sum(0)
    return fn, [PARTIALS[0]], {"lse": PARTIALS[1]}

def breaks():
    raise RuntimeError("no weights here")

number = 3
"""


def command(*words: str, **environment: str) -> list[str]:
    """What starts the CLI, with variables of the environment set or taken away."""
    cleaned = [f"-uDCP_INDUCTOR{name}" for name in ("", "_ON_MISS", "_BACKEND")]
    sets = [f"{name}={value}" for name, value in environment.items()]
    path = f"PYTHONPATH={ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    prefix = ["env", *cleaned, path, "COLUMNS=100", *sets]
    return [*prefix, sys.executable, "-m", "dcp_inductor", *words]


def run_cli(*words: str, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Exit status, and both outputs as one text with single spaces."""
    done = subprocess.run(
        command(*words, **environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.demo
@pytest.mark.parametrize(
    ("lse_mode", "dtype", "base"),
    [("basee", "fp32", "base e"), ("base2", "bf16", "base 2")],
)
def test_the_demo_fuses_and_is_right(lse_mode: str, dtype: str, base: str) -> None:
    status, text = run_cli("demo", *SMALL, "--lse-mode", lse_mode, "--dtype", dtype)
    assert status == 0, text
    assert f"all_to_all_single fused {base}" in text
    assert "exchanges fused - 1 of 1" in text
    assert "All right: 1 of 1 exchanges proved and fused on every rank" in text
    assert "CPU times say nothing about GPUs" in text


@pytest.mark.demo
def test_a_pass_that_is_off_fuses_nothing_and_the_demo_says_so() -> None:
    status, text = run_cli("demo", *SMALL, DCP_INDUCTOR="0")
    assert status == 1, text
    assert "0 of 1 exchanges were fused: DCP_INDUCTOR=0 switches the pass off" in text
    assert "tokens all 8 equal all 8 equal" in text


@pytest.mark.demo
def test_one_rank_exchanges_nothing() -> None:
    status, text = run_cli("demo", *SMALL, "--ranks", "1")
    assert status == 0, text
    assert "nothing is exchanged" in text
    assert "none to fuse" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "9"), "--ranks 9 was asked for, and the demo takes 1 to 8"),
        (("--steps", "0"), "--steps 0 was asked for"),
        (("--dtype", "fp8"), "has fp32, bf16, fp16. Pass one of these"),
        (("--lse-mode", "ln"), "has basee, base2. Pass one of these"),
        (("--ranks", "two"), "invalid int value"),
    ],
)
def test_wrong_arguments_are_named(words: tuple[str, ...], says: str) -> None:
    status, text = run_cli("demo", *words)
    assert status == 2
    assert says in text


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, dcp_inductor.cli as cli; cli._parser().format_help();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# What happens to ranks.


def _wrong_base(task: worker.Task, connection: Connection) -> None:
    exchange._EXP["basee"] = torch.exp2
    # Eager is wrong as well, and sooner.
    torch.compile = lambda model, **options: model  # type: ignore[assignment]
    worker.main(task, connection)


def _dies(task: worker.Task, connection: Connection) -> None:
    connection.send(Progress(task.rank, 0, 3, "compiling"))
    if task.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def _hangs(task: worker.Task, connection: Connection) -> None:
    connection.send(Progress(task.rank, 0, 3, "step 1 of 3"))
    threading.Event().wait()


def _fails(task: worker.Task, connection: Connection) -> None:
    def run(self: worker.Worker) -> RankRecord:
        if task.rank == 1:
            raise ValueError("no such weight")
        return threading.Event().wait()  # type: ignore[return-value]

    worker.Worker.run = run  # type: ignore[method-assign]
    worker.main(task, connection)


def run_on_cpu(
    target: Callable[[worker.Task, Connection], None], settings: DemoSettings
) -> list[RankRecord]:
    return run_ranks(settings, Config(), "cpu", lambda message: None, target)


@pytest.mark.demo
def test_a_wrong_merge_is_seen_even_in_bf16() -> None:
    settings = replace(SMALL_SETTINGS, dtype="bf16")
    records = run_on_cpu(_wrong_base, settings)
    found = problems(settings, Config(), records)
    assert [
        problem.split(" is off")[0] for problem in found if " is off" in problem
    ] == [
        "compiled: a logit",
        "compiled with the pass: a logit",
    ]


@pytest.mark.demo
@pytest.mark.parametrize(
    ("target", "timeout_s", "says"),
    [
        (
            _dies,
            60,
            "Rank 1 was ended by SIGKILL while compiling. All ranks were ended",
        ),
        (_fails, 60, "Rank 1 failed: ValueError: no such weight. All ranks were ended"),
        (_hangs, 5, "No rank made a step for 5 s (rank 0: "),
    ],
)
def test_a_rank_that_does_not_end_ends_the_demo(
    target: Callable[[worker.Task, Connection], None], timeout_s: float, says: str
) -> None:
    with pytest.raises(DemoFailed) as failure:
        run_on_cpu(target, replace(SMALL_SETTINGS, timeout_s=timeout_s))
    assert says in str(failure.value)
    assert multiprocessing.active_children() == []


@pytest.mark.demo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_rank_outlives_the_demo(sent: int, status: int, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        command("demo", *SMALL, TMPDIR=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Where a shell runs the tests in its background, they ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    ranks = _wait_until(lambda: _leaders_below(demo.pid), lambda pids: len(pids) == 2)
    demo.send_signal(sent)
    assert demo.wait(60) == status
    _wait_until(lambda: [p for p in ranks if _runs(p)], lambda pids: not pids)


def _leaders_below(pid: int) -> list[int]:
    """The children of ``pid`` that have made themselves leaders of a session."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in map(int, children) if os.getsid(child) == child]


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def _wait_until(
    look: Callable[[], list[int]], good: Callable[[list[int]], bool]
) -> list[int]:
    until = time.monotonic() + 60
    while not good(seen := look()):
        assert time.monotonic() < until, seen
        time.sleep(0.05)
    return seen


# What counts as right.


def _accuracy(chosen: int, logits: list[float]) -> Accuracy:
    """Of one step of one sequence; exact is 0, 1, 2, and one rank is off by 0.01."""
    exact = torch.tensor([[[0.0, 1.0, 2.0]]], dtype=torch.float64)
    return compare(
        torch.tensor([[chosen]]), torch.tensor([[logits]]), exact, exact + 0.01
    )


def test_equal_tokens_are_equal() -> None:
    accuracy = _accuracy(2, [0.0, 1.0, 2.02])
    assert accuracy.num_equal == 1
    assert accuracy.within_rounding


def test_a_token_that_differs_is_a_tie_only_within_rounding() -> None:
    exact = torch.tensor([[[0.0, 1.99, 2.0]]], dtype=torch.float64)
    logits = torch.tensor([[[0.0, 2.0, 1.99]]])
    near = compare(torch.tensor([[1]]), logits, exact, exact + 0.01)
    far = compare(torch.tensor([[1]]), logits, exact, exact + 0.001)
    assert (near.num_differing, near.only_ties, near.within_rounding) == (1, True, True)
    assert (far.only_ties, far.within_rounding) == (False, False)


def test_a_token_chosen_against_the_logits_is_no_tie() -> None:
    accuracy = _accuracy(0, [0.0, 1.0, 2.0])
    assert accuracy.within_rounding
    assert not accuracy.only_ties


def test_nan_is_not_right() -> None:
    assert not _accuracy(2, [0.0, torch.nan, 2.0]).within_rounding


RIGHT = Accuracy(1, 1, 0.0, 1e-6, 1e-6)
FUSED = Finding("all_to_all_single", "0", 2, True, "", "basee", 1e-7, 1e-5)


def _records(
    finding: Finding, accuracy: Accuracy = RIGHT, other_token: int = 5
) -> list[RankRecord]:
    def record(rank: int, token: int) -> RankRecord:
        runs = [
            RunRecord(name, ((token,),), (1.0,), graphs, accuracy)
            for name, graphs in (
                ("plain", ()),
                ("fused", (GraphReport((finding,), 9, 5),)),
            )
        ]
        return RankRecord(rank, "CPU", "gloo", *runs)

    return [record(0, 5), record(1, other_token)]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (_records(FUSED), []),
        (
            _records(replace(FUSED, fused=False, reason="it leaks")),
            ["all_to_all_single stayed unfused: it leaks"],
        ),
        (
            _records(FUSED, other_token=6),
            [
                "plain: rank 1 decoded other tokens than rank 0",
                "fused: rank 1 decoded other tokens than rank 0",
            ],
        ),
        (
            _records(FUSED, replace(RIGHT, num_equal=0, largest_gap=0.5)),
            [
                f"{name}: 1 of 1 tokens differ from those of one rank that holds the "
                "whole cache, by up to 5.0e-01 in the logit; rounding explains 6.0e-06"
                for name in ("plain", "fused")
            ],
        ),
    ],
)
def test_problems_are_named(records: list[RankRecord], says: list[str]) -> None:
    assert problems(SMALL_SETTINGS, Config(), records) == says


def test_an_exchange_that_is_not_found_is_a_problem() -> None:
    settings = replace(SMALL_SETTINGS, num_layers=2)
    (problem,) = problems(settings, Config(), _records(FUSED))
    assert problem == "the pass found 1 exchanges, and the model has 2"


# explain


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "example.py"
    path.write_text(EXAMPLES)
    return path


def test_explain_of_a_file_shows_the_graphs(example: Path) -> None:
    words = ("explain", f"{example}:merged", "--ranks", "4", "--graphs")
    status, text = run_cli(*words)
    assert status == 0, text
    assert "fused all_to_all_single, 4 ranks: base2" in text
    assert "graph 0 before" in text
    assert "torch.ops.dcp_inductor.a2a_lse_reduce" in text.split("graph 0 after")[1]


def test_explain_of_a_module_names_what_is_refused(example: Path) -> None:
    status, text = run_cli("explain", "example:summed", cwd=example.parent)
    assert status == 1, text
    assert "1 exchanges, 0 fused" in text
    assert "refused all_to_all_single" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (":breaks", "RuntimeError: no weights here"),
        (":number", "has no callable 'number'"),
        ("", "explain needs MODULE:CALLABLE"),
    ],
)
def test_explain_says_what_it_can_not_use(example: Path, name: str, says: str) -> None:
    status, text = run_cli("explain", f"{example}{name}")
    assert status == 2
    assert says in text
