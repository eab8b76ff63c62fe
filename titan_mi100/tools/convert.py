"""The converters: words of `titan-mi100 convert`, and scripts in checkpoint_tools/. A docstring is a command's help."""

from pathlib import Path

from titan_mi100 import cli
from titan_mi100.config.hub import local_path
from titan_mi100.files.hub_files import ADAPTER
from titan_mi100.files.model import torch_file
from titan_mi100.weights import convert
from titan_mi100.weights.adapter import merged_source
from titan_mi100.weights.source import open_source

_HF, _DCP = (
    "HF folder with config.json and safetensors, or a name on the hub",
    "DCP folder, such as RUN/checkpoint/step-500",
)
_TORCH = "file of torch.save with a dict of tensors, or a folder with one such file; its pickle is never executed"
_NEW_HF, _NEW_DCP = (f"{kind} folder to create; must not exist yet" for kind in ("HF", "DCP"))


def hf_to_dcp() -> None:
    """Converts an HF folder to a DCP folder, which the trainer can start from and torch's own tools read."""
    convert.command(
        str(hf_to_dcp.__doc__), _HF, _NEW_DCP, convert.to_dcp, find=lambda path: Path(local_path(str(path)))
    )


def dcp_to_hf() -> None:
    """Converts a DCP folder, such as a run's checkpoint, to an HF folder, which transformers and vLLM load."""
    convert.command(str(dcp_to_hf.__doc__), _DCP, _NEW_HF, convert.to_hf, "auto")


def dcp_to_torch() -> None:
    """Converts a DCP folder to one file of torch.save, model.pt. Only weights are written, no optimizer state."""
    convert.command(str(dcp_to_torch.__doc__), _DCP, "folder to create; must not exist yet", convert.to_torch)


def torch_to_dcp() -> None:
    """Converts a file of torch.save to a DCP folder."""
    convert.command(str(torch_to_dcp.__doc__), _TORCH, _NEW_DCP, convert.to_dcp, find=torch_file)


def merge_lora() -> None:
    """Merges a LoRA adapter into its base, W + (alpha / rank) B A in fp32, and writes the result as an HF folder."""
    parser = cli.Parser(description=merge_lora.__doc__)
    add = parser.add_argument
    add("--base", required=True, help="the model that the adapter was trained on")
    add("--adapter", required=True, help="PEFT folder, or a LoRA run's RUN/checkpoint/step-500")
    add("--output_dir", type=Path, required=True, help=_NEW_HF)
    add("--dtype", choices=convert.DTYPES, default="keep", help="dtype of the written weights (default: the base's)")
    add("--verify", choices=convert.VERIFY, default="bytes", help=convert.VERIFY_HELP)
    options = parser.parse_args()

    def merge() -> None:
        # Nothing is computed here: `merged_source` adds B A to each matrix when the conversion reads it.
        source = merged_source(open_source(local_path(options.base)), local_path(options.adapter, ADAPTER))
        convert.to_hf(source, options.output_dir, options.dtype, options.verify)

    cli.run(merge)
