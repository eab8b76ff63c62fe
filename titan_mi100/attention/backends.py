"""Makes the attention backend with a name of config/kernels.py."""

from importlib import import_module

from titan_mi100.attention.base import Backend
from titan_mi100.config.kernels import KERNELS, OWN
from titan_mi100.errors import UserError


def make_backend(name: str, arch: str, launch: str = "") -> Backend:
    """Create the backend with this name.

    Args:
        arch: "gfx908", "sm90", "cpu".
        launch: launch settings of our kernels; "": the first candidate of the architecture.

    Raises:
        UserError: a package or kernel that the backend needs is missing.
    """
    module, kind = KERNELS[name].source.split(":")
    try:
        backend_class = getattr(import_module(f"titan_mi100.attention.{module}"), kind)
    except ImportError as error:
        raise UserError(f"{kind} cannot be imported ({error})") from None
    backend: Backend = backend_class(launch or arch) if name == OWN else backend_class()
    return backend
