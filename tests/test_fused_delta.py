"""The kernels of the delta rule's loops in Triton's interpreter, against the recurrence in fp64."""

from typing import Any

import pytest
import torch
from compile_report import Launched
from interpreted import DEVICE
from machine_code.launches import Call, Emulated, Fused, compile_all
from test_delta_rule import KEYS, Case, case, changed, errors
from test_fused_elementwise import drawn, gradients

from titan_mi100.model import delta_rule as rule
from titan_mi100.model.delta_rule import delta_rule, recurrence
from titan_mi100.model.fused import delta_launch, elementwise_launch
from titan_mi100.model.fused.running import only

DOCUMENTS = [15, 2, 30, 1, 17]  # chunks of 16 and 32 end inside and between them


def run(some: Case, chunk: int = 32, kinds: tuple[str, ...] = ("delta",)) -> list[torch.Tensor]:
    with only(kinds):
        return some.to(torch.float32).run(delta_rule, chunk=chunk)


@pytest.mark.parametrize(
    ("sizes", "chunk", "rows", "heads", "group", "keys"),
    [
        *(((32, 16), 32, 1, 1, 2, keys) for keys in KEYS),
        ((64, 32), 32, 2, 1, 1, "alike"),
        pytest.param((32, 64), 64, 1, 2, 1, "alike", marks=pytest.mark.full),
        pytest.param((32, 16), 32, 2, 2, 3, "alike", marks=pytest.mark.full),
    ],
)
def test_the_kernels_equal_the_recurrence(
    sizes: tuple[int, int], chunk: int, rows: int, heads: int, group: int, keys: str
) -> None:
    some = case(DOCUMENTS, keys, rows=rows, heads=heads, group=group, sizes=sizes)
    ours, expected = run(some, chunk), some.run(recurrence)
    assert max(errors(ours, expected)) <= 2e-6
    assert all(torch.equal(*pair) for pair in zip(ours, run(some, chunk), strict=True))
    assert not all(torch.equal(*pair) for pair in zip(ours, run(some, chunk, ()), strict=True))  # they did run


QUICK = (1, 17, 65)


@pytest.mark.parametrize(
    "seq",
    [
        pytest.param(n, marks=[pytest.mark.full] * (n not in QUICK))
        for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 300)
    ],
)
def test_lengths(seq: int) -> None:
    """One document, and two, of which the second starts at each third; with all keys, from no decay to none left."""
    for keys in KEYS:
        for lengths in ([seq], [seq // 3, seq - seq // 3]) if seq > 2 else ([seq],):
            some = case(lengths, keys, heads=2, group=1, sizes=(32, 16))
            assert max(errors(run(some), some.run(recurrence))) <= 2e-6, (keys, lengths)


@pytest.mark.parametrize("log", [0.0, -1e-30, -200.0, -1e4])
def test_extremes_of_decay(log: float) -> None:
    some = case([15, 2, 20], "alike", heads=1, group=1, sizes=(32, 16))
    some.inputs[3].fill_(log)
    assert max(errors(run(some), some.run(recurrence))) <= 2e-6
    some.inputs[3][:, ::3] = 0.0
    assert max(errors(run(some), some.run(recurrence))) <= 2e-6


@pytest.mark.parametrize("lengths", [DOCUMENTS, [32, 20, 13], [65]])
def test_parts_of_a_row_pass_the_state_on(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """But not to a document that starts with a part."""
    some = case(lengths, "alike", sizes=(32, 16), heads=1)
    monkeypatch.setattr(rule, "tokens_at_once", lambda *_: 32)
    assert max(errors(run(some), some.run(recurrence))) <= 2e-6


def test_no_bit_of_a_document_depends_on_another() -> None:
    some = case(DOCUMENTS, "alike", sizes=(32, 16), heads=1)
    part = slice(17, 47)  # the third document
    ours, others = run(some), run(changed(some, slice(0, 17)))
    assert not torch.equal(ours[0], others[0])
    assert all(
        torch.equal(a[:, part], b[:, part]) for a, b in zip(ours[:1] + ours[2:7], others[:1] + others[2:7], strict=True)
    )


def test_other_sizes_have_the_plain_forms_bits() -> None:
    for sizes, chunk in (((16, 16), 32), ((48, 16), 32), ((32, 8), 32), ((32, 16), 16)):
        some = case(DOCUMENTS, sizes=sizes)
        assert all(torch.equal(*pair) for pair in zip(run(some, chunk), run(some, chunk, ()), strict=True)), sizes


def check_gates(dtype: torch.dtype) -> None:
    """Against the plain form in fp64; a from where the softplus is e^x to where it is x."""
    a, b = torch.linspace(-40, 40, 2 * 37 * 6).view(2, 37, 6).to(dtype), drawn(2, 37, 6, dtype=dtype, seed=1)
    inputs, computed = [a, b, drawn(6), drawn(6, seed=1)], []
    for wide in (torch.float64, torch.float32):
        with only(["delta"]):
            leaves = [x.double() if wide == torch.float64 else x for x in inputs]
            computed.append(gradients(lambda *leaves: rule.gates(*leaves), leaves))
    for ours, expected in zip(computed[1], computed[0], strict=True):
        bar = torch.finfo(ours.dtype).eps * 8
        assert ((ours.double() - expected).abs() <= bar * (expected.abs() + expected.abs().max() * 1e-3)).all()
    assert computed[1][0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates(dtype: torch.dtype) -> None:
    check_gates(dtype)


@pytest.mark.full
def test_the_trial_finds_nothing_wrong_here_and_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rule.trial(DEVICE, torch.bfloat16) == ""
    launch = delta_launch.launch

    def wrong(kernel: Any, programs: tuple[int, ...], state: torch.Tensor, *arguments: Any, **constants: Any) -> None:
        launch(kernel, programs, state, *arguments, **constants)
        if kernel.__name__ == "outputs_kernel":
            arguments[8].mul_(1 + 1e-4)

    monkeypatch.setattr(delta_launch, "launch", wrong)
    assert (
        rule.trial(DEVICE, torch.bfloat16) == "the delta rule differs from that of plain operations, with random keys"
    )


@pytest.mark.parametrize("arch", ["gfx908", "gfx90a"])
def test_the_machine_code_is_right(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[str]()

    def execute(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        (compiled,) = compile_all([Fused(arch, Launched.of(kernel, arguments, constants))])
        Emulated(compiled, "reversed").run(Call(programs, arguments))
        ran.append(kernel.__name__)

    for module in (delta_launch, elementwise_launch):
        monkeypatch.setattr(module, "launch", execute)
    monkeypatch.setattr(delta_launch, "tile_of", lambda _: delta_launch.tile(arch))
    some = case([13, 4, 20], "alike", heads=1, group=2, sizes=(32, 16))
    assert max(errors(run(some), some.run(recurrence))) <= 2e-6
    backward = ["read", "states_gradient", "pairs_gradient", "keys_gradient", "decays_gradient"]
    expected = ["chunks", "states", "outputs", "chunks", *backward]
    assert ran == [f"{name}_kernel" for name in expected]
    check_gates(torch.float32)
    assert ran[len(expected) :] == ["gates_kernel", "gates_gradient_kernel", "sum_kernel"]
