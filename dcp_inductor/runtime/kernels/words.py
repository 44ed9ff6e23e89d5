"""Device words: how the exchange kernel touches memory, and what a word holds.

Protocol and addresses stay with protocol.py. A *word* is 32 bits; ``address`` is a tile
of int64 addresses and ``mask`` one of booleans, of one shape. A *vector* is four words
(wide) or one (narrow), and what one thread moves at once.

NOTE [memory accesses]
Peer memory and the own slot are accessed by ``ld/st.relaxed.sys``: never held back,
merged, or served from L1. Vectors are spelled out in PTX because the plain operations
give neither: ``tl.load(volatile=True)`` becomes as many single-word loads as the
compiler can't prove aligned, and ``tl.store`` is a weak store. No fence is needed, see
NOTE [sentinel word]: a message has no part that vouches for another part.
Inline assembly runs once in every thread that holds an element: NOTE [one owner] in
protocol.py. Triton's interpreter has no assembly and takes the plain operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_inductor.runtime.kernels import HEADER_SENTINEL, TIMEOUT, WRONG_TAG

# Triton reads annotations: of a device function's parameters only constants have one.
# mypy: allow-untyped-defs, allow-incomplete-defs

INTERPRETED: bool = triton.knobs.runtime.interpret
_INTERPRET = tl.constexpr(INTERPRETED)
# Rounds of polling before a look at the status, which lies in host memory, and at the
# clock: about 2 ms. A power of two.
_ROUNDS = 4096
_HEADER = tl.constexpr(HEADER_SENTINEL)
_WRONG_TAG = tl.constexpr(WRONG_TAG)
_TIMEOUT = tl.constexpr(TIMEOUT)


@triton.jit
def load_vector(address, mask, WIDE: tl.constexpr):
    """Four words from each address; a narrow vector is one word, four times."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        a = tl.load(pointer, mask, 0, volatile=True)
        b, c, d = a, a, a
        if WIDE:
            b = tl.load(pointer + 1, mask, 0, volatile=True)
            c = tl.load(pointer + 2, mask, 0, volatile=True)
            d = tl.load(pointer + 3, mask, 0, volatile=True)
    elif WIDE:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0;"
            " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=r,=r,=r,=r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        a = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0;"
            " @p ld.relaxed.sys.global.b32 $0, [$1]; }",
            "=r,l,r",
            [address, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        b, c, d = a, a, a
    return a, b, c, d


@triton.jit
def store_vector(address, a, b, c, d, mask, WIDE: tl.constexpr):
    """Four words to each address; of a narrow vector the first."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        tl.store(pointer, a, mask)
        if WIDE:
            tl.store(pointer + 1, b, mask)
            tl.store(pointer + 2, c, mask)
            tl.store(pointer + 3, d, mask)
    elif WIDE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $6, 0; mov.b32 $0, 0;"
            " @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; }",
            "=r,l,r,r,r,r,r",
            [address, a, b, c, d, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0;"
            " @p st.relaxed.sys.global.b32 [$1], $2; }",
            "=r,l,r,r",
            [address, a, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_pair(address, mask):
    """Two words from each address, a multiple of 8."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        a = tl.load(pointer, mask, 0, volatile=True)
        b = tl.load(pointer + 1, mask, 0, volatile=True)
    else:
        a, b = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
            " @p ld.relaxed.sys.global.v2.b32 {$0, $1}, [$2]; }",
            "=r,=r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return a, b


@triton.jit
def store_pair(address, a, b, mask):
    """Two words to each address, a multiple of 8."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        tl.store(pointer, a, mask)
        tl.store(pointer + 1, b, mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0;"
            " @p st.relaxed.sys.global.v2.b32 [$1], {$2, $3}; }",
            "=r,l,r,r,r",
            [address, a, b, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def await_assembly(elements: int, wide: bool, sentinel: int) -> tuple[str, str]:
    """PTX that waits for ``elements`` messages at once, and its constraints.

    All loads of a round are in flight together. It ends when no word is a sentinel, or
    when the status isn't zero or time is up, which it looks at every _ROUNDS rounds.
    Then all threads of the program meet: none clears what another still reads.
    Operands, each once an element: payload words, LSE, fault, failed (out); payload and
    header address, mask, tag, status address, limit (in).
    """
    words = [*"abcd"] if wide else ["a"]
    results = [*words, "lse", "fault", "failed"]
    given = ["payload", "header", "mask", "tag", "status", "limit"]
    first = {name: n * elements for n, name in enumerate([*results, *given])}
    lines = [
        ".reg .pred absent, other, failed; .reg .b32 rounds, spoilt;",
        ".reg .b64 start, now; mov.b32 rounds, 0; mov.b64 start, 0;",
    ]
    loads, looks, tags, faults = [], [], [], []
    for index in range(elements):
        at = {name: f"${place + index}" for name, place in first.items()}
        mask, tag, fault = f"mask{index}", f"tag{index}", at["fault"]
        vector = [at[word] for word in words]
        empty = dict.fromkeys(vector, sentinel)
        empty |= {at["lse"]: HEADER_SENTINEL, tag: HEADER_SENTINEL}
        missing = [
            f"setp.eq.or.b32 absent, {w}, {e}, absent;" for w, e in empty.items()
        ]
        lines += [
            f".reg .pred {mask}; .reg .b32 {tag}; mov.b32 {tag}, {at['tag']};",
            f"setp.ne.b32 {mask}, {at['mask']}, 0;",
            *(f"mov.b32 {word}, 0;" for word in [*vector, at["lse"]]),
        ]
        what = f"v4.b32 {{{', '.join(vector)}}}" if wide else f"b32 {vector[0]}"
        pair = f"v2.b32 {{{at['lse']}, {tag}}}"
        loads += [
            f"@{mask} ld.relaxed.sys.global.{what}, [{at['payload']}];",
            f"@{mask} ld.relaxed.sys.global.{pair}, [{at['header']}];",
        ]
        looks += missing
        tags += [
            f"setp.ne.b32 other, {tag}, {at['tag']}; or.pred failed, failed, other;",
            f"selp.b32 {fault}, {WRONG_TAG}, 0, other;",
        ]
        faults += ["setp.ne.b32 absent, rounds, rounds;", *missing]
        faults.append(f"@absent mov.b32 {fault}, {TIMEOUT};")
    lines += [
        "poll:",
        *loads,
        "setp.ne.b32 absent, rounds, rounds;",
        *looks,
        "mov.pred failed, absent; @!absent bra come;",
        "add.u32 rounds, rounds, 1;",
        f"and.b32 spoilt, rounds, {_ROUNDS - 1};",
        "setp.ne.b32 other, spoilt, 0; @other bra poll;",
        f"ld.relaxed.sys.global.b32 spoilt, [${first['status']}];",
        "mov.u64 now, %globaltimer;",
        "setp.eq.b64 other, start, 0; selp.b64 start, now, start, other;",
        f"sub.s64 now, now, start; setp.le.s64 other, now, ${first['limit']};",
        "setp.eq.and.b32 other, spoilt, 0, other; @other bra poll;",
        "come:",
        *tags,
        "@!absent bra meet;",
        *faults,
        "meet: bar.red.or.pred failed, 0, failed;",
    ]
    for index in range(elements):
        lines.append(f"selp.b32 ${first['failed'] + index}, 1, 0, failed;")
    kinds = ["=&r"] * len(results) + ["l", "l", "r", "r", "l", "l"]
    constraints = ",".join(kind for kind in kinds for _ in range(elements))
    return "{ " + " ".join(lines) + " }", constraints


@triton.jit
def await_messages(
    payload,
    header,
    mask,
    tag,
    status,
    limit,
    SENTINEL: tl.constexpr,
    WIDE: tl.constexpr,
    WAIT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    PACK: tl.constexpr,
):
    """Payload words, LSE, fault and failed of each message, come or given up.

    fault: 0, WRONG_TAG or TIMEOUT. failed: not 0 if any message of the program has a
    fault. No thread of the program returns before all have read. limit: nanoseconds,
    in the interpreter rounds. WAIT, CONSTRAINTS: await_assembly's for PACK elements.
    """
    if _INTERPRET:
        rounds = 0
        waits = True
        while waits:
            a, b, c, d = load_vector(payload, mask, WIDE)
            lse, seen = load_pair(header, mask)
            absent = (a == SENTINEL) | (b == SENTINEL) | (c == SENTINEL)
            absent = absent | (d == SENTINEL) | (lse == _HEADER) | (seen == _HEADER)
            rounds += 1
            spoilt = tl.load(as_pointer(status), volatile=True) != 0
            over = (rounds > limit) | spoilt
            waits = (tl.max(tl.max(absent.to(tl.int32), 0), 0) > 0) & (over == 0)
        fault = tl.where(mask & (seen != tag), _WRONG_TAG, 0)
        fault = tl.where(absent, _TIMEOUT, fault)
        failed = fault * 0 + tl.max(tl.max(fault, 0), 0)
    elif WIDE:
        a, b, c, d, lse, fault, failed = tl.inline_asm_elementwise(
            WAIT,
            CONSTRAINTS,
            [payload, header, mask.to(tl.int32), tag, status, limit],
            dtype=(tl.int32,) * 7,
            is_pure=False,
            pack=PACK,
        )
    else:
        a, lse, fault, failed = tl.inline_asm_elementwise(
            WAIT,
            CONSTRAINTS,
            [payload, header, mask.to(tl.int32), tag, status, limit],
            dtype=(tl.int32,) * 4,
            is_pure=False,
            pack=PACK,
        )
        b, c, d = a, a, a
    return a, b, c, d, lse, fault, failed


@triton.jit
def as_pointer(address):
    """An address in this rank's own bookkeeping as a pointer to words."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def element(word, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """Element ``INDEX`` of a word as fp32."""
    if DTYPE.primitive_bitwidth == 32:
        value = word.to(tl.float32, bitcast=True)
    elif DTYPE.is_bf16():
        high = word << 16 if INDEX == 0 else word & -65536
        value = high.to(tl.float32, bitcast=True)
    elif DTYPE.primitive_bitwidth == 16:
        half = (word >> (16 * INDEX)).to(tl.int16)
        value = half.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        byte = (word >> (8 * INDEX)).to(tl.int8)
        value = byte.to(DTYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def distance(count, size):
    """count * size, of two words, as 64 bits.

    In one instruction: with plain operations the compiler widens the factors first.
    """
    if _INTERPRET:
        product = count.to(tl.int64) * size
    else:
        product = tl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;",
            "=l,r,r",
            [count, size],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    return product


@triton.jit
def word_of_pair(low, high, DTYPE: tl.constexpr):
    """Two fp32 values rounded to a 16-bit DTYPE, as a word."""
    if _INTERPRET:
        word = element_bits(low, DTYPE) | (element_bits(high, DTYPE) << 16)
    else:
        # The plain conversion takes one value at a time, at a quarter of the rate.
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;"
            if DTYPE.is_bf16()
            else "cvt.rn.f16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return word


@triton.jit
def reciprocal(value):
    """1 / value for values from 1 to 16: no scaling, at most one ulp off."""
    if _INTERPRET:
        result = 1.0 / value
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def element_bits(value, DTYPE: tl.constexpr):
    """An fp32 value rounded to DTYPE, as the low bits of a word."""
    if DTYPE.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True)
    elif DTYPE.primitive_bitwidth == 16:
        bits = value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = value.to(DTYPE).to(tl.int8, bitcast=True).to(tl.int32) & 0xFF
    if tl.float8e5 == DTYPE:  # The conversion saturates.
        bits = tl.where(value == float("inf"), 0x7C, bits)
        bits = tl.where(value == float("-inf"), 0xFC, bits)
    return bits
