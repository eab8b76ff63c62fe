"""Writes the weights of an HF folder as a DCP folder: what the trainer starts from, and torch's own tools read."""

from titan_mi100.weights import convert


def main() -> None:
    convert.command(
        str(__doc__),
        "HF folder: config.json and safetensors",
        "DCP folder to make; must not be there yet",
        convert.to_dcp,
    )


if __name__ == "__main__":
    main()
