"""Reading a machine, also where its files are missing or hold nonsense; both branches of each check."""

import os
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from machines import build, facts_of, load

from titan_mi100.device.compiler import cannot_compile
from titan_mi100.launch import machine_checks as checks
from titan_mi100.launch import torch_build
from titan_mi100.launch.machine_checks import FAIL, PASS, WARN
from titan_mi100.launch.machine_facts import Facts, System, read
from titan_mi100.launch.torch_build import Torch
from titan_mi100.launch.wheels import AMD_ARCHS
from titan_mi100.planning.cards import CARDS
from titan_mi100.planning.hardware import count_gpus

NODE = "sys/class/kfd/kfd/topology/nodes/1"
CARD = "sys/devices/pci0000:20/0000:20:01.1/0000:21:00.0/0000:22:00.0/0000:23:00.0"


def test_a_card_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    facts = facts_of(load("mi100"), tmp_path)
    first, second = facts.cards
    assert (first.vendor, first.name, first.arch) == ("amd", "MI100", "gfx908")
    assert (first.address, first.device_file) == ("0000:23:00.0", "/dev/dri/renderD128")
    assert (second.address, second.device_file) == ("0000:83:00.0", "/dev/dri/renderD129")
    assert first.iommu == "identity"
    assert (facts.kernel, facts.driver, facts.rocm) == ("6.8.0-48-generic", "6.12.12", "6.4.1")
    assert facts.groups == ("user", "sudo", "video", "render")
    assert [file.path for file in facts.device_files] == ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"]


@pytest.mark.parametrize(
    ("version", "simds", "arch", "name"),
    [("90008", "480", "gfx908", "MI100"), ("90010", "416", "gfx90a", "MI210 or half an MI250"),
     ("110000", "96", "gfx1100", "gfx1100"), ("0", "480", None, "unknown AMD GPU")],
)  # fmt: skip
def test_an_architecture_is_named_as_the_compiler_names_it(
    version: str, simds: str, arch: str | None, name: str, tmp_path: Path
) -> None:
    machine = load("mi100")
    lines = f"simd_count {simds}\nsimd_per_cu 4\ngfx_target_version {version}\nlocation_id 8960"
    machine["files"][f"{NODE}/properties"] = lines
    card = facts_of(machine, tmp_path).cards[0]
    assert (card.arch, card.name, card.address) == (arch, name, "0000:23:00.0")


def test_an_nvidia_card_is_read_from_its_drivers_files(tmp_path: Path) -> None:
    facts = facts_of(load("h100"), tmp_path)
    (card,) = facts.cards
    assert (card.vendor, card.name, card.arch) == ("nvidia", "NVIDIA H100 80GB HBM3", None)
    assert (card.device_file, card.address) == ("/dev/nvidia0", "0000:1b:00.0")
    assert facts.driver == "580.95.05"
    parts = checks.visibility(replace(facts, environ={"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}))  # of the one card
    assert parts is not None and parts.state == PASS


NONSENSE = (b"", b"garbage", b"\xff\0\x1b[31m" * 9, b"9" * 5000, b"-1", b"simd_count x\nlocation_id 99999999")


@pytest.mark.parametrize("name", [pytest.param("mi100", marks=pytest.mark.full), "h100", "laptop"])
def test_no_file_that_is_missing_empty_or_full_of_nonsense_stops_the_reading(name: str, tmp_path: Path) -> None:
    machine = load(name)
    for number, path in enumerate(machine["files"]):
        if path.startswith("dev/"):
            continue
        root = tmp_path / str(number)
        build(machine, root)
        file = root / path
        for content in NONSENSE:
            file.write_bytes(content)
            found = replace(read(replace_root(machine, root)), torch=Torch("2.8.0"))
            assert all(verdict.fact for verdict in checks.judge(found))
        file.unlink()
        checks.judge(read(replace_root(machine, root)))
        file.mkdir()  # cannot be read, whoever asks
        checks.judge(read(replace_root(machine, root)))
        shutil.rmtree(root)


def replace_root(machine: dict[str, Any], root: Path) -> System:
    """The machine as it is below `root` now."""
    return build({**machine, "files": {}, "links": {}}, root)


def test_what_is_not_known_is_not_judged(tmp_path: Path) -> None:
    """An empty root: no card, nothing known, so nothing that could fail but torch and the limits."""
    facts = read(System(tmp_path, {}, group_of=lambda path: "", free_bytes=lambda path: path.stat().st_size))
    assert (facts.cards, facts.device_files, facts.kernel, facts.shm_free) == ((), (), "", None)
    assert [verdict.name for verdict in checks.judge(replace(facts, torch=Torch("2.8.0")))] == ["torch"]
    machine = load("mi100")
    machine["files"] = {path: text for path, text in machine["files"].items() if path.startswith((NODE, "dev/"))}
    found = facts_of({**machine, "links": {}}, tmp_path)
    (card,) = found.cards
    assert card.iommu is None
    judged = {verdict.name for verdict in checks.judge(found)}
    assert "IOMMU" not in judged


def test_this_machine_is_read_as_the_system_calls_say() -> None:
    facts = read()
    assert facts.kernel == os.uname().release
    assert facts.groups and facts.torch.version
    assert len(facts.visible()) >= count_gpus() or count_gpus() == 0


def test_owner_permission_and_space_of_a_real_file(tmp_path: Path) -> None:
    file, system = tmp_path / "file", System()
    file.write_text("")
    assert system.group_of(file) and system.may_use(file) and system.free_bytes(tmp_path) > 0
    file.chmod(0)
    assert system.may_use(file) == (os.geteuid() == 0)
    with pytest.raises(OSError):
        system.group_of(tmp_path / "none")


HEALTHY = load("mi100")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of(HEALTHY, tmp_path_factory.mktemp("mi100"))


def with_card(**changes: object) -> Callable[[Facts], Facts]:
    """The second card is another one than the first."""
    return lambda facts: replace(facts, cards=(facts.cards[0], replace(facts.cards[1], **changes)))


def with_cards(**changes: object) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, cards=tuple(replace(card, **changes) for card in facts.cards))


def with_torch(**changes: object) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, torch=replace(facts.torch, **changes))


def of_geforce(**torch: object) -> Callable[[Facts], Facts]:
    """The cards are GeForce of the series without P2P, and the driver is older than CUDA 13."""
    cards = with_cards(vendor="nvidia", name="NVIDIA GeForce RTX 4090", arch=None, use="always")
    return lambda facts: replace(cards(facts), driver="570.86", torch=Torch("2.13.0", **{"cuda": "12.6", **torch}))  # type: ignore[arg-type]


def changed(**changes: object) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, **changes)


def with_environ(**variables: str) -> Callable[[Facts], Facts]:
    return changed(environ=variables)


def with_files(*numbers: int, **changes: object) -> Callable[[Facts], Facts]:
    """Some device files, of which 0 is /dev/kfd, are others."""

    def files(facts: Facts) -> Any:
        return (replace(file, **changes if n in numbers else {}) for n, file in enumerate(facts.device_files))

    return lambda facts: replace(facts, device_files=tuple(files(facts)))


CASES: list[tuple[checks.Check, Callable[[Facts], Facts], str | None, str]] = [
    (checks.torch_build, with_torch(version=""), FAIL, "not installed"),
    (checks.torch_build, with_torch(version="", problem="/x/version.py cannot be read"), FAIL, "cannot be read"),
    (checks.torch_build, lambda facts: replace(facts, cards=(), torch=Torch()), None, ""),
    (checks.torch_build, lambda facts: replace(facts, cards=(), torch=Torch(problem="no torch")), FAIL, "no torch"),
    (checks.torch_build, with_torch(hip=None), FAIL, "built for the CPU alone; it cannot use 2 x MI100 (gfx908)"),
    (checks.torch_build, with_torch(usable=None), PASS, "2.8.0+rocm6.4, built for ROCm 6.4.43482-0f2d60242"),
    (checks.torch_build, with_torch(usable=0, problem="No HIP GPUs"), FAIL, "2 x MI100 (gfx908): No HIP GPUs"),
    (checks.torch_build, with_torch(usable=None, problem="was killed by SIGSEGV"), FAIL, "was killed by SIGSEGV"),
    (checks.torch_build, with_torch(usable=1), WARN, "sees 1 of 2 visible cards"),
    (checks.torch_build, with_environ(HIP_VISIBLE_DEVICES="-1"), PASS, "hidden from it, so it computes on the CPU"),
    (checks.torch_build, of_geforce(cuda="13.0", usable=0), FAIL, "RTX 4090: it does not say why"),
    (checks.driver, changed(driverless=("MI100 at 0000:43",)), FAIL, "MI100 at 0000:43 without a compute driver"),
    (checks.driver, lambda facts: replace(facts, cards=()), None, ""),
    (checks.driver, changed(rocm=""), PASS, "Linux 6.8.0-48-generic, driver 6.12.12"),
    (checks.architecture, with_torch(archs=("gfx90a",)), FAIL, "gfx908: torch has code for gfx90a only"),
    (checks.architecture, with_torch(archs=None, blas_archs=("gfx90a",)), FAIL, "rocBLAS in torch has code for gfx90a"),
    (checks.architecture, with_torch(archs=None, blas_archs=None), None, ""),
    (checks.architecture, with_card(arch="gfx1036"), FAIL, "gfx1036: torch has code for"),
    (checks.gfx_override, with_environ(HSA_OVERRIDE_GFX_VERSION="9.0.8"), PASS, "equals the cards' own architecture"),
    (checks.gfx_override, with_environ(HSA_OVERRIDE_GFX_VERSION="9.0.10"), FAIL, "gfx908 run code of gfx90a"),
    (checks.gfx_override, with_environ(HSA_OVERRIDE_GFX_VERSION="gfx90a"), FAIL, "is not a version such as 9.0.8"),
    (checks.gfx_override, with_environ(), None, ""),
    (checks.visibility, with_environ(), PASS, "2 of 2; no variable hides a card"),
    (checks.visibility, with_environ(ROCR_VISIBLE_DEVICES="1"), PASS, "1 of 2; ROCR_VISIBLE_DEVICES=1"),
    (checks.visibility, with_environ(CUDA_VISIBLE_DEVICES=""), PASS, "0 of 2; CUDA_VISIBLE_DEVICES="),
    (checks.visibility, with_environ(HIP_VISIBLE_DEVICES="0,-1"), PASS, "1 of 2"),
    (checks.visibility, with_environ(CUDA_VISIBLE_DEVICES="0,2,1"), FAIL, "entry '2' names none of 2 cards"),
    (checks.visibility, with_environ(ROCR_VISIBLE_DEVICES="GPU-4b2c"), PASS, "1 of 2"),
    (checks.visibility, with_environ(ROCR_VISIBLE_DEVICES="GPU-4b2c,none"), FAIL, "entry 'none' names none of 2"),
    (checks.visibility, with_environ(ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="1"), FAIL, "none of 1 cards"),
    (checks.visibility, with_environ(ROCR_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="0,1"), WARN, "set twice"),
    (checks.visibility, with_environ(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1"), WARN, "1 of 2"),
    (checks.visibility, with_environ(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="0"), PASS, "1 of 2"),
    (checks.visibility, with_environ(GPU_DEVICE_ORDINAL="0", HIP_VISIBLE_DEVICES="0"), WARN, "set twice"),
    (checks.visibility, with_environ(CUDA_VISIBLE_DEVICES="\N{ARABIC-INDIC DIGIT ONE}"), FAIL, "names none of 2 cards"),
    (checks.device_files, with_files(0, usable=False), FAIL, "kfd: no permission; group render, you are in user"),
    (checks.device_files, with_files(0, usable=False, group="root"), FAIL, "group root"),
    (checks.device_files, with_files(0, exists=False, usable=False), FAIL, "/dev/kfd: missing"),
    (checks.device_files, with_files(1, exists=False, usable=False), WARN, "/dev/dri/renderD128: missing"),
    (checks.device_files, with_files(1, 2, exists=False), FAIL, "renderD128, /dev/dri/renderD129: missing"),
    (checks.device_files, with_files(2, usable=False), FAIL, "/dev/dri/renderD129: no permission"),
    (
        checks.own_graphics,
        with_card(arch="gfx1036", name="gfx1036", use="never"),
        WARN,
        "1 x gfx1036 is inside the pro",
    ),
    (checks.own_graphics, with_cards(use="alone"), None, ""),
    (checks.nccl_algo, with_environ(NCCL_ALGO="Ring"), PASS, "NCCL_ALGO=Ring"),
    (checks.nccl_algo, with_environ(NCCL_ALGO="Ring,Tree"), PASS, "NCCL_ALGO=Ring,Tree"),
    (checks.nccl_algo, with_environ(NCCL_ALGO="Tree"), FAIL, "no algorithm for all-gather"),
    (checks.nccl_algo, with_environ(NCCL_ALGO="^Tree"), PASS, "NCCL_ALGO=^Tree"),
    (checks.nccl_algo, with_environ(NCCL_ALGO="ring;allreduce:tree"), PASS, "NCCL_ALGO=ring;allreduce:tree"),
    (checks.nccl_algo, with_environ(), None, ""),
    (checks.iommu, with_cards(iommu="identity"), PASS, "passes addresses through"),
    (checks.iommu, with_cards(iommu=""), PASS, "off"),
    (checks.iommu, with_card(iommu="DMA"), WARN, "addresses of 1 x MI100 (gfx908), type DMA;"),
    (checks.iommu, lambda facts: replace(with_cards(iommu="DMA")(facts), processes=1), None, ""),
    (checks.shared_memory, changed(shm_free=64 << 20), WARN, "67.1 MB free; collectives need 512.0 MB"),
    (checks.shared_memory, changed(shm_free=None), WARN, "missing"),
    (checks.shared_memory, changed(shm_free=64 << 20, processes=1), None, ""),
]


@pytest.mark.parametrize(("check", "change", "state", "words"), CASES)
def test_a_check(
    check: checks.Check, change: Callable[[Facts], Facts], state: str | None, words: str, healthy: Facts
) -> None:
    found = check(change(healthy))
    assert (found and found.state) == state
    assert found is None or words in found.fact, found.fact


def test_each_check_is_seen_to_pass_and_to_object(healthy: Facts) -> None:
    states: dict[str, set[str | None]] = {check.__name__: set() for check in checks.CHECKS}
    for check, _, state, _ in CASES:
        states[check.__name__].add(state if state in (PASS, None) else "objects")
    for check in checks.CHECKS:  # the healthy machine
        found = check(healthy)
        states[check.__name__].add(found and found.state)
    assert all({"objects"} < found for found in states.values()), states


def test_a_driver_that_is_older_than_torchs_cuda_is_told_which_build_it_runs(healthy: Facts) -> None:
    for cuda, driver, told in (("13.0", "570.86", True), ("13.0", "580.95", False), ("12.6", "570.86", False)):
        result = checks.torch_build(replace(of_geforce(cuda=cuda, usable=0)(healthy), driver=driver))
        assert (
            result is not None
            and ("torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126" in result.remedy) == told
        )


def test_only_where_no_card_can_work_the_architecture_stops_a_start(healthy: Facts) -> None:
    none = checks.architecture(with_torch(archs=("gfx90a",))(healthy))
    one = checks.architecture(with_card(arch="gfx1036")(healthy))
    assert none is not None and one is not None
    assert (none.stops, one.stops) == (True, False)
    assert "torch[device-gfx908]" in none.remedy
    assert "torch[device-" not in one.remedy  # AMD makes no wheel for this one


@pytest.mark.parametrize(
    ("torch", "stops"),
    [(Torch(), True), (Torch("2.8.0+cpu"), True), (Torch(problem="version.py cannot be read"), False),
     (Torch("2.8.0", hip="6.4", usable=0), False)],
)  # fmt: skip
def test_a_torch_stops_a_start_only_where_it_is_certain_to_be_wrong(torch: Torch, stops: bool, healthy: Facts) -> None:
    found = checks.torch_build(replace(healthy, torch=torch))
    assert found is not None and (found.state, found.stops) == (FAIL, stops)


@pytest.mark.parametrize(
    ("change", "stops"),
    [(with_files(0, usable=False), True), (with_files(0, exists=False), True), (with_files(1, 2, usable=False), True),
     (with_files(1, exists=False), False), (with_files(1, usable=False), False)],
)  # fmt: skip
def test_device_files_stop_a_start_only_where_no_card_is_left(
    change: Callable[[Facts], Facts], stops: bool, healthy: Facts
) -> None:
    found = checks.device_files(change(healthy))
    assert found is not None and found.stops == stops and found.remedy


def test_an_override_is_only_doubtful_where_the_card_has_no_code_of_its_own(healthy: Facts) -> None:
    other = with_cards(arch="gfx1031", name="gfx1031")(with_environ(HSA_OVERRIDE_GFX_VERSION="10.3.0")(healthy))
    override, architecture = checks.gfx_override(other), checks.architecture(other)
    assert override is not None and override.state == WARN
    assert architecture is not None and architecture.state == PASS  # gfx1030, which torch has


def test_beside_an_nvidia_card_an_amd_one_in_the_processor_does_not_count(tmp_path: Path, healthy: Facts) -> None:
    h100 = facts_of(load("h100"), tmp_path)
    both = replace(h100, cards=(replace(healthy.cards[0], arch="gfx90c"), *h100.cards))
    assert [card.vendor for card in both.visible()] == ["nvidia"]
    assert checks.torch_build(both).state == PASS  # type: ignore[union-attr]
    assert [card.vendor for card in replace(both, torch=healthy.torch).visible()] == ["amd"]


def test_that_there_is_no_iommu_is_known(tmp_path: Path) -> None:
    machine = load("mi100")
    machine["files"] = {path: text for path, text in machine["files"].items() if "iommu_group" not in path}
    assert [card.iommu for card in facts_of(machine, tmp_path).cards] == ["", ""]


def test_a_card_that_the_driver_leaves_out_is_found_on_the_bus_unless_it_is_another_containers(tmp_path: Path) -> None:
    machine = load("mi100")
    machine["files"][f"{NODE}/properties"] = None
    facts = facts_of(machine, tmp_path / "left out")
    assert [card.address for card in facts.cards] == ["0000:83:00.0"]
    assert facts.driverless == ("MI100 at 0000:23:00.0",)
    del machine["files"][f"{NODE}/properties"]
    machine["files"][f"{NODE}/properties/locked"] = ""  # listed, but it cannot be read as a file
    assert facts_of(machine, tmp_path / "not given").driverless == ()


def test_the_names_in_the_override_table_are_those_of_the_hardware_table() -> None:
    assert {card.arch for card in CARDS if card.arch.startswith("gfx")} <= AMD_ARCHS


VERSION = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '2.8.0+rocm6.4'
cuda: Optional[str] = None
hip: Optional[str] = '6.4.43482'
"""


def test_torchs_files_say_how_it_was_built(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(VERSION)
    blas = tmp_path / "lib" / "rocblas" / "library"
    blas.mkdir(parents=True)
    for name in ("TensileLibrary_lazy_gfx90a.dat", "Kernels.so-000-gfx908-xnack-.hsaco", "TensileManifest.txt"):
        (blas / name).write_text("")
    built = Torch("2.8.0+rocm6.4", "6.4.43482", blas_archs=("gfx908", "gfx90a"))
    assert torch_build.from_files(tmp_path, blas) == built
    assert torch_build.from_files(tmp_path, tmp_path / "none").blas_archs is None
    (tmp_path / "version.py").write_bytes(b"\xff\0 garbage")
    assert torch_build.from_files(tmp_path, None) == Torch("unknown")
    (tmp_path / "version.py").unlink()
    assert torch_build.from_files(tmp_path, None).problem.endswith("version.py cannot be read")


def test_the_installed_torch_answers_as_its_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(torch_build.installed(wants_blas=False, environ={}), blas_archs=("gfx90a",))
    told = torch_build.ask(known, os.environ)
    assert told.blas_archs == ("gfx90a",)  # of the files alone
    for spec in (None, SimpleNamespace(origin=None)):  # none, and a folder of that name
        monkeypatch.setattr("importlib.util.find_spec", lambda _, spec=spec: spec)
        assert torch_build.installed(wants_blas=False, environ={}) == Torch()
    assert told.problem == "" or told.cuda  # a CUDA build without a driver says so
    assert (told.version, told.hip, told.cuda) == (known.version, known.hip, known.cuda)
    assert told.usable is not None


FAKE = """
    from types import SimpleNamespace as N
    import atexit
    print("a library's greeting")
    atexit.register(print, "and its farewell")
    __version__, version = "2.8.0+rocm6.4", N(hip="6.4.43482", cuda=None)
    _C = N(_cuda_getArchFlags=lambda: "gfx908 gfx90a")
    cuda = N(is_available=lambda: True, device_count=lambda: 2)
"""


def ask(code: str, folder: Path, patience: float = 60) -> Torch:
    """What a torch that consists of this code answers."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(textwrap.dedent(code))
    with patch.object(sys, "path", [str(folder), *sys.path]):
        return torch_build.ask(Torch("known"), os.environ, patience)


def test_a_torch_that_crashes_hangs_or_fails_is_described(tmp_path: Path) -> None:
    crash = ask("import os; os.abort()", tmp_path / "crash")
    assert crash == Torch("known", problem="was killed by SIGABRT while it counted its cards")
    hang = ask("import time; time.sleep(10)", tmp_path / "hang", patience=1)
    assert hang.problem == "did not answer within 1 seconds; the GPU driver may hang"
    assert ask("raise ImportError('no libamdhip64.so')", tmp_path / "fail").problem == "ImportError: no libamdhip64.so"
    assert ask("import sys; sys.exit(0)", tmp_path / "silent").problem == "ended with exit code 0"
    broken = "print('titan_mi100 torch: {\"usable\": -1}'); import sys; sys.exit(1)"
    assert ask(broken, tmp_path / "lies").problem == "ended with exit code 1"


def test_a_build_names_its_architectures_or_says_why_it_sees_no_card(tmp_path: Path) -> None:
    told = ask(FAKE, tmp_path / "two")
    assert told == Torch("2.8.0+rocm6.4", "6.4.43482", None, ("gfx908", "gfx90a"), None, 2)
    code = FAKE + "\n    def init(): raise RuntimeError('No HIP GPUs\\n are available')"
    code += "\n    cuda.is_available, cuda.init = lambda: False, init"
    told = ask(code, tmp_path / "none")
    assert (told.usable, told.problem) == (0, "No HIP GPUs are available")


def test_what_triton_needs_to_build_a_kernel_is_found_as_triton_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere, path = {"PATH": str(tmp_path / "none")}, {"PATH": str(tmp_path)}
    for name in ("gcc", "my-cc"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    assert cannot_compile(path) == cannot_compile({**path, "CC": "my-cc"}) == ("", "")
    assert cannot_compile(nowhere) == ("no gcc or clang in PATH", "sudo apt install gcc")
    assert cannot_compile({**path, "CC": "ccache gcc"}) == ("CC=ccache gcc is no program", "unset CC")
    (tmp_path / "Python.h").unlink()
    header, package = f"{tmp_path / 'Python.h'} is missing", f"python3.{sys.version_info.minor}-dev"
    assert cannot_compile(path) == (header, f"sudo apt install {package}")
    assert cannot_compile(nowhere) == (f"no gcc or clang in PATH; {header}", f"sudo apt install gcc {package}")
