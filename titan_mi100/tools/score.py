"""Give sampled answers their scores: `titan-mi100 score SAMPLES --by number`, after `titan-mi100 sample`.

The scores are kept in a store of their own, beside the answers; started again, it goes on. A --function is your own
code and runs with your rights. This is not a sandbox: it can read and write what you can.
"""

import argparse
import heapq
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from tqdm import tqdm

from titan_mi100 import cli as tool
from titan_mi100.config.layout import IGNORE
from titan_mi100.data.samples import Group, GroupStore, Sampled, Scored
from titan_mi100.errors import UserError
from titan_mi100.files.durable import check_output, sha256_of, write_output
from titan_mi100.files.parts import STORE
from titan_mi100.files.plain import read_plain
from titan_mi100.files.user_code import FORMS, Question, UserCode, namespaces
from titan_mi100.text.scorers import SCORERS, Judged, calls_of, gold_of, last_answer, scorer_of, without_thinking
from titan_mi100.wording import plural, printable, shown

_ROW = "titan-mi100 score "  # how the ids of kept answers begin
_HIGHEST = 1e9  # of scores, weights and limits
_PROMPTS = ("prompt", "question", "instruction", "problem", "input")  # keys of a row


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    usage, example = (
        "%(prog)s SAMPLES --by SCORER[=WEIGHT] [options]",
        "e.g. titan-mi100 score outputs/samples --by text",
    )
    epilog = f"Scorers: {SCORERS}. A function is {FORMS}. A score is the weighted sum."
    parser = tool.Parser(prog="titan-mi100 score", usage=usage, description=__doc__, epilog=epilog, example=example)
    add = parser.add_argument
    add("samples", type=Path, metavar="SAMPLES", help="a folder that titan-mi100 sample has written")
    add("--out", type=Path, metavar="FOLDER", help="of the scores; default: SAMPLES/scored")
    add(
        "--by",
        action="append",
        default=[],
        type=_weighted,
        metavar="SCORER[=WEIGHT]",
        help="may be given several times",
    )
    add(
        "--function",
        action="append",
        default=[],
        type=_weighted,
        metavar="FILE.py:NAME[=WEIGHT]",
        help="your own code; no sandbox",
    )
    add("--gold", default="", metavar="KEY", help="where a row has its gold answer, such as extra.answer")
    add("--network", action="store_true", help="let functions use the network")
    add("--timeout", type=float, default=10.0, metavar="SECONDS", help="of a scorer for an answer; default 10")
    add("--memory", type=float, default=4.0, metavar="GIB", help="of a function's process; default 4")
    add("--keep", choices=("right",), help="write the right answers, to train on them with sft")
    add("--to", type=Path, metavar="FILE.jsonl", help="where to write them")
    add("--above", type=float, default=0.5, metavar="SCORE", help="a higher score is right; default 0.5")
    add("--show", type=int, default=0, metavar="N", help="print the N best and the N worst answers")
    add("--json", action="store_true", help="print the summary as one JSON object")
    return parser


def _run(options: argparse.Namespace) -> None:
    samples, out = GroupStore.open(options.samples, Sampled), options.out or options.samples / "scored"
    if not samples.is_complete or not samples.parts:
        raise UserError(f"{options.samples}: some parts are missing; run titan-mi100 sample again: it goes on")
    _check(options, [options.samples, out])
    scorers, hashed = _scorers(options), sha256_of(options.samples / STORE)
    store = GroupStore(out, Scored("scores", hashed, samples.about.count, scorers.about))
    if store.is_complete:
        print(f"{out}: is complete; nothing is scored again", file=sys.stderr)
    if scorers.functions and not options.network and not namespaces(False):
        print("WARNING network not cut: no unshare, or the kernel does not allow it", file=sys.stderr)
    store.begin()
    for number in tqdm(store.missing, unit="part", delay=1):
        store.write(number, _scored(samples.read(number), scorers, options))
    summary = {"scores": str(out), **_summary(store, scorers.weights, options.above)}
    if options.to:
        if not (rows := [*_kept(store, options.above)]):
            raise UserError(f"--above {options.above:g}: no complete answer has a higher score; nothing to write")
        write_output(options.to, rows, "--to", _is_ours)
        summary["kept"] = len(rows)
    for name, choose in (("best", heapq.nlargest), ("worst", heapq.nsmallest)):
        summary[name] = [text for _, text in choose(options.show, _examples(store))] if options.show else []
    print(json.dumps(summary) if options.json else _table(summary, options))


def _is_ours(start: bytes) -> bool:
    return start.startswith(f'{{"id": "{_ROW}'.encode())


def _check(options: argparse.Namespace, stores: list[Path]) -> None:
    """Refuse options before anything is scored. Raises UserError."""
    folders = [Path(os.path.realpath(store)) for store in stores]
    if folders[0] == folders[1]:
        raise UserError(f"--out {stores[1]}: holds the samples; name another folder")
    if not options.by + options.function:
        raise UserError(f"--by or --function is missing; scorers are {SCORERS}")
    if not (0 < options.timeout < _HIGHEST and 0 < options.memory < _HIGHEST and options.show >= 0):
        raise UserError("--timeout and --memory must be above 0, --show 0 or more; correct them")
    if bool(options.keep) != bool(options.to):
        raise UserError("--keep right and --to FILE.jsonl need each other; give both")
    if options.to and Path(os.path.realpath(options.to)).parent in folders:
        raise UserError(f"--to {options.to}: is in a folder of samples or scores; name a file elsewhere")
    if options.to:
        check_output(options.to, "--to", _is_ours)


class _Scorers(NamedTuple):
    judges: dict[str, Callable[[Judged], float | None]]
    functions: dict[str, UserCode]
    weights: dict[str, float]
    about: list[str]  # what each is, with its weight and the hash of its file


def _weighted(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        return text, 1.0


def _scorers(options: argparse.Namespace) -> _Scorers:
    """The scorers that the options name. Raises UserError."""
    scorers = _Scorers({}, {}, {}, [f"--gold {options.gold}"] if options.gold else [])
    for name, weight in options.by + options.function:
        digest, is_function = "", len(scorers.weights) >= len(options.by)
        try:
            if is_function:
                code = _function(name, options)
                name, digest = f"{Path(code.path).name}:{code.name}", sha256(code.source.encode()).hexdigest()
                scorers.functions[name] = code
            else:
                scorers.judges[name] = scorer_of(name)
                digest = sha256_of(Path(name[7:])) if name.startswith("schema:") else ""
            if name in scorers.weights or not abs(weight) < _HIGHEST:
                raise ValueError("is given twice, or has a weight that is no number")
        except ValueError as error:
            option = "--function" if is_function else "--by"
            raise UserError(
                error if isinstance(error, UserError) else f"{option} {name}: {error}; correct it"
            ) from None
        scorers.weights[name] = weight
        scorers.about.append(f"{name}={weight!r} {digest}".strip())
    return scorers


def _function(text: str, options: argparse.Namespace) -> UserCode:
    path, _, name = text.rpartition(":")
    real = Path(os.path.realpath(path))
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError("must be FILE.py:NAME")
    if real.is_relative_to(os.path.realpath(options.samples)) or "snapshots" in real.parts:
        raise ValueError("code beside data or from the hub is never run; copy the file elsewhere if you trust it")
    try:
        source = read_plain(real).decode()
    except (OSError, UnicodeDecodeError):
        raise ValueError("is no file here that can be read; a function never comes from the hub") from None
    return UserCode(str(real), name, source, options.timeout, options.memory, options.network)


def _prompt(row: dict[str, Any]) -> Any:
    """The prompt in a row: a text, or messages."""
    messages = row["messages"][: -1 if last_answer(row) else None] if isinstance(row.get("messages"), list) else ""
    return next((row[key] for key in _PROMPTS if row.get(key)), messages)


def _question(group: Group, scorers: _Scorers, gold: str) -> tuple[Question, list[Any]]:
    """What is judged of a group, and its gold tool calls. Raises UserError."""
    where, texts, row = group.where or f"prompt {group.prompt}", [each.text for each in group.answers], group.row
    is_open = any("</think>" in text and "<think>" not in text.partition("</think>")[0] for text in texts)
    try:
        calls = calls_of(row) if "tool_calls" in scorers.judges else []
        answers = [without_thinking(text, is_open) for text in texts]
        return Question(where, _prompt(row), answers, gold_of(row, gold), row), calls
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _scored(groups: list[Group], scorers: _Scorers, options: argparse.Namespace) -> list[Group]:
    """The groups with scores. Raises UserError: a scorer fails."""
    asked = [_question(group, scorers, options.gold) for group in groups]
    given = {name: code.scores([question for question, _ in asked]) for name, code in scorers.functions.items()}
    scored = list[Group]()
    for place, (group, (question, calls)) in enumerate(zip(groups, asked, strict=True)):
        answers = []
        for number, answer in enumerate(group.answers):
            where, scores = f"{question.where}, answer {number + 1}", dict[str, float | None]()
            judged = Judged(question.answers[number], len(answer.ids), question.gold, calls)
            for name in scorers.weights:
                judge = scorers.judges.get(name)
                value = (
                    _limited(judge, judged, f"{where}: {name}", options.timeout)
                    if judge
                    else given[name][place][number]
                )
                scores[name] = value
            known = [scorers.weights[name] * value for name, value in scores.items() if value is not None]
            score = sum(known) if len(known) == len(scores) else None
            if any(value is not None and abs(value) >= _HIGHEST for value in (score, *scores.values())):
                raise UserError(f"{where}: a score of {_HIGHEST:g} or more; correct the function or the weights")
            answers.append(replace(answer, score=score, scores=scores))
        scored.append(group._replace(answers=answers))
    return scored


def _limited(judge: Callable[[Judged], float | None], judged: Judged, where: str, seconds: float) -> float | None:
    """A scorer's value. Raises UserError: it fails, or takes long, as patterns can."""

    def stop(*_: Any) -> None:
        raise UserError(f"{where} takes longer than {seconds:g} s; simplify it, or raise --timeout")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return judge(judged)
    except UserError:
        raise
    except Exception as error:  # of a schema whose $ref leads nowhere
        raise UserError(f"{where} fails: {shown(error)}; correct it") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _groups(store: GroupStore) -> Iterator[Group]:
    return (group for number in range(store.count) for group in store.read(number))


def _summary(store: GroupStore, weights: dict[str, float], above: float) -> dict[str, Any]:
    columns: dict[str, list[float | None]] = {name: [] for name in [*weights, "score"]}
    lengths, cut, spreads, dead = list[int](), 0, list[float](), 0
    for group in _groups(store):
        own = [answer.score for answer in group.answers if answer.score is not None]
        spreads += [pstdev(own)] if own else []
        dead += not own or max(own) == min(own)
        for answer in group.answers:
            for name, value in {**answer.scores, "score": answer.score}.items():
                columns[name].append(value)
            lengths.append(len(answer.ids))
            cut += answer.is_cut
    table, count = dict[str, Any](), len(lengths)
    for name, column in columns.items():
        known = [value for value in column if value is not None]
        shares = {"right": sum(value > above for value in known) / count, "not_scored": 1 - len(known) / count}
        table[name] = {"weight": weights.get(name, 1.0), "mean": fmean(known) if known else None, **shares}
    counts = {"prompts": store.about.count, "answers": count, "mean_length": fmean(lengths), "cut_off": cut / count}
    return {**counts, "spread": fmean(spreads or [0.0]), "dead prompts": dead, "scorers": table}


def _examples(store: GroupStore) -> Iterator[tuple[float, str]]:
    for group in _groups(store):
        for number, answer in enumerate(group.answers, 1):
            if answer.score is not None:
                text = " ".join(f"...{str(_prompt(group.row))[-100:]} -> {answer.text[-200:]}".split())
                yield answer.score, printable(f"{answer.score:g}  {group.where}, answer {number}: {text}")


def _kept(store: GroupStore, above: float) -> Iterator[str]:
    """Rows of training data: each right answer to a prompt once, without those that were cut off."""
    for group in _groups(store):
        right = [answer for answer in group.answers if answer.score is not None and answer.score > above]
        for number, ids in enumerate(dict.fromkeys(tuple(answer.ids) for answer in right if not answer.is_cut)):
            row = {"id": f"{_ROW}{group.prompt}/{number}", "input_ids": [*group.prompt_ids, *ids]}
            yield json.dumps(row | {"labels": [IGNORE] * len(group.prompt_ids) + [*ids]}) + "\n"


def _table(summary: dict[str, Any], options: argparse.Namespace) -> str:
    lines = [f"{'scorer':<32}{'weight':>8}{'mean':>9}{f'> {options.above:g}':>9}{'not scored':>12}"]
    for name, own in summary["scorers"].items():
        mean = "-" if own["mean"] is None else f"{own['mean']:.3f}"
        lines.append(f"{name:<32}{own['weight']:>8g}{mean:>9}{own['right']:>9.1%}{own['not_scored']:>12.1%}")
    answers, prompts, dead = (plural(summary[name], name[:-1]) for name in ("answers", "prompts", "dead prompts"))
    lines.append(
        f"{answers} to {prompts}: {summary['mean_length']:.1f} tokens on average, {summary['cut_off']:.1%} cut off; "
        f"{dead}: equal scores teach nothing; standard deviation within a prompt {summary['spread']:.3f}"
    )
    if summary["scorers"]["score"]["mean"] is None:
        lines.append("WARNING no answer has a score: is the gold answer under another key? name it with --gold")
    lines += [f"{name}: {text}" for name in ("best", "worst") for text in summary[name]]
    path = json.dumps(f"{options.to or summary['scores'] + '/part-*.jsonl'}", ensure_ascii=False)
    objective = f"# {plural(summary['kept'], 'row')}" if options.to else '[objective]\nname = "policy"'
    return "\n".join([*lines, f"train on it:\n[data]\npath = {path}\n{objective}"])


if __name__ == "__main__":
    sys.exit(main())
