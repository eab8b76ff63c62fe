"""The certificate of this machine, where the trainer finds it: kept in the cache folder, under what it is bound to."""

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
    """Keep it for the trainer, in the place of an earlier one of the same machine; returns where. Raises OSError."""
    path = _place(cache, certificate.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, as_json(certificate))
    return path


def find(cache: Path, device: torch.device) -> Certificate | None:
    """This machine's certificate, if it has one; says in the log which was taken, or why none of those that are there.

    Raises nothing: a run starts without one, too.
    """
    try:
        if others := sorted((cache / "certificates").glob("*.json"), key=lambda path: path.stat().st_mtime):
            return _of(cache, describe(device, 1, with_commit=False), others[-1])
    except OSError as error:
        log.warning(f"{error.filename or cache}: {error.strerror}; this machine's certificate is not used")
    return None


def _of(cache: Path, here: Machine, newest: Path) -> Certificate | None:
    path = _place(cache, here)
    try:
        certificate = checked(path if path.exists() else newest)
    except UserError as error:
        log.warning(f"the certificate is ignored: {error}; {_MAKE_ONE}")
        return None
    if others := differences(certificate.machine, here):
        log.info(f"a certificate is there, but not of this machine as it is now: {some(others)}; {_MAKE_ONE}")
        return None
    log.info(f"certificate of {certificate.made}: {path}")
    return certificate


def attention_of(certificate: Certificate, dtype: str, head_dim: int) -> tuple[str, str]:
    """The backend that was measured fastest of those that are right, and why in words; "", "": none of this shape."""
    ranked = ranking(certificate.parts, dtype, head_dim)
    if not ranked:
        log.info(f"the certificate has no attention in {dtype} with heads of {head_dim}; it decides nothing here")
        return "", ""
    return ranked[0].backend, f"the fastest that is right by the certificate of {certificate.made}"


def dtype_advice_of(certificate: Certificate) -> str:
    """What the measured products speak for; "": they were not measured."""
    if not (dtype := best_dtype(certificate.parts)):
        return ""
    measured = ", ".join(f"{name} {rate:.3g}" for name, rate in rates(certificate.parts).items())
    return (
        f'matrix products by the certificate, TFLOP/s: {measured}; training.mixed_precision_param = "{dtype}" is the '
        "widest dtype that is at most a tenth slower than the fastest"
    )
