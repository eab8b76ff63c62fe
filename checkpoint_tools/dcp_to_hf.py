"""The same as `titan-mi100 convert dcp-to-hf`, from the checkout."""

from titan_mi100.tools.convert.dcp_to_hf import main

if __name__ == "__main__":
    main()
