"""Random changes to graphs of the corpus: whatever still fuses has the same numbers.

And random mixes of the corpus's choices: they all fuse.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import corpus
import hypothesis.strategies as st
import pytest
import torch
from corpus import Entry
from fuzzing import fixed, many
from harness import captured, copied, fake_world, run_ranks_in_lockstep
from hypothesis import assume, event, given
from test_corpus import LSES, check_numbers, mark_batch, partials
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from dcp_inductor import Config, DcpFusionPass
from dcp_inductor.report import GraphReport

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_COLLECTIVES = (
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.wait_tensor.default,
)

# What the sum of an fp32 merge may be off by, relative to its largest element.
ROUNDING = 2e-5


BASES = (
    Entry("", head_dim=4, guard="where", dtype=torch.float32, pack="fp32 tail"),
    Entry("", head_dim=8, guard="nan_to_num", with_lse="returned"),
    Entry("", head_dim=4, pack="two", spelled="exp", merge="softmax", num_heads=2),
    Entry(
        "",
        head_dim=4,
        pack="two, LSE first",
        merge="logsumexp",
        spelled="exp",
        dtype=torch.float32,
        with_lse="scaled",
        layout="hbd",
    ),
    Entry(
        "",
        head_dim=4,
        pack="two",
        merge="running",
        spelled="exp",
        num_ranks=3,
        num_heads=3,
        dtype=torch.float16,
    ),
    Entry("", head_dim=4, pack="buffer", merge="online", layout="bqhd", num_tokens=4),
    Entry(
        "",
        head_dim=4,
        pack="two",
        merge="sigmoid",
        spelled="exp",
        dtype=torch.float32,
        partials="computed",
        then="relu",
    ),
    Entry(
        "",
        head_dim=4,
        pack="sections",
        merge="max, where total",
        guard="isfinite",
        num_ranks=4,
        num_heads=8,
    ),
)


@pytest.fixture(scope="module")
def groups():
    with fake_world() as groups:
        yield groups


# ------------------------------------------------------------- mutations

_SIBLINGS = (
    {aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.tanh.default},
    {aten.log.default, aten.log2.default, aten.log1p.default},
    {aten.amax.default, aten.amin.default},
    {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor},
    {aten.maximum.default, aten.minimum.default},
    {aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.ge.Scalar},
    {aten.clamp_min.default, aten.clamp_max.default},
    {aten.sum.dim_IntList, aten.amax.default, aten.mean.dim},
    {aten.relu.default, aten.abs.default, aten.neg.default},
)

# What is put behind a float value: (graph, node, number) -> node
_INSERTED: dict[str, Callable[[Graph, Node, float], Any]] = {
    "mul": lambda g, x, c: g.call_function(aten.mul.Tensor, (x, c)),
    "add": lambda g, x, c: g.call_function(aten.add.Tensor, (x, c)),
    "max": lambda g, x, c: g.call_function(aten.clamp_min.default, (x, c)),
    "min": lambda g, x, c: g.call_function(aten.clamp_max.default, (x, c)),
    "relu": lambda g, x, c: g.call_function(aten.relu.default, (x,)),
    "abs": lambda g, x, c: g.call_function(aten.abs.default, (x,)),
    "neg": lambda g, x, c: g.call_function(aten.neg.default, (x,)),
    "round": lambda g, x, c: g.call_function(
        aten.round.decimals, (x,), {"decimals": 3}
    ),
    "flip": lambda g, x, c: g.call_function(aten.flip.default, (x, [0])),
    "flip last": lambda g, x, c: g.call_function(aten.flip.default, (x, [-1])),
    "nan_to_num": lambda g, x, c: g.call_function(
        aten.where.self,
        (
            g.call_function(aten.isnan.default, (x,)),
            g.call_function(aten.full_like.default, (x, 0.0)),
            x,
        ),
    ),
    "threshold": lambda g, x, c: g.call_function(
        aten.where.self,
        (
            g.call_function(aten.gt.Scalar, (x, c)),
            x,
            g.call_function(aten.mul.Tensor, (x, 0.5)),
        ),
    ),
    "bf16": lambda g, x, c: g.call_function(
        _CAST, (g.call_function(_CAST, (x, torch.bfloat16)), x.meta["val"].dtype)
    ),
    "fp16": lambda g, x, c: g.call_function(
        _CAST, (g.call_function(_CAST, (x, torch.float16)), x.meta["val"].dtype)
    ),
}
_NUMBERS = (-70.0, -1.0, -0.1, 0.0, 1e-6, 0.01, 0.5, 0.99, 1.0, 1.01, 2.0, 8.0, 300.0)


def _calls(graph: Graph) -> list[Node]:
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target not in _COLLECTIVES
    ]


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _mutate_op(graph: Graph, draw: Any) -> str:
    """One op becomes one of its siblings."""
    nodes = [n for n in _calls(graph) if any(n.target in s for s in _SIBLINGS)]
    assume(nodes)
    node = draw(st.sampled_from(nodes))
    others = {t for s in _SIBLINGS if node.target in s for t in s} - {node.target}
    node.target = draw(st.sampled_from(sorted(others, key=str)))
    return f"{node.target}"


def _mutate_insert(graph: Graph, draw: Any) -> str:
    nodes = [n for n in [*graph.nodes] if n.op != "output" and _is_float(n)]
    node = draw(st.sampled_from(nodes))
    name = draw(st.sampled_from(sorted(_INSERTED)))
    number = draw(st.sampled_from(_NUMBERS))
    users = [*node.users]
    assume(users)
    kept = draw(st.sampled_from([None, *users]))
    with graph.inserting_before(node.next):
        new = _INSERTED[name](graph, node, number)
    for user in users if kept is None else [kept]:
        user.replace_input_with(node, new)
    return f"{name} {number} after {node.target}"


def _mutate_number(graph: Graph, draw: Any) -> str:
    """A number among a call's arguments becomes another."""
    places = [
        (node, place)
        for node in _calls(graph)
        for place, value in enumerate(node.args)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    assume(places)
    node, place = draw(st.sampled_from(places))
    old = node.args[place]
    choices = (-2, -1, 0, 1, 2) if isinstance(old, int) else _NUMBERS
    new = draw(st.sampled_from(choices))
    assume(new != old)
    node.update_arg(place, new)
    return f"{old} -> {new} in {node.target}"


def _mutate_list(graph: Graph, draw: Any) -> str:
    """Dims of a permute are shuffled; those of a reduction become another."""
    nodes = [
        node
        for node in _calls(graph)
        if node.target
        in (aten.permute.default, aten.amax.default, aten.sum.dim_IntList)
    ]
    assume(nodes)
    node = draw(st.sampled_from(nodes))
    dims = [*node.args[1]]
    if node.target is aten.permute.default:
        new = draw(st.permutations(dims))
    else:
        new = [draw(st.sampled_from([0, 1, -1]))]
    assume([*new] != dims)
    node.update_arg(1, [*new])
    return f"dims of {node.target}"


def _mutate_skip(graph: Graph, draw: Any) -> str:
    """A call is left out: its users read one of its inputs."""
    pairs = [
        (node, source)
        for node in _calls(graph)
        for source in node.all_input_nodes
        if _alike(node, source)
    ]
    assume(pairs)
    node, source = draw(st.sampled_from(pairs))
    node.replace_all_uses_with(source)
    graph.erase_node(node)
    return f"without {node.target}"


def _mutate_rewire(graph: Graph, draw: Any) -> str:
    """A call reads another value of the same kind."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    triples = [
        (node, old, new)
        for node in _calls(graph)
        for old in node.all_input_nodes
        for new in graph.nodes
        if new is not old and place[new] < place[node] and _alike(old, new)
    ]
    assume(triples)
    node, old, new = draw(st.sampled_from(triples))
    node.replace_input_with(old, new)
    return f"{node.target} reads {new.target}"


def _alike(node: Node, other: Node) -> bool:
    a, b = node.meta.get("val"), other.meta.get("val")
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a.shape == b.shape and a.dtype == b.dtype


_MUTATIONS = (
    _mutate_op,
    _mutate_insert,
    _mutate_insert,
    _mutate_number,
    _mutate_list,
    _mutate_skip,
    _mutate_rewire,
)

# ------------------------------------------------------------- running


@dataclass
class Base:
    """A graph of the corpus, its fake inputs and each rank's inputs on fresh data."""

    graph: Graph
    flat: list[list[list[Tensor]]]

    def mutable(self) -> Graph:
        return GraphModule(self.graph.owning_module, copied(self.graph)).graph


_BASES: dict[Entry, Base] = {}


def _base(entry: Entry, groups: dict[str, Any]) -> Base:
    if entry not in _BASES:
        args = [corpus.arguments(entry, *pair) for pair in _data(entry)[0]]
        found = captured(corpus.exchange(entry, groups[entry.group_key]), args[0])
        sets = [
            [[*found.flat_inputs(corpus.arguments(entry, *pair))] for pair in partials]
            for partials in _data(entry)
        ]
        _BASES[entry] = Base(found.before, sets)
    return _BASES[entry]


def _data(entry: Entry) -> list[list[tuple[Tensor, Tensor]]]:
    """Partials of all ranks, of several kinds."""
    rng = torch.Generator().manual_seed(7)
    n, shape = entry.num_ranks, (entry.num_tokens, entry.num_heads)

    def normal(*more: int) -> Tensor:
        return torch.randn((n, *shape, *more), generator=rng)

    o = normal(entry.head_dim)
    empty = torch.where(normal() > 0.5, -torch.inf, normal())
    kinds = [
        (o, normal()),
        (o, normal() * 20),
        (o * 30, normal() * 3 + 60),
        (o, normal() * 3 - 60),
        (o, 1 + normal() * 0.01),
        (o * 1e-3, normal() * 200),
        (o, empty),
    ]
    return [[*zip(*kind, strict=True)] for kind in kinds]


def _valid(graph: Graph, inputs: list[Tensor]) -> bool:
    """Write each node's new value on fake tensors; False if the graph can't run."""
    with FakeTensorMode() as mode:
        known: dict[Node, Any] = {}
        given = iter([mode.from_tensor(tensor) for tensor in inputs])
        for node in graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg(
                    (node.args, node.kwargs), known.__getitem__
                )
                try:
                    known[node] = node.target(*args, **kwargs)
                except (RuntimeError, TypeError, ValueError, IndexError, OverflowError):
                    return False
            elif node.op == "get_attr":
                constant = operator.attrgetter(node.target)(graph.owning_module)
                known[node] = mode.from_tensor(constant)
            if node in known:
                node.meta["val"] = known[node]
    return True


def _same_numbers(new: Any, old: Any, eps: float, lse: float) -> bool:
    """Within a few roundings of ``eps`` or the output's dtype, where ``old`` is finite.

    lse: the largest size of an LSE, whose rounding is a relative error of a weight.
    """
    if not isinstance(old, Tensor) or not old.dtype.is_floating_point:
        return bool(torch.as_tensor(new == old).all())
    eps = max(eps, torch.finfo(old.dtype).eps)
    tolerance = max(8 * eps, ROUNDING) + 8 * 2.0**-24 * lse
    kept = old.isfinite()
    new, old = new[kept].double(), old[kept].double()
    if not old.numel():
        return True
    return bool(((new - old).abs() <= tolerance * old.abs().max()).all())


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse.isfinite(), lse, 0.0)


def _check_mutation(groups: dict[str, Any], data: Any) -> None:
    entry = data.draw(st.sampled_from(BASES))
    base = _base(entry, groups)
    graph = base.mutable()
    told = [
        data.draw(st.sampled_from(_MUTATIONS))(graph, data.draw)
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    assume(_valid(graph, base.flat[0][0]))
    before = copied(graph)
    reports: list[GraphReport] = []
    DcpFusionPass(Config(), reports.append)(graph)
    fused = bool(reports and reports[0].fused)
    event("fused" if fused else "refused")
    if fused:
        # A merge that computes narrower is held to what it can do.
        eps = max(2.0**-7 * ("bf16" in str(told)), 2.0**-10 * ("fp16" in str(told)))
        for inputs in base.flat:
            lses: list[Tensor] = []
            new = run_ranks_in_lockstep(graph, inputs, lses)
            # NaN and +inf count as empty to the op and as numbers to most graphs.
            if any(bool((lse.isnan() | (lse == torch.inf)).any()) for lse in lses):
                continue
            size = max(float(_finite(lse).abs().amax()) for lse in lses)
            old = run_ranks_in_lockstep(before, inputs)
            for rank in range(entry.num_ranks):
                for got, wanted in zip(new[rank], old[rank], strict=True):
                    assert _same_numbers(got, wanted, eps, size), told


@fixed(250)
@given(data=st.data())
def test_what_fuses_after_a_mutation_has_the_same_numbers(groups, data):
    _check_mutation(groups, data)


@pytest.mark.slow
@pytest.mark.timeout(0)
@many(250)
@given(data=st.data())
def test_what_fuses_after_a_mutation_long(groups, data):
    _check_mutation(groups, data)


# ------------------------------------------------------------- found by long runs


def _compares_the_wrong_two(graph: Graph) -> None:
    """In a running merge, the max of what is merged already and the next by another
    comparison: right until an LSE is 88 above a middle one that is above a third."""
    (_, second) = graph.find_nodes(op="call_function", target=aten.ge.Tensor)
    one = next(n for n in graph.nodes if n.target is aten.select.int and n.args[2] == 1)
    second.update_arg(0, one)


def _shifts_then_asks(graph: Graph) -> None:
    """NaN, where all shards are empty, becomes NaN + 1 and then 0."""
    (end,) = graph.output_node().args[0]
    with graph.inserting_before(graph.output_node()):
        shifted = graph.call_function(aten.add.Tensor, (end, 1.0))
        asked = _INSERTED["nan_to_num"](graph, shifted, 0.0)
    graph.output_node().replace_input_with(end, asked)


@pytest.mark.parametrize(
    ("entry", "change", "reason"),
    [
        (BASES[4], _compares_the_wrong_two, "it isn't the LSE merge"),
        (BASES[6], _shifts_then_asks, "looks for NaN"),
    ],
)
def test_change_that_a_long_run_found(groups, entry, change, reason):
    base = _base(entry, groups)
    graph = base.mutable()
    change(graph)
    assert _valid(graph, base.flat[0][0])
    reports: list[GraphReport] = []
    DcpFusionPass(Config(), reports.append)(graph)
    (finding,) = reports[0].findings
    assert not finding.fused
    assert reason in finding.reason


# ------------------------------------------------------------- mixes

_LSE_LAYOUTS = {
    "bhd": ("as o", "trailing 1", "transposed"),
    "b(hd)": ("as o", "trailing 1", "transposed"),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *corpus.FP8)


@st.composite
def mixes(draw: Any) -> Entry:
    """Any choice from each of the corpus's tables, where they go together."""
    num_ranks = draw(st.sampled_from([2, 3, 4]))
    layout = draw(st.sampled_from(sorted(corpus.LAYOUTS)))
    merges = {*corpus.MERGES} - {"no max"} - ({"sigmoid"} if num_ranks > 2 else set())
    parts = draw(st.sampled_from(sorted(corpus.PARTIALS)))
    if parts == "o computed when split":
        merges -= {"bmm"}  # one axis of tokens and heads, which the LSE has apart
    packs = {*corpus.PACKS}
    dtype = draw(st.sampled_from(_DTYPES))
    if dtype in corpus.FP8:
        packs -= {"words tail"}
    return Entry(
        "mix",
        num_ranks=num_ranks,
        num_tokens=draw(st.sampled_from([4, 6])),
        num_heads=num_ranks * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([4, 8, 12])),
        dtype=dtype,
        layout=layout,
        lse_layout=draw(
            st.sampled_from(_LSE_LAYOUTS.get(layout, ("as o", "trailing 1")))
        ),
        partials=parts,
        pack=draw(st.sampled_from(sorted(packs))),
        wire=draw(st.sampled_from(sorted(corpus.WIRES))),
        merge=draw(st.sampled_from(sorted(merges))),
        spelled=draw(st.sampled_from(sorted(corpus.POWERS))),
        guard=draw(st.sampled_from(sorted(corpus.GUARDS))),
        then=draw(st.sampled_from(["returned", "reshape", "transpose", "twice"])),
        with_lse=draw(st.sampled_from(["", *corpus.LSE_THEN])),
        dynamic=draw(st.booleans()),
    )


def _check_mix(groups: dict[str, Any], entry: Entry) -> None:
    (pair, *_) = partials(entry, entry.num_tokens, LSES[0], 0)
    args = corpus.arguments(entry, *pair)
    mark_batch(entry, *args)
    found = captured(corpus.exchange(entry, groups[entry.group_key]), args)
    assert (found.num_ops, found.num_collectives) == (1, 0), found.reasons
    check_numbers(entry, found)


@fixed(18)
@given(entry=mixes())
def test_any_mix_of_choices_fuses(groups, entry):
    _check_mix(groups, entry)


@pytest.mark.slow
@pytest.mark.timeout(0)
@many(18)
@given(entry=mixes())
def test_any_mix_of_choices_fuses_long(groups, entry):
    _check_mix(groups, entry)
