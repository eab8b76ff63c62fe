"""titan_mi100: a native PyTorch trainer for Qwen models."""

import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


_TOOLS = "doctor certify new_config inspect_data rehearse prepare_corpus report generate exact_match harness"
_MOVED = {name: f"tools/{name}.py" for name in _TOOLS.split()} | {
    "convert": "tools/convert/__init__.py", "planner": "tools/plan.py", "profile": "tools/summarise_trace.py",
    "launch.__main__": "launch/launcher.py", "outcome": "watch/outcome.py", "run.watchdog": "watch/watchdog.py",
}  # fmt: skip


class _OldNames:
    """Finds commands by the names of modules that they had before `titan-mi100 WORD`: python -m titan_mi100.planner."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        from importlib.util import spec_from_file_location

        if (found := _MOVED.get(name.removeprefix("titan_mi100."))) is None or not name.startswith("titan_mi100."):
            return None
        file = Path(__file__).parent / found
        inside = [str(file.parent)] if file.stem == "__init__" else None
        return spec_from_file_location(name, file, submodule_search_locations=inside)


sys.meta_path.append(_OldNames)  # asked last, for names that nothing else knows
