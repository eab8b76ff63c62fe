"""Shared by the commands that generate: their options, reading rows, answering in batches, writing rows."""

import json
import os
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from titan_mi100.cli import Parser
from titan_mi100.config.hub import local_path
from titan_mi100.data.files import LONGEST_LINE, RecordReader, label
from titan_mi100.data.formats import parse_record
from titan_mi100.data.strict_json import BadRecord, parse
from titan_mi100.device import accelerator
from titan_mi100.errors import UserError
from titan_mi100.files.durable import is_stream, write_synced
from titan_mi100.files.hub_files import ADAPTER, MODEL, TOKENIZER
from titan_mi100.files.plain import open_plain
from titan_mi100.generation.engine import AnswerBatch, Model, Request
from titan_mi100.model.decode import check_lengths
from titan_mi100.text.assets import VARIABLES
from titan_mi100.weights.base import dtype_name
from titan_mi100.wording import some

_ROW_BEGINS = b'{"prompt": "'
_ROW = {"prompt": str, "output": str, "tokens": int, "finish": str}  # keys of every row, besides settings
_FINISH = ("length", "stop")  # why an answer ended: too long, or with a stop token
T = TypeVar("T")
Row = dict[str, Any]
Judge = Callable[[int, str], Row]


def command_parser(name: str, description: str, epilog: str = "", without: Collection[str] = ()) -> Parser:
    """A parser with the options of every command that generates. Args: without: those that it has not, of output and
    dtype.
    """
    prog, usage = f"titan-mi100 {name}", "%(prog)s --model PATH [options]"
    parser = Parser(prog=prog, usage=usage, description=description, epilog=epilog)
    add, thinking = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--model", metavar="PATH", required=True, help="HF folder or name, DCP folder (RUN/checkpoint/step-N) or file")
    add("--adapter", metavar="PATH", default="", help="a LoRA adapter for it: PEFT folder or checkpoint of a LoRA run")
    add("--tokenizer_path", metavar="PATH", default="", help="default: the model's folder")
    if "output" not in without:
        add("--output", metavar="FILE.jsonl", default="", help="write a row per prompt; rows already there are kept")
    add("--system", metavar="TEXT", help="system message for conversations that have none; default: as trained")
    thinking.add_argument("--enable_thinking", action="store_true", help="set enable_thinking to true ...")
    thinking.add_argument("--no_thinking", dest="enable_thinking", action="store_false", help="... or to false")
    parser.set_defaults(enable_thinking=None)
    add("--preserve_thinking", action=BooleanOptionalAction, help="set the template's variable; default: as trained")
    add("--reasoning_effort", metavar="TEXT", help="set the template's variable, e.g. low; default: as trained")
    add("--max_new_tokens", type=int, default=512, metavar="N", help="default 512")
    add("--batch_size", type=int, default=8, metavar="N", help="prompts at a time; default 8")
    add("--device", default="", help="cpu, cuda, cuda:1; default: the GPU if there is one")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    if "dtype" not in without:
        add("--dtype", choices=dtypes, help="default: bfloat16 on a GPU, else float32")
    return parser


def template_variables(options: Namespace) -> dict[str, Any]:
    """The variables of the chat template that the options set."""
    return {name: setting for name in VARIABLES if (setting := getattr(options, name)) is not None}


def open_model(options: Namespace, with_draft_head: bool = False) -> Model:
    """The model that the options name. Args: as of `Model`. Raises UserError: as it, or the device cannot be used."""
    for option, kind in (("model", MODEL), ("adapter", ADAPTER), ("tokenizer_path", TOKENIZER)):
        setattr(options, option, local_path(getattr(options, option), kind))
    device = options.device or accelerator.kind()
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):  # no such name; no such device; this torch is built without it
        raise UserError(f"--device {device}: cannot be used here; use cpu, or leave it out") from None
    dtype = getattr(torch, options.dtype or ("float32" if device.startswith("cpu") else "bfloat16"))
    return Model(options.model, options.adapter, options.tokenizer_path, torch.device(device), dtype, with_draft_head)


def read_rows(path: str, read: Callable[[Row], T]) -> list[tuple[str, T]]:
    """Pass every row of a data file through `read`, which may raise BadRecord.

    Returns:
        (file:line, result) of each row.

    Raises:
        UserError: the first wrong row, as file:line.
    """
    rows = []
    for record in RecordReader(path):
        where = f"{path}:{label(record.number, record.element)}"
        try:
            rows.append((where, read(parse_record(record))))
        except BadRecord as bad:
            raise UserError(f"{where}: {bad}") from None
    return rows


def generate_all(
    options: Namespace,
    model: Model,
    requests: Sequence[Request],
    load: Callable[[], AnswerBatch],
    settings: Row,
    judge: Judge = lambda index, output: {},
) -> list[Row]:
    """Answer the requests in batches. With --output, append each batch to the file, and keep the rows already there.

    Args:
        load: loads the weights; not called if the output file already has every row.
        settings: values besides prompts and model that the rows depend on; stored in each row.
        judge: (index, output) of a request -> further keys of its row.

    Returns:
        All rows, in the order of the requests: prompt, output, tokens, finish ("stop" or "length"), the keys from
        `judge`, settings.

    Raises:
        UserError: a prompt does not fit the model; or the output file is not from this command, has other prompts or
            settings, or cannot be written.
    """
    if options.batch_size < 1:
        raise UserError(f"batch_size = {options.batch_size} must be at least 1")
    check_lengths(model.spec, {request.where: len(request.ids) for request in requests}, options.max_new_tokens)
    rows: list[Row] = []
    if options.output:
        paths = {"model": options.model} | ({"adapter": options.adapter} if options.adapter else {})
        identity = {name: os.path.abspath(path) for name, path in paths.items()} | {"weights": model.fingerprint()[:16]}
        settings = {**identity, "dtype": dtype_name(model.dtype), "max_new_tokens": options.max_new_tokens, **settings}
        if os.path.lexists(options.output) and not is_stream(Path(options.output)):
            rows = _finished_rows(options.output, requests, settings, judge)
        _append(options.output, [])  # report a path that cannot be written before any work is done
    if len(rows) == len(requests):
        return rows
    answer_batch = load()
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; a log gets few lines, and none from a short job
    with tqdm(total=len(requests), initial=len(rows), unit="row", mininterval=interval, delay=interval) as progress:
        while len(rows) < len(requests):
            indices = range(len(rows), len(requests))[: options.batch_size]
            answers = answer_batch([requests[index].ids for index in indices], indices)
            for index, answer in zip(indices, answers, strict=True):
                output = model.tokenizer.decode(answer.ids)
                row = {"prompt": requests[index].text, "output": output, "tokens": len(answer.ids)}
                row |= {"finish": _FINISH[answer.stopped], **judge(index, output), "settings": settings}
                rows.append(row)
            if options.output:
                _append(options.output, rows[indices.start :])
            progress.update(len(indices))
    return rows


def _finished_rows(path: str, requests: Sequence[Request], settings: Row, judge: Judge) -> list[Row]:
    """The rows of an output file. A last line that a kill or a full disk left incomplete is removed from the file."""
    rows = list[Row]()
    with open_plain(Path(path)) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            if not line.endswith(b"\n") and line[: len(_ROW_BEGINS)] == _ROW_BEGINS[: len(line)] and not file.read(1):
                os.truncate(path, file.tell() - len(line))
                break
            try:
                row = parse(line.removesuffix(b"\n"))
            except BadRecord:
                row = {}
            made_with, problem = row.get("settings"), ""
            if not isinstance(made_with, dict) or {key: type(row.get(key)) for key in _ROW} != _ROW:
                problem = "was not written by this command"
            elif differing := [k for k in sorted({*made_with, *settings}) if made_with.get(k) != settings.get(k)]:
                problem = f"was made with another {some(differing)}"
            elif number > len(requests) or row["prompt"] != requests[number - 1].text:
                problem = "answers another prompt than this input's"
            elif row.keys() != {*_ROW, "settings", *(judged := judge(number - 1, row["output"]))}:
                problem = "was not written by this command"
            elif row != {**row, **judged} or row["finish"] not in _FINISH:
                problem = "would be judged otherwise now"
            if problem:
                raise UserError(f"{path}:{number}: {problem}; name another --output")
            rows.append(row)
    return rows


def _append(path: str, rows: list[Row]) -> None:
    try:
        write_synced(Path(path), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "ab")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); fix that and start again") from None
