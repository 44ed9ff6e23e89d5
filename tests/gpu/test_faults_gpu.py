"""A peer that is killed, skips a call or makes another: an exception in time.

Starts its own two processes on two GPUs; run with plain pytest, not torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

import dcp_inductor
from dcp_inductor.errors import PeerTimeout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
TIMEOUT_S = 3.0


class Layer:
    """Its instances share a function, and a compiled graph."""

    def attend(self, o, lse):
        return dcp_inductor.a2a_lse_reduce(o, lse, lse_mode="base2")


def run(fault: str) -> dict[int, tuple[str, float]]:
    """rank: (what it met, seconds after the fault) for ranks that lived."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(fault, rank, folder, results))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(100)
        exits = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    found = {}
    while not results.empty():
        rank, text, seconds = results.get()
        found[rank] = (text, seconds)
    found[-1] = (str(exits), 0.0)
    return found


def _worker(fault, rank, folder, results):
    os.environ["DCP_INDUCTOR_TIMEOUT_S"] = str(TIMEOUT_S)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    o = torch.randn(4, 8, 64, device="cuda", dtype=torch.bfloat16)
    lse = torch.randn(4, 8, device="cuda")

    def call(batch=4):
        return dcp_inductor.a2a_lse_reduce(o[:batch], lse[:batch], lse_mode="base2")

    def draft(batch=4):
        return dcp_inductor.a2a_lse_reduce(o[:batch], lse[:batch], lse_mode="base2")

    compiled = {function: torch.compile(function) for function in (call, draft)}
    layers = [Layer(), Layer()]
    compiled_layers = [torch.compile(layer.attend) for layer in layers]
    for attend in (*(layer.attend for layer in layers), *compiled_layers):
        attend(o, lse)
    for _ in range(5):
        call()
    for step in compiled.values():
        assert torch.equal(step(), call())
    dcp_inductor.check()
    torch.cuda.synchronize()
    start = time.monotonic()
    if rank == 1 and fault == "killed":
        os._exit(7)
    try:
        if rank == 1 and fault == "narrow":
            call(2)
        elif rank == 1 and fault == "function":
            draft()
        elif fault == "compiled function":
            compiled[draft if rank == 1 else call]()
        elif fault == "layer":
            layers[rank].attend(o, lse)
        elif fault == "compiled layer":
            compiled_layers[rank](o, lse)
        elif rank == 1 and fault == "eager beside compiled":
            compiled[call]()
        elif not (rank == 1 and fault == "skips"):
            call()
        dcp_inductor.check()
        text = "nothing"
    except PeerTimeout as error:
        text = str(error)
    results.put((rank, text, time.monotonic() - start))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.parametrize("fault", ["killed", "skips"])
def test_a_peer_that_never_comes(fault):
    found = run(fault)
    text, seconds = found[0]
    for part in ("Rank 0, group '0', lane 0", "rank 1 sent nothing", "local head"):
        assert part in text
    assert TIMEOUT_S * 0.9 <= seconds < TIMEOUT_S + 5
    assert found[-1][0].startswith("[0")


@pytest.mark.parametrize(
    "fault",
    [
        "narrow",
        "function",
        "compiled function",
        "eager beside compiled",
        "layer",
        "compiled layer",
    ],
)
def test_a_peer_at_another_call(fault):
    """Of one geometry but for the first; the compiled functions share one artifact."""
    found = run(fault)
    assert "another call's data" in found[0][0]
    assert "another call's data" in found[1][0]
    assert found[-1][0] == "[0, 0]"
