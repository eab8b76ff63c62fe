"""Runs under torchrun: job_lora's splits and runs of the made-up family, with the same arguments."""

import runpy
from pathlib import Path

import made_up_family  # noqa: F401  (registers the family)

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("job_lora.py")), run_name="__main__")
