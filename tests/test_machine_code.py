"""The machine code that Triton makes of our kernels for AMD's cards, executed without one (machine_code/): MI100, and
what the emulator itself must notice. Other cards: test_machine_code_others.py.
"""

import itertools
import re
from collections import Counter

import pytest
import torch
from machine_code import faults
from machine_code.assembly import Program, Unknown
from machine_code.cases import BARS, DTYPES, VERSION, are_right, errors, launches, only_full, table
from machine_code.launches import compile_all, load
from machine_code.machine import Fault

from titan_mi100.attention.launches import Launch, Tile

SMALL = Launch(Tile(64, 32, 2, 1), Tile(64, 32, 8, 1), Tile(16, 64, 2, 1))


def test_a_launch_of_each_kernel_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_all(launches("gfx908", "bf16", 64, SMALL))
    found, _ = errors(compiled, SMALL, "bf16", 64, "reversed", monkeypatch)
    assert max(found.values()) <= BARS[torch.bfloat16], found


@pytest.mark.full
@pytest.mark.parametrize("kpack", [1, 2])
def test_the_launch_that_triton_miscompiles_is_found(kpack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """launches.options asks for kpack = 1 where a block is below 32: the other halves the gradients of v."""
    compiled = compile_all(launches("gfx908", "fp16", 64, SMALL, kpack))
    found, _ = errors(compiled, SMALL, "fp16", 64, "in turn", monkeypatch)
    is_wrong = kpack == 2 and VERSION in ("3.4.0", "3.6.0", "3.7.1")
    assert (found.pop("v") > 0.5) == is_wrong and max(found.values()) <= BARS[torch.float16]


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [*itertools.product(("bf16", "fp16"), (64, 128, 256)), pytest.param("fp32", 128, marks=only_full)],
)
def test_every_launch_is_right(dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    are_right("gfx908", dtype, head_dim, table("gfx908", dtype, head_dim), monkeypatch)


# Planted faults that nothing notices, since they change nothing: the barrier between reading delta from LDS and writing
# the queries there, which the first wave alone does; and the wait after a result's first rows are stored, which only
# a wave without such rows needs, where each tile has one of them. On gfx1100 the forward kernel waits before each part
# of the output for sums that a wave with rows in that part has waited for at the first part.
WAITS = ("s_waitcnt removed", "s_waitcnt for one operation less")
UNNOTICED = {"gfx908": Counter({"s_barrier removed": 1}), "gfx1100": Counter(WAITS * 2)}
UNNOTICED["gfx908"].update(WAITS * {"3.6.0": 3, "3.7.1": 1}.get(VERSION, 0))
ABSENT = {"gfx908": {"s_waitcnt_depctr removed"}, "gfx1100": set[str]()}


@only_full
@pytest.mark.parametrize(
    ("arch", "dtype", "launch", "most"), [("gfx908", "bf16", SMALL, 15), ("gfx1100", "fp16", None, 7)]
)
def test_planted_faults_are_noticed(
    arch: str, dtype: str, launch: Launch | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch or table(arch, dtype, 64)[0]
    _, emulated = errors(compile_all(launches(arch, dtype, 64, launch)), launch, dtype, 64, "at random", monkeypatch)
    outcomes = [outcome for kernel in emulated for outcome in faults.plant(kernel, BARS[DTYPES[dtype]], most)]
    left = Counter(outcome.kind for outcome in outcomes if not outcome.noticed)
    for kind in faults.KINDS:
        ours = [outcome for outcome in outcomes if outcome.kind == kind]
        by_result = sum(outcome.noticed == "result" for outcome in ours)
        print(f"{kind:39} {len(ours):3} planted, {left[kind]} not noticed, {by_result} noticed by the result")
    print(*(f"not noticed: {o.kind}, line {o.line}: {o.text}" for o in outcomes if not o.noticed), sep="\n")
    assert len(outcomes) >= 100 and {*faults.KINDS} - {outcome.kind for outcome in outcomes} <= ABSENT[arch]
    assert left <= UNNOTICED[arch]


def program(arch: str, *lines: str) -> Program:
    return load("\n\t".join([f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\nkernel:', *lines]))


def test_too_few_wait_states_are_noticed() -> None:
    load = "global_load_dword v4, v[0:1], off"
    for arch, first, second, least in (
        ("gfx908", "v_mfma_f32_16x16x16f16 a[0:3], v[0:1], v[2:3], 0", "v_accvgpr_read_b32 v9, a3", 10),
        ("gfx908", "v_mfma_f32_16x16x16f16 a[4:7], v[0:1], v[2:3], a[0:3]", "v_accvgpr_write_b32 a1, v9", 5),
        ("gfx908", "v_accvgpr_read_b32 v9, a0", "ds_write_b32 v8, v9", 2),
        ("gfx90a", "v_mfma_f32_16x16x16f16 v[4:7], v[0:1], v[2:3], 0", "v_mov_b32_e32 v9, v7", 11),
        ("gfx90a", "v_mfma_f32_16x16x8bf16 v[4:7], v0, v1, v[8:11]", "v_mov_b32_e32 v8, v0", 7),
        ("gfx942", "v_mfma_f32_16x16x16_f16 v[4:7], v[0:1], v[2:3], 0", "v_mov_b32_e32 v9, v7", 7),
        ("gfx942", "v_mfma_f32_16x16x4_f32 v[4:7], v0, v1, 0", "global_store_dword v[0:1], v7, off", 10),
        ("gfx942", "global_store_dwordx4 v[0:1], v[4:7], off", "v_mov_b32_e32 v4, v0", 2),
        ("gfx942", "v_cmp_lt_f32_e32 vcc, v0, v1", "v_cndmask_b32_e32 v0, v1, v2, vcc", 2),
        ("gfx90a", "v_cmp_lt_f32_e32 vcc, v0, v1", "v_div_fmas_f32 v0, v1, v2, v3", 4),
        (
            "gfx908",
            "global_load_dwordx2 v[0:1], v[0:1], off",
            load,
            1,
        ),  # with XNACK: may be done again, at another address
        ("gfx942", load, "global_store_dword v[2:3], v5, off", 1),
    ):
        for states in (least - 1, least):
            code = program(arch, first, *[f"s_nop {states - 1}"] * bool(states), second)
            wave = code.hazards(code)
            assert bool([wave.late(instruction) for instruction in code.instructions][-1]) == (states < least), second


def test_hazards_of_rdna3_are_noticed() -> None:
    product = "v_wmma_f32_16x16x16_f16 v[{0}], v[{1}], v[16:23], v[{0}]"
    power, use, between = "v_exp_f32_e32 v1, v0", "v_add_f32_e32 v2, v1, v1", "v_mov_b32_e32 v9, v8"
    chain = [product.format("0:7", "8:15"), product.format("24:31", "0:7")]
    permute = ["v_cmpx_gt_i32_e64 s1, v1", "v_permlanex16_b32 v2, v3, s2, s3 op_sel:[1,0]"]
    for arch, lines, is_late in (
        ("gfx1100", [power, use], True),
        ("gfx1151", [power, use], False),
        ("gfx1100", [power, "s_waitcnt_depctr 0xfff", use], False),
        ("gfx1100", [power, *[between] * 5, use], True),
        ("gfx1100", [power, *[between] * 6, use], False),
        ("gfx1100", [power, "v_dual_mov_b32 v4, v5 :: v_dual_mul_f32 v7, v1, v6"], True),
        ("gfx1100", chain, True),
        ("gfx1100", [chain[0], between, chain[1]], False),
        ("gfx1100", permute, True),
        ("gfx1100", [permute[0], between, permute[1]], False),
    ):
        code = program(arch, *lines)
        wave = code.hazards(code)
        assert bool([wave.late(instruction) for instruction in code.instructions][-1]) == is_late, lines


def test_both_halves_of_a_wave_of_rdna3_must_hold_the_same_factors() -> None:
    code = program("gfx1100", "v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], 0")
    wave = code.wave(0, None, None)
    code.instructions[0].run(wave)
    wave.v[256 + 9, 17] += 1
    with pytest.raises(Fault, match="both halves"):
        code.instructions[0].run(wave)


def test_what_the_emulator_does_not_know_is_an_error_that_names_it() -> None:
    program("gfx908", "v_add_f32_e32 v0, v1, v2")
    for line in (
        "v_frobnicate_b32 v0, v1",
        "v_add_f32_e64 v0, v1, v2 clamp",
        "v_add_u32_e64 v0, -v1, v2",
        "v_mov_b32_dpp v0, v1 row_newbcast:1 row_mask:0xf bank_mask:0xf",
        "global_load_dword v0, v[2:3], off glc",
        "ds_read_b32 v0, v1 gds",
        "v_mfma_f32_16x16x16f16 a[0:3], v[0:1], v[2:3], a[0:3] cbsz:1",
    ):
        with pytest.raises(Unknown, match=re.escape(line)):
            program("gfx908", line)
    program("gfx1100", "v_dual_mov_b32 v0, v1 :: v_dual_add_f32 v1, v0, v2")
    for line in (
        "v_dual_mov_b32 v0, v1 :: v_dual_frobnicate_b32 v1, v2",
        "v_permlanex16_b32 v0, v1, s0, s1",
        "v_add_f32_e64 v0, null, v1",
        "s_sendmsg sendmsg(MSG_INTERRUPT)",
        "s_waitcnt_depctr depctr_va_ssrc(0)",
        "s_waitcnt expcnt(0)",
        "global_load_b32 v0, v[2:3], off dlc",
    ):
        with pytest.raises(Unknown, match=re.escape(line)):
            program("gfx1100", line)
