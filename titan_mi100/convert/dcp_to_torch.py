"""Converts a DCP folder to one file of torch.save, model.pt. Only weights are written, no optimizer state."""

from titan_mi100.weights import convert


def main() -> None:
    convert.command(
        str(__doc__),
        "DCP folder, such as RUN/checkpoint/step-500",
        "folder to create; must not exist yet",
        convert.to_torch,
    )


if __name__ == "__main__":
    main()
