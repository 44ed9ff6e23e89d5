"""Several groups, groups made again, fork, spawn, threads.

A group that is made again with the same size is test_workspace.py's.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import packed
from harness import fake_world
from ranks import run_ranks
from torch.distributed import ProcessGroup
from versions import since_2_13

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.compiler import proof
from dcp_inductor.compiler.proof import forget_proofs
from dcp_inductor.errors import BadInput, UnknownGroup
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.op import a2a_lse_reduce
from dcp_inductor.report import GraphReport, Miss
from dcp_inductor.runtime import workspace


def exchange(group: ProcessGroup, head_dim: int = 8, seed: int = 0) -> None:
    """One exchange over ``group``, held against the reference."""
    n, rank = group.size(), group.rank()
    rng = torch.Generator().manual_seed(seed)
    o = torch.randn(n, 3, 4 * n, head_dim, generator=rng)
    lse = torch.randn(n, 3, 4 * n, generator=rng)
    out = a2a_lse_reduce(o[rank], lse[rank], group, lse_mode="base2")
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
    assert torch.equal(out, wanted)


def compiled_exchange(group: ProcessGroup, seed: int = 0) -> None:
    """The same, spelled out and compiled."""
    n, rank = group.size(), group.rank()
    rng = torch.Generator().manual_seed(seed)
    o = torch.randn(n, 3, 4 * n, 8, generator=rng)
    lse = torch.randn(n, 3, 4 * n, generator=rng)
    options = {"post_grad_custom_pre_pass": DcpFusionPass()}
    call = torch.compile(packed, fullgraph=True, options=options)
    out = call(o[rank], lse[rank], n, group.group_name)
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
    torch.testing.assert_close(out, wanted)


# ------------------------------------------------------------- groups


def groups_beside_each_other(rank: int) -> list[tuple[str, int]]:
    """World of 4, two pairs, and pairs across them; two models on each. Then one of the
    pairs is destroyed."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = [dist.group.WORLD, rows[rank // 2], columns[rank % 2]]
    for turn in range(2):
        for seed, group in enumerate(mine):
            for head_dim in (512, 128):
                exchange(group, head_dim, seed + turn)
    compiled_exchange(mine[1])
    compiled_exchange(mine[2])
    by_group = [name for name, _ in workspace.reservations()]
    return [(g.group_name, by_group.count(g.group_name)) for g in mine]


def group_destroyed(rank: int) -> None:
    """A call on a group that is gone says so, and its reservations are gone."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    name = pair.group_name
    exchange(pair)
    dist.destroy_process_group(pair)
    del pair
    o, lse = torch.randn(3, 8, 8), torch.randn(3, 8)
    with pytest.raises(UnknownGroup, match=f"is called '{name}'"):
        torch.ops.dcp_inductor.a2a_lse_reduce(o, lse, name, 2, "base2")
    assert name not in [living for living, _ in workspace.reservations()]


def group_made_again(rank: int, num_ranks: int) -> None:
    """After everything was destroyed, a pair's name comes back with another size."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    for turn, size in enumerate((2, 3)):
        again = dist.PrefixStore(f"turn {turn}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=num_ranks)
        group = dist.new_group([*range(size)])
        if rank < size:
            name = group.group_name
            assert name == "1", "the first group that is made, in both turns"
            exchange(group)
            living = workspace.reservations()
            sizes = [r.geometry.cp_size for found, r in living if found == name]
            assert sizes == [size]
            o, lse = torch.randn(3, 12, 8), torch.randn(3, 12)
            with pytest.raises(
                BadInput, match=rf"for 6 ranks, but group .* has {size}"
            ):
                torch.ops.dcp_inductor.a2a_lse_reduce(o, lse, name, 6, "base2")
        dist.barrier()
        if size == 2:
            dist.destroy_process_group()
            del group


def every_group(rank: int, num_ranks: int) -> list[tuple[str, int]]:
    seen = groups_beside_each_other(rank)
    group_destroyed(rank)
    group_made_again(rank, num_ranks)
    return seen


def test_groups_of_any_life_have_their_own_reservations(tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for seen in run_ranks(every_group, 4, env=env):
        world, row, column = seen
        assert world[1] == 2
        assert (row[1], column[1]) == (3, 3)
        assert len({name for name, _ in seen}) == 3


# ------------------------------------------------------------- processes

_FORKED = """
import os, sys, tempfile
import torch, torch.distributed as dist
import dcp_inductor, dcp_inductor.op
dcp_inductor.install()
assert not torch.cuda.is_initialized()
sys.path.insert(0, {tests!r})
from test_processes import compiled_exchange
folder = tempfile.mkdtemp()
children = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=2
            )
            compiled_exchange(dist.group.WORLD)
            assert len(dcp_inductor.runtime.workspace.reservations()) == 1
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
sys.exit(max(codes))
"""


def test_import_and_install_before_a_fork(tmp_path):
    here = Path(__file__).parent
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", _FORKED.format(tests=str(here))],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def told_apart(given: DcpFusionPass, results: Any) -> None:
    """In a fresh process: what came through the pickle."""
    results.put((given.uuid(), given.config))


def test_pass_and_config_cross_a_spawn():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    given = DcpFusionPass(Config(timeout_s=3.0, backend="collective"))
    process = context.Process(target=told_apart, args=(given, results), daemon=True)
    process.start()
    uuid, config = results.get(timeout=120)
    process.join(30)
    assert (uuid, config) == (given.uuid(), given.config)
    assert pickle.loads(pickle.dumps(given.config)) == given.config


# ------------------------------------------------------------- threads


_MODEL = """
def model{factor}(o, lse):
    return packed(o * {factor}, lse, 2, {group!r}) + {factor}
"""


@since_2_13("it compiles in one thread at a time")
def test_threads_compile_at_the_same_time():
    """Each thread's exchange is proved and fused; no setting of the process is lost."""
    failures: queue.Queue[BaseException] = queue.Queue()
    reports: dict[int, list[GraphReport]] = {number: [] for number in range(4)}
    start = threading.Barrier(len(reports))
    settings = torch.get_num_threads(), torch.get_default_dtype()
    forget_proofs()

    def compile_one(number: int, group: str) -> None:
        names: dict[str, Any] = {"packed": packed}
        exec(_MODEL.format(factor=number + 2, group=group), names)
        options = {
            "post_grad_custom_pre_pass": DcpFusionPass(
                Config(), reports[number].append
            ),
            "fx_graph_cache": False,
        }
        try:
            call = torch.compile(
                names[f"model{number + 2}"], fullgraph=True, options=options
            )
            start.wait(60)
            call(torch.randn(3, 4, 8 + 4 * number), torch.randn(3, 4))
        except BaseException as error:
            failures.put(error)

    with fake_world() as groups:
        threads = [
            threading.Thread(target=compile_one, args=(n, groups["2"].group_name))
            for n in reports
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
    assert failures.empty(), failures.get()
    assert [sum(r.fused for r in seen) for seen in reports.values()] == [1] * 4
    assert (torch.get_num_threads(), torch.get_default_dtype()) == settings


def test_proofs_in_threads_restore_the_processs_settings(monkeypatch):
    """Dynamo compiles in one thread at a time; a caller of the pass may not."""
    inside = []

    def judge(region: Any) -> Miss:
        inside.append(torch.get_num_threads())
        time.sleep(0.02)
        return Miss("not judged")

    monkeypatch.setattr(proof, "_judge", judge)
    monkeypatch.setattr(proof, "fingerprint", lambda region: f"of {region}")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = [
            threading.Thread(target=proof.prove, args=(number,)) for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert inside == [1] * 8
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        forget_proofs()
