from typing import Any
class WaitStates:
    def missing(self, instruction: Any) -> str:
        return ""
