"""The pass in torch.compile: hook, cache key, caches, counter, logs, explain."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import layers, packed, two_exchanges
from ranks import run_ranks
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode

import dcp_inductor
from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.compiler import fusion_pass as fusion_pass_module
from dcp_inductor.compiler.proof import forget_proofs
from dcp_inductor.errors import BadInput, FusionMissed
from dcp_inductor.integrations.inductor import PassChain, installed_passes
from dcp_inductor.merge import a2a_lse_reduce_reference
from dcp_inductor.runtime.groups import alias_group, forget_alias

COUNTER = fusion_pass_module.COUNTER


@pytest.fixture
def fake_group():
    """A group of two ranks that sends nothing, for compiling alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # A graph that an earlier run has left in the cache would not ask the pass.
    with inductor_config.patch(fx_graph_cache=False):
        yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture
def clean_hook():
    before = inductor_config.post_grad_custom_pre_pass
    yield
    inductor_config.post_grad_custom_pre_pass = before
    torch._dynamo.reset()


class Other(CustomGraphPass):
    """Somebody else's pass: counts its graphs."""

    graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "other"


def inputs(b: int = 3, h: int = 4, d: int = 8, dtype=torch.float32):
    rng = torch.Generator().manual_seed(b)
    return torch.randn(b, h, d, generator=rng).to(dtype), torch.randn(
        b, h, generator=rng
    )


def compile_with(graph_pass, fn=packed, *args, **options):
    options = {"post_grad_custom_pre_pass": graph_pass, **options}
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, options=options)


@pytest.mark.parametrize("there", [None, Other(), [Other()], (Other(), Other())])
def test_install_keeps_what_is_there(clean_hook, there):
    inductor_config.post_grad_custom_pre_pass = there
    others = installed_passes()
    dcp_inductor.install()
    dcp_inductor.install()
    *kept, ours = installed_passes()
    assert kept == others
    assert isinstance(ours, DcpFusionPass)
    dcp_inductor.uninstall()
    assert installed_passes() == others
    dcp_inductor.uninstall()
    assert installed_passes() == others


def test_installed_pass_runs_beside_another(clean_hook, fake_group):
    other = Other()
    inductor_config.post_grad_custom_pre_pass = other
    dcp_inductor.install()
    before = counters["inductor"][COUNTER]
    torch._dynamo.reset()
    torch.compile(packed)(*inputs(), 2)
    assert other.graphs == 1
    assert counters["inductor"][COUNTER] == before + 1


def test_chain_for_a_hook_of_one_pass():
    first, second = Other(), Other()
    chain = PassChain(first, second)
    chain(torch.fx.Graph())
    assert (first.graphs, second.graphs) == (1, 1)
    assert chain.uuid() == ("other", "other")
    assert PassChain(first, lambda graph: None).uuid() is None


def test_switched_off_touches_nothing(clean_hook, monkeypatch):
    monkeypatch.setenv("DCP_INDUCTOR", "0")
    inductor_config.post_grad_custom_pre_pass = None
    assert dcp_inductor.install() is None
    assert inductor_config.post_grad_custom_pre_pass is None


def test_config_reads_the_environment_and_refuses_nonsense(monkeypatch):
    monkeypatch.setenv("DCP_INDUCTOR_BACKEND", "Collective")
    monkeypatch.setenv("DCP_INDUCTOR_TIMEOUT_S", "2.5")
    monkeypatch.setenv("DCP_INDUCTOR_ON_MISS", "raise")
    monkeypatch.setenv("DCP_INDUCTOR_AG_RS", "1")
    monkeypatch.setenv("DCP_INDUCTOR_EAGER_DECODE", "on")
    assert Config.from_env() == Config(
        backend="collective",
        timeout_s=2.5,
        on_miss="raise",
        ag_rs=True,
        eager_decode=True,
    )
    monkeypatch.setenv("DCP_INDUCTOR_AG_RS", "0")
    assert not Config.from_env().ag_rs
    monkeypatch.setenv("DCP_INDUCTOR_BACKEND", "nccl")
    with pytest.raises(
        BadInput, match="'auto', 'symm_mem', 'flashinfer', 'collective'"
    ):
        Config.from_env()
    monkeypatch.setenv("DCP_INDUCTOR_TIMEOUT_S", "soon")
    with pytest.raises(BadInput, match="takes seconds"):
        Config.from_env()
    with pytest.raises(BadInput, match="positive number"):
        Config(timeout_s=0)


CHANGED = {
    "enabled": False,
    "backend": "collective",
    "timeout_s": 1.0,
    "on_miss": "warn",
    "ag_rs": True,
    "eager_decode": True,
}


def test_uuid_covers_every_field_of_config():
    assert CHANGED.keys() == Config.__dataclass_fields__.keys()
    uuids = {DcpFusionPass(Config()).uuid()}
    uuids |= {DcpFusionPass(Config(**{k: v})).uuid() for k, v in CHANGED.items()}
    assert len(uuids) == len(CHANGED) + 1


def test_a_proof_doesnt_depend_on_the_default_dtype(fake_group):
    """Hosts load models under bf16; probes of that width would hide an error."""
    errors, args = [], inputs()
    for dtype in (torch.float32, torch.bfloat16):
        reports = []
        forget_proofs()
        fn = compile_with(
            DcpFusionPass(Config(), reports.append),
            lambda o, lse: packed(o, lse, 2),
            fx_graph_cache=False,
        )
        torch._dynamo.reset()
        torch.set_default_dtype(dtype)
        try:
            fn(*args)
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(torch.float32)
        errors.append(reports[0].findings[0].error)
    assert errors[0] == errors[1] < 1e-6


def test_versions_are_of_all_that_a_verdict_rests_on():
    """Triton's interpreter is numpy's too; another numpy, and it may run a kernel."""
    found = dict(fusion_pass_module._versions())
    assert {"torch", "triton", "numpy"} < {*found}


@pytest.mark.parametrize("what", ["source_hash", "_versions"])
def test_uuid_covers_sources_and_versions(monkeypatch, what):
    before = DcpFusionPass(Config()).uuid()
    monkeypatch.setattr(fusion_pass_module, what, lambda: "changed")
    assert DcpFusionPass(Config()).uuid() != before


@contextlib.contextmanager
def groups_of(*ranks: list[int]) -> Iterator[list[dist.ProcessGroup]]:
    """Groups in a world of their own, in which this process is rank 1."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield [dist.new_group(of_group) for of_group in ranks]
    finally:
        dist.destroy_process_group()


def test_uuid_covers_the_rank_in_each_group_where_a_verdict_reads_it():
    """One rank of the world can be another one in a group made again under its name."""
    keys: dict[bool, dict[int, set[str]]] = {True: {}, False: {}}
    names = set()
    for ranks in ([0, 1], [1, 2], [0, 1]):
        with groups_of(ranks) as (group,):
            names.add(group.group_name)
            for ag_rs, of_rank in keys.items():
                key = DcpFusionPass(Config(ag_rs=ag_rs)).uuid()
                of_rank.setdefault(group.rank(), set()).add(key)
    assert len(names) == 1
    (first,), (second,) = keys[True].values()
    assert first != second
    assert keys[False][0] == keys[False][1], "it isn't read without Config.ag_rs"


def test_uuid_covers_what_a_hosts_name_of_a_group_means():
    found = []
    try:
        with groups_of([0, 1], [1, 2]) as groups:
            for group in (*groups, groups[0]):
                alias_group("host:0", group.group_name)
                found.append(DcpFusionPass(Config(ag_rs=True)).uuid())
    finally:
        forget_alias("host:0")
    assert found[0] == found[2] != found[1]


def test_pass_and_config_pickle():
    original = DcpFusionPass(Config(timeout_s=3.0), listener=print)
    copy = pickle.loads(pickle.dumps(original))
    assert copy.uuid() == original.uuid()
    assert copy.config == original.config


def test_a_graph_without_exchange_is_left_alone(fake_group, caplog):
    reports = []
    fn = compile_with(DcpFusionPass(Config(), reports.append), lambda x: x.sin() + 1)
    fn(torch.ones(3))
    assert [report.findings for report in reports] == [()]


def test_one_log_line_a_graph(fake_group, caplog):
    with caplog.at_level(logging.INFO, logger="dcp_inductor.passes"):
        compile_with(DcpFusionPass(Config()), layers, fx_graph_cache=False)(
            *inputs(), 2, 3
        )
    lines = [r.getMessage() for r in caplog.records if r.name == "dcp_inductor.passes"]
    assert lines == ["fused 3 of 3 exchanges"]


def mean(o, lse, num_ranks):
    received = packed(o, lse, num_ranks)
    return received, dist._functional_collectives.all_to_all_single(o, None, None, "0")


@pytest.mark.parametrize("on_miss", ["log", "warn", "raise"])
def test_on_miss(fake_group, on_miss, recwarn):
    fn = compile_with(
        DcpFusionPass(Config(on_miss=on_miss)), mean, fx_graph_cache=False
    )
    o, lse = torch.randn(4, 4, 8), torch.randn(4, 4)
    if on_miss == "raise":
        with pytest.raises(Exception, match="fused 1 of 2 exchanges") as caught:
            fn(o, lse, 2)
        assert isinstance(
            caught.value.__cause__ or caught.value.inner_exception, FusionMissed
        )
        return
    fn(o, lse, 2)
    warned = [w for w in recwarn if "fused 1 of 2 exchanges" in str(w.message)]
    assert len(warned) == (on_miss == "warn")


def test_explain_real_and_fake_inputs(fake_group):
    report = dcp_inductor.explain(packed, *inputs(), 2)
    assert (report.fused, report.refused, len(report.graphs)) == (1, [], 1)
    assert re.search(r"fused +all_to_all_single, 2 ranks: base2, error", str(report))
    assert "a2a_lse_reduce" in report.graphs[0].after
    assert "a2a_lse_reduce" not in report.graphs[0].before
    with FakeTensorMode():
        o, lse = torch.empty(3, 4, 8), torch.empty(3, 4)
    report = dcp_inductor.explain(two_exchanges, o, lse, 2)
    (finding,) = report.exchanges
    assert finding.fused
    assert finding.with_lse
    assert (finding.group, finding.lse_mode) == ("0", "basee")


def test_explain_says_what_it_refuses_and_where_the_graph_breaks(fake_group):
    def broken(o, lse):
        out = packed(o, lse, 2)
        torch._dynamo.graph_break()
        return mean(o, lse + out.mean(), 2)

    report = dcp_inductor.explain(broken, torch.randn(4, 4, 8), torch.randn(4, 4))
    assert len(report.graphs) == 2
    assert report.fused == 2
    (miss,) = report.refused
    assert "carries 1 tensor" in miss.reason
    assert "all_to_all_single" in miss.exchange
    assert report.breaks
    assert "refused" in str(report)
    nothing = dcp_inductor.explain(torch.sin, torch.ones(2))
    assert "No exchange of a kind that the pass knows" in str(nothing)


def test_explain_leaves_a_dynamic_batch_dynamic(fake_group):
    o, lse = inputs(5)
    torch._dynamo.mark_dynamic(o, 0)
    torch._dynamo.mark_dynamic(lse, 0)
    report = dcp_inductor.explain(packed, o, lse, 2)
    assert report.fused == 1


def cached_run(rank, num_ranks):
    """Compile the same function on every rank; return what the caches and op did."""
    ours = DcpFusionPass(Config())
    fn = torch.compile(
        packed, fullgraph=True, options={"post_grad_custom_pre_pass": ours}
    )
    rng = torch.Generator().manual_seed(3)
    o = torch.randn(num_ranks, 3, 2 * num_ranks, 8, generator=rng)
    lse = torch.randn(num_ranks, 3, 2 * num_ranks, generator=rng) * 4
    out = fn(o[rank], lse[rank], num_ranks)
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode="base2")
    torch.testing.assert_close(out, wanted)
    found = counters["inductor"]
    return {
        "fused": found[COUNTER],
        "hit": found["fxgraph_cache_hit"]
        + counters["aot_autograd"]["autograd_cache_hit"],
        "miss": found["fxgraph_cache_miss"],
        "bypass": found["fxgraph_cache_bypass"],
    }


def test_one_cache_directory_for_all_ranks_cold_and_warm(tmp_path):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    cold = run_ranks(cached_run, 2, env=env)
    assert sum(result["miss"] for result in cold) >= 1
    warm = run_ranks(cached_run, 2, env=env)
    for result in warm:
        assert result["hit"] >= 1
        assert result["miss"] == 0
    for result in cold + warm:
        assert (result["fused"], result["bypass"]) == (1, 0)


def test_training_graphs_stay_right(fake_group):
    """Fused or not, a graph that needs gradients keeps its gradient's graph."""
    o, lse = inputs()
    fn = compile_with(
        DcpFusionPass(Config()), lambda o, lse: packed(o * 2, lse, 2).sum()
    )
    o.requires_grad_()
    fn(o, lse).backward()
    assert o.grad is not None


def test_a_functionalized_subgraph_is_no_exchange() -> None:
    """auto_functionalized_v2 also wraps higher-order ops, which have no schema."""
    from dcp_inductor.compiler.exchange import find_exchanges
    from dcp_inductor.compiler.gather_scatter import find_scatters

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    wrapped = torch.ops.higher_order.auto_functionalized_v2
    subgraph = torch.ops.higher_order.cond
    node = graph.call_function(wrapped, (subgraph,), {"_all_bases": [x]})
    graph.output(node)
    assert not hasattr(subgraph, "_schema")
    assert not find_exchanges(graph)
    assert not find_scatters(graph)


def test_a_bug_in_reading_a_region_is_a_refusal(fake_group, monkeypatch) -> None:
    from dcp_inductor.compiler import fusion_pass

    def fail(self: Any, exchange: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(fusion_pass._Finders, "propose", fail)
    reports: list[Any] = []
    compile_with(DcpFusionPass(Config(), reports.append))(*inputs(), 2)
    ((finding,),) = [report.findings for report in reports]
    assert not finding.fused
    assert finding.reason == "internal error: KeyError: 'a bug'"
