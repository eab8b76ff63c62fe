"""Converts a DCP folder, such as a run's checkpoint, to an HF folder, which transformers and vLLM load."""

from titan_mi100.weights import convert


def main() -> None:
    read, made = "DCP folder, such as RUN/checkpoint/step-500", "HF folder to create; must not exist yet"
    convert.command(str(__doc__), read, made, convert.to_hf, "auto")


if __name__ == "__main__":
    main()
