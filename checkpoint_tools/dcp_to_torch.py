"""The same as `titan-mi100 convert dcp-to-torch`, from the checkout."""

from titan_mi100.tools.convert import dcp_to_torch

if __name__ == "__main__":
    dcp_to_torch()
