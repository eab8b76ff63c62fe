"""Sample, score and train again and again: `titan-mi100 rounds --job.config_file X.toml`.

A round samples answers to prompts of data.path, scores them, and trains on them; then answers to data.validation_path
are scored. Each part is a command that runs alone; started again after any kill, the rounds go on.
"""

import argparse
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from titan_mi100 import cli as tool
from titan_mi100.checkpoint.sealed import MANIFEST, list_checkpoints
from titan_mi100.config.as_text import settings_parser, to_toml
from titan_mi100.config.check import check
from titan_mi100.config.hub import COMMITS_FILE
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, ObjectiveConfig, RoundsConfig, ValidationConfig
from titan_mi100.config.srun import srun_tasks
from titan_mi100.data.answer_store import SAMPLED
from titan_mi100.data.files import expand_patterns
from titan_mi100.data.prepare import check_teacher
from titan_mi100.data.prompts import asked_of
from titan_mi100.data.samples import GroupStore, Scored
from titan_mi100.doors import door
from titan_mi100.errors import UserError
from titan_mi100.files import durable
from titan_mi100.files.isolated import ended
from titan_mi100.files.plain import read_object, read_plain
from titan_mi100.files.pool import end_with_parent
from titan_mi100.generation.batch import read_rows
from titan_mi100.log import log, setup_logging
from titan_mi100.open_run.reference import APART
from titan_mi100.tools import sample, score
from titan_mi100.tools.rounds_report import drift, finished, report, summary_of, why_over
from titan_mi100.watch.outcome import STATE, read_outcome

_ABOUT, _PARTS = "rounds.json", "parts.json"
_LARGEST = 1 << 28  # bytes of a record of the parts of a round
# What must not change when the rounds are started again; other settings may, for what is not made yet.
_FIXED = ("checkpoint.initial_load_path", "model.", "lora.", "training.seed", "rounds.held_out_k", "the prompts")
_NOISE = 4.0  # times the first round's difference of log p, beyond which a server has other weights
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _run(*_parser().parse_known_args(argv)))


def _parser() -> tool.Parser:
    description, epilog = __doc__.replace("`", ""), "docs/ROUNDS.md explains the keys of [rounds] and the report."
    parser = settings_parser("titan-mi100 rounds", description, epilog)
    parser.add_argument("--nproc_per_node", type=int, metavar="N", help="processes that train; default: as of train")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def _run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    setup_logging(0)
    if os.environ.get("WORLD_SIZE", "1") != "1" or srun_tasks(os.environ) != 1:
        raise UserError("rounds start their processes themselves: start one process, without torchrun and srun")
    config, commands = load_config(settings, None), Commands()
    for line in config.notes:
        _note(line)
    rounds = Rounds(config, options.nproc_per_node, commands)
    commands.listen()
    folder = rounds.folder
    folder.mkdir(parents=True, exist_ok=True)
    _lock = durable.FolderLock(folder, 0)
    code = rounds.run()
    told = report(folder, rounds.summaries, rounds.why)
    print(json.dumps(told) if options.json else (folder / "report.md").read_text())
    return code


class Ended(Exception):
    """Raised where a part has ended with an exit code that is not 0, and has said why; 3: it was told to stop."""

    def __init__(self, code: int) -> None:
        self.code = code


class Commands:
    """Runs one command of titan-mi100 at a time, each in a process that ends with this one.

    A signal stops it; between commands it raises Ended.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = self._is_starting = False

    def listen(self) -> None:
        """Let signals stop the commands, but those that are ignored, as nohup does with SIGHUP."""
        for each in STOPS:
            if signal.getsignal(each) != signal.SIG_IGN:
                signal.signal(each, self._stop)

    def __call__(self, words: Sequence[str], is_read: bool) -> bytes:
        """Run a command to its end; its output if it is read, else that goes to stderr. Raises Ended."""
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        if self._is_stopped:  # while the command before ended by itself
            raise Ended(3)
        self._is_starting = True
        self._child = subprocess.Popen(
            [sys.executable, "-m", "titan_mi100", *words], stdout=subprocess.PIPE if is_read else sys.stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
        self._is_starting = False
        if self._is_stopped:  # meanwhile
            self._child.send_signal(signal.SIGTERM)
        told, _ = self._child.communicate()
        if code := self._child.returncode:
            _note(f"titan-mi100 {words[0]}: {ended(code)}")
            raise Ended(3 if self._is_stopped else max(code, 1))
        return told or b""

    def _stop(self, *_: Any) -> None:
        self._is_stopped = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        elif not self._is_starting:
            raise Ended(3)


class Rounds:
    """Rounds in a folder.

    Attributes:
        summaries: of each round that is complete, and of the model before them.
        why: why there is no further round; "": there is one.
    """

    def __init__(self, config: Config, processes: int | None, run: Callable[[Sequence[str], bool], bytes]) -> None:
        """Args: processes: that train; None: as many as train starts. run: a command, see Commands.

        Raises:
            UserError: everything that is wrong with the config.
        """
        self._config, self._processes, self._of, self._run = config, processes, config.rounds, run
        self.folder, self.summaries, self.why = Path(config.job.run_folder), list[dict[str, Any]](), ""
        self._server = door("rounds --server")(self._of) if self._of.server else None
        if problems := [*self._problems()]:
            raise UserError("\n".join(problems))
        self._rows, self._held_out = self._read(config.data.path), self._read(config.data.validation_path)
        if share := config.data.validation_fraction:
            random.Random(config.training.seed).shuffle(self._rows)
            count = max(1, round(share * len(self._rows)))
            self._held_out, self._rows = self._rows[:count], self._rows[count:]
        asked = {json.dumps(asked_of(row)[0]) for row in self._rows}
        if again := sum(json.dumps(asked_of(row)[0]) in asked for row in self._held_out):
            log.warning(f"{again:,} of {len(self._held_out):,} held-out prompts are prompts of data.path, too")

    def _problems(self) -> Iterator[str]:
        config, of, save = self._config, self._of, self._config.checkpoint
        needed = {
            "job.run_folder is not set": config.job.run_folder,
            "rounds.count is not set": of.count,
            'objective.name must be "policy"': config.objective.name == "policy",
            "data.path is not set; name the prompts": config.data.path,
            "data.validation_path or validation_fraction is not set: held-out prompts": config.data.validation_path
            or config.data.validation_fraction,
            "[validation] has no effect in rounds; delete it": config.validation == ValidationConfig(),
            "model.chat_template has no effect on samples; let the tokenizer have it": not config.model.chat_template,
            "checkpoint.fresh and load_step have no effect in rounds; delete them": not save.fresh
            and save.load_step == -1,
            "objective.advantage has no effect with rounds.teacher; delete it": not of.teacher
            or config.objective.advantage == "mean",
            'objective.advantage = "teacher" is for one round; set rounds.teacher': of.teacher
            or config.objective.advantage != "teacher",
            "rounds.served_model and restart have no effect without server": of.server
            or not (of.served_model or of.restart),
            "rounds.served_model is not set": of.served_model or not of.server,
            "rounds.restart is not set: only adapters are handed to vLLM and SGLang without it": not of.server
            or of.restart
            or (config.lora.rank and of.server_kind != "llamacpp"),
        }
        yield from (problem for problem, holds in needed.items() if not holds)
        if all(needed.values()):
            yield from map(str, check(self._settings_of(1), self._processes, with_files=False))
            yield from self._problems_of_parts()

    def _problems_of_parts(self) -> Iterator[str]:
        """What is wrong with the options of the commands, before any of them runs."""
        of, seq_len = self._of, self._config.training.seq_len
        try:
            words = self._sample_words(0, Path("x"), Path("x"), of.k, 1)
            options = sample.parser().parse_args([*map(str, words[1:])])
            sample.check(options)
            if options.limit or options.server != of.server:
                yield "rounds.sample: --limit and --server are not for it; set rounds.prompts, rounds.server"
            if options.max_new_tokens >= seq_len:
                yield f"training.seq_len = {seq_len} must hold a prompt and --max_new_tokens {options.max_new_tokens}"
            options = score.parser().parse_args([*map(str, self._score_words(Path("x"))[1:])])
            score.check(options, Path("y"))
            score.scorers_of(options)
            if options.out or options.to:
                yield "rounds.score: --out, --keep and --to are not for it"
            if of.teacher:
                check_teacher(of.teacher, self._config.tokenizer_path())
        except (SystemExit, ValueError) as error:
            own = f": {error}" if isinstance(error, ValueError) else ", see above"
            yield f"rounds.sample or rounds.score is wrong{own}" if not isinstance(error, UserError) else str(error)

    def _read(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of files, each with a prompt. Raises UserError."""
        files = [file for files in expand_patterns(paths) for file in files]
        read = [read_rows(file, lambda row: (row, asked_of(row))) for file in files]
        return [row for rows in read for _, (row, _) in rows]

    def run(self) -> int:
        """Make what is missing. Returns the exit code: 3: told to stop; else that of a part that has failed."""
        try:
            self._begin()
            for number in range(self._of.count + 1):
                if number and (why := self._round(number)):
                    break
                self._score_held_out(number)
                self.summaries.append(summary_of(number, self._parts(number)))
                _note(finished(self.summaries))
                report(self.folder, self.summaries, "")
                if why := why_over(self.summaries, self._of):
                    break
        except Ended as ended:
            self.why = "told to stop" if ended.code == 3 else "a part has failed, see its message"
            _note(f"{self.why}; start again with the same command: it continues")
            return ended.code
        self.why = why or f"{self._of.count} rounds were asked for"
        return 0

    def _begin(self) -> None:
        """Write what the rounds are made of, or compare it. Raises UserError: it differs."""
        settings = asdict(replace(self._config, notes=()))
        about = {f"{name}.{key}": own for name, section in settings.items() for key, own in dict(section).items()}
        about["the prompts"] = hashlib.sha256(json.dumps([self._rows, self._held_out]).encode()).hexdigest()
        about, path = json.loads(json.dumps(about)), self.folder / _ABOUT
        names = sorted(each.name for each in self.folder.iterdir() if each.name[0] != "." and each.name != COMMITS_FILE)
        if path.exists():
            before = read_object(path, "name another job.run_folder", _LARGEST)
            differing = [key for key, own in about.items() if own != before.get(key)]
            fixed = (*_FIXED, *["rounds.score"] * ("held_out" in self._parts(0)))
            if wrong := [key for key in differing if key.startswith(fixed)]:
                remedy = "start with the same settings, or name another job.run_folder"
                raise UserError(f"{self.folder}: was begun with other {', '.join(wrong)}; {remedy}")
            if differing:
                _note(f"from here on with other {', '.join(differing)}")
        elif names:
            raise UserError(f"{self.folder}: holds other files, such as {names[0]}; name a new folder: job.run_folder")
        durable.replace(path, json.dumps(about, indent=1), is_synced=True)
        if self._config.commits:  # a later start takes these, not what the names mean by then
            durable.replace(self.folder / COMMITS_FILE, json.dumps(dict(self._config.commits), indent=1) + "\n")
        _write(self.folder / "held-out.jsonl", self._held_out)

    def _round(self, number: int) -> str:
        """Sample, score and train. Returns why it cannot be trained; "": it was.

        Raises:
            UserError: the first round cannot be trained.
        """
        folder, seed = self._folder(number), self._config.training.seed + number
        prompts, samples, run = folder / "prompts.jsonl", folder / "samples", folder / "run"
        self._part(number, "prompts", partial(self._choose, number, prompts))
        words = partial(self._sample_words, number - 1, prompts, samples, self._of.k, seed)
        self._part(number, "sample", lambda: {**self._told(words()), "by_server": bool(self._of.server)})
        self._part(number, "score", partial(self._score, samples))
        scored, config = self._parts(number)["score"], self._settings_of(number)
        needs_spread = not (self._of.teacher or config.objective.kl_weight or config.objective.cut_off == "shape")
        if needs_spread and scored["dead_prompts"] == scored["prompts"]:
            problem = f"round {number}: all answers to each prompt have the same score, so nothing can be learned"
            if number > 1:
                return problem
            remedy = "take easier or harder prompts, a larger rounds.k or another score, and another job.run_folder"
            raise UserError(f"{problem}; {remedy}")
        settings = folder / "train.toml"
        durable.replace(settings, to_toml(config), is_synced=True)
        processes = ["--nproc_per_node", self._processes] if self._processes else []
        words_of_run = ["--job.config_file", settings, *processes]
        if self._of.teacher:
            teach = ["teach", *words_of_run, "--model", self._of.teacher, "--out", folder / "teacher"]
            teach += shlex.split(self._of.teach)
            self._part(number, "teach", partial(self._made, teach, dict[str, Any]))
        self._part(number, "train", partial(self._made, ["train", *words_of_run], partial(_trained, run)))
        if not self._of.keep_checkpoints:
            shutil.rmtree(self._folder(number - 1) / "run" / "checkpoint", ignore_errors=True)
        return ""

    def _score_held_out(self, number: int) -> None:
        folder = self._folder(number)
        prompts, samples = self.folder / "held-out.jsonl", folder / "held-out"
        words = partial(self._sample_words, number, prompts, samples, self._of.held_out_k, self._config.training.seed)
        self._part(number, "sample_held_out", lambda: self._told(words()))
        self._part(number, "held_out", lambda: self._told(self._score_words(samples)))
        if self._parts(number)["held_out"]["scorers"]["score"]["mean"] is None:
            raise UserError(
                f"{prompts}: no answer has a score; name the key of the right answer: rounds.score = '--gold KEY'"
            )

    def _score(self, samples: Path) -> dict[str, Any]:
        told, store = self._told(self._score_words(samples)), GroupStore.open(samples / "scored", Scored)
        told["dead"] = list[int]()
        for group in store.groups():
            known = {answer.score for answer in group.answers} - {None}
            told["dead"] += [group.prompt] * (len(known) < 2)
        return told

    def _choose(self, number: int, path: Path) -> dict[str, Any]:
        """Write the prompts of a round: those that were asked least, in random order. A prompt rests if its last two
        groups had equal scores, not long ago.
        """
        asked, dead, resting = Counter[int](), Counter[int](), set[int]()
        for before in range(1, number):
            parts = self._parts(before)
            for index, prompt in enumerate(parts["prompts"]["asked"]):
                asked[prompt] += 1
                dead[prompt] = dead[prompt] + 1 if index in parts["score"]["dead"] else 0
                resting -= {prompt}
                resting |= {prompt} if dead[prompt] > 1 and number - before <= self._of.rest else set()
        eligible = [prompt for prompt in range(len(self._rows)) if prompt not in resting]
        if not eligible:
            raise UserError(f"rounds.rest = {self._of.rest}: all prompts rest, nothing is left to learn from; lower it")
        random.Random(f"{self._config.training.seed}/{number}").shuffle(eligible)
        chosen = sorted(eligible, key=asked.__getitem__)[: self._of.prompts or None]
        _write(path, [self._rows[prompt] for prompt in chosen])
        return {"asked": chosen, "resting": len(resting)}

    def _settings_of(self, number: int) -> Config:
        """The config of a round's training."""
        config, folder = self._config, self._folder(number)
        scored, (model, adapter) = str(folder / "samples" / "scored" / "part-*.jsonl"), self._weights(number - 1)
        objective, export = config.objective, config.checkpoint.export_dtype
        if self._of.teacher:
            objective = replace(objective, advantage="teacher", teacher=str(folder / "teacher"))
        by_server = self._parts(number).get("sample", {}).get("by_server", bool(self._of.server))
        if objective.correction == "auto" and (by_server or config.lora.base == "nf4"):
            objective = replace(objective, correction="truncate")  # nf4: the engine samples with the weights in 16 bits
        if by_server:
            objective = replace(objective, most_apart=self._most_apart(number))
        if config.lora.rank and export == "auto":
            export = "float32"  # what the next round starts from is not rounded
        return replace(
            config,
            job=replace(config.job, run_folder=str(folder / "run")),
            model=replace(config.model, tokenizer_path=config.tokenizer_path()),
            data=replace(config.data, path=(scored,), validation_path=(), validation_fraction=0.0),
            lora=replace(config.lora, initial_load_path=adapter),
            checkpoint=replace(config.checkpoint, initial_load_path=model, export_hf=True, export_dtype=export),
            objective=objective,
            rounds=RoundsConfig(),
            notes=(),
        )

    def _most_apart(self, number: int) -> float:
        """How far a server's log p may be from the trainer's: what it was in the first round is its rounding."""
        own, before = self._config.objective.most_apart, map(self._parts, range(1, number))
        first = next((parts["train"]["apart"] for parts in before if parts["sample"]["by_server"]), None)
        return own if first is None or own != ObjectiveConfig.most_apart else min(own, max(_NOISE * first, 1e-3))

    def _weights(self, number: int) -> tuple[str, str]:
        """Model and adapter ("": none) after a round."""
        base, lora = self._config.checkpoint.initial_load_path, self._config.lora
        run, trained = self._folder(number) / "run", self._parts(number).get("train", {})
        if not number:
            return base, lora.initial_load_path
        if lora.rank:
            return base, str(run / f"hf-step-{trained['step']}")
        return str(run / "checkpoint" / f"step-{trained['step']}"), ""

    def _sample_words(self, number: int, data: Path, out: Path, k: int, seed: int) -> list[Any]:
        """The words of titan-mi100 sample, with the weights after a round. A server gets them here."""
        model, adapter = self._weights(number)
        own = ["--tokenizer_path", self._config.tokenizer_path(), *shlex.split(self._of.sample)]
        words = ["sample", "--model", model, "--data", data, "--out", out, "--k", k, "--seed", seed, "--json", *own]
        if self._server is None:
            return [*words, "--adapter", adapter]
        name = self._of.served_model
        if number:
            trained = self._parts(number)["train"]
            name = trained["name"]
            self._server.serve(name, self._folder(number) / "run" / f"hf-step-{trained['step']}", bool(adapter))
        return [*words, "--server", self._of.server, "--served_model", name, "--server_kind", self._of.server_kind]

    def _score_words(self, samples: Path) -> list[Any]:
        return ["score", samples, "--json", "--show", 2, *shlex.split(self._of.score)]

    def _folder(self, number: int) -> Path:
        return self.folder / f"round-{number}"

    def _parts(self, number: int) -> dict[str, Any]:
        """What the finished parts of a round have said."""
        path = self._folder(number) / _PARTS
        return read_object(path, "delete the round's folder", _LARGEST) if path.exists() else {}

    def _part(self, number: int, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Make a part of a round, if it was not made before, and note what it says."""
        parts = self._parts(number)
        if name in parts:
            return
        _note(f"round {number} of {self._of.count}: {name.replace('_', ' ')}")
        started = time.monotonic()
        self._folder(number).mkdir(exist_ok=True)
        parts[name] = {**make(), "seconds": time.monotonic() - started}
        durable.replace(self._folder(number) / _PARTS, json.dumps(parts, indent=1), is_synced=True)

    def _told(self, words: Sequence[Any]) -> dict[str, Any]:
        """What a command with --json says."""
        return dict(json.loads(self._run([*map(str, words)], True)))

    def _made(self, words: Sequence[Any], look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a command, then look at what it has made."""
        self._run([*map(str, words)], False)
        return look()


def _note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    durable.replace(path, "".join(json.dumps(row) + "\n" for row in rows), is_synced=True)


def _trained(run: Path) -> dict[str, Any]:
    """What a complete run says of itself."""
    outcome = read_outcome(run / STATE)
    assert outcome is not None and outcome.state == "done", outcome
    step = int(list_checkpoints(run / "checkpoint")[-1].name.removeprefix("step-"))
    seal = hashlib.sha256(read_plain(run / "checkpoint" / f"step-{step}" / MANIFEST)).hexdigest()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "log_ratio" in line]
    apart = read_object(run / SAMPLED / APART, "start again")
    tokens = sum(line["tokens"] for line in steps)
    return {"step": step, "name": f"titan-round-{seal[:12]}", "tokens": tokens, "apart": apart["mean"], **drift(steps)}
