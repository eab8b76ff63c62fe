"""The same as `titan-mi100 convert torch-to-dcp`, from the checkout."""

from titan_mi100.tools.convert.torch_to_dcp import main

if __name__ == "__main__":
    main()
