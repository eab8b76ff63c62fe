"""Why tokens are learned or masked: encodes the records of some documents again, and notes what each token is.

Prepared files hold only whether a token is learned. A document is explained only if its record, encoded again, gives
exactly the same tokens and the same mask; otherwise nothing is claimed about it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.config.settings import Config, DataConfig
from titan_mi100.data.columns import Findings
from titan_mi100.data.conversation import last_of, with_system_prompt
from titan_mi100.data.encode import Encoder, Span, byte_offsets
from titan_mi100.data.files import Record, RecordReader, expand_patterns
from titan_mi100.data.formats import BadRecord, Format, choose_format, parse_record
from titan_mi100.data.prepared import DataFacts, DocumentTable
from titan_mi100.data.sets import patterns
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.chat_template import ChatTemplate, Rendered
from titan_mi100.text.turns import Turn

_MOST_READ = 1 << 28  # bytes of each file that are read again
_OF_ROLES = {"system": "system message", "user": "user message", "tool": "answer of a tool", "assistant": "answer"}


class Kind(NamedTuple):
    """What a token is part of; and why it is not learned, if it is not and that does not say it."""

    what: str
    why: str = ""


def explain(
    config: Config, facts: DataFacts, tokenizer: Tokenizer, table: DocumentTable, numbers: Sequence[int]
) -> dict[int, list[Kind]]:
    """Number of a document -> the kind of each token. A document that cannot be explained is left out.

    The records are encoded in this process: they are the ones that passed the limits of preparation.
    """
    assert table.origins is not None
    files, lines = table.origins.files, table.origins.lines[table.origins.document_lines[list(numbers)]].tolist()
    template = None
    if facts.system_prompt is not None:  # the data hold conversations
        template = ChatTemplate.from_folder(config.tokenizer_path(), config.model.chat_template, tokenizer)
    encoder = _NotingEncoder(tokenizer, template, config.data, config.training.seq_len)
    noted = {}
    for index in {file for file, _, _ in lines}:
        form = _format(config.data, config.objective.answers, files[index])
        for record in _read_again(files[index], {(line, element) for file, line, element in lines if file == index}):
            noted[index, record.number, record.element] = encoder.noted(record, form)
    explained = {}
    for number, where in zip(numbers, lines, strict=True):
        for encoded, kinds in noted.get(tuple(where), ()):
            for start in range(0, len(encoded), config.training.seq_len):  # data.overlong cuts documents here
                inside = slice(start, start + config.training.seq_len)
                if np.array_equal(encoded[inside], table[number]):
                    first = kinds[start]._replace(why="nothing comes before it") if encoded[start] & 1 else kinds[start]
                    explained[number] = [first, *kinds[inside][1:]]
    return explained


def _format(settings: DataConfig, answers: str, file: str) -> Format:
    data_patterns = patterns(settings)
    matching = zip(data_patterns, expand_patterns([each.path for each in data_patterns]), strict=True)
    form = next(pattern.format for pattern, files in matching if file in files)
    return choose_format(file, replace(settings, format=form), answers)


def _read_again(file: str, places: set[tuple[int, int]]) -> Iterator[Record]:
    """The records at these places (line, element), unless they are too far into the file."""
    reader = RecordReader(file)
    for record in reader:
        if (record.number, record.element) in places:
            places.remove((record.number, record.element))
            yield record
        if not places or reader.consumed > _MOST_READ:
            return


class _NotingEncoder(Encoder):
    """An encoder that notes the kind of each token."""

    def noted(self, record: Record, form: Format) -> list[tuple[np.ndarray, list[Kind]]]:
        """The documents of a record, before they are cut to rows: their values, and a kind per token."""
        self._noted = list[tuple[np.ndarray, list[Kind]]]()
        self._is_prompt = form.name in ("pairs", "prompt_completion")
        try:
            nulls = self.null_arguments or record.nulls
            example = form.read_row(parse_record(record), self.ignored_keys, Findings(), nulls)
            encoded = self.encode(example)
        except BadRecord:  # the edges of its messages cannot be told apart
            return []
        if example.messages is None:
            kind = Kind("text" if example.text is not None else "tokens", "its label is -100")
            self._noted = [(document, [kind] * len(document)) for document in encoded.documents]
        return self._noted

    def _conversation(self, messages: list[dict[str, Any]], *how: Any, **more: Any) -> Any:
        self._messages = with_system_prompt(messages, self._config.system_prompt)
        return super()._conversation(messages, *how, **more)

    def _rendered(self, rendered: Rendered, spans: list[Span]) -> tuple[np.ndarray, bool]:
        encoded, joined = super()._rendered(rendered, spans)
        kinds, of_character = [Kind("template")], np.zeros(len(rendered.text), dtype=np.int64)
        for start, stop, kind in (span for turn in rendered.turns for span in self._kinds(turn)):
            of_character[start:stop] = len(kinds)
            kinds.append(kind)
        edges = (np.flatnonzero(np.diff(of_character)) + 1).tolist()
        _, ends = self.tokenizer.encode_with_offsets(rendered.text)
        # A token across an edge belongs to what its last byte is part of, as an answer that begins in it is learned.
        places = np.searchsorted(byte_offsets(rendered.text, edges, self.tokenizer), ends - 1, side="right")
        self._noted.append((encoded, [kinds[number] for number in of_character[[0, *edges]][places]]))
        return encoded, joined

    def _kinds(self, turn: Turn) -> Iterator[tuple[int, int, Kind]]:
        """Spans of a turn; later ones replace those they overlap. The rules are those of `supervised_spans`."""
        config, weight, is_answer = self._config, self._messages[turn.message].get("weight"), turn.role == "assistant"
        why = ""
        if weight == 0 and (is_answer or config.loss in ("all", "weight")):
            why = "it belongs to the prompt" if self._is_prompt else "weight 0"
        elif config.loss == "weight" and weight != 1:
            why = "no weight 1"
        elif is_answer and config.loss == "last" and turn.message != last_of("assistant", self._messages):
            why = "not the last answer: data.loss = last"
        elif is_answer and config.loss == "last_round" and turn.message < last_of("user", self._messages):
            why = "before the last user message: data.loss = last_round"
        elif turn.lost_reasoning and config.earlier_thinking != "template":
            why = "the template leaves out its reasoning"
        elif is_answer and config.earlier_thinking == "unroll":
            why = "an earlier round: a document of its own teaches it"
        yield turn.start, turn.stop, Kind(_OF_ROLES[turn.role], why)
        yield turn.start, turn.answer, Kind("empty think block", why or "the prompt ends with it: data.empty_think")
        if turn.reasons:
            yield turn.start, turn.thought, Kind("reasoning", why or "earlier reasoning: data.earlier_thinking")
