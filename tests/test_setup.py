"""Kinds of machines (tests/machines.py): which torch is set up, how many processes start, what the doctor advises."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import REPO
from machines import KINDS, RYZEN, Kind

from titan_mi100.attention.launches import candidates
from titan_mi100.errors import UserError
from titan_mi100.launch.machine_checks import PASS, judge
from titan_mi100.launch.wheels import AMD_WHEELS, PYTORCH_WHEELS, rocm_remedy
from titan_mi100.planning.hardware import count_gpus

pytestmark = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def chosen(root: Path, **settings: str) -> list[str]:
    """What setup_env.sh chooses below `root`: pip's arguments, and the line for the user."""
    chooses = f'eval "$(sed -n "/^_titan_torch() {{/,/^}}/p" {REPO}/scripts/setup_env.sh)"; _titan_torch "$1"'
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TITAN_")} | settings
    command = ["bash", "-euc", chooses, "-", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_torch_that_is_set_up_has_code_for_the_cards(kind: Kind, tmp_path: Path) -> None:
    kind.build(tmp_path)
    torch, words = chosen(tmp_path)
    assert torch == kind.torch and kind.words in words
    requirement, *index = torch.split()
    name = requirement.partition("==")[0]
    assert chosen(tmp_path, TITAN_TORCH="2.9.1")[0].split() == [f"{name}==2.9.1", *index]
    assert chosen(tmp_path, TITAN_TORCH_INDEX="https://a.b/c")[0] == f"{requirement} --index-url https://a.b/c"
    assert chosen(tmp_path, TITAN_TORCH_INDEX="")[0] == requirement  # the index that pip is configured for


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_container_may_have_a_card_of_any_number(kind: Kind, number: int, tmp_path: Path) -> None:
    if kind is not KINDS["laptop"]:
        return
    (tmp_path / "dev").mkdir()
    (tmp_path / f"dev/nvidia{number}").touch()
    assert "NVIDIA's cards" in chosen(tmp_path)[1] and count_gpus(tmp_path, {}) == 1


def test_a_process_starts_for_each_card_that_a_run_computes_on(kind: Kind, tmp_path: Path) -> None:
    kind.build(tmp_path)
    assert count_gpus(tmp_path, {}) == len(kind.archs)
    assert count_gpus(tmp_path, {"HIP_VISIBLE_DEVICES": "0,2"}) == min(len(kind.archs), 2)
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    if kind.amd and kind.nvidia:  # torch's build decides
        cards = sum(version != RYZEN for version in kind.amd)
        assert (count_gpus(tmp_path, {}, False), count_gpus(tmp_path, {}, True)) == (len(kind.nvidia), cards)


def test_the_doctor_advises_what_the_machine_lacks_and_nothing_else(kind: Kind, tmp_path: Path) -> None:
    facts = kind.facts(tmp_path)
    assert len(facts.visible()) == len(kind.archs)
    amd = [card.arch or "" for card in facts.visible() if card.vendor == "amd"]
    assert not amd or tuple(amd) == kind.archs
    objections = {result.name: f"{result.fact}\n{result.remedy}" for result in judge(facts) if result.state != PASS}
    assert objections.keys() == kind.advice.keys()
    assert all(words in objections[check] for check, words in kind.advice.items()), objections
    if "rocm" in kind.torch and amd != [""]:  # its remedy for a wrong torch is the torch that is set up
        of_amd = kind.torch.replace("==2.12.0", "").replace("torch[device-gfx1031]", "'torch[device-gfx1031]'")
        assert f"pip install {of_amd}" in rocm_remedy(amd).splitlines()
        assert kind.torch.partition("--index-url ")[2].startswith((PYTORCH_WHEELS, AMD_WHEELS))


WITHOUT_KERNELS = {"sm70", "gfx803", "gfx1031", ""}  # no matrix instructions for bf16; "": an old kernel does not say


def test_our_kernels_have_launches_for_the_cards(kind: Kind) -> None:
    for arch in {arch.replace("_", "") for arch in kind.archs}:
        if arch in WITHOUT_KERNELS:
            with pytest.raises(UserError, match="no launch for"):
                candidates(arch, 128, 2)
        else:
            assert candidates(arch, 128, 2)
