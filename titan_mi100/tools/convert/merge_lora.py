"""Merges a LoRA adapter into its base, W + (alpha / rank) B A in fp32, and writes the result as an HF folder."""

from pathlib import Path

from titan_mi100 import cli
from titan_mi100.weights import convert
from titan_mi100.weights.adapter import merged_source
from titan_mi100.weights.source import open_source


def main() -> None:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("--base", type=Path, required=True, help="the model that the adapter was trained on")
    add("--adapter", type=Path, required=True, help="PEFT folder, or a LoRA run's RUN/checkpoint/step-500")
    add("--output_dir", type=Path, required=True, help="HF folder to create; must not exist yet")
    add("--dtype", choices=convert.DTYPES, default="keep", help="dtype of the written weights (default: the base's)")
    add("--verify", choices=convert.VERIFY, default="auto", help=convert.VERIFY_HELP)
    options = parser.parse_args()

    def merge() -> None:
        # Nothing is computed here: `merged_source` adds B A to each matrix when the conversion reads it.
        source = merged_source(open_source(options.base), options.adapter)
        convert.to_hf(source, options.output_dir, options.dtype, options.verify)

    cli.run(merge)


if __name__ == "__main__":
    main()
