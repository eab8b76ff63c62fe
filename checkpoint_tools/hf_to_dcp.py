"""Writes the weights of an HF folder as a DCP folder: what the trainer starts from, and torch's own tools read."""

import argparse
from pathlib import Path

from titan_mi100 import convert, tool
from titan_mi100.model_source import open_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_dir", type=Path, required=True, help="HF folder: config.json and safetensors")
    parser.add_argument("--output_dir", type=Path, required=True, help="DCP folder to make; must not be there yet")
    parser.add_argument(
        "--dtype", choices=convert.DTYPES, default="keep", help="of the written weights (default: keep)"
    )
    parser.add_argument("--verify", choices=convert.VERIFY, default="auto", help=convert.VERIFY_HELP)
    options = parser.parse_args()
    tool.run(lambda: convert.to_dcp(open_source(options.input_dir), options.output_dir, options.dtype, options.verify))


if __name__ == "__main__":
    main()
