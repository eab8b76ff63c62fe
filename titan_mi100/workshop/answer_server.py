"""Answers of a server, and new weights for it: vLLM, SGLang or llama.cpp. Prompts and answers are token ids; a text is
never encoded again.

Nothing that a server sends is trusted: its size and its time are limited, and an answer that is not exactly what was
asked for is refused.
"""

import json
import os
import socket
import subprocess
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Collection
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

from titan_mi100.config.settings import RoundsConfig
from titan_mi100.data.samples import LENGTH, STOP, Answer, read_group
from titan_mi100.data.strict_json import BadRecord, parse, shown
from titan_mi100.errors import UserError
from titan_mi100.wording import printable, shortened

PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds until a request is sent again
_AGAIN = (0, 429, 503)  # of HTTP: the server may answer later; 0: there was no connection, or it ended
_STARTS = 1800.0  # seconds that a restarted server may take
ROUND = "titan-round-"  # begins the names of served weights
_DRAFTED = 16  # tokens: the log p of so many are not all 0
# What is not sent has the value of the model's generation_config.json, or of the server's command line.
_EVERY = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_OPENAI = {"n": 1, "logprobs": 1, "repetition_penalty": 1.0, "return_token_ids": True}
KINDS: dict[str, dict[str, Any]] = {  # server -> what it is sent
    "vllm": {**_EVERY, **_OPENAI, "top_k": 0},
    "sglang": {**_EVERY, **_OPENAI, "top_k": -1, "no_stop_trim": True},
    "llamacpp": {
        **_EVERY, "top_k": 0, "repeat_penalty": 1.0, "samplers": ["temperature"], "n_probs": 1, "return_tokens": True
    },
}  # fmt: skip


class Connections:
    """Opens a connection for each request, from any thread, and follows no redirect and asks no proxy.

    Raises:
        UserError: the address is none.
    """

    def __init__(self, url: str, timeout: float, largest: int) -> None:
        """Args: url: http://HOST:PORT, also with /v1. timeout: seconds for a whole answer. largest: its bytes."""
        self._url, self._timeout, self._largest, self._sockets = url, timeout, largest, set[socket.socket]()
        try:
            parts = urlsplit(url)
            self._class = {"http": HTTPConnection, "https": HTTPSConnection}[parts.scheme]
            self._host, self._port = parts.hostname or "", parts.port
        except (ValueError, KeyError):
            self._host = ""
        if not self._host or parts.username is not None or parts.query or parts.fragment:
            raise UserError(f"--server {printable(url)}: expected http://HOST:PORT or https://HOST:PORT")
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")

    def exchange(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and content of the answer to a POST, or without a body to a GET; 0 and a reason: there is none."""
        try:
            return self._exchange(path, body)
        except (OSError, HTTPException, ValueError) as error:  # the last: a host that cannot be encoded
            return 0, (str(error) or type(error).__name__).encode()

    def _exchange(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = self._class(self._host, self._port, timeout=self._timeout)
        connection.connect()
        sock = connection.sock  # the connection forgets it when the server says that it will close
        timer = Timer(self._timeout, _shut, [sock])  # the connection's own timeout is that of a byte
        self._sockets.add(sock)
        timer.start()
        try:
            method = "GET" if body is None else "POST"
            connection.request(method, f"{self._prefix}/{path}", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read(self._largest + 1)
            if response.length and len(content) <= self._largest:
                raise ConnectionError("the answer was cut off")
            return response.status, content
        finally:
            timer.cancel()
            self._sockets.discard(sock)
            connection.close()

    def end(self) -> None:
        """Let all requests under way fail."""
        for each in [*self._sockets]:
            _shut(each)


class Server:
    """Asks for one answer at a time, from any thread.

    Args:
        options: server (http://HOST:PORT, also with /v1), served_model, server_kind, server_timeout (seconds for a
            whole answer), max_new_tokens.
        vocabulary: ids of the tokenizer.

    Raises:
        UserError: the address is none.
    """

    def __init__(self, options: Namespace, stop_ids: Collection[int], vocabulary: int) -> None:
        self._url, self._timeout, self._most = options.server, options.server_timeout, options.max_new_tokens
        self._stop_ids, self._vocabulary, self._model = {*stop_ids}, vocabulary, options.served_model
        self._has_ended, kind = False, options.server_kind
        self._form = "completion" if kind == "llamacpp" else "v1/completions"
        length = {"n_predict" if kind == "llamacpp" else "max_tokens": self._most, "stop_token_ids": sorted(stop_ids)}
        self._settings = {**KINDS[kind], **length, "model": self._model, "stream": False}
        self._largest = (1 << 20) + (self._most << 12)  # bytes of an answer
        self._connections = Connections(self._url, self._timeout, self._largest)

    def ask(self, where: str, prompt: list[int], seed: str) -> Answer:
        """One answer. Args: where: the prompt's, for messages.

        Raises:
            UserError: there is none, also after several tries, or it is not what was asked for.
        """
        number = zlib.crc32(seed.encode()) & 0x7FFFFFFF
        content = self._post(json.dumps({**self._settings, "prompt": prompt, "seed": number}).encode())
        try:
            if len(content) > self._largest:
                raise BadRecord("too large", f"more than {self._largest:,} bytes")
            read = self._read(parse(content))
            [answer] = read_group({"prompt_ids": prompt, "answers": [read]}).answers
            self._check(answer)
        except BadRecord as bad:
            raise UserError(f"{self._url}: its answer to {where} cannot be used: {printable(str(bad))}") from None
        return answer

    def end(self) -> None:
        """Let all requests under way fail."""
        self._has_ended = True
        self._connections.end()

    def _read(self, answer: dict[str, Any]) -> dict[str, Any]:
        if (model := answer.get("model", self._model)) != self._model:
            raise BadRecord("another model", f"it is of {shown(model)}; correct --served_model")
        try:
            if self._form == "completion":
                tokens, ids = answer["completion_probabilities"], answer["tokens"]
                if [token["id"] for token in tokens] != ids:
                    raise KeyError
                finish = {"eos": STOP, "limit": LENGTH}[answer["stop_type"]]
                return {"ids": ids, "log_p": [token["logprob"] for token in tokens], "finish": finish}
            [choice] = answer["choices"]
            log_p, finish = choice["logprobs"]["token_logprobs"], choice["finish_reason"]
            return {"ids": [*choice["token_ids"]], "log_p": log_p, "finish": finish}
        except (KeyError, TypeError, ValueError):
            expected = "one choice with token_ids, logprobs.token_logprobs and finish_reason"
            if self._form == "completion":
                expected = "stop_type, tokens, and their ids in completion_probabilities, where llama.cpp leaves out "
                expected += "those that end inside a character"
            remedy = "a text is not encoded again; take a newer server, or correct --server_kind"
            raise BadRecord("another form", f"expected {expected}; {remedy}") from None

    def _check(self, answer: Answer) -> None:
        """Raises BadRecord: the first thing that is wrong."""
        ids, most, stops = answer.ids, self._most, answer.ids[-1] in self._stop_ids
        rules = {
            f"{len(ids):,} ids; --max_new_tokens is {most:,}": len(ids) <= most,
            f"the id {max(ids)}; the tokenizer has {self._vocabulary:,}": max(ids) < self._vocabulary,
            "goes on after a stop token of --model; is it another model?": self._stop_ids.isdisjoint(ids[:-1]),
            f'finish is "{answer.finish}", but the last id, {ids[-1]}, is {"a" if stops else "no"} stop token of '
            "--model; is it another model?": answer.is_cut != stops,
            f"cut off after {len(ids):,} of {most:,} ids; lower --max_new_tokens, or let the server have a longer "
            "context": not answer.is_cut or len(ids) == most,
            "a log p is below -10,000": min(answer.log_p) >= -1e4,
            "all log p are 0; start the server without drafting": len(ids) < _DRAFTED or any(answer.log_p),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise BadRecord("bad answer", broken[0])

    def _post(self, body: bytes) -> bytes:
        for pause in (*PAUSES, 0):
            end = time.monotonic() + self._timeout
            status, content = self._connections.exchange(self._form, body)
            if status == 200:
                return content
            if (is_late := time.monotonic() >= end) or status not in _AGAIN or self._has_ended:
                break
            time.sleep(pause)
        problem = f"HTTP {status}: " * bool(status) + " ".join(content[:999].decode(errors="replace").split())
        problem = f"{printable(shortened(problem, 200))}; when that is corrected,"
        if is_late:
            problem = f"no whole answer in {self._timeout:g} s; with another --server_timeout or --concurrency"
        raise UserError(f"{self._url}: {problem} start again: it goes on")


class ServedWeights:
    """Hands the weights of a round to a server, under a name that no other weights have had.

    An adapter is loaded beside the base (vLLM, SGLang), and those of earlier rounds are unloaded: under an old name a
    server may answer from its cache. Where settings.restart is set, the user's command restarts the server instead.
    Whether it answers from them is checked later, by the trainer's own log p.
    """

    def __init__(self, settings: RoundsConfig) -> None:
        """Raises UserError: the address is none."""
        self._settings, self._connections = settings, Connections(settings.server, 600.0, 1 << 24)

    def serve(self, name: str, model: Path, is_adapter: bool) -> None:
        """Let the server have a model under a name. Raises UserError: it does not."""
        command, served = self._settings.restart, self._served() or []
        if command and name not in served:
            print(f"restarting the server: {printable(command)}", file=sys.stderr)
            environment = {**os.environ, "MODEL": str(model.absolute()), "NAME": name}
            restarted = subprocess.run(
                command, shell=True, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr,
                start_new_session=True,
            )  # fmt: skip
            if code := restarted.returncode:
                raise UserError(f"rounds.restart ends with code {code}; correct the command, then start again")
            end = time.monotonic() + _STARTS
            while name not in (self._served() or []):
                if time.monotonic() > end:
                    problem = f"lists no model {name} {_STARTS:g} s after rounds.restart"
                    raise UserError(f"{self._settings.server}: {problem}; let it serve $MODEL as $NAME")
                time.sleep(1)
        elif not command and is_adapter:
            if name not in served:
                self._post("load", {"lora_name": name, "lora_path": str(model.absolute())})
            for old in (old for old in served if old.startswith(ROUND) and old != name):
                self._post("unload", {"lora_name": old})

    def _served(self) -> list[str] | None:
        """The names that it lists; None: it does not answer, or not in OpenAI's form."""
        status, content = self._connections.exchange("v1/models")
        try:
            return [str(model["id"]) for model in parse(content)["data"]] if status == 200 else None
        except (BadRecord, KeyError, TypeError):
            return None

    def _post(self, verb: str, body: dict[str, str]) -> None:
        path = f"{'v1/' * (self._settings.server_kind == 'vllm')}{verb}_lora_adapter"
        status, content = self._connections.exchange(path, json.dumps(body).encode())
        told = printable(shortened(" ".join(content[:999].decode(errors="replace").split()), 200))
        if status != 200 and verb == "load" and "already" not in told:
            problem = f"POST /{path}: {f'HTTP {status}' if status else 'no answer'}, {told}"
            remedy = "start it with adapters that can be loaded (docs/ROUNDS.md), or set rounds.restart"
            raise UserError(f"{self._settings.server}: {problem}; {remedy}")


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
