"""Converts an HF folder to a DCP folder, which the trainer can start from and torch's own tools read."""

from titan_mi100.weights import convert


def main() -> None:
    read, made = "HF folder with config.json and safetensors", "DCP folder to create; must not exist yet"
    convert.command(str(__doc__), read, made, convert.to_dcp)


if __name__ == "__main__":
    main()
