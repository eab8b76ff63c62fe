"""The same as `titan-mi100 convert merge-lora`, from the checkout."""

from titan_mi100.tools.convert.merge_lora import main

if __name__ == "__main__":
    main()
