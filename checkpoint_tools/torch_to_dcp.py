"""The same as `titan-mi100 convert torch-to-dcp`, from the checkout."""

from titan_mi100.tools.convert import torch_to_dcp

if __name__ == "__main__":
    torch_to_dcp()
