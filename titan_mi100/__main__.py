"""The console command: `titan-mi100 WORD ...` or `python -m titan_mi100 WORD ...`. Each word is a function of a module.

A module is imported only when its command is used, and this file does not import torch: help and mistakes answer at
once. `train` does what run_train.sh does: it blocks signals first, then launch/launcher.py supervises the run.
"""

import os
import signal
import sys
from typing import Any

from titan_mi100.doors import COMMANDS, door

# as run_train.sh blocks them
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def console() -> int:
    """What pyproject.toml installs as `titan-mi100`."""
    # child processes must import the installed package, not another titan_mi100 in the current folder
    os.environ["PYTHONSAFEPATH"] = "1"
    return main()


def main() -> int:
    """Run the command that sys.argv names and return its exit code. The command reads its own sys.argv[1:]."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["train"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # before anything is imported: the launcher waits for them
        from titan_mi100.launch import launcher

        sys.argv[0] = "titan-mi100 train"
        return launcher.main(arguments[1:])
    from titan_mi100 import cli

    if not arguments or arguments[0] in ("-h", "--help"):
        return cli.exit_code(lambda: print(_help()))
    if arguments[0] == "--version":
        return cli.exit_code(lambda: print(cli.versions()))
    count = 2 if any(name.startswith(f"{arguments[0]} ") for name in COMMANDS) else 1
    name = " ".join(arguments[:count])
    if count == 2 and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        return cli.exit_code(lambda: print(_help(f"{arguments[0]} ")))
    if name not in COMMANDS:
        cli.say(f"titan-mi100: {_unknown(arguments, count)}")
        return 2
    sys.argv = [f"titan-mi100 {name}", *arguments[count:]]
    command = list[Any]()
    # a limit of memory can be too low for torch's libraries, which the import loads
    code = cli.exit_code(lambda: command.append(door(name))) or command[0]()
    return code if isinstance(code, int) else 0


def _help(group: str = "") -> str:
    """The list of commands. Args: group: only those that begin with it, such as "convert "; empty: all."""
    shown = {name: summary for name, (_, summary) in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, shown))
    lines = [f"usage: titan-mi100 {group}COMMAND [arguments]; titan-mi100 {group}COMMAND --help explains them", ""]
    return "\n".join([*lines, *(f"  {name:<{width}}  {summary}" for name, summary in shown.items())])


def _unknown(given: list[str], count: int) -> str:
    """The message about a command that does not exist."""
    from titan_mi100.errors import did_you_mean
    from titan_mi100.wording import shown

    of_group = [name.split()[1] for name in COMMANDS if count == 2 and name.startswith(f"{given[0]} ")]
    known = of_group or [*dict.fromkeys(name.split()[0] for name in COMMANDS)]
    where = f"{given[0]} " * (count - 1)
    return f"{where}{shown(given[count - 1])} is not a command{did_you_mean(given[count - 1], known, where)}"


if __name__ == "__main__":
    sys.exit(main())
