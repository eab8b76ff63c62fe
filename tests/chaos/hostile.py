"""Row 10: hostile checkpoints, HF folders, tokenizers: each must be refused, no code run and nothing read outside.

PYTHONPATH=.:tests python -m chaos.hostile FOLDER    builds and opens every case; prints {name: what went wrong}
"""

import functools
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from chaos.case import Case, Outcome
from chaos.hostile_pickles import SPEC, Build, Call, dcp_cases, moved_outside, piped, torch_cases
from chaos.watch import SEEN, START, Watch
from conftest import REPO, job_environment
from safetensors.torch import save_file

from titan_mi100.errors import UserError
from titan_mi100.files import isolated
from titan_mi100.files.stored import StoredTensors, open_dcp, open_torch
from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.shapes.families import read_hf_config, to_hf_config
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer, tokenizer_files
from titan_mi100.weights.source import open_weights

TIME_LIMIT = 30  # seconds a case


# ---- HF folders


def hf_folder(folder: Path, shards: int = 1) -> Path:
    """Sound weights with their config, in one file or two."""
    hf = folder / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(to_hf_config(SPEC)))
    tensors = {name: torch.ones(shape) for name, shape in parameter_shapes(SPEC).items()}
    if shards == 1:
        save_file(tensors, hf / "model.safetensors")
        return hf
    names = sorted(tensors)
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, hf / file)
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return hf


def config(**changes: Any) -> Build:
    def build(folder: Path) -> None:
        file = hf_folder(folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return build


def shard_named(name: str) -> Build:
    """The index places half of the tensors in a file of that name, where they are."""

    def build(folder: Path) -> None:
        hf = hf_folder(folder, shards=2)
        named = name.format(folder=folder)
        index = hf / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-1.safetensors", named.replace("\0", "\\u0000")))
        for place in (folder / "outside", hf / "sub"):
            place.mkdir()
            shutil.copy(hf / "model-1.safetensors", place / "shard.safetensors")

    return build


def shard_of(value: Any, file: str) -> Build:
    """The index has `value` for half of the tensors, which are in a file of that name."""

    def build(folder: Path) -> None:
        hf = hf_folder(folder, shards=2)
        (hf / "model-1.safetensors").rename(hf / file)
        index = hf / "model.safetensors.index.json"
        index.write_text(index.read_text().replace('"model-1.safetensors"', json.dumps(value)))

    return build


def dangling(file: Path, folder: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("nowhere")


def replaced(name: str, do: Callable[[Path, Path], Any], shards: int = 2) -> Build:
    """`do` with a file of a sound HF folder, and the case's folder."""
    return lambda folder: do(hf_folder(folder, shards) / name, folder)


def header(content: bytes, length: int | None = None, data: bytes = b"") -> Callable[[Path, Path], Any]:
    """A safetensors file of this header; `length`: what it claims of the header's length."""
    claimed = len(content) if length is None else length
    return lambda file, folder: file.write_bytes(struct.pack("<Q", claimed) + content + data)


def tensors(count: int, shape: tuple[int, ...] = (0,), end: float = 0, start: float = 0) -> bytes:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    return json.dumps({f"tensor-{number}": entry for number in range(count)}).encode()


def wrong_blob(folder: Path) -> None:
    """Laid out as the hub's cache, but the link leads beside `blobs`."""
    hf = hf_folder(folder)
    snapshot = folder / "hub" / "models--x" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    hf.rename(snapshot)
    (folder / "hub" / "models--y" / "blobs").mkdir(parents=True)
    (snapshot / "model.safetensors").rename(folder / "hub" / "models--y" / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to("../../../models--y/blobs/abc")
    hf.symlink_to(snapshot)


def hf_cases() -> dict[str, Build]:
    index, one = "model.safetensors.index.json", "model.safetensors"
    deep = b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    return {
        "config with auto_map": config(auto_map={"AutoModelForCausalLM": "modeling.Qwen3"}),
        "config that trusts code": config(trust_remote_code=True),
        "config of a billion layers": config(num_hidden_layers=10**9),
        "config of a quadrillion tokens": config(vocab_size=10**15),
        "config nested without end": replaced("config.json", lambda file, _: file.write_bytes(deep)),
        "config of a gigabyte": replaced("config.json", lambda file, _: os.truncate(file, 1 << 30)),
        "config is a link": replaced("config.json", moved_outside),
        "config is a pipe": replaced("config.json", lambda file, _: piped(file)),
        "config is no object": replaced("config.json", lambda file, _: file.write_text("[1]")),
        "shard above": shard_named("../outside/shard.safetensors"),
        "shard absolute": shard_named("{folder}/outside/shard.safetensors"),
        "shard in a folder": shard_named("sub/shard.safetensors"),
        "shard named ..": shard_named(".."),
        "shard without a name": shard_named(""),
        "shard with NUL": shard_named("a\0b"),
        "shard is a link": replaced("model-1.safetensors", moved_outside),
        "shard is a pipe": replaced("model-1.safetensors", lambda file, _: piped(file)),
        "shard is a folder": replaced("model-1.safetensors", lambda file, _: (file.unlink(), file.mkdir())),
        "weights are a link": replaced(one, moved_outside, 1),
        "weights are a pipe": replaced(one, lambda file, _: piped(file), 1),
        "weights are another repository's blob": wrong_blob,
        "index is a link": replaced(index, moved_outside),
        "index is a pipe": replaced(index, lambda file, _: piped(file)),
        "index nested without end": replaced(index, lambda file, _: file.write_bytes(deep)),
        "index of a gigabyte": replaced(index, lambda file, _: os.truncate(file, 1 << 30)),
        "index of numbers": replaced(index, lambda file, _: file.write_text('{"weight_map": {"a": 5}}')),
        "header of an exabyte": replaced(one, header(b"{}", 1 << 60), 1),
        "header of 64 megabytes": replaced(one, header(b"{}" + b" " * (1 << 26)), 1),
        "header beyond the file": replaced(one, header(b"{}", 1 << 20), 1),
        "header nested without end": replaced(one, header(deep), 1),
        "metadata of numbers": replaced(one, header(b'{"__metadata__": {"format": 1}}'), 1),
        "metadata that is a list": replaced(one, header(b'{"__metadata__": []}'), 1),
        "50,000 tensors": replaced(one, header(tensors(50_000)), 1),
        "tensors that overlap": replaced(one, header(tensors(2, (16,), 64), data=bytes(64)), 1),
        "tensor beyond the file": replaced(one, header(tensors(1, (1 << 20,), 4 << 20), data=bytes(64)), 1),
        "tensor of more than its bytes": replaced(one, header(tensors(1, (1 << 20,), 64), data=bytes(64)), 1),
        "tensor of an overflowing size": replaced(one, header(tensors(1, (1 << 62, 4), 64), data=bytes(64)), 1),
        "offsets that are floats": replaced(one, header(tensors(1, (16,), 64.0, 0.0), data=bytes(64)), 1),
        "an offset that is false": replaced(one, header(tensors(1, (16,), 64, False), data=bytes(64)), 1),
        "33 dimensions": replaced(one, header(tensors(1, (1,) * 33, 4), data=bytes(4)), 1),
        "no value of impossible sizes": replaced(one, header(tensors(1, (1 << 62, 0))), 1),
        "header in UTF-16": replaced(one, header(tensors(1, (16,), 64).decode().encode("utf-16"), data=bytes(64)), 1),
        "a name of 10 MB": replaced(one, header(json.dumps({"x" * (10 << 20): {"dtype": "I8"}}).encode()), 1),
        "shard that is null": shard_of(None, "None"),
        "shard that is a number": shard_of(5, "5"),
        "config is a link to nowhere": replaced("config.json", dangling),
        "pickle for weights": replaced(
            one, lambda file, f: file.write_bytes(pickle.dumps(Call(os.system, f"touch {f / 'canary'}"))), 1
        ),
    }


# ---- tokenizers and chat templates


def tokenizer_folder(folder: Path) -> Path:
    tokenizer = folder / "tok"
    shutil.copytree(REPO / "tests" / "assets" / "tokenizer", tokenizer)
    for file in tokenizer.iterdir():
        file.chmod(0o644)
    return tokenizer


def tokenizer_file(name: str, do: Callable[[Path, Path], Any]) -> Build:
    def build(folder: Path) -> None:
        file = tokenizer_folder(folder) / name
        if not file.exists():
            file.write_text("{{ messages }}")
        do(file, folder)

    return build


def template(source: str) -> Build:
    return tokenizer_file(
        "chat_template.jinja", lambda file, f: file.write_text(source.replace("CANARY", str(f / "canary")))
    )


def templates_elsewhere(folder: Path) -> None:
    (folder / "outside").mkdir()
    (folder / "outside" / "tool_use.jinja").write_text("secret")
    (tokenizer_folder(folder) / "additional_chat_templates").symlink_to(folder / "outside")


def alone(name: str, content: bytes) -> Build:
    """A folder with nothing but this file."""

    def build(folder: Path) -> None:
        (folder / "tok").mkdir()
        (folder / "tok" / name).write_bytes(content)

    return build


def json_edit(name: str, **changes: Any) -> Build:
    return tokenizer_file(name, lambda file, _: file.write_text(json.dumps(json.loads(file.read_text()) | changes)))


def steps_in_steps(folder: Path) -> None:
    json_edit("tokenizer.json", normalizer="HERE")(folder)
    file = folder / "tok" / "tokenizer.json"
    steps = '{"type": "Sequence", "normalizers": [' * 2000 + "]}" * 2000
    file.write_text(file.read_text().replace('"HERE"', steps))


def tokenizer_cases() -> dict[str, Build]:
    deep = b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    touch = "touch CANARY"
    cases = {
        "config with auto_map": json_edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Tokenizer", None]}),
        "config nested without end": tokenizer_file("tokenizer_config.json", lambda file, _: file.write_bytes(deep)),
        "config is a link": tokenizer_file("tokenizer_config.json", moved_outside),
        "config is a pipe": tokenizer_file("tokenizer_config.json", lambda file, _: piped(file)),
        "definition is a link": tokenizer_file("tokenizer.json", moved_outside),
        "definition is a pipe": tokenizer_file("tokenizer.json", lambda file, _: piped(file)),
        "definition of a gigabyte": tokenizer_file("tokenizer.json", lambda file, _: os.truncate(file, 1 << 30)),
        "definition nested without end": tokenizer_file("tokenizer.json", lambda file, _: file.write_bytes(deep)),
        "definition, steps in steps": steps_in_steps,
        "definition, infinite ids": json_edit(
            "tokenizer.json", added_tokens=[{"id": float("inf"), "content": "a", "special": True}]
        ),
        "model is a pickle": alone("x.model", pickle.dumps([1])),
        "model with a length beyond it": alone("x.model", b"\x0a\xff\xff\xff\xff\x7f"),
        "pieces of no model": alone("x.model", b"\xff\xfe\0\0"),
        "template is a link": tokenizer_file("chat_template.jinja", moved_outside),
        "template is a link to nowhere": tokenizer_file("chat_template.jinja", dangling),
        "template is a folder": tokenizer_file("chat_template.jinja", lambda file, _: (file.unlink(), file.mkdir())),
        "templates in a linked folder": templates_elsewhere,
        "definition is a link to nowhere": tokenizer_file("tokenizer.json", dangling),
        "template of a gigabyte": tokenizer_file("chat_template.jinja", lambda file, _: os.truncate(file, 1 << 30)),
    }
    for name, source in {
        "climbs to object": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "climbs by attr": "{{ (''|attr('__class__')|attr('__mro__'))[1]|attr('__subclasses__')() }}",
        "climbs by a global": "{{ cycler.__init__.__globals__.os.system('" + touch + "') }}",
        "climbs by lipsum": "{{ lipsum.__globals__['os'].system('" + touch + "') }}",
        "climbs by its own function": "{{ raise_exception.__globals__['json'].codecs.open('CANARY', 'w') }}",
        "climbs by a message": "{{ messages.__class__.__base__.__subclasses__() }}",
        "climbs by a format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
        "climbs by itself": "{{ self._TemplateReference__context.environment.filters }}",
        "changes a message": "{{ messages.append(1) }}",
        "includes a file": "{% include '/etc/passwd' %}",
        "imports a file": "{% import '../outside/secret' as x %}",
        "loops a billion times": "{% for i in range(10**9) %}{% endfor %}",
        "text of a terabyte": "{{ 'a' * 10**13 }}",
        "nested without end": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "loops in loops": "{% for i in [1] %}" * 100 + "{% endfor %}" * 100,
    }.items():
        cases[f"template {name}"] = template(source)
    return cases


# ---- opening them


def read_all(stored: StoredTensors) -> dict[str, torch.Tensor]:
    return {name: stored.read(name, (0,) * len(shape), shape) for name, (shape, _) in stored.kinds.items()}


def read_dcp(folder: Path) -> None:
    stored = open_dcp(folder / "ck", {".metadata", *(f"__{n}_0.distcp" for n in range(4)), "link.distcp", "pipe"})
    read_all(stored)
    if stored.others != ["optim.param_groups.0.lr", "optim.param_groups.0.betas"]:
        raise UserError(f"{folder}: has other entries than tensors")


def read_torch(folder: Path) -> None:
    read_all(open_torch(folder / "model.pt"))


def read_hf(folder: Path) -> None:
    spec = read_hf_config(folder / "hf")
    open_weights(folder / "hf").check(parameter_shapes(spec))


def open_tokenizer(folder: Path) -> None:
    tokenizer_files(folder / "tok")
    tokenizer = load_tokenizer(folder / "tok")
    ChatTemplate.from_folder(folder / "tok", tokenizer=tokenizer).render([{"role": "user", "content": "Hello"}])


_KINDS: dict[str, tuple[Callable[[], dict[str, Build]], Callable[[Path], None]]] = {
    "dcp": (dcp_cases, read_dcp),
    "torch file": (torch_cases, read_torch),
    "hf": (hf_cases, read_hf),
    "tokenizer": (tokenizer_cases, open_tokenizer),
}


@functools.cache  # some are large, and each case asks for its own
def made(cases: Callable[[], dict[str, Build]]) -> dict[str, Build]:
    return cases()


def hostile_cases() -> list[tuple[str, Build]]:
    """Every case: its name, which begins with its kind, and what builds it in an empty folder."""
    return [(f"{kind}: {name}", build) for kind, (cases, _) in _KINDS.items() for name, build in made(cases).items()]


def run_case(name: str, folder: Path, watch: Watch | None = None) -> str:
    """Build a case in an empty folder and open it; "" when it was refused as it should be, else what went wrong."""
    kind, case = name.split(": ", 1)
    cases, opened = _KINDS[kind]
    folder = folder.resolve()
    made(cases)[case](folder)
    (folder / "canary").unlink(missing_ok=True)  # building some of them touches it
    watch = watch or Watch()
    watch.seen, watch.folder = [], folder
    isolated._CODE = START
    outcome = "was accepted"
    try:
        opened(folder)
    except UserError as error:
        outcome = "" if str(folder) in str(error) else f"the message names no file: {error}"
        outcome += "".join(str(error).partition(SEEN)[1:])
    except BaseException as error:
        outcome = f"was not refused, but failed: {error!r}"[:300]
    finally:
        watch.folder = None
    found = [outcome, *watch.seen, *(["its code was run"] if (folder / "canary").exists() else [])]
    return "; ".join(filter(None, found))


def run_all(folder: Path, every: int = 1) -> dict[str, str]:
    """`run_case` of every case, or of every third etc., in one process of its own."""
    command = [sys.executable, "-m", "chaos.hostile", str(folder), str(every)]
    done = subprocess.run(command, env=job_environment(), capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise RuntimeError(f"the cases ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def cases(quick: bool) -> Iterator[Case]:
    """Row 10, the same whether quick or not: it takes under a minute."""

    def run(folder: Path, without: tuple[str, ...]) -> Outcome:
        outcomes = run_all(folder / "cases")
        return Outcome(len(outcomes), [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome])

    yield Case("all, in a process of their own", run)


def main() -> None:
    folder, watch = Path(sys.argv[1]), Watch()

    def give_up(*_: Any) -> None:
        raise KeyboardInterrupt(f"took more than {TIME_LIMIT} s")  # which nobody takes for a file that cannot be read

    signal.signal(signal.SIGALRM, give_up)
    found = {}
    for number, (name, _) in enumerate(hostile_cases()[:: int(sys.argv[2])]):
        (case := folder / str(number)).mkdir(parents=True)
        signal.alarm(TIME_LIMIT)
        found[name] = run_case(name, case, watch)
        signal.alarm(0)
        shutil.rmtree(case)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
