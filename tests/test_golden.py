"""Whole graphs before and after the pass, for a few spellings, as text.

The text is harness.normalised: op names, shapes and constants, no node names. It is
the same on every torch; ``EXPECTTEST_ACCEPT=1`` writes it anew.
"""

from __future__ import annotations

import corpus
import torch
from corpus import Entry
from expecttest import TestCase
from harness import captured, fake_world, normalised
from versions import since_2_13


@since_2_13("its graphs have their inputs in another order")
class GoldenGraphs(TestCase):
    maxDiff = None

    def graphs(self, entry: Entry) -> tuple[str, str]:
        o = torch.zeros(entry.num_tokens, entry.num_heads, entry.head_dim)
        lse = torch.zeros(entry.num_tokens, entry.num_heads)
        args = corpus.arguments(entry, o, lse)
        if entry.dynamic:
            for tensor in args:
                torch._dynamo.mark_dynamic(tensor, 0)
        with fake_world() as groups:
            found = captured(corpus.exchange(entry, groups[entry.group_key]), args)
            return normalised(found.before), normalised(found.after)

    def test_packed_bytes(self):
        entry = Entry("", head_dim=8, guard="where")
        before, after = self.graphs(entry)
        self.assertExpectedInline(
            before,
            """\
%0: float32[3, 4] = input
%1: bfloat16[3, 4, 8] = input
%2: bfloat16[3, 2, 2, 8] = reshape(%1, [3, 2, 2, 8])
%3: bfloat16[2, 3, 2, 8] = permute(%2, [1, 0, 2, 3])
%4: bfloat16[2, 3, 2, 8] = clone(%3)
%5: uint8[2, 3, 2, 16] = view(%4, uint8)
%6: float32[3, 4, 1] = unsqueeze(%0, -1)
%7: float32[3, 2, 2, 1] = reshape(%6, [3, 2, 2, 1])
%8: float32[2, 3, 2, 1] = permute(%7, [1, 0, 2, 3])
%9: float32[2, 3, 2] = squeeze(%8, -1)
%10: float32[2, 3, 2, 1] = unsqueeze(%9, -1)
%11: float32[2, 3, 2, 1] = clone(%10)
%12: uint8[2, 3, 2, 4] = view(%11, uint8)
%13: uint8[2, 3, 2, 20] = cat([%5, %12], -1)
%14: uint8[2, 3, 2, 20] = all_to_all_single(%13, [1, 1], [1, 1], GROUP)
%15: uint8[2, 3, 2, 20] = wait_tensor(%14)
%16: uint8[2, 3, 2, 4] = slice(%15, 3, 16, end)
%17: uint8[2, 3, 2, 4] = clone(%16)
%18: float32[2, 3, 2, 1] = view(%17, float32)
%19: float32[2, 3, 2] = squeeze(%18, -1)
%20: float32[1, 3, 2] = amax(%19, [0], True)
%21: bool[1, 3, 2] = eq(%20, -inf)
%22: float32[1, 3, 2] = full([1, 3, 2], 0)
%23: float32[1, 3, 2] = where(%21, %22, %20)
%24: float32[2, 3, 2] = sub(%19, %23)
%25: float32[2, 3, 2] = exp2(%24)
%26: float32[2, 3, 2, 1] = unsqueeze(%25, -1)
%27: uint8[2, 3, 2, 16] = slice(%15, 3, 0, 16)
%28: uint8[2, 3, 2, 16] = clone(%27)
%29: bfloat16[2, 3, 2, 8] = view(%28, bfloat16)
%30: float32[2, 3, 2, 8] = convert_element_type(%29, float32)
%31: float32[2, 3, 2, 8] = mul(%26, %30)
%32: float32[3, 2, 8] = sum(%31, [0])
%33: float32[3, 2] = sum(%25, [0])
%34: float32[3, 2] = clamp_min(%33, 1.0)
%35: float32[3, 2, 1] = unsqueeze(%34, -1)
%36: float32[3, 2, 8] = div(%32, %35)
%37: bfloat16[3, 2, 8] = convert_element_type(%36, bfloat16)
return [%37]""",
        )
        self.assertExpectedInline(
            after,
            """\
%0: float32[3, 4] = input
%1: bfloat16[3, 4, 8] = input
%2: bfloat16[3, 2, 8] = a2a_lse_reduce(%1, %0, GROUP, 2, base2)
return [%2]""",
        )

    def test_two_exchanges_with_merged_lse(self):
        entry = Entry(
            "",
            pack="two",
            spelled="exp",
            guard="where",
            head_dim=8,
            with_lse="returned",
            wire="in place",
        )
        before, after = self.graphs(entry)
        self.assertExpectedInline(
            before,
            """\
%0: float32[3, 4] = input
%1: bfloat16[3, 4, 8] = input
%2: bfloat16[2, 3, 2, 8] = empty([2, 3, 2, 8])
%3: bfloat16[3, 2, 2, 8] = reshape(%1, [3, 2, 2, 8])
%4: bfloat16[2, 3, 2, 8] = permute(%3, [1, 0, 2, 3])
%5: bfloat16[2, 3, 2, 8] = clone(%4)
%6: bfloat16[2, 3, 2, 8] = all_to_all_single(%5, [1, 1], [1, 1], GROUP)
%7: float32[2, 3, 2] = empty([2, 3, 2])
%8: float32[3, 4, 1] = unsqueeze(%0, -1)
%9: float32[3, 2, 2, 1] = reshape(%8, [3, 2, 2, 1])
%10: float32[2, 3, 2, 1] = permute(%9, [1, 0, 2, 3])
%11: float32[2, 3, 2] = squeeze(%10, -1)
%12: float32[2, 3, 2] = clone(%11)
%13: float32[2, 3, 2] = all_to_all_single(%12, [1, 1], [1, 1], GROUP)
%14: float32[2, 3, 2] = wait_tensor(%13)
%15: float32[1, 3, 2] = amax(%14, [0], True)
%16: bool[1, 3, 2] = eq(%15, -inf)
%17: float32[1, 3, 2] = full([1, 3, 2], 0)
%18: float32[1, 3, 2] = where(%16, %17, %15)
%19: float32[2, 3, 2] = sub(%14, %18)
%20: float32[2, 3, 2] = exp(%19)
%21: float32[2, 3, 2, 1] = unsqueeze(%20, -1)
%22: bfloat16[2, 3, 2, 8] = wait_tensor(%6)
%23: float32[2, 3, 2, 8] = convert_element_type(%22, float32)
%24: float32[2, 3, 2, 8] = mul(%21, %23)
%25: float32[3, 2, 8] = sum(%24, [0])
%26: float32[3, 2] = sum(%20, [0])
%27: float32[3, 2] = clamp_min(%26, 1.0)
%28: float32[3, 2, 1] = unsqueeze(%27, -1)
%29: float32[3, 2, 8] = div(%25, %28)
%30: bfloat16[3, 2, 8] = convert_element_type(%29, bfloat16)
%31: float32[3, 2] = squeeze(%15, 0)
%32: float32[3, 2] = sum(%20, [0])
%33: float32[3, 2] = log(%32)
%34: float32[3, 2] = add(%31, %33)
return [%30, %34]""",
        )
        self.assertExpectedInline(
            after,
            """\
%0: float32[3, 4] = input
%1: bfloat16[3, 4, 8] = input
%2: bfloat16[2, 3, 2, 8] = empty([2, 3, 2, 8])
%3: float32[2, 3, 2] = empty([2, 3, 2])
%4: tuple = a2a_lse_reduce_with_lse(%1, %0, GROUP, 2, basee)
%5: bfloat16[3, 2, 8] = getitem(%4, 0)
%6: float32[3, 2] = getitem(%4, 1)
return [%5, %6]""",
        )

    def test_dynamic_batch(self):
        entry = Entry(
            "",
            pack="fp32 tail",
            head_dim=8,
            dynamic=True,
            num_tokens=4,
            dtype=torch.float16,
        )
        before, after = self.graphs(entry)
        self.assertExpectedInline(
            before,
            """\
%0: size = input
%1: float32[s0, 4] = input
%2: size = input
%3: float16[s0, 4, 8] = input
%4: float16[s0, 2, 2, 8] = reshape(%3, [%0, 2, 2, 8])
%5: float16[2, s0, 2, 8] = permute(%4, [1, 0, 2, 3])
%6: float32[2, s0, 2, 8] = convert_element_type(%5, float32)
%7: float32[s0, 4, 1] = unsqueeze(%1, -1)
%8: float32[s0, 2, 2, 1] = reshape(%7, [%0, 2, 2, 1])
%9: float32[2, s0, 2, 1] = permute(%8, [1, 0, 2, 3])
%10: float32[2, s0, 2] = squeeze(%9, -1)
%11: float32[2, s0, 2, 1] = unsqueeze(%10, -1)
%12: float32[2, s0, 2, 9] = cat([%6, %11], -1)
%13: float32[2, s0, 2, 9] = all_to_all_single(%12, [1, 1], [1, 1], GROUP)
%14: float32[2, s0, 2, 9] = wait_tensor(%13)
%15: float32[2, s0, 2] = select(%14, 3, -1)
%16: float32[1, s0, 2] = amax(%15, [0], True)
%17: float32[2, s0, 2] = sub(%15, %16)
%18: float32[2, s0, 2] = exp2(%17)
%19: float32[2, s0, 2, 1] = unsqueeze(%18, -1)
%20: float32[2, s0, 2, 8] = slice(%14, 3, 0, -1)
%21: float32[2, s0, 2, 8] = mul(%19, %20)
%22: float32[s0, 2, 8] = sum(%21, [0])
%23: float32[s0, 2] = sum(%18, [0])
%24: float32[s0, 2, 1] = unsqueeze(%23, -1)
%25: float32[s0, 2, 8] = div(%22, %24)
%26: float16[s0, 2, 8] = convert_element_type(%25, float16)
return [%26]""",
        )
        self.assertExpectedInline(
            after,
            """\
%0: size = input
%1: float32[s0, 4] = input
%2: size = input
%3: float16[s0, 4, 8] = input
%4: float16[s0, 2, 8] = a2a_lse_reduce(%3, %1, GROUP, 2, base2)
return [%4]""",
        )

    def test_several_tokens_a_sequence(self):
        entry = Entry(
            "",
            layout="bqhd",
            pack="two",
            head_dim=8,
            num_tokens=6,
            num_ranks=4,
            num_heads=8,
            spelled="exp2 of log2(e)",
        )
        before, after = self.graphs(entry)
        self.assertExpectedInline(
            before,
            """\
%0: float32[3, 2, 8] = input
%1: bfloat16[3, 2, 8, 8] = input
%2: bfloat16[3, 2, 4, 2, 8] = reshape(%1, [3, 2, 4, 2, 8])
%3: bfloat16[4, 3, 2, 2, 8] = permute(%2, [2, 0, 1, 3, 4])
%4: bfloat16[4, 3, 2, 2, 8] = clone(%3)
%5: bfloat16[4, 3, 2, 2, 8] = all_to_all_single(%4, [1, 1, 1, 1], [1, 1, 1, 1], GROUP)
%6: float32[3, 2, 8, 1] = unsqueeze(%0, -1)
%7: float32[3, 2, 4, 2, 1] = reshape(%6, [3, 2, 4, 2, 1])
%8: float32[4, 3, 2, 2, 1] = permute(%7, [2, 0, 1, 3, 4])
%9: float32[4, 3, 2, 2] = squeeze(%8, -1)
%10: float32[4, 3, 2, 2] = clone(%9)
%11: float32[4, 3, 2, 2] = all_to_all_single(%10, [1, 1, 1, 1], [1, 1, 1, 1], GROUP)
%12: float32[4, 3, 2, 2] = wait_tensor(%11)
%13: float32[1, 3, 2, 2] = amax(%12, [0], True)
%14: float32[4, 3, 2, 2] = sub(%12, %13)
%15: float32[4, 3, 2, 2] = mul(%14, 1.4426950408889634)
%16: float32[4, 3, 2, 2] = exp2(%15)
%17: float32[4, 3, 2, 2, 1] = unsqueeze(%16, -1)
%18: bfloat16[4, 3, 2, 2, 8] = wait_tensor(%5)
%19: float32[4, 3, 2, 2, 8] = convert_element_type(%18, float32)
%20: float32[4, 3, 2, 2, 8] = mul(%17, %19)
%21: float32[3, 2, 2, 8] = sum(%20, [0])
%22: float32[3, 2, 2] = sum(%16, [0])
%23: float32[3, 2, 2, 1] = unsqueeze(%22, -1)
%24: float32[3, 2, 2, 8] = div(%21, %23)
%25: bfloat16[3, 2, 2, 8] = convert_element_type(%24, bfloat16)
return [%25]""",
        )
        self.assertExpectedInline(
            after,
            """\
%0: float32[3, 2, 8] = input
%1: bfloat16[3, 2, 8, 8] = input
%2: bfloat16[6, 8, 8] = reshape(%1, [6, 8, 8])
%3: float32[6, 8] = reshape(%0, [6, 8])
%4: bfloat16[6, 2, 8] = a2a_lse_reduce(%2, %3, GROUP, 4, basee)
%5: bfloat16[3, 2, 2, 8] = reshape(%4, [3, 2, 2, 8])
return [%5]""",
        )
