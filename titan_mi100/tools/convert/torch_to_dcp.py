"""Converts a file of torch.save to a DCP folder."""

from titan_mi100.weights import convert


def main() -> None:
    read = "file of torch.save with a dict of tensors; its pickle is never executed"
    convert.command(str(__doc__), read, "DCP folder to create; must not exist yet", convert.to_dcp)


if __name__ == "__main__":
    main()
