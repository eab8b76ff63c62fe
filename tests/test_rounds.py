"""Rounds: parts that go on after any kill with the same bits, prompts that rest, ends, warnings, servers that lie."""

import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Thread, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import with_tokenizer
from test_generate import write_folder
from test_sample import Stub, answer
from torch import Tensor
from transformers import AutoModelForCausalLM

from titan_mi100.config.check import check_start
from titan_mi100.config.load import load_config
from titan_mi100.config.toml_file import read_toml
from titan_mi100.data.samples import Answer, Group, GroupStore, Sampled, Scored
from titan_mi100.errors import UserError
from titan_mi100.generation.engine import Model
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.open_run.start import open_run
from titan_mi100.open_run.teacher import write_teacher
from titan_mi100.parallel.distributed import World
from titan_mi100.run.folder import RunFolder
from titan_mi100.tools import rounds, sample, score, teach
from titan_mi100.tools.rounds_report import report, warnings
from titan_mi100.train import train
from titan_mi100.watch.outcome import Outcome, write_run_state
from titan_mi100.workshop import answer_server

NEVER = SimpleNamespace(reason="")
LORA = {"lora.rank": 2, "lora.alpha": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return with_tokenizer(write_folder(tmp_path_factory.mktemp("model") / "base"))


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> dict[str, Any]:
    """Of two rounds."""
    for name, count in (("prompts", 12), ("held-out", 4)):
        rows = [{"question": f"{name} {i}?", "answer": f"#### {i}"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = tmp_path / "judge.py"
    judge.write_text("def score(prompt, answer, row):\n    return len(answer) % 3 / 2\n")
    return {
        "job.run_folder": tmp_path / "rounds", "data.path": tmp_path / "prompts.jsonl",
        "data.validation_path": tmp_path / "held-out.jsonl", "checkpoint.initial_load_path": model,
        "objective.name": "policy", "objective.cut_off": "keep", "rounds.count": 2, "rounds.prompts": 6, "rounds.k": 3,
        "rounds.sample": "--max_new_tokens 8 --batch_size 4 --device cpu", "rounds.score": f"--function {judge}:score",
        "rounds.patience": 0, "training.seq_len": 128, "training.epochs": 1, "training.local_batch_size": 2,
        "training.target_tokens_per_step": 256, "training.mixed_precision_param": "float32", "optimizer.lr": 1e-3,
        "lr_scheduler.warmup_steps": 0, "metrics.enable_tensorboard": "false", "checkpoint.interval": 0,
        "model.attention_backend": "sdpa",
    }  # fmt: skip


def opened(settings: dict[str, Any], call: Callable[[Sequence[str], bool], bytes]) -> rounds.Rounds:
    config = load_config([f"--{key}={value}" for key, value in settings.items()], None)
    return rounds.Rounds(config, None, call)


def run(settings: dict[str, Any], call: Callable[[Sequence[str], bool], bytes]) -> tuple[int, dict[str, Any]]:
    of = opened(settings, call)
    of.folder.mkdir(exist_ok=True)
    code = of.run()
    return code, report(of.folder, of.summaries, of.why)


def in_process(world: World) -> Callable[[Sequence[str], bool], bytes]:
    """Runs the commands of rounds here."""

    def run(words: Sequence[str], is_read: bool) -> bytes:
        name, *rest = words
        if name in ("sample", "score"):
            told = io.BytesIO()
            with io.TextIOWrapper(told, write_through=True) as stream, contextlib.redirect_stdout(stream):
                code = {"sample": sample, "score": score}[name].main(rest)
                content = told.getvalue()
            if code:
                raise rounds.Ended(code)
            return content
        if name == "teach":
            options, settings = teach.parser().parse_known_args(rest)
            config = load_config(["--job.config_file", str(teach.write_config(options)), *settings])
            write_teacher(config, world, Path(options.out))
            return b""
        config = load_config(rest)
        folder = RunFolder(config.job, False, world)
        try:
            ended = train(open_run(config, world, folder.path), NEVER)  # type: ignore[arg-type]
            write_run_state(folder.path, Outcome(0, ended[0], state="done", next=ended[1]))
        except UserError as error:
            print(error)
            raise rounds.Ended(2) from None
        return b""

    return run


def content(folder: Path) -> dict[str, bytes]:
    """What must have the same bits: parts of stores, weights, prompts."""
    names = ("part-*.*", "*.safetensors", "*.distcp", "prompts.jsonl")
    files = [path for name in names for path in folder.rglob(name)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Called(Exception):
    pass


def never(*_: Any) -> bytes:
    raise Called


@pytest.mark.parametrize("trained", [LORA, pytest.param({}, marks=pytest.mark.full)], ids=["lora", "whole"])
def test_rounds_go_on_after_a_kill_at_any_part_with_the_same_bits(
    trained: dict[str, Any], settings: dict[str, Any], world: World, tmp_path: Path, capfd: Any, full: bool
) -> None:
    here, killed, count = in_process(world), list[str](), 2 if full else 1
    settings |= {**trained, "rounds.count": count}
    code, told = run(settings, here)
    whole = content(tmp_path / "rounds")
    assert code == 0 and told["why"] == f"{count} rounds were asked for"
    assert [each["round"] for each in told["rounds"]] == [*range(count + 1)]
    assert all(0 <= each["held_out"] <= 1 for each in told["rounds"]) and told["rounds"][1]["apart"] < 1e-5
    assert Path(told["model"]).is_dir() if told["best"] else told["model"] == ""
    assert (tmp_path / "rounds" / "round-1" / "run" / "checkpoint").exists() == (count == 1)
    for path in (tmp_path / "rounds").glob("round-*/run/hf-step-*/*.safetensors"):  # nothing is rounded on the way
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float32}
    prompts = [path.read_text() for path in (tmp_path / "rounds").glob("round-*/prompts.jsonl")]
    assert len({*prompts}) == count

    def dying(words: Sequence[str], is_read: bool) -> bytes:
        """Each command ends once after its work, before that is noted."""
        told, name = here(words, is_read), " ".join(words)
        if name not in killed:
            killed.append(name)
            raise rounds.Ended(3)
        return told

    again = {**settings, "job.run_folder": tmp_path / "again"}
    while run(again, dying)[0] == 3:
        pass
    assert len(killed) == 2 + 5 * count and content(tmp_path / "again") == whole
    assert run({**again, "rounds.patience": 9}, never)[0] == 0
    settings |= {"rounds.score": "--by length:3", "rounds.held_out_k": 2}
    with pytest.raises(UserError, match=r"was begun with other rounds\.held_out_k, rounds\.score; start with the same"):
        run(settings, never)
    capfd.readouterr()
    assert run({**again, "optimizer.lr": 2e-3, "rounds.k": 4}, never)[0] == 0  # for further rounds
    assert "from here on with other optimizer.lr, rounds.k, rounds.patience" in capfd.readouterr().err
    (other := tmp_path / "other").mkdir()
    (other / "held-out.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"other: holds other files, such as held-out\.jsonl; name a new folder"):
        run({**again, "job.run_folder": other}, never)
    assert (other / "held-out.jsonl").read_text() == "mine"


def test_a_teacher_who_agrees_changes_nothing(
    settings: dict[str, Any], model: Path, world: World, tmp_path: Path
) -> None:
    """The student is its own teacher: each token's advantage is zero."""
    given = {**settings, "rounds.count": 1, "rounds.teacher": model, "optimizer.weight_decay": 0}
    code, told = run(given, in_process(world))
    export = tmp_path / "rounds" / "round-1" / "run" / f"hf-step-{told['rounds'][1]['step']}"
    start, after = (load_file(next(path.glob("*.safetensors"))) for path in (model, export))
    assert code == 0 and all(torch.equal(start[name], after[name]) for name in start.keys() | after.keys())
    other = with_tokenizer(write_folder(tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({name: own * 1.2 for name, own in weights.items()}, other / "model.safetensors", {"format": "pt"})
    assert run({**given, "rounds.teacher": other, "job.run_folder": tmp_path / "more"}, in_process(world))[0] == 0
    round_1, forward = tmp_path / "more" / "round-1", AutoModelForCausalLM.from_pretrained(other)
    expected = dict[int, Tensor]()
    for group in GroupStore.open(round_1 / "samples" / "scored", Scored).read(0):
        for each in group.answers:
            ids = torch.tensor([group.prompt_ids + each.ids])
            log_p = forward(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            expected[len(expected)] = log_p[len(group.prompt_ids) - 1 :].detach()
    [part] = (round_1 / "teacher").glob("part-*.safetensors")
    arrays = load_file(part)
    told = torch.cat([expected[int(number)] for number in arrays["documents"]])
    assert (arrays["log_p"][:, 0] - told).abs().max() < 1e-4 and len(expected) == 18


def test_a_teacher_of_samples_is_refused_where_it_would_not_be_used(
    settings: dict[str, Any], model: Path, tmp_path: Path, capfd: Any
) -> None:
    words = ["--job.config_file", str(tmp_path / "x.toml"), "--model", str(model), "--out", str(tmp_path / "t")]

    def refused(objective: str, *more: str) -> str:
        rows = f'[data]\npath = "{settings["data.path"]}"\n[checkpoint]\ninitial_load_path = "{model}"\n'
        rows += "[training]\nseq_len = 128\n"
        (tmp_path / "x.toml").write_text(f"{rows}[objective]\n{objective}\n")
        assert teach.main([*words, *more]) == 2
        return str(capfd.readouterr().err)

    assert 'sampled answers: name = "policy", advantage = "teacher"' in refused('name = "policy"')
    assert 'has no effect with advantage = "mean"; delete it' in refused('name = "policy"\nteacher = "t"')
    judged = 'name = "policy"\nadvantage = "teacher"\n'
    assert "teacher is not set; name the folder" in refused(judged)
    assert "--top_k have no effect with sampled answers" in refused(judged + 'teacher = "t"', "--top_k", "4")
    assert '"shape" changes scores, and a teacher gives none' in refused(
        judged + 'teacher = "t"\ncut_off = "shape"\ncut_off_tokens = 2\nlongest_answer = 8'
    )
    assert "correction_cap = 1 must be above 1" in refused(
        'name = "policy"\ncorrection = "truncate"\ncorrection_cap = 1.0'
    )


def made_up(scores: Callable[[str, int, int], float], **trained: float) -> Callable[[Sequence[str], bool], bytes]:
    """Runs nothing: writes stores and a run as the commands would. Args: scores: of (folder, prompt, answer).

    Every answer has one token. trained: what the last step of each run measures.
    """

    def call(words: Sequence[str], is_read: bool) -> bytes:
        name, options = words[0], dict(pairwise(words))
        if name == "sample":
            rows, k = Path(options["--data"]).read_text().splitlines(), int(options["--k"])
            about = Sampled("samples", "s", "p", "t", len(rows), k, 0, 8, [1], "", 0)
            store = GroupStore(Path(options["--out"]), about)
            each = [Answer([1], [-1.0], "stop")] * k
            groups = [Group(n, "", json.loads(row), [1], each) for n, row in enumerate(rows)]
            store.begin()
            store.write(0, groups)
            return json.dumps({"answers": k * len(rows), "mean_length": 1.0, "cut_off": 0}).encode()
        if name == "score":
            samples = GroupStore.open(Path(words[1]), Sampled)
            store = GroupStore(samples.folder / "scored", Scored("scores", samples.digest, samples.about.count, []))
            groups = []
            for group in samples.read(0):
                each = [Answer([1], [-1.0], "stop", "", scores(words[1], group.prompt, i), {"x": 1.0})
                        for i in range(samples.about.k)]  # fmt: skip
                groups.append(group._replace(answers=each))
            store.begin()
            store.write(0, groups)
            return json.dumps(score.summarise(groups, {}, 0.5, 2)).encode()
        folder = Path(read_toml(Path(options["--job.config_file"]))["job"]["run_folder"])
        (folder / "checkpoint" / "step-3").mkdir(parents=True)
        (folder / "checkpoint" / "step-3" / "manifest.json").write_text(str(folder))
        step = {"log_ratio": -0.01, "kl": 0.01, "clipped": 0.1, "entropy": 1.0, "tokens": 5, **trained}
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, **step}) + "\n")
        write_run_state(folder, Outcome(0, "", state="done", next=""))
        (folder / "sampler").mkdir()
        (folder / "sampler" / "apart.json").write_text('{"mean": 0.002}')
        return b""

    return call


def test_rounds_end_when_the_held_out_score_stops_rising_or_the_model_has_gone_far(settings: dict[str, Any]) -> None:
    many = {**settings, "rounds.count": 9, "rounds.patience": 2}
    of_round = [0.2, 0.5, 0.4, 0.5, 0.9]

    def rising(folder: str, prompt: int, answer: int) -> float:
        number = int(folder.partition("/round-")[2].partition("/")[0])
        return of_round[number] if "held-out" in folder else answer % 2

    code, told = run(many, made_up(rising))
    assert code == 0 and told["best"] == 1 and [each["round"] for each in told["rounds"]] == [0, 1, 2, 3]
    assert told["why"] == "the held-out score has not risen for 2 rounds (rounds.patience)"
    assert told["model"].endswith("round-1/run/hf-step-3") and told["rounds"][1]["dead"] == 0
    code, told = run({**many, "rounds.patience": 0, "rounds.count": 4}, made_up(rising))  # they go on, and are kept
    assert told["best"] == 4 and told["why"] == "4 rounds were asked for"
    folder = settings["job.run_folder"]
    page = (folder / "report.md").read_text()
    assert "| 4 | 0.9 | 0 | 0.333 | 1 | 0 | 0 | 0.01 | 0.01 | 0.1 | 1 | 0.002 |" in page
    assert "best: round 4, held-out score 0.900: " in page and "worst held-out answers of round 4" in page
    far = {**many, "job.run_folder": folder.parent / "far"}
    code, told = run(far, made_up(rising, log_ratio=-0.7))
    assert told["why"].startswith("round 1 has moved 0.70 nats per token from its sampler") and len(told["rounds"]) == 2
    run({**far, "rounds.most_drift": 0, "rounds.count": 2}, made_up(rising))


def test_prompts_come_in_turn_and_rest_when_their_groups_are_equal_twice(settings: dict[str, Any]) -> None:
    given = {**settings, "rounds.count": 9, "rounds.prompts": 8, "rounds.rest": 2, "rounds.keep_checkpoints": "true"}
    rows = [json.loads(line) for line in settings["data.path"].read_text().splitlines()]
    of = settings["job.run_folder"]

    def easy(folder: str, prompt: int, answer: int) -> float:
        """The first three prompts of the file are always answered."""
        asked = json.loads((Path(folder).parent / "prompts.jsonl").read_text().splitlines()[prompt]) \
            if "held-out" not in folder else {}  # fmt: skip
        return 1.0 if asked in rows[:3] else answer % 2

    assert run(given, made_up(easy))[0] == 0
    parts = [json.loads((of / f"round-{n}" / "parts.json").read_text()) for n in range(1, 10)]
    asked = [part["prompts"]["asked"] for part in parts]
    assert all(len({*each}) == 8 for each in asked) and {*asked[0], *asked[1]} == {*range(12)}
    for index in range(3):
        seen, dead = list[int](), 0
        for number, each in enumerate(asked):
            rests = dead >= 2 and number - seen[-1] <= 2
            assert not (rests and index in each), (index, number)
            if index in each:
                seen, dead = [*seen, number], dead + 1
        assert dead >= 2
    assert max(part["prompts"]["resting"] for part in parts) > 0 and (of / "round-1" / "run" / "checkpoint").is_dir()
    kept = parts[4]
    (of / "round-5" / "parts.json").unlink()
    (of / "round-5" / "prompts.jsonl").unlink()
    with pytest.raises(Called):
        run(given, never)
    assert json.loads((of / "round-5" / "parts.json").read_text())["prompts"].items() >= {
        "asked": kept["prompts"]["asked"], "resting": kept["prompts"]["resting"]}.items()  # fmt: skip


def test_equal_scores_of_all_answers_end_the_rounds(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="round 1: all answers to each prompt have the same score"):
        run(settings, made_up(lambda *_: 1.0))
    later = {**settings, "job.run_folder": settings["job.run_folder"].parent / "later"}
    code, told = run(later, made_up(lambda folder, prompt, answer: 1.0 if "round-2" in folder else answer % 2))
    assert code == 0 and told["why"].startswith("round 2: all answers") and len(told["rounds"]) == 2
    shaped = {"objective.cut_off": "shape", "objective.cut_off_tokens": 2, "objective.longest_answer": 8}
    shaped |= {"job.run_folder": later["job.run_folder"].parent / "shaped"}
    assert run({**settings, **shaped}, made_up(lambda *_: 1.0))[1]["why"] == "2 rounds were asked for"  # lengths differ


def test_held_out_prompts_without_a_right_answer_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="no answer has a score; name the key of the right answer"):
        run(settings, made_up(lambda *_: None))  # type: ignore[arg-type,return-value]


def test_the_command_prints_one_report_and_its_exit_code_is_that_of_a_part(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    words, calls = [f"--{key}={own}" for key, own in settings.items()], list[str]()
    real = made_up(lambda folder, prompt, answer: answer % 2)

    class Fake:
        def listen(self) -> None:
            calls.append("listen")

        def __call__(self, words: Sequence[str], is_read: bool) -> bytes:
            calls.append(words[0])
            if words[0] == "train" and calls.count("train") == 2:
                raise rounds.Ended(6)
            return real(words, is_read)

    monkeypatch.setattr(rounds, "Commands", Fake)
    assert rounds.main([*words, "--json"]) == 6
    told = capfd.readouterr()
    assert json.loads(told.out)["why"] == "a part has failed, see its message" and "it continues" in told.err
    assert rounds.main([*words]) == 0
    assert capfd.readouterr().out.startswith("# Rounds in ") and calls[0] == "listen"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rounds.main(words) == 2 and "start one process" in capfd.readouterr().err


def test_a_signal_stops_the_command_that_runs_or_the_rounds_between_two() -> None:
    commands, before = rounds.Commands(), {each: signal.getsignal(each) for each in rounds.STOPS}
    try:
        commands.listen()
        assert commands(["--version"], True).startswith(b"titan_mi100")

        def waits() -> None:
            Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
            time.sleep(60)

        with pytest.raises(rounds.Ended) as ended:
            waits()
        assert ended.value.code == 3
        with pytest.raises(rounds.Ended):  # nothing is started any more
            commands(["--version"], True)
        with pytest.raises(rounds.Ended) as ended:
            rounds.Commands()(["configs", "--nonsense"], True)
        assert ended.value.code == 2
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_what_goes_wrong_is_warned_of() -> None:
    one = {"round": 1, "held_out": 0.5, "standard_error": 0.01, "score": 0.5, "length": 20.0, "dead": 0.2}
    assert warnings([one]) == warnings([one, one, one]) == warnings([one, *[{**one, "score": None}] * 2]) == []
    assert "answers have grown from 20 to 50 tokens" in warnings([one, one, {**one, "length": 50}])[0]
    assert "the held-out score does not" in warnings([one, one, {**one, "score": 0.7}])[0]
    assert warnings([one, one, {**one, "score": 0.7, "held_out": 0.6}]) == []
    assert "95% of the prompts have equal scores" in warnings([one, {**one, "dead": 0.95}])[0]


REFUSED: dict[str, dict[str, Any]] = {
    "job.run_folder is not set": {"job.run_folder": None},
    "rounds.count is not set": {"rounds.count": None},
    'objective.name must be "policy"': {"objective.name": None, "objective.cut_off": None},
    "data.validation_path or validation_fraction is not set: held-out prompts": {"data.validation_path": None},
    "[validation] has no effect in rounds": {"validation.freq": 5},
    "rounds.served_model is not set": {"rounds.server": "http://h", "rounds.restart": "true"},
    "rounds.restart is not set": {"rounds.server": "http://h", "rounds.served_model": "m"},
    "rounds.served_model and restart have no effect without server": {"rounds.restart": "true"},
    "checkpoint.fresh and load_step have no effect": {"checkpoint.fresh": "true"},
    "objective.advantage has no effect with rounds.teacher": {"rounds.teacher": "a", "objective.advantage": "std"},
    "holds no tokenizer, so nothing shows": {"rounds.teacher": "a"},
    "--limit and --server are not for it": {"rounds.sample": "--limit 3 --max_new_tokens 8"},
    "--out, --keep and --to are not for it": {"rounds.score": "--by text --out /tmp/x"},
    "must hold a prompt and --max_new_tokens 128": {"rounds.sample": "--max_new_tokens 128"},
    "No closing quotation": {"rounds.score": "--by 'text"},
    "is no scorer": {"rounds.score": "--by foo"},
    "--by or --function is missing": {"rounds.score": None},
    "no file here that can be read": {"rounds.score": "--function nowhere.py:f"},
    "parallelism.tensor_parallel_degree": {"parallelism.tensor_parallel_degree": 3},
    "clip_low": {"objective.clip_low": 2.0},
    "expected http://HOST:PORT": {"rounds.server": "h", "rounds.served_model": "m", "rounds.restart": "true",
                                  "rounds.sample": "--max_new_tokens 8"},
    "a row has one of": {"data.path": "bad"},
}  # fmt: skip


@pytest.mark.parametrize("expected", REFUSED)
def test_what_is_refused_before_anything_is_made(expected: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (bad := tmp_path / "bad.jsonl").write_text('{"answer": 1}\n')
    given = {**settings, **REFUSED[expected]}
    given = {key: bad if value == "bad" else value for key, value in given.items() if value is not None}
    with pytest.raises(UserError) as refused:
        opened(given, never)
    assert expected in str(refused.value)
    assert not settings["job.run_folder"].exists()


@pytest.mark.parametrize(("key", "option", "expected"), [
    ("rounds.sample", "--k 3", "--k is given twice"), ("rounds.sample", "--temperature 1", "unrecognized arguments"),
    ("rounds.score", "--show 3 --by text", "--show is given twice"),
    ("rounds.sample", "--max_new_tokens 0", "must be 1"),
])  # fmt: skip
def test_options_of_the_parts_are_read_before_they_run(
    key: str, option: str, expected: str, settings: dict[str, Any], capfd: Any
) -> None:
    with pytest.raises(UserError) as refused:
        opened({**settings, key: option}, never)
    assert expected in capfd.readouterr().err + str(refused.value)


def test_a_plain_run_refuses_rounds_and_held_out_prompts_that_are_learned_are_named(
    settings: dict[str, Any], caplog: Any
) -> None:
    with pytest.raises(UserError, match="is for titan-mi100 rounds; start that"):
        check_start(load_config([f"--{key}={value}" for key, value in settings.items()], 1))
    opened({**settings, "data.validation_path": settings["data.path"]}, never)
    assert "12 of 12 held-out prompts are prompts of data.path, too" in caplog.text


# --- servers ---


class Served(Stub):
    """A server of the form of vLLM, which samples with our engine. Args: mode: honest, or how it lies."""

    def __init__(self, base: Path, mode: str) -> None:
        super().__init__()
        self.base, self.mode, self.adapters, self.answered = base, mode, dict[str, str](), 0
        self.networks = dict[str, Any]()
        self.RequestHandlerClass.do_GET = lambda handler: handler.send(  # type: ignore[attr-defined]
            {"data": [{"id": name} for name in ["base", *handler.server.adapters]]}
        )

    def network(self, name: str) -> tuple[Model, Any]:
        adapter = {"honest": self.adapters.get(name, ""), "dies": self.adapters.get(name, "")}.get(self.mode, "")
        if adapter not in self.networks:
            loaded = Model(str(self.base), adapter, "", torch.device("cpu"), torch.float32)
            self.networks[adapter] = loaded, loaded.load(as_trained=True)
            if self.mode == "another model":
                for parameter in self.networks[adapter][1].parameters():
                    parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        return self.networks[adapter]

    def behave(self, handler: Any, body: dict[str, Any]) -> None:  # type: ignore[override]
        path = self.asked[-1][0]
        if "lora_adapter" in path:
            name = body["lora_name"]
            if path == "/v1/load_lora_adapter":
                self.adapters[name] = body["lora_path"]
            else:
                del self.adapters[name]
            handler.send(b"Success")
            return
        self.answered += 1
        if self.mode == "dies" and self.answered > 40:
            handler.connection.close()
            return
        loaded, network = self.network(body["model"])
        sampling = Sampling(1.0, vocabulary=loaded.tokenizer.n_vocab, with_log_p=True)
        [made] = generate(network, [body["prompt"]], sampling, loaded.stop_ids, body["max_tokens"], [str(body["seed"])])
        ids, log_p = zip(*made.sampled, strict=True)
        handler.send({**answer("vllm", ids, log_p, "stop" if made.stopped else "length"), "model": body["model"]})


@pytest.fixture
def serve(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Served]]:
    monkeypatch.setattr(answer_server, "PAUSES", (0.0,))
    begun = list[Served]()

    def begin(mode: str) -> Served:
        begun.append(server := Served(model, mode))
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield begin
    for server in begun:
        server.shutdown()
        server.server_close()


MODES = {"honest": "2 rounds were asked for", "old weights": "a part has failed", "another model": "a part has failed",
         "dies": "a part has failed"}  # fmt: skip
OFTEN = ("honest", "old weights")


@pytest.mark.parametrize("mode", [m if m in OFTEN else pytest.param(m, marks=pytest.mark.full) for m in MODES])
def test_a_server_that_dies_or_answers_from_other_weights_is_found_out(
    mode: str, serve: Callable[[str], Served], settings: dict[str, Any], world: World, capfd: Any
) -> None:
    server = serve(mode)
    given = {**settings, **LORA, "optimizer.lr": 0.004, "rounds.server": server.url, "rounds.served_model": "base",
             "rounds.most_drift": 0, "rounds.sample": "--max_new_tokens 8 --concurrency 1"}  # fmt: skip
    code, told = run(given, in_process(world))
    output = "".join(capfd.readouterr())
    rounds_made = [each["round"] for each in told["rounds"]]
    assert (code, told["why"].partition(",")[0]) == (0 if mode == "honest" else 2, MODES[mode]), output
    if mode == "dies":
        assert "start again: it goes on" in output
        server.mode = "honest"
        assert run(given, in_process(world))[0] == 0
    elif mode == "honest":
        first, second = (rounds_made := told["rounds"])[1]["apart"], told["rounds"][2]["apart"]
        assert max(first, second) < 1e-5 and len(rounds_made) == 3
        loaded = [body["lora_name"] for path, body in server.asked if path == "/v1/load_lora_adapter"]
        assert len({*loaded}) == 2 == len(loaded) and [*server.adapters] == loaded[1:]
        config = (settings["job.run_folder"] / "round-2" / "train.toml").read_text()
        assert 'correction = "truncate"' in config and "most_apart = 0.001 " in config
    else:  # the first round has no other weights than the base
        assert rounds_made == ([0, 1] if mode == "old weights" else [0])
        assert "the mean is above objective.most_apart" in output


def test_a_server_is_restarted_by_the_users_command(serve: Callable[[str], Served], tmp_path: Path) -> None:
    server, names = serve("honest"), tmp_path / "names"

    def of(command: str = "") -> answer_server.ServedWeights:
        words = [f"--rounds.server={server.url}", f"--rounds.restart={command}"]
        return answer_server.ServedWeights(load_config(words, None).rounds)

    served = of(f'echo "$MODEL $NAME" >> {names}')
    server.adapters["titan-round-2"] = ""  # it is there soon
    served.serve("titan-round-2", tmp_path, False)
    assert not names.exists()  # it serves them already
    del server.adapters["titan-round-2"]
    Timer(0.3, server.adapters.update, [{"x": ""}]).start()
    served.serve("x", tmp_path, False)
    assert names.read_text() == f"{tmp_path} x\n"
    with pytest.raises(UserError, match=r"rounds\.restart ends with code 7; correct the command"):
        of("exit 7").serve("y", tmp_path, False)
    server.behave = lambda handler, body: handler.send(b"LoRA is off", 400)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="POST /v1/load_lora_adapter: HTTP 400, LoRA is off; start it with adapters"):
        of().serve("z", tmp_path, True)
