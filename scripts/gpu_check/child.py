"""The process that measures: reads tasks from stdin, a line each, and answers each with its outcome."""

import gc
import json
import os
import sys

from titan_mi100.files.pool import end_with_parent
from titan_mi100.workshop.measure import children


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    for line in sys.stdin:
        name, target, arguments = json.loads(line)
        print(f"== {name}", file=sys.stderr, flush=True)
        outcome = children.call(target, arguments)
        if "torch" in sys.modules:
            _free()
        # a NaN is no JSON: it ends this process, and so counts as a failure of its task alone
        print(json.dumps(outcome, allow_nan=False), file=answers)
    os._exit(0)  # a broken library can hang in the interpreter's teardown


def _free() -> None:
    """Free what a task has left: its process group, and its memory, so that the next task's peak is its own."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
