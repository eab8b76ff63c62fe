"""Text from a model: `python -m titan_mi100.generate --model PATH` with --prompt, with --input, or as a chat.

Everything that can be wrong with the input is said before the weights are read.
"""

import argparse
import codecs
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from titan_mi100 import tool
from titan_mi100.adapter import lora_of, merged
from titan_mi100.answers import Answer, Request, RowFile, answer_all, read_rows
from titan_mi100.assets import folder_of
from titan_mi100.chat_template import ChatTemplate
from titan_mi100.data.conversation import Message, in_order, message_list, tool_list
from titan_mi100.data.strict_json import BadRow, listed, parse
from titan_mi100.decode import Generated, Sampling, check_lengths, generate, stream
from titan_mi100.distributed import fill_parameters
from titan_mi100.durable import sha256_of
from titan_mi100.errors import UserError
from titan_mi100.model import attention
from titan_mi100.model.lora import base_fingerprint
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.model_source import open_source, verify_files
from titan_mi100.model_spec import ModelSpec, parameter_shapes
from titan_mi100.plain_file import LARGEST_CONFIG, read_plain
from titan_mi100.sealed import MANIFEST
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights import in_words

_DTYPES = ("float32", "bfloat16", "float64")
_PROMPT_KEYS = ("messages", "prompt", "question")


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(_parser().parse_args(argv)))


def exit_code(program: Callable[[], None]) -> int:
    """As tool.exit_code, of what fills a device's memory too."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]

    def run() -> None:
        try:
            program()
        except torch.OutOfMemoryError:
            raise UserError("the device's memory is full; lower --batch_size or --max_new_tokens") from None

    return tool.exit_code(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m titan_mi100.generate",
        description=__doc__.splitlines()[0],
        epilog="Without --prompt and --input, on a terminal: a chat.",
        allow_abbrev=False,
    )
    add_options(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", action="append", help="may be given several times")
    prompts.add_argument("--input", metavar="FILE", help="JSONL with prompt, question or messages; .txt: a line each")
    parser.add_argument("--raw", action="store_true", help="go on with the text itself, without the chat template")
    parser.add_argument("--json", action="store_true", help="print rows of JSON instead of text")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default: the most probable token, always"
    )
    parser.add_argument("--top_k", type=int, default=0, metavar="K", help="sample from the K most probable; 0: all")
    parser.add_argument(
        "--top_p", type=float, default=1.0, metavar="P", help="from the fewest that have this probability"
    )
    parser.add_argument(
        "--seed", type=int, default=42, help="of what is drawn; a row's draws depend on its number only"
    )
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that generates."""
    parser.add_argument(
        "--model", metavar="PATH", required=True, help="HF folder, DCP folder (RUN/checkpoint/step-500) or torch file"
    )
    parser.add_argument(
        "--adapter", metavar="PATH", default="", help="LoRA adapter of it: a PEFT folder, or a LoRA run's checkpoint"
    )
    parser.add_argument("--tokenizer_path", metavar="PATH", default="", help="default: the model's folder")
    parser.add_argument("--output", metavar="FILE.jsonl", default="", help="a row each; rows already there are kept")
    parser.add_argument("--system", metavar="TEXT", help="system message, for conversations that have none")
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument(
        "--enable_thinking", action="store_true", default=None, help="the template's variable enable_thinking is true"
    )
    thinking.add_argument("--no_thinking", dest="enable_thinking", action="store_false", help="it is false")
    parser.add_argument("--max_new_tokens", type=int, default=512, metavar="N", help="default 512")
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="prompts at a time; default 8")
    parser.add_argument("--device", default="", help="cpu, cuda, cuda:1; default: the GPU if there is one")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: bfloat16 on a GPU, else float32")


def _run(options: argparse.Namespace) -> None:
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    problems = sampling.problems()
    if options.raw and (options.system is not None or options.enable_thinking is not None):
        problems.append("--raw uses no template, so --system, --enable_thinking and --no_thinking change nothing")
    chats = options.prompt is None and options.input is None
    if chats and not sys.stdin.isatty():
        problems.append("nothing to do: give --prompt or --input, or start on a terminal for a chat")
    if chats and (options.output or options.json):
        problems.append("--output and --json are for --prompt or --input, not for a chat")
    check_options(options, problems)
    device, dtype = device_and_dtype(options)
    model = load_model(options.model, options.adapter, options.tokenizer_path, device, dtype)
    speak = Speaker(model, options.raw, options.system, options.enable_thinking)
    if chats:
        _chat(model, speak, options, sampling)
        return
    requests = _requests(options, speak)
    check_requests(model.spec, requests, options.max_new_tokens)
    settings = {**made_with(options, model, dtype), **asdict(sampling), "seed": options.seed}
    file = RowFile(options.output, requests, settings)
    load = partial(load_answer, model, sampling, options.seed, options.max_new_tokens)
    rows = answer_all(requests, load, model.tokenizer, options.batch_size, file, lambda number, output: {})
    if options.output:
        cut = sum(row["finish"] == "length" for row in rows)
        said = {"output": options.output, "rows": len(rows), "stopped_by_length": cut}
        print(json.dumps(said) if options.json else f"{options.output}: {len(rows)} rows; {_cut_off(cut, options)}")
        return
    for request, row in zip(requests, rows, strict=True):
        if options.json:
            print(json.dumps(row, ensure_ascii=False))
            continue
        if len(rows) > 1:
            print(f"--- {request.where} ---")
        print(row["output"])
        if row["finish"] == "length":
            print(f"({request.where}: {_cut_off(1, options)})", file=sys.stderr)


def _cut_off(rows: int, options: argparse.Namespace) -> str:
    return f"{rows} stopped by length, after --max_new_tokens {options.max_new_tokens}"


def check_options(options: argparse.Namespace, problems: list[str]) -> None:
    """Refuse what every command's options must not be, together with the problems found so far."""
    for name in ("max_new_tokens", "batch_size"):
        if getattr(options, name) < 1:
            problems.append(f"{name} = {getattr(options, name)} must be at least 1")
    if options.output and not (folder := Path(options.output).absolute().parent).is_dir():
        problems.append(f"{options.output}: the folder {folder} does not exist; make it first")
    if problems:
        raise UserError("\n".join(problems))


def device_and_dtype(options: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Where to compute and in what; raises UserError for a device that is not here."""
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        here = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    except RuntimeError:
        here = False
    if not here:
        raise UserError(f"--device {name}: not here; use cpu, or one of the {torch.cuda.device_count()} GPU(s)")
    return device, getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))


# --- the model ---


@dataclass(frozen=True)
class Model:
    """What a path holds: everything but the weights is read and checked, those come with `load`."""

    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_ids: frozenset[int]
    fingerprint: Callable[[], str]  # of the weights
    load: Callable[[], Qwen3]


def made_with(options: argparse.Namespace, model: Model, dtype: torch.dtype) -> dict[str, Any]:
    """What every command's rows depend on besides the prompts, for the rows to name."""
    found = {"model": os.path.abspath(options.model)}
    if options.adapter:
        found["adapter"] = os.path.abspath(options.adapter)
    if options.output:
        found["weights"] = model.fingerprint()[:16]
    return {**found, "dtype": in_words(dtype), "max_new_tokens": options.max_new_tokens}


def load_model(path: str, adapter: str, tokenizer_path: str, device: torch.device, dtype: torch.dtype) -> Model:
    """Open a model in whatever form.

    Args:
        adapter: a LoRA adapter of it, see adapter.merged; "": none.
        tokenizer_path: of another tokenizer than the folder's own, and of its template; "": the folder's.

    Raises:
        UserError: there is no such model, it is damaged, or the tokenizer is not its own.
    """
    source = open_source(path)
    if lora_of(source) is not None:
        raise UserError(f"{path}: is an adapter; name its base in --model, and this in --adapter")
    source = merged(source, adapter) if adapter else source
    if (spec := source.spec) is None:
        raise UserError(f"{path}: has no config.json beside it, so nothing says the model's shape; convert it first")
    source.names()
    folder = str(folder_of(path))
    tokenizer = load_tokenizer(tokenizer_path or folder)
    if tokenizer.n_vocab > spec.vocab_size:
        raise UserError(
            f"{tokenizer_path or folder}: its tokenizer has ids up to {tokenizer.n_vocab - 1}, the model only "
            f"{spec.vocab_size}; name the model's own in --tokenizer_path"
        )

    def fingerprint() -> str:
        if source.manifest is not None and not adapter:
            return sha256_of(source.path / MANIFEST)
        return base_fingerprint(source.weights.read, parameter_shapes(spec))

    def load() -> Qwen3:
        verify_files(source.path)
        with torch.device("meta"):
            model = Qwen3(spec, attention.choose_backend("sdpa", device.type)).to(dtype)
        model = model.to_empty(device=device).requires_grad_(False)
        fill_parameters(model.named_parameters(), source.weights.read)
        return model

    template = _template(tokenizer_path or folder, tokenizer.eos_token)
    return Model(spec, tokenizer, template, _stop_ids(Path(folder), tokenizer), fingerprint, load)


def _template(path: str, eos_token: str) -> ChatTemplate | None:
    """The tokenizer's chat template; None where it has none."""
    folder = folder_of(path)
    config = folder / "tokenizer_config.json"
    has_one = (folder / "chat_template.jinja").is_file() or (config.is_file() and _json_of(config).get("chat_template"))
    return ChatTemplate.from_folder(path, eos_token=eos_token) if has_one else None


def _stop_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The end of a turn, what generation_config.json names, and <|endoftext|>."""
    found = set(tokenizer.end_ids())
    file = folder / "generation_config.json"
    if file.is_file():
        named = _json_of(file).get("eos_token_id")
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token_id) is int for token_id in ids):
            raise UserError(f"{file}: eos_token_id = {named!r} must be a token id or a list of such")
        found.update(ids)
    return frozenset(found)


def _json_of(file: Path) -> dict[str, Any]:
    try:
        return parse(read_plain(file, LARGEST_CONFIG))
    except BadRow as bad:
        raise UserError(f"{file}: {bad}; copy it again") from None


# --- what to answer ---


class Speaker:
    """Turns a text or a conversation into what the model reads."""

    def __init__(self, model: Model, raw: bool, system: str | None, enable_thinking: bool | None) -> None:
        """Raises UserError: what a chat template would have to do was asked for, and there is none."""
        self._tokenizer, self.template = model.tokenizer, None if raw else model.template
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if self.template is None and (self._system or self._variables):
            raise UserError("the tokenizer has no chat template; leave out --system and the switches of thinking")
        if self.template is None and not raw:
            print("the tokenizer has no chat template: the model goes on with the text itself", file=sys.stderr)

    def __call__(self, where: str, given: str | list[Message], tools: list[Any] | None = None) -> Request:
        """Through the template, with the header of the answer; without one, the text itself.

        Raises:
            UserError: the template refuses it, or it is a conversation and there is no template.
        """
        if self.template is None:
            if not isinstance(given, str):
                raise UserError(f"{where}: a conversation needs a chat template; give a text, or leave out --raw")
            return Request(where, given, self._tokenizer.encode(given))
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if messages[0]["role"] != "system":
            messages = [*self._system, *messages]
        try:
            text = self.template.render(messages, add_generation_prompt=True, tools=tools, **self._variables)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return Request(where, text, self._tokenizer.encode(text))


def check_requests(spec: ModelSpec, requests: Sequence[Request], max_new_tokens: int) -> None:
    """Refuse prompts that do not fit the model; see decode.check_lengths."""
    check_lengths(spec, {request.where: len(request.ids) for request in requests}, max_new_tokens)


def _requests(options: argparse.Namespace, speak: Speaker) -> list[Request]:
    if options.prompt is not None:
        return [speak(f"prompt {number}", text) for number, text in enumerate(options.prompt, 1)]
    if options.input.endswith(".txt"):
        return [speak(where, text) for where, text in _lines(options.input)]
    return [speak(where, *given) for where, given in read_rows(options.input, _prompt_of)]


def _lines(path: str) -> list[tuple[str, str]]:
    """The lines of a text, each with its file:line; raises UserError for one that is blank."""
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}; convert it with iconv") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if lines == [""]:
        raise UserError(f"{path}: is empty; write a prompt on each line")
    if blank := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        raise UserError(f"{path}:{blank[0]}: blank line: delete it")
    return [(f"{path}:{number}", line) for number, line in enumerate(lines, 1)]


def _prompt_of(row: dict[str, Any]) -> tuple[str | list[Message], list[Any] | None]:
    """The text or conversation to answer, and the tools that go with it."""
    keys = [key for key in _PROMPT_KEYS if row.get(key) is not None]
    if len(keys) != 1:
        raise BadRow("not one prompt", f"a row has one of {', '.join(_PROMPT_KEYS)}; this one has {listed(keys)}")
    given = row[keys[0]]
    if isinstance(given, str):
        if not given:
            raise BadRow("empty", f"{keys[0]} is an empty text")
        return given, tool_list(row.get("tools"))
    messages = in_order(message_list(given, keys[0]))
    if messages[-1]["role"] == "assistant":
        raise BadRow("nothing to answer", "the last message is the assistant's; leave it out")
    return messages, tool_list(row.get("tools"))


def load_answer(model: Model, sampling: Sampling, seed: int, max_new_tokens: int) -> Answer:
    """Read the weights. What is drawn for a prompt depends on the seed and its number, not on the batch."""
    network = model.load()

    def answer(prompts: Sequence[list[int]], numbers: Sequence[int]) -> list[Generated]:
        seeds = [f"{seed}/{number}" for number in numbers]
        return generate(network, prompts, sampling, model.stop_ids, max_new_tokens, seeds, model.tokenizer.n_vocab)

    return answer


# --- a chat ---


def _chat(model: Model, speak: Speaker, options: argparse.Namespace, sampling: Sampling) -> None:
    """Read a line, say the answer as it comes, until the input ends."""
    network = model.load()
    print("An empty line starts anew, Ctrl-D ends.", file=sys.stderr)
    messages: list[Message] = []
    for turn in count():
        try:
            text = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        if not text:
            messages = []
            continue
        messages.append({"role": "user", "content": text})
        try:
            ids = speak("the conversation", text if speak.template is None else messages).ids
            said: list[int] = []
            seeds, most, vocabulary = [f"{options.seed}/{turn}"], options.max_new_tokens, model.tokenizer.n_vocab
            characters = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside of a character
            for (token,) in stream(network, [ids], sampling, model.stop_ids, most, seeds, vocabulary):
                assert token is not None
                said.append(token)
                print(characters.decode(model.tokenizer.token_bytes(token)), end="", flush=True)
            print(characters.decode(b"", final=True))
        except UserError as error:  # the conversation has grown too long, or its template refuses it
            print(error, "An empty line starts anew.", file=sys.stderr)
            messages.pop()
            continue
        if len(said) == most:
            print(f"({_cut_off(1, options)})", file=sys.stderr)
        messages.append({"role": "assistant", "content": model.tokenizer.decode(said)})


if __name__ == "__main__":
    sys.exit(main())
