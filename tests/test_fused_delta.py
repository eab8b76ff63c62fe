"""The kernels of the delta rule's loops in Triton's interpreter, against the recurrence in fp64."""

from typing import Any

import pytest
import torch
from compile_report import Launched
from interpreted import DEVICE
from machine_code.launches import Call, Emulated, Fused, compile_all
from test_delta_rule import KEYS, Case, case, changed, errors

from titan_mi100.model import delta_rule as rule
from titan_mi100.model.delta_rule import delta_rule, recurrence
from titan_mi100.model.fused import delta_launch
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


@pytest.mark.full
def test_the_trial_finds_nothing_wrong_here_and_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rule.trial(DEVICE, torch.bfloat16) == ""
    states = delta_launch.forward_states
    monkeypatch.setattr(delta_launch, "forward_states", lambda *inputs: [x * (1 + 1e-4) for x in states(*inputs)])
    assert rule.trial(DEVICE, torch.bfloat16) == "the delta rule differs from fp64 with random keys"


def test_the_machine_code_for_an_mi100_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[str]()

    def execute(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        (compiled,) = compile_all([Fused("gfx908", Launched.of(kernel, arguments, constants))])
        Emulated(compiled, "reversed").run(Call(programs, arguments))
        ran.append(kernel.__name__)

    monkeypatch.setattr(delta_launch, "launch", execute)
    monkeypatch.setattr(delta_launch, "tile_of", lambda _: delta_launch.tile("gfx908"))
    some = case([13, 4, 20], "alike", heads=1, group=2, sizes=(32, 16))
    assert max(errors(run(some), some.run(recurrence))) <= 2e-6
    forward = ["prepare_kernel", "inverse_kernel"]
    gradients = ["read_kernel", "states_gradient_kernel", "pairs_gradient_kernel", "keys_gradient_kernel"]
    assert ran == [*forward, "states_kernel", *forward, *gradients]
