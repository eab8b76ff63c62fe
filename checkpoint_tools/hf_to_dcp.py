"""The same as `titan-mi100 convert hf-to-dcp`, from the checkout."""

from titan_mi100.tools.convert import hf_to_dcp

if __name__ == "__main__":
    hf_to_dcp()
