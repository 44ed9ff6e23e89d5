"""dcp-inductor doctor: as a user runs it, on machines that lack things; its parts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch

import dcp_inductor
from dcp_inductor import Config
from dcp_inductor.cli import main
from dcp_inductor.doctor import machine, software
from dcp_inductor.doctor.advice import advice
from dcp_inductor.doctor.checkup import (
    BackendState,
    Card,
    Checkup,
    Hook,
    Host,
    Link,
    Need,
)
from dcp_inductor.doctor.command import DTYPES
from dcp_inductor.doctor.examine import examine
from dcp_inductor.runtime import workspace
from dcp_inductor.runtime.backends import BACKENDS
from dcp_inductor.runtime.backends.collective import Collective
from dcp_inductor.runtime.backends.symm_mem import SymmMem
from dcp_inductor.runtime.call import Geometry
from dcp_inductor.runtime.kernels import SlotGeometry

# Lets nothing of these be found, as on a machine that doesn't have them.
WITHOUT = """
import importlib.metadata as metadata, importlib.util as util, sys
names = {names!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
find, version = util.find_spec, metadata.version
def found(name, *a):
    return None if name.split(".")[0] in names else find(name, *a)
util.find_spec = found
def installed(name):
    if name.split("-")[0] in names:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = installed
from dcp_inductor.cli import main
sys.exit(main({argv!r}))
"""


def doctor(*argv, without=()):
    """(status, stdout, stderr) of the command in a fresh process."""
    argv = ["doctor", *argv]
    code = WITHOUT.format(names=tuple(without), argv=argv)
    command = ["-c", code] if without else ["-m", "dcp_inductor", *argv]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_as_a_user_runs_it_without_a_gpu():
    status, out, err = doctor()
    assert status == 2, err
    assert "Exchanges would run on collective." in out
    assert str(torch.__version__).split("+")[0] in out
    assert "symm_mem: no, no GPU is seen" in out
    assert "sees no GPU" in " ".join(out.split())


@no_gpu
def test_json_without_triton_and_the_extras():
    missing = ("triton", "flashinfer", "sglang", "matplotlib")
    status, out, err = doctor("--json", "--ranks", "4", without=missing)
    assert status == 2, err
    found = json.loads(out)
    assert found["versions"]["triton"] is None
    assert found["versions"]["torch"] == str(torch.__version__)
    assert [host["version"] for host in found["hosts"]] == [None, None]
    assert found["cards"] == found["links"] == []
    assert not found["fused"]
    rows = {row["name"]: row for row in found["backends"]}
    assert [*rows] == [backend.name for backend in BACKENDS]
    assert rows["collective"]["taken"]
    assert rows["flashinfer"]["slot_bytes"] is None
    assert found["next"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--ranks", "1"], "--ranks 1 was asked for; an exchange has at least 2"),
        (["--heads", "0"], "--heads 0 was asked for; an exchange has at least 1"),
        (["--max-tokens", "-4"], "--max-tokens -4"),
        (["--head-dim", "0"], "--head-dim 0"),
        (["--dtype", "int8"], "--dtype int8 was asked for"),
        (["--heads", "10", "--ranks", "4"], "Pass --heads 12"),
    ],
)
def test_bad_input(argv, why, capsys):
    assert main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert why in err
    assert not out


def test_an_option_that_is_no_number(capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--heads", "many"])
    assert left.value.code == 2
    assert "--heads" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_workspaces_are_what_the_backends_say(dtype):
    need = Need(4, 100, 64, 192, dtype)
    found = {row.name: row for row in examine(need, Config()).backends}
    slot = SlotGeometry(4, 100 * 16, 192, getattr(torch, dtype))
    row = found["symm_mem"]
    assert 256 <= row.slot_bytes - slot.total_bytes - 4 * slot.rows < 512
    assert row.num_slots == 2
    assert row.total_bytes == 2 * row.slot_bytes
    assert found["collective"].total_bytes == 0


def test_a_geometry_that_is_declined_has_no_size():
    found = {row.name: row for row in examine(Need(2, head_dim=3)).backends}
    assert found["symm_mem"].slot_bytes is None
    assert "no positive multiple of 4" in found["symm_mem"].why_not


# --- with cards that aren't there


@pytest.fixture
def cards(monkeypatch):
    """Two H200s with NVLinks; the list may be changed."""
    found = [
        types.SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, uuid=index
        )
        for index in range(2)
    ]
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(
        cuda,
        "get_device_properties",
        lambda device: found[getattr(device, "index", device)],
    )
    monkeypatch.setattr(
        cuda,
        "get_device_capability",
        lambda device: (found[getattr(device, "index", device)].major, 0),
    )
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(machine, "_nvlinks", lambda: [[0, 18], [18, 0]])
    monkeypatch.setattr(machine, "_multicast", lambda index: True)
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "CUDA")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: True if name == "triton" else find(name, *a),
    )
    return found


def words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_two_cards_that_can(cards, capsys):
    assert main(["doctor"]) == 0
    text = words(capsys)
    assert "Exchanges would run on symm_mem." in text
    assert "0, 1: NVIDIA H200, capability 9.0, 141 GiB, multicast" in text
    assert "peer access, 18 NVLinks: 0-1" in text
    assert "dcp_inductor.reserve(group, max_tokens=64, num_heads=128" in text
    assert "sees no GPU" not in text


def test_no_peer_access(cards, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    assert main(["doctor"]) == 2
    text = words(capsys)
    assert "symm_mem: no, the cards of ranks 0 and 1 have no peer access" in text
    assert "no peer access, 18 NVLinks: 0-1" in text


def test_more_ranks_than_cards(cards, capsys):
    assert main(["doctor", "--ranks", "8"]) == 2
    text = words(capsys)
    assert "8 ranks need a GPU each, and this process sees 2" in text
    assert "Pass --ranks 2, or make more visible" in text


def test_one_card(cards, capsys):
    cards.pop()
    assert main(["doctor"]) == 2
    assert "One GPU is seen; an exchange needs two" in words(capsys)


def test_symmetric_memory_of_another_kind(cards, capsys, monkeypatch):
    from torch.distributed import _symmetric_memory

    monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "NCCL")
    assert main(["doctor"]) == 2
    assert "symmetric memory is set to NCCL in this process" in words(capsys)


@pytest.mark.parametrize(
    ("variables", "status", "says"),
    [
        ({"DCP_INDUCTOR_BACKEND": "collective"}, 2, "Unset it to let a fused backend"),
        ({"DCP_INDUCTOR_BACKEND": "symm_mem"}, 0, "would run on symm_mem."),
        ({"DCP_INDUCTOR_BACKEND": "flashinfer"}, 2, "the first exchange would raise"),
        ({"DCP_INDUCTOR": "0"}, 0, "switches everything off. Unset it."),
    ],
)
def test_what_the_environment_asks_for(
    cards, capsys, monkeypatch, variables, status, says
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "dcp_inductor.runtime.backends.flashinfer.installed_op", lambda: "not here"
    )
    assert main(["doctor"]) == status
    assert says in words(capsys)


class Driver:
    """libcuda's three functions that are called. fails: the one that does."""

    def __init__(self, attributes, fails=""):
        self.attributes, self.fails = attributes, fails

    def cuInit(self, flags):
        return 3 if self.fails == "cuInit" else 0

    def cuDeviceGet(self, card, index):
        card._obj.value = 70 + index
        return 101 if self.fails == "cuDeviceGet" else 0

    def cuDeviceGetAttribute(self, answer, attribute, card):
        answer._obj.value = self.attributes.get((card.value, attribute), 0)
        return 1 if self.fails == "cuDeviceGetAttribute" else 0


def test_multicast_is_the_drivers_word(monkeypatch):
    attributes = {(71, 132): 1, (70, 131): 1}
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Driver(attributes))
    assert [machine._multicast(index) for index in range(2)] == [False, True]


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_that_doesnt_answer(monkeypatch, fails):
    driver = Driver({(70, 132): 1}, fails)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver)
    assert machine._multicast(0) is None


def test_looking_leaves_the_symmetric_memory_backend_free():
    """torch lets it be changed until its first use, and some looks at it are one."""
    code = """
from torch._C._distributed_c10d import _SymmetricMemory as memory
from dcp_inductor.doctor import machine
machine.cards(), machine.links(), machine.symmetric_memory(), machine._multicast(0)
memory.set_backend("NCCL")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    if "does not find allocation backend" in done.stderr:
        pytest.skip("this build of torch has no NCCL symmetric memory")
    assert done.returncode == 0, done.stderr


# --- this process


def test_passes_on_the_hooks_are_named():
    from torch._inductor import config

    with config.patch(post_grad_custom_pre_pass=print):
        dcp_inductor.install()
        try:
            found = {hook.name: hook.passes for hook in software.hooks()}
            (sentence,) = [s for s in examine().next if "post_grad" in s]
        finally:
            dcp_inductor.uninstall()
    ours = "dcp_inductor.compiler.fusion_pass.DcpFusionPass"
    assert found["post_grad_custom_pre_pass"] == ["builtins.print", ours]
    assert found["post_grad_custom_post_pass"] == []
    assert sentence.startswith("builtins.print is on post_grad_custom_pre_pass too")


def test_reservations_of_this_process_and_their_bytes(monkeypatch, capsys):
    geometry = Geometry(2, 16, 32, 64, torch.bfloat16, lanes=3)
    buffers = types.SimpleNamespace(nbytes=5 << 20)
    device = torch.device("cuda", 0)
    reservations = [
        ("dcp", workspace.Reservation("dcp", 0, geometry, SymmMem(), device, buffers)),
        ("0", workspace.Reservation("0", 0, geometry, Collective(), device, None)),
    ]
    monkeypatch.setattr(
        "dcp_inductor.doctor.backends.reservations", lambda: reservations
    )
    first, second = examine().reserved
    assert (first.group, first.backend, first.total_bytes) == (
        "dcp",
        "symm_mem",
        5 << 20,
    )
    assert (first.lanes, first.slots, first.dtype) == (3, 6, "bfloat16")
    assert (second.backend, second.slots, second.total_bytes) == ("collective", 0, 0)
    main(["doctor"])
    assert "16 tokens, 32 heads of 64, bfloat16, 3 lane(s), 6 slots, 5.0 MiB" in words(
        capsys
    )


def test_caches_are_on_or_off():
    from torch._inductor import config

    with config.patch(force_disable_caches=False, fx_graph_cache=False):
        assert software.caches()["FX graphs"] == "off"
    with config.patch(force_disable_caches=False, fx_graph_cache=True):
        assert software.caches()["FX graphs"] == "on"
    with config.patch(force_disable_caches=True):
        assert software.caches()["FX graphs"] == "off (all are disabled)"


# --- advice: each row, and a machine for which it doesn't hold

READY = Checkup(
    need=Need(2),
    versions={"triton": "3"},
    cards=[Card(i, "H200", "9.0", 1 << 17, True) for i in range(2)],
    links=[Link((0, 1), True, 18)],
    symmetric_memory="torch's CUDA",
    backends=[
        BackendState("symm_mem", True, None, True, 1, 2, 2),
        BackendState("collective", False, None, False, 0, 0, 0),
    ],
    hooks=[Hook("post_grad_custom_pre_pass", [])],
    caches={},
    hosts=[Host("sglang", None, "")],
    reserved=[],
    enabled=True,
    asked_backend="auto",
)
NOTHING = [replace(row, taken=False) for row in READY.backends]
SGLANG = [Host("sglang", "0.5.23", "this package is registered as its plugin")]
UNREGISTERED = [Host("sglang", "0.5.23", "this package isn't registered as its plugin")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"enabled": False}, "DCP_INDUCTOR=0 switches"),
        ({"cards": []}, "sees no GPU"),
        ({"versions": {"triton": None}}, "Install triton"),
        ({"need": Need(4)}, "Pass --ranks 2"),
        ({"cards": READY.cards[:1]}, "One GPU is seen"),
        ({"backends": NOTHING, "asked_backend": "flashinfer"}, "would raise"),
        ({"asked_backend": "collective"}, "BACKEND=collective is set"),
        (
            {
                "hooks": [
                    Hook("post_grad_custom_pre_pass", ["x.Other", "DcpFusionPass"])
                ]
            },
            "x.Other is on post_grad_custom_pre_pass too",
        ),
        ({"hosts": UNREGISTERED}, "its entry point isn't registered"),
        ({"hosts": SGLANG}, "serve with --enable-torch-compile"),
    ],
)
def test_advice(change, says):
    ready = advice(READY)
    assert not any(says in sentence for sentence in ready)
    assert any("reserve(group, max_tokens=64" in sentence for sentence in ready)
    assert any(says in sentence for sentence in advice(replace(READY, **change)))


@pytest.mark.parametrize("change", [{"enabled": False}, {"backends": NOTHING}])
def test_no_call_to_make_where_nothing_would_fuse(change):
    sentences = advice(replace(READY, **change))
    assert not any("reserve(" in sentence for sentence in sentences)
    assert sentences
