"""The same as `titan-mi100 convert hf-to-dcp`, from the checkout."""

from titan_mi100.tools.convert.hf_to_dcp import main

if __name__ == "__main__":
    main()
