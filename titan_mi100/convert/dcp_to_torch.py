"""Writes the weights of a DCP folder as one file of torch.save, model.pt; optimizer state stays behind."""

from titan_mi100.weights import convert


def main() -> None:
    convert.command(
        str(__doc__),
        "DCP folder, such as RUN/checkpoint/step-500",
        "folder to make; must not be there yet",
        convert.to_torch,
    )


if __name__ == "__main__":
    main()
