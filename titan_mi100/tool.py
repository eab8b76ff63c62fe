"""How a command of ours starts and ends: its words go to the log, its errors are one message and an exit code."""

import errno
import sys
from collections.abc import Callable

from titan_mi100.errors import UserError
from titan_mi100.logging import log, setup_logging


def run(main: Callable[[], object], afterwards: str = "nothing was left behind") -> None:
    """Run it, then exit: 0, 1 failed, 2 the user's input, 130 interrupted.

    Args:
        afterwards: how things stand when it has failed.
    """
    setup_logging(0)
    try:
        main()
    except UserError as error:
        log.error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        log.error("interrupted")
        sys.exit(130)
    except (RuntimeError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        log.error(f"{error}{'; free some space' if full else ''}; {afterwards}")
        sys.exit(1)
