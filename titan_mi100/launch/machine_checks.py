"""The checks of the doctor: each is a function of the machine's facts. docs/DOCTOR.md has the sources of each.

A check returns None if it does not apply, or if the facts that it needs are not known. It fails if training would not
work, would hang or would compute wrong results. It warns about what hangs or misleads on some machines only.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from titan_mi100.errors import UserError
from titan_mi100.launch.machine_facts import HIDING, Card, Facts, System, read
from titan_mi100.launch.wheels import PYTORCH_WHEELS, rocm_remedy
from titan_mi100.planning.cards import CARDS
from titan_mi100.wording import bytes_in_words, shown, some

PASS, WARN, FAIL = "pass", "warn", "fail"
SHM_WANTED = 512_000_000  # bytes, the limit of DeepSpeed's ds_report; Docker's default is 64 MiB
# NCCL's algorithms for all-gather and reduce-scatter. "tree" is not one: it serves all-reduce only.
_SERVE_ALL_GATHER = {"ring", "pat", "nvls", "collnetdirect"}


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Attributes:
        state: pass, warn or fail.
        fact: what was found.
        remedy: what to do, one alternative per line; "" if nothing has to be done.
        stops: no run can work, so no run is started.
    """

    name: str
    state: str
    fact: str
    remedy: str = ""
    stops: bool = False


Check = Callable[[Facts], Result | None]


def judge(facts: Facts) -> list[Result]:
    """Run the checks and return the verdicts of those that apply."""
    return [verdict for check in CHECKS if (verdict := check(facts))]


def before_start(processes: int, say: Callable[[str], None], system: System | None = None) -> None:
    """Run the checks, as the launcher does, and report those that do not pass.

    Args:
        processes: processes of the run on this machine.
        say: prints a line.
        system: where the facts are read; None: this machine.

    Raises:
        UserError: no run can work on this machine.
    """
    try:
        verdicts = judge(read(system, processes))
    except Exception as error:  # a bug in the checks must not stop a run
        say(f"doctor: the checks of this machine failed ({error!r}); starting without them")
        return
    for verdict in verdicts:
        if verdict.state != PASS and not verdict.stops:
            say(f"doctor: {verdict.state}: {_line(verdict)}")
    if stopping := [_line(verdict) for verdict in verdicts if verdict.stops]:
        raise UserError("\n".join([*stopping, "no run can work here; titan-mi100 doctor shows all checks"]))


def _line(verdict: Result) -> str:
    return f"{verdict.name}: {verdict.fact}; {verdict.remedy}".replace("\n", "; or ").replace("; or or", "; or")


def torch_build(facts: Facts) -> Result | None:
    """Is torch built for these cards, and can it use them?"""
    torch, cards, vendor = facts.torch, facts.visible(), facts.vendor()
    platform = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else "the CPU alone"
    fact = f"{torch.version}, built for {platform}"
    remedy = rocm_remedy([card.arch for card in cards]) if vendor == "amd" else "pip install torch"
    if not torch.version:
        if not cards and not torch.problem:
            return None  # run_train.sh checks for torch itself
        return Result("torch", FAIL, torch.problem or "not installed", remedy, stops=not torch.problem)
    if torch.problem and torch.usable is None and not cards:  # usable is 0 if torch answered that it sees no driver
        return Result("torch", FAIL, f"{fact}; it cannot be imported: {torch.problem}", remedy)
    if not cards:
        where = "the cards are hidden from it" if facts.numbered() != facts.present() else "no GPU"
        return Result("torch", PASS, f"{fact}; {where}, so it computes on the CPU")
    if not (torch.hip if vendor == "amd" else torch.cuda):
        remedy += "\nor export CUDA_VISIBLE_DEVICES= to train on the CPU"
        return Result("torch", FAIL, f"{fact}; it cannot use {named(cards)}", remedy, stops=True)
    if torch.usable is None and not torch.problem:
        return Result("torch", PASS, fact)  # the fast checks do not import torch
    if not torch.usable:
        why = torch.problem or "it does not say why"
        remedy = "install a driver that fits torch, or a torch that fits the driver"
        if (torch.cuda or "") >= "13" and "" < facts.driver < "580":  # the oldest driver of CUDA 13
            remedy = f"install driver 580 or newer, or: pip install torch==2.13.0 --index-url {PYTORCH_WHEELS}/cu126"
        remedy = f"fix the other failed checks first; if there are none, {remedy}"
        return Result("torch", FAIL, f"{fact}; it cannot use {named(cards)}: {why}", remedy)
    if torch.usable < len(facts.numbered()):
        remedy = "see what is wrong with the others: sudo dmesg | grep -e amdgpu -e NVRM"
        return Result("torch", WARN, f"{fact}; it sees {torch.usable} of {len(facts.numbered())} visible cards", remedy)
    return Result("torch", PASS, f"{fact}; it sees {named(cards)}")


def driver(facts: Facts) -> Result | None:
    """Does each Instinct card have its driver?"""
    if facts.driverless:
        remedy = "load it: sudo modprobe amdgpu; see why it skips a card: sudo dmesg | grep -e kfd -e amdgpu"
        return Result("driver", FAIL, f"{some(facts.driverless)} without a compute driver", remedy)
    rocm = f", ROCm {facts.rocm} in /opt/rocm" if facts.rocm else ""
    fact = f"Linux {facts.kernel}, driver {facts.driver or 'of the kernel'}{rocm}"
    return Result("driver", PASS, fact) if facts.visible() else None


def architecture(facts: Facts) -> Result | None:
    """Do torch and its rocBLAS have code for each AMD card's architecture? For NVIDIA's cards torch itself warns."""
    torch, name = facts.torch, "architecture"
    archs = {_override(facts) or card.arch or "" for card in facts.visible() if torch.hip} - {""}
    lists = {"torch": torch.archs or (), "rocBLAS in torch": torch.blas_archs or ()}
    known = {library: listed for library, listed in lists.items() if listed}
    missing = {arch for arch in archs for listed in known.values() if arch not in listed}
    if not archs or not known:
        return None
    if not missing:
        return Result(name, PASS, f"{some(sorted(archs))}: {' and '.join(known)} have code for it")
    library = next(library for library, listed in known.items() if not missing <= set(listed))
    fact = f"{some(sorted(missing))}: {library} has code for {some(known[library], 20)} only"
    return Result(name, FAIL, fact, rocm_remedy(missing), stops=missing == archs)


def gfx_override(facts: Facts) -> Result | None:
    """HSA_OVERRIDE_GFX_VERSION makes ROCm treat every card as another architecture."""
    version = facts.environ.get("HSA_OVERRIDE_GFX_VERSION")
    if not version or facts.vendor() != "amd" or not facts.visible():
        return None
    name, forced, fact = "gfx override", _override(facts), f"HSA_OVERRIDE_GFX_VERSION={version}"
    if forced is None:
        return Result(name, FAIL, f"{fact} is not a version such as 9.0.8", "unset HSA_OVERRIDE_GFX_VERSION")
    others = {card.arch for card in facts.visible() if card.arch} - {forced}
    if not others:
        return Result(name, PASS, f"{fact}: equals the cards' own architecture")
    fact += f" makes {some(sorted(others))} run code of {forced}"
    # The override is for consumer cards that no build supports. A card that torch has code for must not be overridden.
    supported = {card.arch for card in CARDS if card.arch.startswith("gfx9")}
    if others & supported.union(facts.torch.archs or (), facts.torch.blas_archs or ()):
        return Result(name, FAIL, fact, "unset HSA_OVERRIDE_GFX_VERSION: this card does not need it")
    return Result(name, WARN, fact, "correct only if both have the same instructions, as gfx1031 and gfx1030 do")


def own_graphics(facts: Facts) -> Result | None:
    """Does a processor's own graphics have a number among the cards? A process could compute on it."""
    cards, used = facts.numbered(), facts.visible()
    if not used or len(used) == len(cards):
        return None
    numbers = ",".join(str(number) for number, card in enumerate(facts.present()) if card in used)
    fact = f"{named(set(cards) - set(used))} is inside the processor, and ROCm gives it a number like a card's"
    return Result("own graphics", WARN, fact, f"export HIP_VISIBLE_DEVICES={numbers}")


def visibility(facts: Facts) -> Result | None:
    """Which cards are visible, and do the variables that hide cards contradict each other?"""
    cards, name = facts.present(), "visible cards"
    if not cards:
        return None
    variables = {variable: facts.environ[variable] for variable in HIDING if variable in facts.environ}
    words = " ".join(f"{variable}={setting}" for variable, setting in variables.items()) or "no variable hides a card"
    fact = f"{len(facts.visible())} of {len(cards)}; {words}"
    steps = facts.hiding()
    for (_, before), (variable, after) in itertools.pairwise(steps):
        entries = [*(word.strip() for word in facts.environ[variable].split(",")), ""]
        wrong = entries[len(after)]
        if wrong not in ("", "-1"):
            fact += f"; {variable}: entry {shown(wrong)} names none of {len(before)} cards, numbered from 0"
            remedy = f"this entry and the ones after it are ignored silently; correct {variable}"
            return Result(name, FAIL, fact, remedy)
    if facts.vendor() == "nvidia" or len(variables) < 2:
        return Result(name, PASS, fact)
    hip, cuda = variables.get("HIP_VISIBLE_DEVICES"), variables.get("CUDA_VISIBLE_DEVICES")
    if set(variables) == {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} and hip == cuda:
        return Result(name, PASS, fact)
    remedy = "keep one of them: ROCR_ renumbers the cards for the others, and HIP_ replaces CUDA_VISIBLE_DEVICES"
    return Result(name, WARN, f"{fact}: set twice", remedy)


def device_files(facts: Facts) -> Result | None:
    """May this user open the cards' device files? Their group is render on most systems, video on older ones."""
    own = {card.device_file for card in facts.visible()}
    if not own:
        return None
    needed = {"/dev/kfd"} if facts.vendor() == "amd" else set()
    name, files = "device files", [file for file in facts.device_files if file.path in own | needed]
    absent = [file.path for file in files if not file.exists]
    closed = [file for file in files if file.exists and not file.usable]
    out_of_reach = {*absent, *(file.path for file in closed)}
    none_works = bool(needed & out_of_reach) or own <= out_of_reach
    if closed:
        groups = sorted({file.group for file in closed} - {"root"})
        fact = f"{some(file.path for file in closed)}: no permission; group {some(groups) or 'root'}, you are in "
        remedy = f"sudo usermod -a -G {','.join(groups)} $USER, then log in again; a container needs --group-add"
        if not groups:
            remedy = f"sudo chgrp render {closed[0].path} && sudo chmod g+rw {closed[0].path}; a udev rule keeps it so"
        return Result(name, FAIL, fact + (some(facts.groups) or "no group"), remedy, stops=none_works)
    if absent:
        remedy = "start the container with --device=/dev/kfd --device=/dev/dri; without a container load the driver"
        return Result(name, FAIL if none_works else WARN, f"{some(absent)}: missing", remedy, stops=none_works)
    return Result(name, PASS, f"{some(file.path for file in files)}: can be opened")


def nccl_algo(facts: Facts) -> Result | None:
    """Does NCCL_ALGO leave an algorithm for all-gather and reduce-scatter, which FSDP uses? "tree" serves neither."""
    algorithms = facts.environ.get("NCCL_ALGO")
    if not algorithms or not facts.visible():
        return None
    is_list = not {*algorithms} & {*":;^"}  # else by function, or of what is excluded
    if is_list and not _SERVE_ALL_GATHER & {word.strip() for word in algorithms.lower().split(",")}:
        fact = f"NCCL_ALGO={algorithms} leaves no algorithm for all-gather and reduce-scatter, which FSDP uses"
        remedy = "unset NCCL_ALGO: NCCL and RCCL then choose by message size and topology"
        return Result("NCCL_ALGO", FAIL, fact, remedy)
    return Result("NCCL_ALGO", PASS, f"NCCL_ALGO={algorithms}")


def iommu(facts: Facts) -> Result | None:
    """An IOMMU that translates addresses can make transfers between cards slow, or hang."""
    cards = [card for card in facts.visible() if card.iommu is not None]
    if facts.used() < 2 or not cards:
        return None
    translated = [card for card in cards if (card.iommu or "").startswith("DMA")]
    if translated:
        fact = f"it translates addresses of {named(translated)}, type {translated[0].iommu}; NCCL and RCCL can hang"
        remedy = "add iommu=pt to GRUB_CMDLINE_LINUX_DEFAULT in /etc/default/grub, then sudo update-grub and reboot"
        return Result("IOMMU", WARN, fact, remedy)
    return Result("IOMMU", PASS, "passes addresses through" if any(card.iommu for card in cards) else "off")


def shared_memory(facts: Facts) -> Result | None:
    """NCCL and RCCL exchange data between processes in /dev/shm, and fail if it is full."""
    if facts.used() < 2:
        return None
    size = "missing" if facts.shm_free is None else f"{bytes_in_words(facts.shm_free)} free"
    if facts.shm_free is not None and facts.shm_free >= SHM_WANTED:
        return Result("/dev/shm", PASS, size)
    remedy = "start the container with --shm-size=1g or --ipc=host; else sudo mount -o remount,size=8g /dev/shm"
    return Result("/dev/shm", WARN, f"{size}; collectives need {bytes_in_words(SHM_WANTED)}", remedy)


CHECKS: tuple[Check, ...] = (
    device_files, driver, visibility, torch_build, architecture, gfx_override, nccl_algo, iommu,
    shared_memory, own_graphics,
)  # fmt: skip


def named(cards: Iterable[Card]) -> str:
    """Cards as text: "2 x MI100 (gfx908)"."""
    names = [card.name if card.arch in (None, card.name) else f"{card.name} ({card.arch})" for card in cards]
    return some(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _override(facts: Facts) -> str | None:
    """The architecture that HSA_OVERRIDE_GFX_VERSION names: gfx90a for 9.0.10. None: the value is no version."""
    match = re.fullmatch(r"(\d{1,2})\.(\d{1,2})\.(\d{1,2})", facts.environ.get("HSA_OVERRIDE_GFX_VERSION", ""))
    return f"gfx{match[1]}{int(match[2]):x}{int(match[3]):x}" if match else None
