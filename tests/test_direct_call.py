"""What Inductor's generated code calls in place of the op (lowering.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

import dcp_inductor
from dcp_inductor import DcpFusionPass

OPS = torch.ops.dcp_inductor
LANE = "a2a_lse_reduce_lane"


@pytest.fixture(autouse=True)
def _fresh(process_group_of_one):
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def process_group_of_one(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def one(o, lse):
    return OPS.a2a_lse_reduce(o, lse, "0", 1, "base2")


def with_lse(o, lse):
    return OPS.a2a_lse_reduce_with_lse(o, lse, "0", 1, "base2")


def in_a_branch(o, lse):
    def other(o, lse):
        return OPS.a2a_lse_reduce(o, lse, "0", 1, "basee")

    return torch.cond(lse.sum() > 0, one, other, (o, lse))


def run(fn, **options):
    """The result of ``fn`` compiled, what it should be, and the code."""
    dcp_inductor.install()
    o, lse = torch.randn(3, 2, 8), torch.rand(3, 2)
    try:
        compiled = torch.compile(
            fn, options={"post_grad_custom_pre_pass": DcpFusionPass(), **options}
        )
        got, codes = run_and_get_code(compiled, o, lse)
    finally:
        dcp_inductor.uninstall()
    return got, fn(o, lse), "\n".join(codes)


@pytest.mark.parametrize(
    ("fn", "function", "calls"),
    [
        (one, "dcp_inductor.op.reduce(", 1),
        (with_lse, "dcp_inductor.op.list_with_lse(", 1),
        (in_a_branch, "dcp_inductor.op.reduce(", 2),
    ],
)
def test_generated_python_calls_the_function_itself(fn, function, calls):
    got, wanted, code = run(fn)
    torch.testing.assert_close(got, wanted)
    assert code.count(function) == calls
    assert "import dcp_inductor.op" in code
    assert LANE not in code


def test_a_cpp_wrapper_calls_the_op():
    got, wanted, code = run(one, cpp_wrapper=True)
    torch.testing.assert_close(got, wanted)
    assert LANE in code
    assert "dcp_inductor.op.reduce(" not in code


_WITHOUT_THE_PASS = """
import sys
import torch
import torch.distributed as dist
import dcp_inductor

call = dcp_inductor.a2a_lse_reduce
imported = "torch._inductor.lowering" in sys.modules
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
from torch._inductor.utils import run_and_get_code

def step(o, lse):
    return call(o, lse, lse_mode="base2")

compiled = torch.compile(step, fullgraph=True)
with torch._inductor.config.patch(force_disable_caches=True):
    _, codes = run_and_get_code(compiled, torch.ones(2, 4, 8), torch.zeros(2, 4))
print(imported, codes[0].count("dcp_inductor.op.reduce("))
"""


def test_the_public_op_is_lowered_where_the_pass_is_not_installed():
    """And loading it imports no Inductor. In a process of its own: others install."""
    command = [sys.executable, "-c", _WITHOUT_THE_PASS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False 1\n", done.stderr
