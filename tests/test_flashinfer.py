"""The flashinfer backend without a GPU: what an installed op is taken for, blockers,
and the op's contract on gloo ranks.

The real packages are test_flashinfer_real.py's.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from dataclasses import replace
from pathlib import Path

import flashinfer_package as stand_in
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dcp_inductor import Config
from dcp_inductor.doctor.checkup import Need
from dcp_inductor.doctor.examine import examine
from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime.backends import flashinfer, flashinfer_op
from dcp_inductor.runtime.backends.flashinfer import FlashInfer
from dcp_inductor.runtime.backends.flashinfer_op import InstalledOp, op_in
from dcp_inductor.runtime.call import ExchangeCall, Geometry

GEOMETRY = Geometry(2, 8, 32, 64, torch.bfloat16)
CUDA = torch.device("cuda", 0)
OP = InstalledOp("flashinfer.comm.dcp_lse_reduce", False, True, True, (), "hash")


# --- what an installed op is taken for


def test_a_released_op_and_a_coming_one(tmp_path):
    released = op_in(stand_in.write(tmp_path / "released"))
    assert (released.sets_backend, released.needs_devcomm, released.needs_packed) == (
        True,
        True,
        True,
    )
    coming = op_in(stand_in.write_coming(tmp_path / "coming"))
    assert (coming.sets_backend, coming.needs_devcomm, coming.needs_packed) == (
        False,
        False,
        False,
    )
    assert released.sources != coming.sources
    assert released.missing_headers == coming.missing_headers == ()


@pytest.mark.parametrize(
    ("switch", "sets_backend"),
    [
        ("symm_mem.set_backend('NCCL')", True),
        ("from torch import set_backend; set_backend('NCCL')", True),
        ("backend = symm_mem.get_backend('cuda')", False),
        ("'symm_mem.set_backend()'", False),
    ],
)
def test_the_switch_is_a_call(tmp_path, switch, sets_backend):
    assert op_in(stand_in.write(tmp_path, switch=switch)).sets_backend is sets_backend


def test_an_op_without_its_source_is_taken_for_the_strictest(tmp_path):
    op = op_in(stand_in.write(tmp_path, switch="pass", source=None))
    assert (op.needs_devcomm, op.needs_packed) == (True, True)


def test_views_and_device_communicators_are_told_apart(tmp_path):
    source = "#ifdef NCCL_HAS_DEVCOMM\n"
    op = op_in(stand_in.write(tmp_path, source=source))
    assert (op.needs_devcomm, op.needs_packed) == (True, False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"last": "is_lse_base_on_e=False, enable_pdl=None"}, "is_lse_base_on_e"),
        ({"last": "lse_mode='base2', *, out"}, "lse_mode, out)"),
        ({"last": "lse_mode='base2', **more"}, "lse_mode, more)"),
        ({"module": "def decode_cp_a2a_lse_reduce(): pass"}, "takes ()"),
        (
            {"module": stand_in.MODULE.replace("_create_workspace", "_make")},
            "has no decode_cp_a2a_lse_reduce_create_workspace",
        ),
        ({"module": "x = 1"}, "has no flashinfer.comm.decode_cp_a2a_lse_reduce"),
    ],
)
def test_an_op_of_another_signature_is_refused(tmp_path, change, why):
    reason = op_in(stand_in.write(tmp_path, **change))
    assert isinstance(reason, str)
    assert why in reason


def test_an_op_that_cant_be_read(tmp_path):
    package = stand_in.write(tmp_path, last="lse_mode=")
    assert "can't be read" in op_in(package)


def test_a_module_that_stands_in_for_flashinfer(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    assert flashinfer_op.installed_op() == "FlashInfer isn't installed"


def test_no_flashinfer(monkeypatch):
    monkeypatch.setattr(flashinfer_op.importlib.util, "find_spec", lambda name: None)
    assert flashinfer_op.installed_op() == "FlashInfer isn't installed"


@pytest.fixture
def not_imported():
    """No module of FlashInfer is imported; afterwards those that were."""

    def take_out():
        names = [name for name in sys.modules if name.split(".")[0] == "flashinfer"]
        return {name: sys.modules.pop(name) for name in names}

    before = take_out()
    yield
    take_out()
    sys.modules.update(before)


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize("error", ["ImportError('no cuda')", "OSError('no libmpi')"])
def test_a_flashinfer_that_cant_be_imported_has_no_size(tmp_path, monkeypatch, error):
    package = stand_in.write(tmp_path, module=f"{stand_in.MODULE}\nraise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(op_in(package), InstalledOp)
    with pytest.raises(BackendUnavailable, match=r"can't be imported here: .*no "):
        FlashInfer().slot_bytes(GEOMETRY)
    rows = {row.name: row for row in examine(Need(2), Config()).backends}
    assert rows["flashinfer"].total_bytes is None


# --- blockers: docs/backends.md has them in this order


@pytest.fixture
def machine(monkeypatch):
    """A machine on which nothing blocks; ``change`` makes something do."""
    found = {
        "op": OP,
        "capability": (9, 0),
        "nccl": (2, 30, 7),
        "devcomm": True,
        "group": "nccl",
    }
    monkeypatch.setattr(flashinfer, "installed_op", lambda: found["op"])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: found["capability"]
    )
    monkeypatch.setattr(
        torch.cuda.nccl, "version", lambda: found["nccl"], raising=False
    )
    monkeypatch.setattr(flashinfer, "torch_gives_devcomm", lambda: found["devcomm"])
    return found


def group_of(name):
    backend = types.SimpleNamespace(name=lambda: name)
    return types.SimpleNamespace(_get_backend=lambda device: backend)


BLOCKERS = [
    ("device", torch.device("cpu"), "on cpu"),
    ("op", "FlashInfer isn't installed", "isn't installed"),
    ("capability", (8, 9), "compute capability 8.9"),
    ("capability", (13, 0), "compute capability 13.0"),
    ("op", replace(OP, missing_headers=("torch/x.hpp",)), "has no torch/x.hpp"),
    ("nccl", (2, 28, 9), "NCCL 2.28.9; device communicators need 2.29"),
    ("devcomm", False, "its headers don't define NCCL_HAS_DEVCOMM"),
    ("group", "gloo", "the group communicates by gloo"),
]


@pytest.mark.parametrize(("what", "value", "why"), BLOCKERS)
def test_each_blocker_of_a_rank(machine, what, value, why):
    def unavailable():
        device = machine.get("device", CUDA)
        return FlashInfer().unavailable(group_of(machine["group"]), device)

    assert unavailable() is None
    machine[what] = value
    assert why in unavailable()


@pytest.mark.parametrize(
    ("what", "value"), [("nccl", (2, 26, 0)), ("devcomm", False), ("group", "gloo")]
)
def test_an_op_without_device_communicators_needs_none(machine, what, value):
    machine["op"] = replace(OP, needs_devcomm=False)
    machine[what] = value
    assert FlashInfer().unavailable(group_of(machine["group"]), CUDA) is None


@pytest.mark.parametrize(
    ("text", "gives"),
    [("#define NCCL_HAS_DEVCOMM", True), ("#define NCCL_HAS_SYMMEM", False), (None, 0)],
)
def test_torchs_headers_say_whether_it_gives_them(tmp_path, text, gives):
    header = tmp_path / flashinfer_op._DEVCOMM_HEADER
    if text is not None:
        header.parent.mkdir(parents=True)
        header.write_text(text)
    assert flashinfer_op.torch_gives_devcomm(tmp_path) == gives


def test_without_a_group_its_backend_is_no_blocker(machine):
    assert FlashInfer().unavailable(None, CUDA) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float32}, "takes fp16 and bf16"),
        ({"dtype": torch.float8_e4m3fn}, "takes fp16 and bf16"),
        ({"cp_size": 65, "num_heads": 65}, "65 ranks; FlashInfer serves 2 to 64"),
        ({"cp_size": 1}, "1 ranks"),
        ({"head_dim": 60}, "120 bytes; FlashInfer needs a multiple of 16"),
        ({"lanes": 2}, "2 lanes of 128 rows"),
    ],
)
def test_each_blocker_of_a_geometry(change, why):
    assert FlashInfer().declines(GEOMETRY) is None
    assert why in FlashInfer().declines(replace(GEOMETRY, **change))


@pytest.mark.parametrize(
    ("lanes", "max_tokens", "taken"),
    [(1, 4096, True), (2, 1, True), (2, 2, False), (4, 1, False)],
)
def test_lanes_beside_each_other_fit_on_a_card(lanes, max_tokens, taken):
    """16 heads a rank and two ranks: 32 blocks a token and lane, 64 at most."""
    geometry = replace(GEOMETRY, lanes=lanes, max_tokens=max_tokens)
    assert (FlashInfer().declines(geometry) is None) is taken


def test_wide_rows_take_more_blocks():
    geometry = Geometry(2, 1, 32, 1920, torch.bfloat16, lanes=2)
    assert FlashInfer().declines(geometry) is None
    assert FlashInfer().declines(replace(geometry, head_dim=1928)) is not None


def test_an_op_that_switches_is_taken_only_when_asked_for(machine):
    assert FlashInfer().only_if_asked() is None
    machine["op"] = replace(OP, sets_backend=True)
    assert "breaks custom all-reduce" in FlashInfer().only_if_asked()
    machine["op"] = "FlashInfer isn't installed"
    assert FlashInfer().only_if_asked() is None


# --- on gloo ranks, with a stand-in for the op. Ranks take seconds to start, so each of
# --- the two groups runs all of its cases, and every test looks at its own.


@contextlib.contextmanager
def connecting(folder, rank, case, geometry=GEOMETRY, memory=None, write=None, **op):
    """Yields what connects a reservation on this rank: (buffers, op, memory)."""
    first = Path(folder, case, str(rank))
    (write or stand_in.write)(first)
    stand_in.first_on_path(first)
    memory = memory or stand_in.SymmetricMemory()
    memory.stand_in()
    made = stand_in.Op(memory, **op)

    def connect():
        buffers = FlashInfer().allocate(dist.group.WORLD, geometry, torch.device("cpu"))
        buffers.connect()
        return buffers, made, memory

    try:
        yield connect
    finally:
        made.close()


COMING = {"write": stand_in.write_coming, "packed": False, "needs_nccl": False}
# The op, and whether the backend has to clear empty rows for it.
EXACT = {
    "released": ({}, True),
    "coming": (COMING, True),
    "coming, clears itself": ({**COMING, "selects": True}, False),
}
# The op, whether symmetric memory is in use, what is said, and whose memory is left.
BROKEN = {
    "no device communicators": (
        {"error": "requires NCCL >= 2.29"},
        False,
        "doesn't run here: requires NCCL >= 2.29",
        "NCCL",
    ),
    "wrong numbers": ({"scale": 1.1}, False, "from merge.py on this machine", "NCCL"),
    "no numbers": ({"scale": float("nan")}, False, "off by inf", "NCCL"),
    "memory in use": ({}, True, "is CUDA and in use", "CUDA"),
    "another schema": (
        {"schema": flashinfer_op.SCHEMA.replace("int cp_rank, ", "")},
        False,
        "this backend calls",
        "CUDA",
    ),
    "hidden switch": (
        {
            "write": lambda folder: stand_in.write(
                folder,
                switch="getattr(symm_mem, 'set_' + 'backend')('NCCL')",
                source=stand_in.COMING_SOURCE,
            )
        },
        False,
        "which its source didn't show",
        "NCCL",
    ),
}


def partials(n, num_tokens, geometry, seed):
    """Of all ranks, with empty shards that hold NaN."""
    rng = torch.Generator().manual_seed(seed)
    shape = (n, num_tokens, geometry.num_heads)
    o = torch.randn(*shape, geometry.head_dim, generator=rng).to(geometry.dtype)
    lse = torch.randn(shape, generator=rng) * 5
    for rank, empty in zip(range(n), (-torch.inf, torch.inf, torch.nan), strict=False):
        lse[rank, :, rank::5] = empty
        o[rank, :, rank::5] = torch.nan
    return o, lse


def exact(rank, n, folder):
    """The cases of EXACT: whether each had its rows cleared; fails on wrong numbers."""
    return {case: exact_case(rank, n, folder, case) for case in EXACT}


def exact_case(rank, n, folder, case):
    geometry = replace(GEOMETRY, cp_size=n, num_heads=n * 8, capture_domains=2)
    with connecting(folder, rank, case, geometry, **EXACT[case][0]) as connect:
        buffers, op, _ = connect()
        for num_tokens, mode, slot in itertools.product(
            (1, 3, 8), ("base2", "basee"), range(geometry.num_slots)
        ):
            o, lse = partials(n, num_tokens, geometry, num_tokens + slot)
            call = ExchangeCall(o[rank], lse[rank], dist.group.WORLD, "0", mode, False)
            out, _ = buffers.run(call, slot)
            wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode=mode)
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
            assert op.calls[-1][0] == slot
        assert not buffers.spoilt(0)
        return buffers.clears_empty


@pytest.fixture(scope="module")
def exact_ranks(tmp_path_factory):
    return run_ranks(exact, 3, str(tmp_path_factory.mktemp("exact")))


@pytest.mark.parametrize("case", EXACT)
def test_every_slot_width_and_base(exact_ranks, case):
    assert [found[case] for found in exact_ranks] == [EXACT[case][1]] * 3


def others(rank, n, folder):
    """The cases of BROKEN: what was said and whose memory it left; and the slots."""
    found = {}
    for case, (op, in_use, _, _) in BROKEN.items():
        memory = stand_in.SymmetricMemory(in_use=in_use)
        with connecting(folder, rank, case, memory=memory, **op) as connect:
            with pytest.raises(BackendUnavailable) as caught:
                connect()
            found[case] = str(caught.value), memory.backend
    found["slots"] = slots(rank, n, folder)
    return found


def slots(rank, n, folder):
    """Memory, warm-up, views and merged LSE of one reservation."""
    options = {**COMING, "selects": True}
    with connecting(folder, rank, "slots", **options) as connect:
        buffers, op, memory = connect()
        found = {
            "workspaces": len(memory.made),
            "nbytes": buffers.nbytes,
            "of one": FlashInfer().slot_bytes(GEOMETRY),
            "memory": memory.backend,
            "warmed": [slot for slot, _ in op.calls],
        }
        o, lse = partials(n, 8, GEOMETRY, 1)
        reference = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")

        def run(o, with_lse=False):
            group = dist.group.WORLD
            call = ExchangeCall(o, lse[rank], group, "0", "base2", with_lse)
            results = buffers.run(call, 0)
            for got, wanted in zip(results, reference, strict=True):
                if got.numel():
                    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
            return op.calls[-1], len(op.calls)

        odd = torch.empty(8, 32, 65, dtype=o.dtype)[:, :, :64].copy_(o[rank])
        found["views"] = run(o[rank])[0]
        found["odd views"], before = run(odd)
        found["calls with LSE"] = run(o[rank], with_lse=True)[1] - before
        return found


@pytest.fixture(scope="module")
def other_ranks(tmp_path_factory):
    return run_ranks(others, 2, str(tmp_path_factory.mktemp("others")))


@pytest.mark.parametrize("case", BROKEN)
def test_an_op_that_doesnt_work_says_so_at_reserve(other_ranks, case):
    for found in other_ranks:
        text, memory = found[case]
        assert BROKEN[case][2] in text
        assert memory == BROKEN[case][3]


def test_a_workspace_a_slot_and_each_is_warmed(other_ranks):
    for found in (rank["slots"] for rank in other_ranks):
        assert found["workspaces"] == GEOMETRY.num_slots == 2
        assert found["nbytes"] == 2 * found["of one"]
        assert found["memory"] == "CUDA"
        # Whether it clears rows; two bases, one width since 16 heads are 16 rows.
        assert found["warmed"] == [0, 0, 0, 1]


def test_views_go_in_unpacked_where_they_can(other_ranks):
    for found in (rank["slots"] for rank in other_ranks):
        assert found["views"] == (0, False)
        assert found["odd views"] == (0, True)


def test_a_merged_lse_is_the_collective_backends(other_ranks):
    assert [rank["slots"]["calls with LSE"] for rank in other_ranks] == [0, 0]


def test_the_switch_is_said(caplog, monkeypatch):
    memory = stand_in.SymmetricMemory()
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: memory.backend)
    monkeypatch.setattr(_symmetric_memory, "set_backend", memory.set_backend)
    flashinfer._switch(CUDA)
    assert "from CUDA to NCCL" in caplog.text
    assert memory.backend == "NCCL"
    caplog.clear()
    flashinfer._switch(CUDA)
    assert not caplog.text
