"""The same as `titan-mi100 convert dcp-to-hf`, from the checkout."""

from titan_mi100.tools.convert import dcp_to_hf

if __name__ == "__main__":
    dcp_to_hf()
