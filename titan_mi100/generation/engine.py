"""A model for generation: network, tokenizer, chat template and stop tokens, opened from a path."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titan_mi100.attention.base import Shape
from titan_mi100.attention.choice import without_trial
from titan_mi100.data.conversation import Message, with_system_prompt
from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object
from titan_mi100.files.templates import template_file
from titan_mi100.model.decode import Generated, Sampling, generate
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.families import MODELS
from titan_mi100.model.lora import apply_lora, base_fingerprint, is_adapter
from titan_mi100.parallel.distributed import fill_parameters
from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.text.assets import GENERATION, PROMPTS, check_draft_keys, folder_of, prompt_settings, stop_ids
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights.adapter import MergedWeights, merged_source
from titan_mi100.weights.pieces import read_pieces
from titan_mi100.weights.source import open_source, read_manifest, verify_files
from titan_mi100.wording import printable, shortened

_SOME = 128  # tokens: which kernel runs does not depend on their number


class Request(NamedTuple):
    """A prompt, rendered and tokenised."""

    where: str  # file:line, or "prompt 1"
    text: str
    ids: list[int]


# Token ids of the prompts and the indices of their requests -> their continuations
AnswerBatch = Callable[[Sequence[list[int]], Sequence[int]], list[Generated]]


class Model:
    """A model in any supported form (HF folder, DCP folder, torch file). All but its weights is read and checked.

    Args:
        path: the model's folder or file.
        adapter: a LoRA adapter to merge into it, see adapter.merged_source; "": none.
        tokenizer_path: another tokenizer and chat template than those in the model's folder; "": those.
        with_draft_head: the network has it, to draft with.

    Raises:
        UserError: there is no such model, it is damaged, or the tokenizer has more tokens than the model.
    """

    def __init__(
        self, path: str, adapter: str, tokenizer_path: str, device: torch.device, dtype: torch.dtype,
        with_draft_head: bool = False,
    ) -> None:  # fmt: skip
        if with_draft_head:
            check_draft_keys(folder_of(path), "take another model", is_new=True)
        source = open_source(path, with_draft_head=with_draft_head)
        if source.lora is not None:
            raise UserError(f"{path}: is an adapter; name its base in --model, and this in --adapter")
        source = merged_source(source, adapter) if adapter else source
        if source.spec is None:
            remedy = "make an HF folder of it: titan-mi100 convert, with --hf_assets_path"
            raise UserError(f"{path}: has no config.json beside it, so the model's shape is unknown; {remedy}")
        if with_draft_head and not source.spec.has_draft_head:
            remedy = 'take a Qwen3.5 that has it, or train one: draft_head.train = "after", draft_head.fresh = true'
            raise UserError(f"{path}: has no draft head (mtp.*); {remedy}")
        self.source, self.spec, self.device, self.dtype = source, source.spec, device, dtype
        self._manifests = [read_manifest(Path(folder)) for folder in (path, adapter) if folder]
        tokenizer_path = tokenizer_path or str(folder_of(path))
        self.tokenizer = load_tokenizer(tokenizer_path)
        if self.tokenizer.n_vocab > self.spec.vocab_size:
            raise UserError(
                f"{tokenizer_path}: its tokenizer has ids up to {self.tokenizer.n_vocab - 1}, the model only "
                f"{self.spec.vocab_size}; name the model's own in --tokenizer_path"
            )
        self.prompts = prompt_settings(source.assets, source.assets_folder)
        self.template, config = None, folder_of(tokenizer_path) / "tokenizer_config.json"
        settings = read_object(config, "copy it from the model that you started from") if lexists(config) else {}
        if settings.get("chat_template") or template_file(config.parent):
            self.template = ChatTemplate.from_folder(tokenizer_path, tokenizer=self.tokenizer)
        ends = self.tokenizer.end_ids("" if self.template is None else self.template.end_of_turn)
        self.stop_ids = {*ends, *stop_ids(source.assets, source.assets_folder / GENERATION)}

    def fingerprint(self) -> str:
        """A digest of the weights: of the manifests, which identify every byte; without manifests, of sampled bytes."""
        read, shapes = self.source.weights.read, parameter_shapes(self.spec)
        sampled = base_fingerprint(read, shapes) if not all(self._manifests) else ""
        return hashlib.sha256(json.dumps([*self._manifests, sampled]).encode()).hexdigest()

    def load(self, as_trained: bool = False) -> CausalLM:
        """Build the network on the device, with its weights.

        Args:
            as_trained: compute as training does: an adapter stays beside its base, because a sum is rounded in 16 bits.
        """
        verify_files(self.source.path)
        shape = Shape(1, _SOME, *self.spec.attention, str(self.dtype).removeprefix("torch."))
        attention = without_trial(shape, self.device)
        with torch.device("meta"):
            network = MODELS[self.spec.model_type](self.spec, attention)
        read, weights = read_pieces(self.spec, self.source.weights.read), self.source.weights
        if as_trained and isinstance(weights, MergedWeights):
            apply_lora(network, weights.lora, self.dtype)
            base = read_pieces(self.spec, weights.base.read)
            adapter = read_pieces(self.spec, weights.adapter.read, weights.lora.rank)
            read = lambda name, *place: (adapter if is_adapter(name) else base)(name, *place)  # noqa: E731
        network = network.to(self.dtype)
        for weight in (weight for layer in network.model.blocks() for weight in layer.fp32_parameters()):
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        network = network.to_empty(device=self.device).requires_grad_(False).eval()  # an adapter may have dropout
        fill_parameters(network.named_parameters(), read)
        if not as_trained:
            network.merge()
        return network


class PromptBuilder:
    """Builds requests from texts or conversations."""

    def __init__(self, model: Model, system: str | None, variables: dict[str, Any] | None, raw: bool = False) -> None:
        """An option that is not given has the value of training, from the model's titan_mi100.json.

        Args:
            system: message for conversations that have none; "": none.
            variables: variables of the chat template.
            raw: use no chat template.

        Raises:
            UserError: an option needs a chat template, and none is used.
        """
        self._tokenizer, self.template = model.tokenizer, None if raw else model.template
        trained, as_trained = model.prompts, f"as the model was trained ({PROMPTS})"
        self.variables = dict(variables or {})
        if self.template is not None:
            self.template.require({name: own for name, own in self.variables.items() if name != "enable_thinking"})
            for name, setting in trained.variables.items():
                if name not in self.variables:
                    option = "--no_thinking" if setting is True else "--enable_thinking"
                    option = option if name == "enable_thinking" else f"--{'no-' * (setting is True)}{name}"
                    print(f"{name} = {json.dumps(setting)}, {as_trained}; {option} overrides", file=sys.stderr)
                    self.variables[name] = setting
        if system is None and self.template is not None and trained.system_prompt:
            system = trained.system_prompt
            setting = f"system message {printable(shortened(repr(system), 100))}"
            print(f"{setting}, {as_trained}; --system TEXT overrides, --system '' leaves it out", file=sys.stderr)
        self.system = system or ""
        if self.template is None and (self.system or self.variables):
            why = "--raw uses no chat template" if raw else "the tokenizer has no chat template"
            raise UserError(f"{why}; leave out --system and the options of thinking")
        if self.template is None and not raw:
            text = "WARNING the tokenizer has no chat template: the model continues the text itself"
            print(text, file=sys.stderr)

    def __call__(self, where: str, given: str | list[Message], tools: list[Any] | None = None) -> Request:
        """Render it with the template, ending with the header of the answer. Without a template, take the text itself,
        or that of a lone message of the user.

        Raises:
            UserError: the template refuses it, or it is a conversation and there is no template.
        """
        if self.template is not None:
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            try:
                messages = with_system_prompt(messages, self.system)
                given = self.template.render_prompt(messages, tools=tools, **self.variables)
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        elif not isinstance(given, str) and [message["role"] for message in given] == ["user"]:
            given = given[0]["content"]
        if not isinstance(given, str):
            raise UserError(f"{where}: a conversation needs a chat template; give a text, or leave out --raw")
        return Request(where, given, self._tokenizer.encode(given))


def load_answer(model: Model, sampling: Sampling, seed: int, max_new_tokens: int) -> AnswerBatch:
    """Load the weights. The draws for a prompt depend on the seed and the prompt's index, not on the batch."""
    network, limited = model.load(), replace(sampling, vocabulary=model.tokenizer.n_vocab)

    def answer_batch(prompts: Sequence[list[int]], indices: Sequence[int]) -> list[Generated]:
        seeds = [f"{seed}/{index}" for index in indices]
        return generate(network, prompts, limited, model.stop_ids, max_new_tokens, seeds)

    return answer_batch


@contextmanager
def full_memory_is_an_error() -> Iterator[None]:
    """Turn torch's out-of-memory error into a UserError that names the options to lower."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError("the device's memory is full; lower --batch_size or --max_new_tokens") from None
