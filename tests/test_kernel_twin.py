"""The exchange kernel without a GPU: planning, compiled text, and its CPU twin.

The twin runs the same kernel in Triton's interpreter, one process a rank; what only a
GPU shows (memory order, residency, speed) is left to tests/gpu.

Axes: N ranks, B tokens, H heads before the exchange, h = H / N after it, D head dim.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import rounding_steps
from torch import Tensor
from versions import interprets

from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.merge import LSE_MODES, LseMode, a2a_lse_reduce_reference
from dcp_inductor.runtime.kernels import (
    HEADER_BYTES,
    HEADER_SENTINEL,
    MAX_RANKS,
    MAX_VECTORS,
    PAYLOAD_SENTINEL,
    Failure,
    KernelShape,
    SlotGeometry,
    declines,
    initialise,
    read_failure,
)

pytest.importorskip("triton")
from twin_worker import Call, Job, Result, receive, send

pytestmark = interprets
INF, NAN = float("inf"), float("nan")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The interpreter truncates to bfloat16 where a GPU rounds; float8 merges are exact.
STEP = rounding_steps(fp32=2e-6) | dict.fromkeys(FLOAT8, 0.0)


class TwinHost:
    """The interpreter's process; a reply that doesn't come ends it."""

    def __init__(self) -> None:
        tests = Path(__file__).parent
        path = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(tests / "twin_worker.py")],
            env=os.environ
            | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, job: Job) -> Result:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        send(self.process.stdin, job)
        ready, _, _ = select.select([self.process.stdout], [], [], job.timeout_s + 60)
        if not ready:
            self.process.kill()
            pytest.fail("the twin's process doesn't answer")
        return receive(self.process.stdout)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def twin() -> Iterator[TwinHost]:
    host = TwinHost()
    yield host
    host.close()


def random_call(
    cp_size: int,
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    lse_mode: LseMode = "base2",
    max_programs: int = 1,
    seed: int = 0,
) -> Call:
    rng = torch.Generator().manual_seed(seed)
    shape = (cp_size, tokens, cp_size * heads)
    partial_lse = torch.randn(shape, generator=rng) * 4
    if dtype in FLOAT8:  # The interpreter doesn't round float8: keep to exact merges.
        integers = torch.randint(-8, 9, (*shape, dim), generator=rng)
        partial_o = integers.float().to(dtype)
        keeper = torch.randint(0, cp_size, shape[1:], generator=rng)
        ranks = torch.arange(cp_size).view(-1, 1, 1)
        partial_lse = torch.where(ranks == keeper, partial_lse, -INF)
    else:
        partial_o = torch.randn((*shape, dim), generator=rng).to(dtype)
    return Call(partial_o, partial_lse, lse_mode=lse_mode, max_programs=max_programs)


def reference(call: Call, rank: int) -> tuple[Tensor, Tensor]:
    return a2a_lse_reduce_reference(
        call.partial_o, call.partial_lse, rank=rank, lse_mode=call.lse_mode
    )


def check(job: Job, result: Result) -> None:
    """Every result is right, every slot is empty again, every epoch is the same."""
    assert not result.late
    assert result.failures == [None] * job.cp_size
    for call, outs, lses in zip(job.calls, result.outs, result.lses, strict=True):
        step = STEP[call.partial_o.dtype]
        for rank in range(job.cp_size):
            out, lse = reference(call, rank)
            torch.testing.assert_close(
                outs[rank].float(),
                out.float(),
                rtol=step,
                atol=step / 4,
                equal_nan=True,
            )
            if call.return_lse:
                torch.testing.assert_close(lses[rank], lse, rtol=1e-5, atol=1e-5)
            else:
                assert (lses[rank] == -123.0).all()
    assert result.unread == 0
    uses = torch.zeros(job.slot_rows, dtype=torch.int32)
    for call in job.calls:
        uses[: call.partial_o.shape[1] * call.partial_o.shape[2] // job.cp_size] += 1
    assert result.epochs == [uses.tolist()] * job.cp_size


# Planning


def test_geometry_counts_every_byte() -> None:
    geometry = SlotGeometry(cp_size=4, rows=10, head_dim=96, dtype=torch.bfloat16)
    assert geometry.payload_bytes == 2 * 4 * 10 * 192
    assert geometry.lse_offset == geometry.payload_bytes
    assert geometry.lse_bytes == 2 * 4 * 10 * HEADER_BYTES
    assert geometry.total_bytes == 2 * 4 * 10 * (192 + HEADER_BYTES)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_headers_are_aligned_where_payload_rows_are_not(rows: int) -> None:
    geometry = SlotGeometry(cp_size=3, rows=rows, head_dim=6, dtype=torch.bfloat16)
    assert geometry.shape.vector_bytes == 4
    assert geometry.lse_offset % 16 == 0
    assert 0 <= geometry.payload_bytes - 2 * 3 * rows * 12 < 16


def test_initialise_writes_nothing_but_sentinels() -> None:
    geometry = SlotGeometry(cp_size=3, rows=5, head_dim=24, dtype=torch.float16)
    buffer = torch.zeros(geometry.total_bytes + 32, dtype=torch.uint8)
    initialise(buffer, geometry)
    payload = buffer[: geometry.payload_bytes].view(torch.float16)
    assert (payload == 0).all()
    assert payload.signbit().all()
    headers = buffer[geometry.lse_offset : geometry.total_bytes].view(torch.int32)
    assert (headers == HEADER_SENTINEL).all()
    assert (buffer[geometry.total_bytes :] == 0).all()


@pytest.mark.parametrize("dtype", PAYLOAD_SENTINEL)
def test_the_sentinel_word_is_all_negative_zeros(dtype: torch.dtype) -> None:
    elements = torch.tensor([PAYLOAD_SENTINEL[dtype]], dtype=torch.int32).view(dtype)
    assert elements.numel() == 4 // dtype.itemsize
    assert (elements.float() == 0).all()
    assert elements.float().signbit().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "cp_size", "reason"),
    [
        (torch.float64, 64, 2, "float64"),
        (torch.bfloat16, 64, 1, "1 ranks"),
        (torch.bfloat16, 64, MAX_RANKS + 1, "17 ranks"),
        (torch.bfloat16, 65, 2, "130 bytes"),
        (torch.float8_e4m3fn, 66, 2, "66 bytes"),
        (torch.bfloat16, 0, 2, "0 bytes"),
        (torch.float32, 4 * MAX_VECTORS + 4, 2, "1025 vectors"),
        (torch.float32, MAX_VECTORS + 1, 2, "1025 vectors"),
    ],
)
def test_declines_with_a_reason(
    dtype: torch.dtype, head_dim: int, cp_size: int, reason: str
) -> None:
    assert reason in (declines(dtype, head_dim, cp_size) or "taken")


@pytest.mark.parametrize("dtype", PAYLOAD_SENTINEL)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 96, 192, 512, 576])
def test_every_shape_has_one_owner_for_every_element(
    dtype: torch.dtype, head_dim: int
) -> None:
    for cp_size in range(2, MAX_RANKS + 1):
        assert declines(dtype, head_dim, cp_size) is None
        shape = KernelShape(cp_size, head_dim, dtype)
        assert shape.vectors * shape.vector_bytes == head_dim * dtype.itemsize
        assert shape.block == 32 * shape.num_warps >= shape.vectors
        assert shape.others_pad % shape.awaited == 0
        assert shape.others_pad >= cp_size - 1
        for padded in (shape.block, shape.others_pad, shape.num_warps):
            assert padded & (padded - 1) == 0


def test_read_failure() -> None:
    assert read_failure(torch.zeros(4, dtype=torch.int32)) is None
    status = torch.tensor([3, 17, 1, 5], dtype=torch.int32)
    assert read_failure(status) == Failure("timeout", row=17, source_rank=1, epoch=5)


# The compiled text


def compiled(shape: KernelShape) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dcp_inductor.runtime.kernels.exchange import _constants
    from dcp_inductor.runtime.kernels.protocol import exchange_kernel

    constants = _constants(shape, dependent=True)
    first = len(exchange_kernel.params) - len(constants)
    source = ASTSource(
        fn=exchange_kernel,
        signature={
            param.name: "constexpr" if param.is_constexpr else param.annotation
            for param in exchange_kernel.params
        },
        constexprs={(first + i,): value for i, value in enumerate(constants)},
    )
    options = {"num_warps": shape.num_warps, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("cp_size", "head_dim", "dtype", "vector"),
    [
        (2, 512, torch.bfloat16, "v4.b32"),
        (16, 576, torch.float32, "v4.b32"),
        (3, 96, torch.float8_e5m2, "v4.b32"),
        (4, 6, torch.float16, "b32"),
    ],
)
def test_compiles_to_whole_vectors_with_one_owner(
    cp_size: int, head_dim: int, dtype: torch.dtype, vector: str
) -> None:
    from dcp_inductor.runtime.kernels.exchange import _check_copies

    shape = KernelShape(cp_size, head_dim, dtype)
    kernel = compiled(shape)
    for access in (
        f"ld.relaxed.sys.global.{vector}",
        f"st.relaxed.sys.global.{vector}",
    ):
        assert access in kernel.asm["ptx"]
    _check_copies(kernel.asm["ptx"], shape)
    # NOTE [one owner]: a warp's lanes lie along a row, sources in registers.
    layout = "sizePerThread = [1, 1], threadsPerWarp = [1, 32], "
    layout += f"warpsPerCTA = [1, {shape.num_warps}]"
    tiles = [line for line in kernel.asm["ttgir"].splitlines() if "[1, 32]" in line]
    assert tiles
    assert all(layout in line for line in tiles)


@pytest.mark.parametrize("copied", ["bar.red", "st.relaxed.sys"])
def test_a_copied_access_is_refused(copied: str) -> None:
    from dcp_inductor.runtime.kernels.exchange import _check_copies

    shape = KernelShape(2, 512, torch.bfloat16)
    text = "bar.red.or.pred p, 0, p;" + "st.relaxed.sys.global.b32 [a], b;" * 7
    _check_copies(text, shape)
    with pytest.raises(BackendUnavailable, match="copied an access"):
        _check_copies(text + copied, shape)


def test_no_argument_is_promised_to_be_a_multiple_of_16() -> None:
    """The launch that loads the variant passes zeros; NOTE [one variant]."""
    from dcp_inductor.runtime.kernels.protocol import exchange_kernel

    params = [param for param in exchange_kernel.params if not param.is_constexpr]
    assert params
    assert all(param.do_not_specialize for param in params)


def test_rows_that_are_pushed_and_awaited_are_carried_apart() -> None:
    """Triton loses a name that enters a loop as another's value."""
    text = compiled(KernelShape(2, 512, torch.bfloat16)).asm["ttgir"]
    loops = [line for line in text.splitlines() if "scf.while" in line]
    outer = next(line for line in loops if "%token" in line)
    assert all(name in outer for name in ("%head", "%sent_token", "%sent_head"))


# The twin


@pytest.mark.parametrize(
    ("cp_size", "heads", "dim", "dtype", "lse_mode"),
    [
        (2, 2, 96, torch.bfloat16, "base2"),
        (2, 3, 24, torch.float32, "basee"),
        (2, 1, 6, torch.bfloat16, "base2"),
        (3, 2, 24, torch.float16, "basee"),
        (3, 1, 96, torch.float8_e4m3fn, "base2"),
        (4, 1, 16, torch.float8_e5m2, "basee"),
        (4, 2, 96, torch.float16, "base2"),
        (8, 1, 16, torch.bfloat16, "basee"),
    ],
)
def test_calls_of_changing_width(
    twin: TwinHost,
    cp_size: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    lse_mode: LseMode,
) -> None:
    calls = [
        random_call(
            cp_size,
            tokens,
            heads,
            dim,
            dtype,
            lse_mode=lse_mode,
            max_programs=programs,
            seed=seed,
        )
        for seed, (tokens, programs) in enumerate([(2, 1), (1, 1), (3, 2), (1, 9)])
    ]
    job = Job(cp_size, slot_rows=3 * heads + 1, calls=calls, skew_s=0.02)
    check(job, twin.run(job))


@pytest.mark.parametrize("cp_size", [2, 4])
def test_worked_exchange(twin: TwinHost, cp_size: int) -> None:
    """Head map, source order, base at once: o = 100 * source + head, lse = source."""
    heads = 2 * cp_size
    source = torch.arange(float(cp_size)).view(-1, 1, 1, 1)
    head = torch.arange(float(heads)).view(1, 1, -1, 1)
    partial_o = (100 * source + head).expand(cp_size, 1, heads, 4)
    partial_lse = source[..., 0].expand(cp_size, 1, heads)
    modes = [Call(partial_o, partial_lse, lse_mode=mode) for mode in LSE_MODES]
    job = Job(cp_size, slot_rows=2, calls=modes)
    result = twin.run(job)
    check(job, result)
    first = {2: (66.66667, 73.10586), 4: (226.6667, 249.2653)}[cp_size]
    for outs, value in zip(result.outs, first, strict=True):
        got = torch.stack([out[0, :, 0] for out in outs]).flatten()
        torch.testing.assert_close(got, value + torch.arange(float(heads)))


def special_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """partial_o ``[2, B, 2, 8]`` and partial_lse ``[2, B, 2]``, a row a case."""
    cases = [  # (o, lse) of rank 0, (o, lse) of rank 1
        ((5.0, 1.5), (NAN, -INF)),
        ((5.0, 1.5), (0.0, INF)),
        ((NAN, NAN), (5.0, 1.5)),
        ((NAN, -INF), (NAN, INF)),
        ((0.0, NAN), (0.0, -INF)),
        ((7.0, -1e30), (9.0, -1e30)),
        ((-0.0, 1.0), (-0.0, 2.0)),
        ((-0.0, -0.0), (1.0, -0.0)),
        ((0.0, 130.3), (1.0, 130.9)),
        ((0.0, 65.2), (1.0, 65.4)),
        ((3.0, 0.0), (1.0, 0.0)),
        ((NAN, 0.0), (1.0, 0.0)),
        ((INF, 0.0), (1.0, 0.0)),
        ((2.0, 1.0), (4.0, -200.0)),
    ]
    table = torch.tensor(cases).permute(1, 0, 2)
    partial_o = table[:, :, None, :1].expand(-1, -1, 2, 8).contiguous()
    partial_o[..., 1::2] += torch.where(partial_o[..., 1::2] == 0, 0.0, 0.5)
    return partial_o.to(dtype), table[:, :, 1:].expand(-1, -1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_special_values(twin: TwinHost, dtype: torch.dtype) -> None:
    partial_o, partial_lse = special_rows(dtype)
    calls = [
        Call(partial_o, partial_lse, lse_mode="basee", max_programs=4),
        Call(partial_o.flip(0), partial_lse.flip(0), lse_mode="base2"),
    ]
    job = Job(2, slot_rows=partial_o.shape[1], calls=calls)
    check(job, twin.run(job))


@pytest.mark.parametrize("dtype", PAYLOAD_SENTINEL)
def test_words_of_negative_zeros_arrive(twin: TwinHost, dtype: torch.dtype) -> None:
    """Words of the sentinel, and words with one negative zero, from every rank."""
    partial_o = torch.full((3, 2, 3, 16), -0.0)
    partial_o[:, 1, :, ::4] = 1.0
    partial_lse = torch.full((3, 2, 3), -0.0)
    call = Call(partial_o.to(dtype), partial_lse)
    job = Job(3, slot_rows=2, calls=[call, call])
    check(job, twin.run(job))


def test_lse_on_demand_and_equal_in_both_bases(twin: TwinHost) -> None:
    partial_o, partial_lse = torch.ones(2, 2, 4, 16), torch.ones(2, 2, 4)
    calls = [
        Call(partial_o, partial_lse, lse_mode="basee"),
        Call(partial_o, partial_lse, lse_mode="base2"),
        Call(partial_o, partial_lse, lse_mode="base2", return_lse=False),
    ]
    job = Job(2, slot_rows=4, calls=calls)
    result = twin.run(job)
    check(job, result)
    for lses, value in zip(result.lses, (1.693147, 2.0), strict=False):
        torch.testing.assert_close(lses[1], torch.full((2, 2), value))


def strided_inputs() -> dict[str, tuple[Tensor, Tensor]]:
    """partial_o ``[2, 3, 4, 16]`` and partial_lse ``[2, 3, 4]``, oddly laid out."""
    rng = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    plain = random(2, 3, 4, 16).half(), random(2, 3, 4)
    return {
        "head-major, pitch of 8 tokens": (
            random(2, 4, 8, 16).half()[:, :, :3].transpose(1, 2),
            random(2, 4, 3).transpose(1, 2),
        ),
        "columns of a wider row": (random(2, 3, 4, 24).half()[..., :16], plain[1]),
        "rows at odd elements": (random(2, 3, 4, 17).half()[..., 1:], plain[1]),
        "inner stride 2": (random(2, 3, 4, 32).half()[..., ::2], plain[1]),
        "one row for all tokens": (
            random(2, 1, 4, 16).half().expand(2, 3, 4, 16),
            random(2, 3, 1).expand(2, 3, 4),
        ),
        "lse of an extra axis": (plain[0], random(2, 3, 4, 3)[..., 1]),
    }


def test_strided_inputs(twin: TwinHost) -> None:
    calls = [Call(*inputs, max_programs=3) for inputs in strided_inputs().values()]
    job = Job(2, slot_rows=6, calls=calls)
    check(job, twin.run(job))


def test_every_row_is_for_itself(twin: TwinHost) -> None:
    """bs * q tokens at once give what each token gives alone, bit for bit."""
    whole = random_call(2, 4, 1, 16, torch.float32, seed=5)
    alone = [
        Call(whole.partial_o[:, t : t + 1], whole.partial_lse[:, t : t + 1])
        for t in range(4)
    ]
    result = twin.run(Job(2, slot_rows=4, calls=[whole, *alone]))
    for rank in range(2):
        rows = torch.cat([outs[rank] for outs in result.outs[1:]])
        assert torch.equal(result.outs[0][rank], rows)


def test_bits_do_not_depend_on_arrival(twin: TwinHost) -> None:
    call = random_call(4, 2, 1, 24, torch.float32, seed=6)
    prompt, skewed = (
        twin.run(Job(4, slot_rows=2, calls=[call] * 2, skew_s=skew_s))
        for skew_s in (0.0, 0.2)
    )
    for rank in range(4):
        first = prompt.outs[0][rank]
        for result in (prompt, skewed):
            assert all(torch.equal(outs[rank], first) for outs in result.outs)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_a_late_clear_wipes_no_later_message(twin: TwinHost, cp_size: int) -> None:
    """Peers send epoch e + 1 while rank 0 has read e and not yet cleared it."""
    calls = [
        random_call(cp_size, tokens, 1, 16, torch.bfloat16, seed=tokens)
        for tokens in (1, 1, 2, 1)
    ]
    job = Job(cp_size, slot_rows=2, calls=calls, slow=frozenset({0}), spin_limit=5000)
    check(job, twin.run(job))


@pytest.mark.parametrize(("cp_size", "absent"), [(2, 1), (4, 2)])
def test_a_peer_that_never_comes(twin: TwinHost, cp_size: int, absent: int) -> None:
    call = random_call(cp_size, 3, 1, 16, torch.bfloat16, max_programs=2)
    job = Job(
        cp_size,
        slot_rows=3,
        calls=[call],
        absent=frozenset({absent}),
        spin_limit=200,
        timeout_s=30,
    )
    result = twin.run(job)
    assert not result.late
    for rank in set(range(cp_size)) - job.absent:
        failure = result.failures[rank]
        assert failure is not None
        assert (failure.kind, failure.row, failure.epoch) == ("timeout", 0, 0)
        assert failure.source_rank == absent
        for outs, lses in zip(result.outs, result.lses, strict=True):
            assert outs[rank].isnan().all()
            assert lses[rank].isnan().all()


def test_a_wrong_tag_is_noticed_by_all(twin: TwinHost) -> None:
    """Rank 2's second call is another one: each rank learns of it, and from whom."""
    call = random_call(3, 2, 1, 16, torch.bfloat16)
    other = Call(call.partial_o, call.partial_lse, tags=(7, 7, 8))
    result = twin.run(Job(3, slot_rows=2, calls=[call, other]))
    assert not result.late
    assert result.failures[0] == Failure("wrong_tag", row=0, source_rank=2, epoch=1)
    assert result.failures[1] == Failure("wrong_tag", row=0, source_rank=2, epoch=1)
    assert result.failures[2] == Failure("wrong_tag", row=0, source_rank=1, epoch=1)
    for rank in range(3):
        assert not result.outs[0][rank].isnan().any()
        assert result.outs[1][rank].isnan().all()


def test_a_tag_is_31_bits_and_never_its_own_sentinel(twin: TwinHost) -> None:
    call = random_call(2, 1, 1, 16, torch.float32)
    calls = [
        Call(call.partial_o, call.partial_lse, tags=(tag,))
        for tag in (0, -1, HEADER_SENTINEL, 2**63 + 5)
    ]
    job = Job(2, slot_rows=1, calls=calls)
    check(job, twin.run(job))


def test_calls_of_different_width_fail_on_both_sides(twin: TwinHost) -> None:
    """The width is in the tag; the rows of one side only run into the spoilt slot."""
    wide = random_call(2, 2, 1, 16, torch.float32)
    job = Job(
        2,
        slot_rows=2,
        calls=[Call(wide.partial_o, wide.partial_lse, tags=(2, 1))],
        timeout_s=30,
        widths=(2, 1),
    )
    result = twin.run(job)
    assert not result.late
    kinds = {failure.kind for failure in result.failures if failure is not None}
    assert None not in result.failures
    assert kinds == {"wrong_tag"}
    assert result.outs[0][0].isnan().all()
