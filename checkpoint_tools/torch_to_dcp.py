"""Writes the weights in a file of torch.save as a DCP folder."""

import argparse
from pathlib import Path

from titan_mi100 import convert, tool
from titan_mi100.model_source import open_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input_dir",
        type=Path,
        required=True,
        help="file of torch.save with a dict of tensors; nothing else in it is run",
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="DCP folder to make; must not be there yet")
    parser.add_argument(
        "--dtype", choices=convert.DTYPES, default="keep", help="of the written weights (default: keep)"
    )
    parser.add_argument("--verify", choices=convert.VERIFY, default="auto", help=convert.VERIFY_HELP)
    parser.add_argument(
        "--hf_assets_path",
        default="",
        help="folder to take config.json and tokenizer files from (default: the input's own)",
    )
    options = parser.parse_args()
    tool.run(
        lambda: convert.to_dcp(
            open_source(options.input_dir, options.hf_assets_path), options.output_dir, options.dtype, options.verify
        )
    )


if __name__ == "__main__":
    main()
