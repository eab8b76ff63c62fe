"""The parameters that a model holds, by its shape: what a wrapper dropped would not be trained or saved."""

from collections.abc import Collection

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.model.decoder import CausalLM
from titan_mi100.shapes.base import ROWS, ModelSpec, adapter_pieces
from titan_mi100.wording import some


def held_names(spec: ModelSpec, adapter: Collection[str], rank: int) -> set[str]:
    """The names in the model of all its parameters. Args: adapter: names of adapter_shapes; rank: of the adapter."""
    pieces, wholes = spec.pieces | adapter_pieces(spec, rank), {*spec.parameters, *adapter}
    parts = {name for name, piece in pieces.items() if piece.whole in wholes}
    return wholes - {piece.whole for piece in pieces.values()} | parts


def check_names(model: CausalLM, spec: ModelSpec, lora: LoRAConfig) -> None:
    """Assert that a model or stage holds what its shape says: what a wrapper dropped would not be trained or saved."""
    stage, every = model.model.stage, held_names(spec, lora.shapes(spec) if lora.rank else (), lora.rank)
    embeds = stage.first or (stage.last and (spec.tie_word_embeddings or spec.has_draft_head))
    kept = dict.fromkeys(("model.embed_tokens.weight", f"model.embed_tokens{ROWS}"), embeds)
    expected = {name for name in every if kept.get(name, stage.last) and not name.startswith("model.layers.")}
    expected |= {name for name in every if name.startswith(tuple(f"model.layers.{number}." for number in stage.layers))}
    differing = expected ^ {name for name, _ in model.named_parameters() if not name.endswith(".largest")}  # of NF4
    assert not differing, f"the model that was built and its shape differ in {some(sorted(differing))}"
