"""Compares an HF folder, loaded by transformers, with the same weights in our model."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object
from titan_mi100.model.families import MODELS
from titan_mi100.parallel.distributed import fill_parameters
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.text.assets import CONFIG, GENERATION, read_assets, stop_ids
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights.base import Weights
from titan_mi100.weights.pieces import read_pieces
from titan_mi100.weights.source import open_source
from titan_mi100.wording import some

_DTYPE = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"  # the argument's name
# What programs that compute the same in fp32 may differ by, relative to the largest logit: the order of sums of
# thousands of products matters. transformers sums Qwen3.5's decay of a chunk in fp32, and takes differences.
_ERROR = {"qwen3_5": 2e-4, "qwen3_5_moe": 2e-4}
_TEXTS = (
    "What is 12 + 30?",
    "<|im_start|>user\nHallo, wie geht's?<|im_end|>\n<|im_start|>assistant\n",
    "  def f(x):\n\treturn x ** 2  # 数学 🙂",
)
_MESSAGES = (
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello, what can I do for you?"},
        {"role": "user", "content": "Nothing."},
    ],
)


def assert_same_logits(exported: Path, texts: bool = True) -> None:
    """Assert that transformers computes with an exported folder what our model does."""
    source = open_source(exported)
    assert source.spec is not None
    assert compare(exported, source.weights, source.spec, texts)[0] == []


@torch.no_grad()
def compare(
    folder: Path, weights: Weights, spec: ModelSpec, texts: bool = False, adapter: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[str], float]:  # fmt: skip
    """Load a folder with transformers on the CPU, and compare its logits with those of `weights` in our model.

    In fp32; logits that differ there by more than usual are computed once more in fp64: it may have been rounding.

    The folder's own Python code is never run. transformers raises all kinds of exceptions for a folder that it cannot
    read, or a model that it cannot compute.

    Args:
        weights: ours. The folder's weights are cast to the same dtypes first, so that only the computation is compared.
        texts: also compare tokenizer, chat template and the tokens that end a turn.
        adapter: a PEFT folder that peft loads onto the folder's model; `weights` are merged already.

    Returns:
        Problems, one text each; and the largest difference of the logits.
    """
    transformers.utils.logging.disable_progress_bar()
    # Memory holds one model at a time: theirs is deleted before ours is built.
    theirs, loading = getattr(transformers, _class_of(folder, spec)).from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="eager",
        output_loading_info=True,
        **{_DTYPE: dtype},  # overrides the dtype of config.json
    )
    problems = []
    if lacking := sorted(name for name in loading["missing_keys"] if not spec.passes_through(name)):
        problems.append(f"does not find {some(lacking)}, and would start with random values")
    theirs = theirs.eval()
    if adapter is not None:
        import peft  # imported here, because only this needs it

        theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval().to(dtype)
    else:
        for name, parameter in theirs.named_parameters():
            same = spec.own_name(name).replace("experts.gate_up_proj", "experts.gate_proj")  # ours hold experts apart
            same = same if parameter.ndim < 3 else f"{same}.weight"
            if same in weights.kinds:  # a rounding to bf16 and back, if ours are stored in bf16
                parameter.copy_(parameter.to(weights.kinds[same].dtype))
    prompts = _prompts(folder, spec.vocab_size)
    expected = [theirs(ids).logits for ids in prompts]
    del theirs
    difference, largest = 0.0, 1.0
    with torch.device("meta"):  # no time spent on initial values
        ours = MODELS[spec.model_type](spec)
    ours.to(dtype).to_empty(device="cpu")
    fill_parameters(ours.named_parameters(), read_pieces(spec, weights.read))
    for ids, logits in zip(prompts, expected, strict=True):
        our_logits, finite = ours(ids), logits.isfinite()
        if not torch.equal(our_logits.isfinite(), finite):
            problems.append("their logits are finite at other places than ours")
        elif finite.any():  # weights with NaN give no finite logits; they were compared byte by byte already
            difference = max(difference, (our_logits - logits)[finite].abs().max().item())
            largest = max(largest, logits[finite].abs().max().item())
    del ours
    most = _ERROR.get(spec.model_type.removesuffix("_text"), 1e-5) * largest
    if difference > most and dtype == torch.float32 and not problems:
        return compare(folder, weights, spec, texts, adapter, torch.float64)
    if difference > most:
        problems.append(f"logits differ from ours by {difference:.1e} (they are up to {largest:.1f})")
    return problems + (_compare_texts(folder) if texts else []), difference


def _class_of(folder: Path, spec: ModelSpec) -> str:
    """The class of transformers that the folder's config.json names, if it is one of this family's."""
    own = to_hf_config(spec)["architectures"][0]
    named = read_object(folder / CONFIG, "").get("architectures")
    text_only = own.replace("ForConditionalGeneration", "ForCausalLM")
    return text_only if named == [text_only] else own


def _prompts(folder: Path, vocabulary: int) -> list[Tensor]:
    """Prompts, (1, tokens) each: ids spread over the whole vocabulary, and texts if there is a tokenizer."""
    prompts = [[(step * i * i + step) % vocabulary for i in range(16)] for step in (1, 7919, 104729, 1299709)]
    if _has_tokenizer(folder):
        tokenizer = load_tokenizer(folder)
        prompts += [[i for i in tokenizer.encode(text) if i < vocabulary] for text in _TEXTS]
    return [torch.tensor([ids]) for ids in prompts if ids]


def _compare_texts(folder: Path) -> list[str]:
    """Compare token ids, chat template and end-of-turn tokens of transformers with ours. Returns problems."""
    if not _has_tokenizer(folder):
        return []
    ours = load_tokenizer(folder)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    problems = [
        f"token ids of {t!r} differ" for t in _TEXTS if theirs.encode(t, add_special_tokens=False) != ours.encode(t)
    ]
    if theirs.eos_token_id != ours.eos_token_id:
        problems.append(f"eos_token_id is {theirs.eos_token_id}, ours is {ours.eos_token_id}")
    if ours.eos_token_id not in stop_ids(read_assets(folder), folder / GENERATION):
        problems.append(f"generation_config.json does not stop at {ours.eos_token!r}")
    if theirs.chat_template is None:
        return problems
    try:
        template = ChatTemplate.from_folder(folder, tokenizer=ours)
    except UserError as error:
        return [*problems, f"the chat template cannot be used: {error}"]
    for messages in _MESSAGES:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if text != template.render(messages, add_generation_prompt=True):
            problems.append("the chat template renders other text than ours")
    return problems


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").exists()
