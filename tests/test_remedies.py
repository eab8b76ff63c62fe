"""The remedies of messages are followed: each leads to what works, or to a different, true message."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remedies
from test_answers import config_of, folder_of
from test_chat_template import say
from test_distill import forge, settings_of_a_pass, student
from test_what_rows_say import ANSWER, ASK, LABELLED, MOVED, MOVED_PAIR, PAIR, Fix, outcome, without

from titan_mi100.config.as_text import to_toml
from titan_mi100.config.load import load_config
from titan_mi100.data import answer_store
from titan_mi100.data.answer_store import Identity, LogprobStore, Wanted, placed
from titan_mi100.data.answers import LABELS, PAIRS
from titan_mi100.data.prepare import prepare_run
from titan_mi100.errors import UserError
from titan_mi100.open_run.columns import columns_of
from titan_mi100.open_run.start import open_run
from titan_mi100.open_run.teacher import write_teacher
from titan_mi100.parallel.distributed import World
from titan_mi100.workshop import vllm_answers

# -- answers: pairs, labels, reference log-probabilities, teachers' folders --

WHOLE = {"chosen": [ASK, ANSWER], "rejected": [ASK, say("assistant", "b")]}
SCORED = PAIR | {"score_chosen": 1, "score_rejected": 2}
KWARGS = PAIR | {"chat_template_kwargs": {"enable_thinking": True}}
# First words of a message of data/answers.py -> a row that is refused for it, and the row as its remedy makes it.
ROWS: dict[str, tuple[Fix, str, Fix]] = {
    "unknown key data.enable_thinking for all rows": (
        (KWARGS, PAIRS, {}), "name the key in data.ignored_keys, and set data.enable_thinking",
        (KWARGS, PAIRS, {"ignored_keys": ("chat_template_kwargs",), "enable_thinking": "true"})),
    "no answer chosen or rejected holds": (
        (WHOLE | {"rejected": [ASK]}, PAIRS, {}), "holds the prompt alone; add its answer", (WHOLE, PAIRS, {})),
    "other prompts chosen and rejected begin": (
        (WHOLE | {"chosen": [say("user", "r"), ANSWER]}, PAIRS, {}), "begin both with the prompt", (WHOLE, PAIRS, {})),
    "no prompt two prompts it is": (
        (PAIR | {"question": "r"}, PAIRS, {}), "keep one", (without("prompt", PAIR) | {"question": "r"}, PAIRS, {})),
    "two system messages one is system,": (
        (WHOLE | {"system": "s"} | {key: [say("system", "t"), *WHOLE[key]] for key in WHOLE}, PAIRS, {}),
        "delete one", (WHOLE | {"system": "s"}, PAIRS, {})),
    "no answer has no answer behind": (
        (WHOLE | {"chosen": [ASK, say("tool", "t")]}, PAIRS, {}), "add it", (WHOLE, PAIRS, {})),
    "no answer ends with the user;": (
        (WHOLE | {"chosen": [ASK, say("user", "r")]}, PAIRS, {}), "end it with the assistant's answer",
        (WHOLE | {"chosen": [ASK, say("user", "r"), ANSWER]}, PAIRS, {})),
    "two answers the prompt ends with": (
        ({"messages": [ASK, ANSWER], "chosen": "a", "rejected": "b"}, PAIRS, {}), "end it with the user's",
        ({"messages": [ASK, ANSWER, ASK], "chosen": "a", "rejected": "b"}, PAIRS, {})),
    "contradiction ; swap answers and scores,": (
        (SCORED, PAIRS, {}), "swap answers and scores",
        (SCORED | {"chosen": "b", "rejected": "a", "score_chosen": 2, "score_rejected": 1}, PAIRS, {})),
    "no label is null; delete the": (
        (LABELLED | {"label": None}, LABELS, {}), "or write true or false", (LABELLED, LABELS, {})),
    "no label expected (true or false),": (
        (without("label", LABELLED) | {"good": True}, LABELS, {}), "name its column in data.label_column",
        (without("label", LABELLED) | {"good": True}, LABELS, {"label_column": "good"})),
    "wrong type must be true or": (
        (LABELLED | {"label": 1}, LABELS, {}), "must be true or false", (LABELLED, LABELS, {})),
    "nothing to learn is null; delete": ((PAIR | {"chosen": None}, PAIRS, {}), "delete the row", (PAIR, PAIRS, {})),
    "nothing to learn is blank; delete": ((PAIR | {"chosen": " "}, PAIRS, {}), "delete the row", (PAIR, PAIRS, {})),
    "missing key the row has no": (
        (MOVED_PAIR, PAIRS, {}), "name its column in data.chosen_column", (MOVED_PAIR, PAIRS, MOVED)),
    "wrong type must be a text,": (
        (PAIR | {"chosen": 5}, PAIRS, {}), "must be a text, a message or a list", (PAIR | {"chosen": "5"}, PAIRS, {})),
    "part not read beside , which": (
        (WHOLE | {"history": [["x", "y"]]}, PAIRS, {}), "put it there",
        ({key: [say("user", "x"), say("assistant", "y"), *WHOLE[key]] for key in WHOLE}, PAIRS, {})),
    "must be a text or a": (
        (PAIR | {"prompt": 5}, PAIRS, {}), "must be a text or a list of messages", (PAIR | {"prompt": "5"}, PAIRS, {})),
    "two prompts is not the prompt": (
        (WHOLE | {"prompt": "r"}, PAIRS, {}), "keep one", (WHOLE, PAIRS, {})),
}  # fmt: skip


def test_every_remedy_for_a_row_with_answers_leads_on(tmp_path: Path) -> None:
    listed = {words for _, words in remedies.messages(("BadRecord", "expect"), "data/answers")} - {""}
    assert listed == ROWS.keys()  # "": a message of a part of the row, whose own remedy it repeats
    for key, ((row, answers, options), words, (changed, kind, more)) in ROWS.items():
        assert words in (reason := outcome(row, tmp_path, answers=answers, **options).reason), (key, reason)
        assert (made := outcome(changed, tmp_path, answers=kind, **more)).learned, (key, made.reason)


@pytest.fixture
def classroom(world: World, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a teacher's folder, or the parts that it lacks, as titan-mi100 teach does: (name, settings of rows)."""
    config, model = student(tmp_path), tmp_path / "run"
    model.mkdir()
    run = open_run(config, world, model)
    run.save()
    run.close()

    def make(out: Path, *words: str, **rows: str) -> None:
        (tmp_path / "student.toml").write_text(to_toml(student(tmp_path, **rows)))
        given = ["--job.config_file", str(tmp_path / "student.toml"), "--model", str(model / "checkpoint" / "step-0")]
        started = settings_of_a_pass([*given, "--out", str(out), "--top_k", "5"], monkeypatch)
        write_teacher(load_config([*started, *words], 1), world, out)

    return make


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        call()
    return str(refused.value)


def opens(folder: Path, tmp_path: Path, world: World, **rows: str) -> None:
    """As a student's run opens the teacher's folder."""
    config = student(tmp_path, **{"objective.name": "distill", "objective.teacher": str(folder)}, **rows)
    columns_of(config.objective, config.data, world, prepare_run(config, None), config.spec())


def change(folder: Path, **fields: Any) -> None:
    path = folder / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def about_of(folder: Path) -> Identity:
    return Identity(**json.loads((folder / "store.json").read_text()))


# First words of a message of data/answer_store.py -> what it says, and its remedy.
STORES = {
    "": "is without its store.json, which says what it was made of; move it out of the folder, and start again",
    "is damaged": "is damaged; delete it, and make it again: titan-mi100 teach",
    "cannot be read ( ); correct": "(No such file or directory); correct that, or delete it, and make it again: titan",
    "cannot be read ( ); name": "cannot be read (Not a directory); name another folder",
    "cannot be written ( ); free": "cannot be written (Not a directory); free some space, or correct the path",
    "has format than this version's, ;": "has a newer format than this version's, 2; make it of this run's data: titan",
    "has nothing about documents of the": "which other settings of [data] left out; make it of this run's data: titan",
    "kind = and k = do": "kind = 'reference' and k = 5 do not fit each other; make it of this run's data: titan",
    "part is not written, as it": "not finite; ask again, or compute with --training.mixed_precision_param float32",
    "was made of": "was made of another tokenizer; make it of this run's data: titan-mi100 teach",
    "was written for another folder or": "was written for another folder or as another part; delete it, and make it",
}


@pytest.mark.full
def test_every_remedy_of_a_teachers_folder_leads_on(
    classroom: Callable[..., None], tmp_path: Path, world: World
) -> None:
    files = ("data/answer_store", "files/parts")
    known = {words for file in files for _, words in remedies.messages(("UserError",), file)}
    assert known >= STORES.keys(), STORES.keys() - known
    sound, folder, told = tmp_path / "sound", tmp_path / "teacher", list[str]()
    classroom(sound)
    open_it, make = partial(opens, folder, tmp_path, world), partial(classroom, folder)

    def copied() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        return next(folder.glob("part-00000-*"))

    # parts that are damaged, of another store, or gone: deleted and made again
    for damage in (
        lambda part: part.write_bytes(part.read_bytes()[:-1]),
        lambda part: forge(folder, lambda arrays: None, of="part 0 of another"),
        lambda part: part.unlink(),
    ):
        damage(copied())
        told.append(refusal(open_it))
        [*map(Path.unlink, folder.glob("part-00000-*"))]
        assert "run titan-mi100 teach again: it goes on" in refusal(open_it)
        make()
        open_it()
    part, about = copied(), about_of(folder)
    store = LogprobStore(folder, about, "")
    part.unlink()  # between the listing and the reading
    told.append(refusal(partial(store.verify, None)))
    make()
    open_it()
    # a folder of something else: teach refuses to write there, too, and names the two ways out
    for fields in ({"format": 3}, {"kind": "reference"}, {"tokenizer": "other"}):
        copied()
        change(folder, **fields)
        told.append(refusal(open_it))
        assert "; name another folder with --out, or delete this one" in refusal(make)
    shutil.rmtree(folder)
    make()
    open_it()
    # parts without their store.json: all are named at once
    copied()
    (folder / "store.json").unlink()
    (tmp_path / "aside").mkdir()
    told.append(refusal(open_it))
    for line in told[-1].splitlines():
        Path(line.partition(": ")[0]).rename(tmp_path / "aside" / Path(line.partition(": ")[0]).name)
    assert "holds no teacher's answers; make it of this run's data: titan-mi100 teach" in refusal(open_it)
    make()
    open_it()
    # rows that the teacher has not seen: those that it dropped as repeated
    rows = student(tmp_path).data.path[0]
    twice = tmp_path / "twice.jsonl"
    twice.write_text(Path(rows).read_text() * 2)
    shutil.rmtree(folder)
    make(**{"data.path": str(twice), "data.duplicates": "drop"})
    told.append(refusal(partial(open_it, **{"data.path": str(twice)})))
    again = partial(make, **{"data.path": str(twice)})
    assert "was made of other rows; name another folder with --out" in refusal(again)
    classroom(tmp_path / "another", **{"data.path": str(twice)})
    opens(tmp_path / "another", tmp_path, world, **{"data.path": str(twice)})
    # what is no folder, or cannot be written
    told.append(refusal(partial(opens, twice, tmp_path, world)))
    told.append(refusal(LogprobStore(twice / "teacher", about, "").begin))
    (begun := LogprobStore(tmp_path / "corrected", about, "")).begin()
    data, arrays = prepare_run(student(tmp_path), None), dict(LogprobStore(sound, about, "").load(1))
    wanted = Wanted([source.rows for source in (*data.sources, *data.validation)], data.facts.n_vocab)
    told.append(refusal(partial(begun.write, 1, arrays | {"log_p": arrays["log_p"] * np.nan}, wanted)))
    begun.write(1, arrays, wanted)
    for words in STORES.values():
        assert any(words in text for text in told), words


def test_the_remedies_of_an_import_and_of_a_reference_lead_on(tmp_path: Path, world: World) -> None:
    """Parts of an import cannot be made again one by one; those of a reference are, from the run's first weights."""
    config, ids, answers = student(tmp_path), tmp_path / "ids.jsonl", tmp_path / "answers.jsonl"
    vllm_answers.write_ids(config, ids)
    lines = [json.loads(line) for line in ids.read_text().splitlines()]
    for line in lines:
        entries = [{str(token): {"logprob": -3.0}, "7": {"logprob": -0.5}} for token in line["prompt_token_ids"]]
        line["prompt_logprobs"] = [None, *entries[1:]]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    vllm_answers.read_answers(config, answers, tmp_path / "import", 1)
    [part] = (tmp_path / "import").glob("part-*")
    part.write_bytes(part.read_bytes()[:-1])
    assert f"is damaged; {answer_store.IMPORT}" in refusal(partial(opens, tmp_path / "import", tmp_path, world))
    part.unlink()
    assert f"0 of 1 parts are there; {answer_store.IMPORT}" in refusal(
        partial(opens, tmp_path / "import", tmp_path, world)
    )
    vllm_answers.read_answers(config, answers, tmp_path / "new", 1)
    opens(tmp_path / "new", tmp_path, world)

    config = config_of(tmp_path)
    folder = folder_of(config)
    open_run(config, world, folder).close()
    [part] = (folder / "reference").glob("part-*")

    def sums() -> Any:
        store = LogprobStore(folder / "reference", about_of(folder / "reference"), "")
        return placed(map(store.load, store.parts), np.arange(store.about.documents + 1))

    before = sums()
    part.write_bytes(part.read_bytes()[:-1])
    assert "is damaged; delete it, and start again: it is made anew" in refusal(lambda: open_run(config, world, folder))
    part.unlink()
    open_run(config, world, folder).close()
    assert (sums() == before).all()
