"""Give sampled answers their scores: `titan-mi100 score SAMPLES --by number`, after `titan-mi100 sample`.

The scores are kept in a store of their own, beside the answers; started again, it goes on. A --function is your own
code and runs with your rights. This is not a sandbox: it can read and write what you can.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple

from tqdm import tqdm

from titan_mi100 import cli as tool
from titan_mi100.config.layout import IGNORE
from titan_mi100.data.prompts import asked_of
from titan_mi100.data.samples import Group, GroupStore, Sampled, Scored
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import UserError
from titan_mi100.files.durable import check_output, sha256_of, write_output
from titan_mi100.files.plain import read_plain
from titan_mi100.files.user_code import FORMS, HIGHEST, Question, UserCode, namespaces
from titan_mi100.text.scorers import SCORERS, Judged, gold_of, scorer_of, without_thinking
from titan_mi100.wording import plural, printable, shown

_ROW = "titan-mi100 score "  # how the ids of kept answers begin


class Scorer(NamedTuple):
    """A scorer with its weight. One of judge and code is set."""

    weight: float
    digest: str = ""  # of its file
    judge: Callable[[Judged], float | None] | None = None
    code: UserCode | None = None


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _run(parser().parse_args(argv)))


def parser() -> tool.Parser:
    """Make the command's parser."""
    usage = "%(prog)s SAMPLES --by SCORER[=WEIGHT] [options]"
    epilog = f"Scorers: {SCORERS}. A function is {FORMS}. A score is the weighted sum."
    made = tool.Parser(prog="titan-mi100 score", usage=usage, description=__doc__, epilog=epilog)
    add, several = made.add_argument, dict[str, Any](action="append", default=[], type=_weighted)
    add("samples", type=Path, metavar="SAMPLES", help="a folder that titan-mi100 sample has written")
    add("--out", type=Path, metavar="FOLDER", help="of the scores; default: SAMPLES/scored")
    add("--by", **several, metavar="SCORER[=WEIGHT]", help="may be given several times")
    add("--function", **several, metavar="FILE.py:NAME[=WEIGHT]", help="your own code, which runs with your rights")
    add("--gold", default="", metavar="KEY", help="where a row has its gold answer, such as extra.answer")
    add("--network", action="store_true", help="let functions use the network")
    add("--timeout", type=float, default=10.0, metavar="SECONDS", help="of a scorer for an answer; default 10")
    add("--memory", type=float, default=4.0, metavar="GIB", help="of a function's process; default 4")
    add("--keep", choices=("right", "all"), help="write the right answers, to train on them with sft; all: as they are")
    add("--to", type=Path, metavar="FILE.jsonl", help="where to write them")
    add("--above", type=float, default=0.5, metavar="SCORE", help="a higher score is right; default 0.5")
    add("--show", type=int, default=0, metavar="N", help="print the N best and the N worst answers")
    add("--json", action="store_true", help="print the summary as one JSON object")
    return made


def _run(options: argparse.Namespace) -> None:
    samples, target = GroupStore.open(options.samples, Sampled), options.out or options.samples / "scored"
    if not samples.is_complete or not samples.parts:
        raise UserError(f"{options.samples}: some parts are missing; run titan-mi100 sample again: it goes on")
    check(options, target)
    if options.keep == "all":
        parser().check_used(options, "--keep all", ("samples", "keep", "to", "json"))
        rows = [*_kept(samples.groups(), None)]
        write_output(options.to, rows, "--to", _is_ours)
        print(json.dumps({"kept": len(rows)}) if options.json else f"{options.to}: {plural(len(rows), 'answer')}")
        return
    scorers = scorers_of(options)
    about = [f"{name}={scorer.weight!r} {scorer.digest}".rstrip() for name, scorer in scorers.items()]
    about += [f"--gold {options.gold}"] if options.gold else []
    store = GroupStore(target, Scored("scores", samples.digest, samples.about.count, about))
    if options.function and not options.network and not namespaces(False):
        print("WARNING network not cut: no unshare, or the kernel does not allow it", file=sys.stderr)
    if store.is_complete:
        print(f"{target}: is complete; nothing is scored again", file=sys.stderr)
    store.begin()
    signal.signal(signal.SIGALRM, _too_late)
    for number in tqdm(store.missing, unit="part", delay=1, mininterval=0.1 if sys.stderr.isatty() else 10):
        store.write(number, _scored(samples.read(number), scorers, options))
    weights = {name: scorer.weight for name, scorer in scorers.items()}
    summary = {"scores": str(target), **summarise(store.groups(), weights, options.above, options.show)}
    if options.to:
        if not (rows := [*_kept(store.groups(), options.above)]):
            raise UserError(f"--above {options.above:g}: no complete answer has a higher score; nothing to write")
        write_output(options.to, rows, "--to", _is_ours)
        summary["kept"] = len(rows)
    print(json.dumps(summary) if options.json else _table(summary, options))


def _is_ours(start: bytes) -> bool:
    return start.startswith(f'{{"id": "{_ROW}'.encode())


def _too_late(*_: Any) -> None:
    raise TimeoutError("took longer than --timeout")


def check(options: argparse.Namespace, target: Path) -> None:
    """Refuse options before anything is scored. Raises UserError."""
    folders = [Path(os.path.realpath(folder)) for folder in (options.samples, target)]
    is_all, scores = options.keep == "all", bool(options.by + options.function)
    is_inside = options.to and Path(os.path.realpath(options.to)).parent in folders
    for is_wrong, problem in (
        (folders[0] == folders[1], f"--out {target}: holds the samples; name another folder"),
        (not (is_all or scores), f"--by or --function is missing; scorers are {SCORERS}"),
        (is_all and scores, "--keep all scores nothing: leave --by and --function out"),
        (not (0 < options.timeout < HIGHEST > options.memory > 0), "--timeout and --memory must be above 0"),
        (options.show < 0, f"--show {options.show}: must be 0 or more"),
        (bool(options.keep) != bool(options.to), "--keep and --to FILE.jsonl need each other; give both"),
        (is_inside, f"--to {options.to}: name another folder"),
    ):
        if is_wrong:
            raise UserError(problem)
    if options.to:
        check_output(options.to, "--to", _is_ours)


def _weighted(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        return text, 1.0


def scorers_of(options: argparse.Namespace) -> dict[str, Scorer]:
    """The scorers that the options name. Raises UserError."""
    scorers = dict[str, Scorer]()
    for number, (name, weight) in enumerate([*options.by, *options.function]):
        is_code = number >= len(options.by)
        try:
            if is_code:
                code = _code(name, options)
                name, digest = f"{Path(code.path).name}:{code.name}", sha256(code.source.encode()).hexdigest()
                scorer = Scorer(weight, digest, code=code)
            else:
                judge, file = scorer_of(name), name.removeprefix("schema:")
                scorer = Scorer(weight, "" if file == name else sha256_of(Path(file)), judge)
            if name in scorers or not abs(weight) < HIGHEST:
                raise ValueError("is given twice, or its weight is too large")
        except ValueError as error:
            option = "--function" if is_code else "--by"
            raise UserError(error if isinstance(error, UserError) else f"{option} {name}: {error}") from None
        scorers[name] = scorer
    return scorers


def _code(text: str, options: argparse.Namespace) -> UserCode:
    """The function that an option names. Raises ValueError."""
    path, _, name = text.rpartition(":")
    real = Path(os.path.realpath(path))
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError("must be FILE.py:NAME")
    if real.is_relative_to(os.path.realpath(options.samples)) or "snapshots" in real.parts:
        raise ValueError("code beside data or from the hub is never run; if you trust it, copy the file elsewhere")
    try:
        source = read_plain(real).decode()
    except (OSError, UnicodeDecodeError):
        raise ValueError("is no file here that can be read; a function never comes from the hub") from None
    return UserCode(str(real), name, source, options.timeout, options.memory, options.network)


def _prompt(row: dict[str, Any]) -> Any:
    """The prompt in a row: a text, or messages; "": none that is known."""
    try:
        messages, _ = asked_of(row)
    except BadRecord:  # a store that another program has written
        return ""
    return messages[0]["content"] if [message["role"] for message in messages] == ["user"] else messages


def _question(group: Group, gold: str) -> Question:
    """What is judged of a group. Raises UserError."""
    where, texts = group.where or f"prompt {group.prompt}", [answer.text for answer in group.answers]
    is_open = any("</think>" in text and "<think>" not in text.partition("</think>")[0] for text in texts)
    answers = [without_thinking(text, is_open) for text in texts]
    try:
        return Question(where, _prompt(group.row), answers, gold_of(group.row, gold), group.row)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _scored(groups: list[Group], scorers: dict[str, Scorer], options: argparse.Namespace) -> list[Group]:
    """The groups with scores. Raises UserError: a scorer fails."""
    questions = [_question(group, options.gold) for group in groups]
    by_code = {name: each.code.scores(questions) for name, each in scorers.items() if each.code}
    scored = list[Group]()
    for index, (group, question) in enumerate(zip(groups, questions, strict=True)):
        answers = []
        for number, (answer, text) in enumerate(zip(group.answers, question.answers, strict=True)):
            scores, judged = dict[str, float | None](), Judged(text, len(answer.ids), question.gold, group.row)
            for name, scorer in scorers.items():
                try:
                    signal.setitimer(signal.ITIMER_REAL, options.timeout)
                    scores[name] = scorer.judge(judged) if scorer.judge else by_code[name][index][number]
                except Exception as error:  # a slow pattern; a schema whose $ref leads nowhere
                    problem = f"{question.where}, answer {number + 1}: {name} fails ({shown(error)}); correct it"
                    raise UserError(problem) from None
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            known = [scorers[name].weight * own for name, own in scores.items() if own is not None]
            score = sum(known) if len(known) == len(scores) else None
            answers.append(replace(answer, score=score, scores=scores))
        scored.append(group._replace(answers=answers))
    return scored


def summarise(groups: Iterable[Group], weights: Mapping[str, float], above: float, show: int) -> dict[str, Any]:
    """Figures of scored answers, and the best and the worst.

    Args:
        weights: of the scorers.
        above: a higher score is right.
        show: how many of the best, and of the worst.
    """
    columns = dict[str, list[float | None]]()
    lengths, cut, spreads, means = list[int](), 0, list[float](), list[float]()
    dead, prompts, told = 0, 0, list[tuple[float, str]]()
    for group in groups:
        prompts += 1
        told = sorted([*told, *_examples(group)], key=itemgetter(0))
        told = told[:show] + told[max(show, len(told) - show) :]
        own = [answer.score for answer in group.answers if answer.score is not None]
        spreads += [pstdev(own)] if own else []
        means += [fmean(own)] if own else []
        dead += not own or max(own) == min(own)
        for answer in group.answers:
            for name, score in {**answer.scores, "score": answer.score}.items():
                columns.setdefault(name, []).append(score)
            lengths.append(len(answer.ids))
            cut += answer.is_cut
    table, count = dict[str, Any](), len(lengths)
    for name, column in columns.items():
        known = [score for score in column if score is not None]
        shares = {"right": sum(score > above for score in known) / count, "not_scored": 1 - len(known) / count}
        table[name] = {"weight": weights.get(name, 1.0), "mean": fmean(known) if known else None, **shares}
    counts = {"prompts": prompts, "answers": count, "mean_length": fmean(lengths), "cut_off": cut / count}
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
    shown = {"best": [text for _, text in told[::-1][:show]], "worst": [text for _, text in told[:show]]}
    spread = {"spread": fmean(spreads or [0.0]), "dead_prompts": dead, "standard_error": error}
    return {**counts, **spread, "scorers": table, **shown}


def _examples(group: Group) -> Iterator[tuple[float, str]]:
    for number, answer in enumerate(group.answers, 1):
        if answer.score is not None:
            text = " ".join(f"...{str(_prompt(group.row))[-100:]} -> {answer.text[-200:]}".split())
            yield answer.score, printable(f"{answer.score:g}  {group.where}, answer {number}: {text}")


def _kept(groups: Iterable[Group], above: float | None) -> Iterator[str]:
    """Rows of training data: each right answer to a prompt once, without those that were cut off; None: all answers."""
    for group in groups:
        right = [x for x in group.answers if x.score is not None and above is not None and x.score > above]
        kept = group.answers if above is None else [answer for answer in right if not answer.is_cut]
        for number, ids in enumerate(dict.fromkeys(tuple(answer.ids) for answer in kept)):
            row = {"id": f"{_ROW}{group.prompt}/{number}", "input_ids": [*group.prompt_ids, *ids]}
            yield json.dumps(row | {"labels": [IGNORE] * len(group.prompt_ids) + [*ids]}) + "\n"


def table_of(summary: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of each scorer, and of the score: name, weight, mean, share of right answers, and of those without a score."""
    for name, own in summary["scorers"].items():
        mean = "-" if own["mean"] is None else f"{own['mean']:.3f}"
        yield name, f"{own['weight']:g}", mean, f"{own['right']:.1%}", f"{own['not_scored']:.1%}"


def in_words(summary: dict[str, Any]) -> str:
    """What the table does not have."""
    return (
        "{answers:,} answers to {prompts:,} prompts: {mean_length:.1f} tokens on average, {cut_off:.1%} cut off; "
        "prompts whose scores are equal teach nothing: {dead_prompts:,}; standard deviation in a prompt {spread:.3f}"
        "".format_map(summary)
    )


def _table(summary: dict[str, Any], options: argparse.Namespace) -> str:
    lines = [f"{'scorer':<32}{'weight':>8}{'mean':>9}{f'> {options.above:g}':>9}{'not scored':>12}"]
    lines += ["{:<32}{:>8}{:>9}{:>9}{:>12}".format(*cells) for cells in table_of(summary)]
    lines.append(in_words(summary))
    if summary["scorers"]["score"]["mean"] is None:
        lines.append("WARNING no answer has a score: is the gold answer under another key? name it with --gold")
    lines += [f"{name}: {text}" for name in ("best", "worst") for text in summary[name]]
    path = os.path.abspath(options.to or f"{summary['scores']}/part-*.jsonl")
    objective = f"# {plural(summary['kept'], 'row')}" if options.to else '[objective]\nname = "policy"'
    return "\n".join([*lines, f"train on it:\n[data]\npath = {json.dumps(path, ensure_ascii=False)}\n{objective}"])
