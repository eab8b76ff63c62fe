"""Stores certificates in the cache folder, under a hash of what they are bound to, and finds this machine's one."""

import hashlib
import json
from pathlib import Path

import torch

from titan_mi100.certificate.check import checked
from titan_mi100.certificate.form import Certificate, Machine, as_json
from titan_mi100.certificate.machine import BOUND, describe, differences
from titan_mi100.certificate.verdicts import best_dtype, ranking, rates
from titan_mi100.errors import UserError
from titan_mi100.files import durable
from titan_mi100.logging import log
from titan_mi100.wording import some

_MAKE_ONE = "make one here with python -m titan_mi100.certify"


def _place(cache: Path, machine: Machine) -> Path:
    bound = json.dumps([getattr(machine, name) for name in BOUND])
    return cache / "certificates" / f"{hashlib.sha256(bound.encode()).hexdigest()[:32]}.json"


def store(cache: Path, certificate: Certificate) -> Path:
    """Store a certificate for the trainer; it replaces an earlier one of the same machine.

    Returns:
        Its path.

    Raises:
        OSError: the cache folder cannot be written to.
    """
    path = _place(cache, certificate.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, as_json(certificate))
    return path


def find(cache: Path, device: torch.device) -> Certificate | None:
    """This machine's certificate, or None. The log says which one is used, or why an existing one is not.

    It raises no error, because a run does not need a certificate.
    """
    try:
        if others := sorted((cache / "certificates").glob("*.json"), key=lambda path: path.stat().st_mtime):
            return _read_for(cache, describe(device, 1, with_commit=False), others[-1])
    except OSError as error:
        log.warning(f"{error.filename or cache}: {error.strerror}; this machine's certificate is not used")
    return None


def _read_for(cache: Path, here: Machine, newest: Path) -> Certificate | None:
    path = _place(cache, here)
    try:
        certificate = checked(path if path.exists() else newest)
    except UserError as error:
        log.warning(f"the certificate is ignored: {error}; {_MAKE_ONE}")
        return None
    if others := differences(certificate.machine, here):
        log.info(f"the newest certificate does not match this machine and program: {some(others)}; {_MAKE_ONE}")
        return None
    log.info(f"certificate of {certificate.made}: {path}")
    return certificate


def attention_of(certificate: Certificate, dtype: str, head_dim: int) -> tuple[str, str]:
    """The fastest correct attention backend by the certificate, and the reason as text; ("", ""): none was measured.

    Args:
        dtype: the compute dtype, such as "bfloat16".
        head_dim: the model's head size; the certificate's shape must have the same.
    """
    ranked = ranking(certificate.parts, dtype, head_dim)
    if not ranked:
        log.info(
            f"the certificate has no attention in {dtype} with heads of {head_dim}; it does not choose the backend"
        )
        return "", ""
    return ranked[0].backend, f"the fastest correct one by the certificate of {certificate.made}"


def dtype_advice_of(certificate: Certificate) -> str:
    """A recommendation of the compute dtype from the measured matrix products; "": they were not measured."""
    if not (dtype := best_dtype(certificate.parts)):
        return ""
    measured = ", ".join(f"{name} {rate:.3g}" for name, rate in rates(certificate.parts).items())
    return (
        f'matrix products in the certificate, TFLOP/s: {measured}; training.mixed_precision_param = "{dtype}" is the '
        "widest dtype that is at most a tenth slower than the fastest"
    )
