"""Runs a model's own chat template in a sandbox, and finds each message in the rendered text.

Messages are found by provenance, not by searching the text: each string of a message enters the template as a `Traced`,
which keeps the source of each character through the template's string operations. So text in a message that looks like
a turn's header cannot mislead it.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, cycle, pairwise
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from titan_mi100.errors import UserError
from titan_mi100.files.child import call_in_child
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain, refuse_code
from titan_mi100.files.templates import read_template, template_file
from titan_mi100.text.base import Tokenizer, named_tokens
from titan_mi100.text.traced import Origin, Traced, TracingEnvironment, trace
from titan_mi100.text.turns import REASONING, Prompt, Turn, TurnFinder, Untraceable, has_reasoning, reasoning_spans

_REASONING_FIELDS = (REASONING, "thinking", "reasoning")  # names that `transformers` accepts, by priority
_CHATML = Path(__file__).parents[1] / "train_configs" / "chatml.jinja"  # ours, for base models without a template
_PROBE = ({"role": "user", "content": "Hello"},)
_MOST_TRIED = 1 << 20  # characters that a template may render from _TRIED
_TRIED = ({"role": "system", "content": "Be brief."}, *_PROBE, {"role": "assistant", "content": "Hello!"}, *_PROBE)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and a turn for each of its messages."""

    text: str
    turns: list[Turn]


class ChatTemplate:
    """A folder's Jinja chat template, run as `transformers` runs it. Build it with `from_folder`."""

    _given: tuple[Path, str, str]  # what `from_folder` was given

    def __init__(self, file: Path, source: str, special_tokens: dict[str, str], special: Collection[str] = ()) -> None:
        """
        Args:
            file: where the template came from, for messages.
            source: Jinja text.
            special_tokens: variables of the template, such as eos_token.
            special: the tokens that can end a turn, besides eos_token.
        """
        self._file = file
        self._special = special
        self._special_tokens = special_tokens
        self._source = source
        self.is_dated = "strftime_now" in source
        try:
            self._template = TracingEnvironment().from_string(source)
        except Exception as error:  # from Jinja, or from Python for code that it cannot compile
            problem = str(error) or type(error).__name__
            reason = f"the chat template is not valid Jinja: {problem}; correct or replace it"
            if "unknown tag 'generation'" in problem:
                reason = "marks what is learned with {% generation %}, which data.loss says here; remove the two tags"
            raise UserError(f"{file}: {reason}") from error
        self._probed = lru_cache(maxsize=256)(self._probe)

    @classmethod
    def from_folder(
        cls, path: str | Path, template: str | Path = "", tokenizer: Tokenizer | None = None
    ) -> "ChatTemplate":
        """Read a folder's template: `chat_template.jinja`, or if there is none, that in `tokenizer_config.json`.

        Args:
            path: an HF tokenizer folder, or a tokenizer file in such a folder.
            template: a Jinja file to use instead, for all conversations.
            tokenizer: of that folder. It has the end token in case `tokenizer_config.json` is missing or does not name
                it, and the special tokens for `end_of_turn`.

        Returns:
            The compiled template, with the special tokens of `tokenizer_config.json` as its variables.

        Raises:
            UserError: a file is missing or malformed, there is no template, or it needs too much memory or time.
        """
        eos_token, special = (tokenizer.eos_token, tuple(sorted(tokenizer.special))) if tokenizer else ("", ())
        call_in_child("text.chat_template:try_template", Path(path), str(template), eos_token, special)
        made = cls._read(path, template, eos_token, special)
        made._given = Path(path), str(template), eos_token
        return made

    @classmethod
    def _read(
        cls, path: str | Path, template: str | Path, eos_token: str, special: Collection[str] = ()
    ) -> "ChatTemplate":
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        config_file = folder / "tokenizer_config.json"
        # A link that the user names is followed. A link inside a model folder is not: it came with the folder.
        file = Path(os.path.realpath(template)) if template else template_file(folder)
        try:
            # A folder must have a tokenizer_config.json; beside a single tokenizer file it is optional.
            needed = folder == Path(path) or os.path.lexists(config_file)
            config = json.loads(read_plain(config_file, LARGEST_CONFIG).decode("utf-8")) if needed else {}
            refuse_code(config_file, config)
            source = config.get("chat_template")
            special_tokens = named_tokens(config)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{config_file}: cannot be used ({error!r}); copy the checkpoint's tokenizer files"
            raise UserError(problem) from error
        if file:
            source = read_template(file)
        if not isinstance(source, str):
            raise UserError(
                f"{config_file}: no chat_template, or several, and no chat_template.jinja; copy that file from "
                f"the family's chat model, or name a Jinja file in model.chat_template, e.g. {_CHATML}"
            )
        if eos_token:
            special_tokens.setdefault("eos_token", eos_token)
        named = Path(template) if template else file or config_file
        return cls(named, source, special_tokens, special)

    @cached_property
    def end_of_turn(self) -> str:
        """The token that ends an assistant's turn; "" if none is known.

        It is eos_token if the template writes it behind an assistant's message. Otherwise it is the first special token
        that the template itself writes behind one: base models have `<|endoftext|>` as eos_token and a ChatML template.
        """
        eos_token = self._special_tokens.get("eos_token") or ""
        tokens = sorted({*self._special, eos_token} - {""}, key=len, reverse=True)
        for messages in (_TRIED[1:], _TRIED):  # some templates refuse a system message, others want one
            try:
                followed, last = (self._behind_answer(messages[:n]) for n in (len(messages), len(messages) - 1))
            except UserError:
                continue
            if eos_token and eos_token in followed:
                return eos_token
            if tokens and (first := re.search("|".join(map(re.escape, tokens)), last)):
                return first[0]
        return eos_token

    @cached_property
    def wraps_results(self) -> bool:
        """Whether it writes <tool_response> around the result of a tool."""
        with suppress(UserError):
            return "<tool_response>" in self.render((*_TRIED[1:3], {"role": "tool", "content": "12"}))
        return False

    def _behind_answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes between the only assistant's message and the next message's text, or the end."""
        index = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        prepared = [_traced(i, message) for i, message in enumerate(self._prepared(messages))]
        return TurnFinder(self._run(prepared, False, {}), "").behind(index)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """Render a conversation, byte for byte as `apply_chat_template(tokenize=False)` does.

        Arguments of tool calls that are JSON text are given as objects to a template that refuses texts (Qwen3.5's), as
        servers do.

        Args:
            messages: dicts of JSON values, with a `role` and all other keys that the template reads.
            add_generation_prompt: end with the header of an assistant's turn.
            variables: further variables of the template, such as `tools` or `enable_thinking`.

        Returns:
            The text.

        Raises:
            UserError: the template refuses the conversation, or fails.
        """
        return str.__str__(self._run(self._prepared(messages), add_generation_prompt, variables))

    def require(self, variables: Mapping[str, Any]) -> None:
        """Raises UserError: the template does not read one of the variables, or refuses its value."""
        reads = jinja2.meta.find_undeclared_variables(TracingEnvironment().parse(self._source))
        for name in variables.keys() - reads:
            raise UserError(f"{self._file}: the chat template does not read {name}; leave it out, or use one that does")
        try:
            self.render(_PROBE)
        except UserError:  # it wants another conversation
            return
        self.render(_PROBE, **variables)

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """`render` with add_generation_prompt, in the child process with limits on memory and time."""
        return str(call_in_child("text.chat_template:render_apart", *self._given, messages, variables))

    def render_turns(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        """Render a conversation and find each message in the text.

        Args:
            messages, variables: see `render`.

        Returns:
            The same text as from `render`, and one turn per message, in order.

        Raises:
            UserError: from `render`; or the template rewrites an assistant's message so that the source of its
                characters is lost. (Rewritten text of other messages counts as the template's own.)
        """
        prepared, end_of_turn, prompt = self._prepared(messages), self.end_of_turn, None
        answers = [i for i, message in enumerate(prepared) if message.get("role") == "assistant"]
        if answers and end_of_turn:
            prompt = self._prompt(prepared[: answers[0]], variables)
            if prompt.changes_text and "enable_thinking" not in variables:
                variables = {**variables, "enable_thinking": has_reasoning(prepared[answers[-1]])}
        text = self._run([_traced(i, message) for i, message in enumerate(prepared)], False, variables)
        finder = TurnFinder(text, end_of_turn)
        turns: list[Turn] = []
        for i, message in enumerate(prepared):
            if message.get("role") != "assistant":
                turns.append(finder.other(i, str(message.get("role", "")), finder.difference(i, message, False)))
                continue
            if prompt is None:
                config_file = self._file.parent / "tokenizer_config.json"
                raise UserError(f"{config_file}: eos_token is missing; add the token that ends a turn")
            try:
                turns.append(finder.assistant(i, message, prompt, is_last=i == len(prepared) - 1))
            except Untraceable as problem:
                raise UserError(
                    f"{self._file}: message {i}: {problem}, so the assistant's own text cannot be located; "
                    "use a template that writes each assistant message as Qwen3's does"
                ) from problem
        return Rendered(finder.text, turns)

    def _prompt(self, prefix: list[dict[str, Any]], variables: dict[str, Any]) -> "Prompt":
        """The generation prompt with these variables.

        It does not depend on the conversation. So it is rendered for a fixed conversation, once per set of variables;
        only if the template refuses that one, for the beginning of this conversation.
        """
        variables = {key: value for key, value in variables.items() if key != "enable_thinking"}
        return self._probed(json.dumps(variables)) or self._prompt_after(prefix or list(_PROBE), variables)

    def _probe(self, variables: str) -> "Prompt | None":
        try:
            return self._prompt_after(list(_PROBE), json.loads(variables))
        except UserError:
            return None

    def _prompt_after(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> "Prompt":
        """The generation prompt after some messages: the difference between renderings with and without it."""
        modes: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
        without = [self.render(messages, **variables, **mode) for mode in modes]
        opened = [self.render(messages, add_generation_prompt=True, **variables, **mode) for mode in modes]
        pairs = list(zip(opened, without, strict=True))
        if any(not longer.startswith(shorter) or len(longer) == len(shorter) for longer, shorter in pairs):
            raise UserError(f"{self._file}: add_generation_prompt does not append a header; use Qwen3's template")
        prompts = default, thinking, unthinking = [longer.removeprefix(shorter) for longer, shorter in pairs]
        # Not the default, which our exports change: rows must mean the same to a base model and to its export.
        header = thinking if unthinking.startswith(thinking) else default
        return Prompt(header, unthinking.removeprefix(header), tuple(prompts), len({*without}) > 1)

    def _prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as `transformers` passes them to a template: no null keys, reasoning under its usual names."""
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise UserError(f"{self._file}: a conversation is a list of at least one message, each an object")
        prepared = []
        for message in messages:
            present = {key: value for key, value in message.items() if value is not None}
            names = [name for name in _REASONING_FIELDS if name in present]
            if names:
                reasoning = present[names[0]]
                present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
            prepared.append(present)
        return prepared

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        fixed = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        context = {"tools": None, "documents": None, **self._special_tokens, **variables, **fixed}
        try:
            return self._template.render(context)
        except Exception as error:  # the template is data, so each of its errors is reported to the user
            as_objects = messages
            with suppress(AttributeError, TypeError, ValueError):  # no calls, or no JSON
                as_objects = list(map(_with_objects, messages))
            if as_objects != messages:
                return self._run(as_objects, add_generation_prompt, variables)
            reason = str(error) or type(error).__name__
            raise UserError(f"{self._file}: the chat template refuses this conversation: {reason}") from error


def try_template(path: str, template: str, eos_token: str, special: Collection[str] = ()) -> None:
    """Runs in the child process, with limits on time and memory: render a conversation in all ways that are used.

    A template may refuse this conversation; that is no error.
    """
    tried = ChatTemplate._read(path, template, eos_token, special)
    prompted: Callable[..., str] = partial(tried.render, add_generation_prompt=True, enable_thinking=False, tools=[])
    for render in (tried.render, tried.render_turns, prompted):
        try:
            if len(str(render(_TRIED))) > _MOST_TRIED:
                raise MemoryError
        except UserError as error:
            if isinstance(error.__cause__, MemoryError):
                raise MemoryError from None


_read_once = lru_cache(ChatTemplate._read)


def render_apart(path: str, template: str, eos_token: str, messages: list[Any], variables: dict[str, Any]) -> str:
    """Runs in the child process, for `render_prompt`."""
    return _read_once(path, template, eos_token).render(messages, add_generation_prompt=True, **variables)


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, where they are JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        text = function.get("arguments")
        arguments = json.loads(text) if isinstance(text, str) else text
        source = text.runs[0][1] if isinstance(text, Traced) else None
        function = {**function, "arguments": trace(arguments, source) if source else arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message


def _traced(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with all its strings as `Traced`. Reasoning inside the content gets the field REASONING."""
    traced = {
        key: trace(value, Origin(index, REASONING if key in _REASONING_FIELDS else key))
        for key, value in message.items()
    }
    if thoughts := reasoning_spans(message):
        content = message["content"]
        parts = zip(pairwise([0, *chain(*thoughts), len(content)]), cycle(("content", REASONING)), strict=False)
        traced["content"] = Traced(content, [(stop - start, Origin(index, field)) for (start, stop), field in parts])
    return traced
