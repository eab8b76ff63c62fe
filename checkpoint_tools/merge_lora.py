"""The same as `titan-mi100 convert merge-lora`, from the checkout."""

from titan_mi100.tools.convert import merge_lora

if __name__ == "__main__":
    merge_lora()
