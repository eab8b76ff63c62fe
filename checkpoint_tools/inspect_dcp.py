"""The same as `titan-mi100 convert inspect-dcp`, from the checkout."""

from titan_mi100.tools.inspect_dcp import main

if __name__ == "__main__":
    main()
