"""The same as `titan-mi100 convert dcp-to-torch`, from the checkout."""

from titan_mi100.tools.convert.dcp_to_torch import main

if __name__ == "__main__":
    main()
