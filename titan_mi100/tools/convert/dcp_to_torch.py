"""Converts a DCP folder to one file of torch.save, model.pt. Only weights are written, no optimizer state."""

from titan_mi100.weights import convert


def main() -> None:
    read, made = "DCP folder, such as RUN/checkpoint/step-500", "folder to create; must not exist yet"
    convert.command(str(__doc__), read, made, convert.to_torch)


if __name__ == "__main__":
    main()
