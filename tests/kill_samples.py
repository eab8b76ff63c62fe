"""Kills sampling, scoring and learning at random moments and starts them again: all must be as if nobody had disturbed.

    python tests/kill_samples.py [--kills 30] [--seed 0] [--folder WORK]

Parts: `sample` by our engine, in two processes; `sample` by a server, a stub on loopback whose answers follow from the
seeds, and which is killed too; `score` with a function; a run, in its pass before training and in its steps. A kill
takes the command alone, one of its processes, or all. Stores and checkpoints are compared byte for byte.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from kill_teach import CONFIG, PROGRAM, children, ended, environment, read_options, run

STUB = """
import json, random, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rng = random.Random(json.dumps([body["prompt"], body["seed"]]))
        ids = [rng.randrange(200) for _ in range(rng.randrange(1, 20))] + body["stop_token_ids"][:1]
        logprobs = {"token_logprobs": [-round(rng.random(), 3) for _ in ids]}
        choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": "stop", "token_ids": ids}
        content = json.dumps({"model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    def handle_error(self, *_):  # a client that was killed is no error
        pass

Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FUNCTION = "import time\ndef score(prompt, answer, row):\n    time.sleep(0.01)\n    return len(answer) % 3\n"
PORT = 18743
ROWS = ["--training.seq_len", "128", "--training.local_batch_size", "2", "--model.attention_backend", "sdpa"]


def commands(out: str) -> dict[str, list[str]]:
    data = str(Path(CONFIG[1]).parent / "debug" / "additions.jsonl")
    asked = ["sample", "--model", "model/hf-step-60", "--data", data, "--out", out, "--max_new_tokens", "32"]
    return {
        "engine": [*asked, "--limit", "160", "--k", "4", "--processes", "2", "--device", "cpu"],
        "server": [*asked, "--limit", "512", "--k", "4", "--server", f"http://127.0.0.1:{PORT}", "--served_model", "m",
                   "--concurrency", "2"],
        "score": ["score", "samples", "--out", out, "--by", "length:20", "--function", "judge.py:score"],
        "train": ["train", "--job.run_folder", out, "--checkpoint.initial_load_path", "model/hf-step-60",
                  "--data.path", "scored/part-*.jsonl", "--objective.name", "policy", *ROWS,
                  "--training.steps", "30", "--training.gradient_accumulation_steps", "1",
                  "--checkpoint.interval", "5", "--metrics.enable_tensorboard", "false",
                  "--training.mixed_precision_param", "float32"],
    }  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    """The bytes that must be equal: parts of stores, and the weights and state of the last step."""
    last = [folder / "checkpoint" / "step-30" / name for name in ("__0_0.distcp", "trainer.json")]
    files = [*folder.rglob("part-*"), *(path for path in last if path.exists())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class Server:
    def __init__(self, work: Path) -> None:
        (work / "stub.py").write_text(STUB)
        self._work = work
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "stub.py", str(PORT)], cwd=self._work)
        time.sleep(1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def kill_once(
    work: Path, words: list[str], after: float, who: str, draw: random.Random, server: Server | None = None
) -> str:
    process = subprocess.Popen([PROGRAM, *words], cwd=work, env=environment(work), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        process.wait(after)
        return "ended before"
    except subprocess.TimeoutExpired:
        pass
    below = children(process.pid)
    if who == "server" and server:
        server.kill()
    targets = {"command": [process.pid], "child": [draw.choice(below or [process.pid])], "all": [process.pid, *below]}
    for target in targets.get(who, ()):
        try:
            os.kill(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
    how = ended(process, below)
    if who == "server" and server:
        server.start()
    return how


def main() -> int:
    options, work = read_options(__doc__.splitlines()[0], 30)
    draw, failures, server = random.Random(options.seed), 0, Server(work)
    (work / "judge.py").write_text(FUNCTION)
    if not (work / "model").exists():
        done = run(work, "train", *CONFIG, "--job.run_folder", "model", "--training.steps", "60")
        assert done.returncode == 0, done.stderr
    seconds, undisturbed = dict[str, float](), dict[str, dict[str, bytes]]()
    for kind, out in (("engine", "samples"), ("server", "served"), ("score", "scored"), ("train", "trained")):
        shutil.rmtree(work / out, ignore_errors=True)
        started = time.monotonic()
        done = run(work, *commands(out)[kind])
        assert done.returncode == 0, done.stderr
        seconds[kind], undisturbed[kind] = time.monotonic() - started, content(work / out)
        print(f"undisturbed: {kind} {seconds[kind]:.0f} s, {len(undisturbed[kind])} files", flush=True)
        assert len(undisturbed[kind]) > 2
    for number in range(options.kills):
        kind = (*seconds,)[number % 4]
        out = work / f"killed-{number}"
        shutil.rmtree(out, ignore_errors=True)
        words, said = commands(str(out))[kind], []
        for _ in range(draw.choice((1, 1, 2))):
            after = draw.uniform(0.1, 1.0) * seconds[kind]
            who = draw.choice(("command", "child", "all", *["server"] * 2 * (kind == "server")))
            said.append(f"{who} after {after:.1f} s: {kill_once(work, words, after, who, draw, server)}")
        parts = len(list(out.rglob("part-*"))) if out.exists() else 0
        done = run(work, *words)
        left = [path.name for path in out.rglob(".*part-*")] if out.exists() else []
        is_raw = "Traceback" in done.stderr or "unexpected error" in done.stderr
        is_equal = out.exists() and content(out) == undisturbed[kind] and not done.returncode and not left
        failures += not is_equal or is_raw
        verdict = "equal" if is_equal else "DIFFERS"
        print(f"{number} {kind}: {'; '.join(said)}; {parts} parts were there; {verdict} {left}", flush=True)
        if not is_equal:
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", flush=True)
        else:
            shutil.rmtree(out)
    server.kill()
    print(f"{options.kills} kills, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
