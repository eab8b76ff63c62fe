"""Writes the weights of a DCP folder, such as a run's checkpoint, as an HF folder: transformers and vLLM load it."""

from titan_mi100.weights import convert


def main() -> None:
    convert.command(
        str(__doc__),
        "DCP folder, such as RUN/checkpoint/step-500",
        "HF folder to make; must not be there yet",
        convert.to_hf,
        "auto",
    )


if __name__ == "__main__":
    main()
