"""Writes the weights in a file of torch.save as a DCP folder."""

from titan_mi100.weights import convert


def main() -> None:
    convert.command(
        str(__doc__),
        "a file of torch.save with a dict of tensors; nothing else in it is run",
        "DCP folder to make; must not be there yet",
        convert.to_dcp,
    )


if __name__ == "__main__":
    main()
