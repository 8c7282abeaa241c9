"""SandboxFusion's protocol against a small server that runs what it is sent, as the real one does without isolation.

The answers' fields are those of sandbox/server/sandbox_api.py in https://github.com/bytedance/SandboxFusion.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from poise.sandbox import Limits, Sandbox, SandboxError


class Fake(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.server.failures:
            code, answer = self.server.failures.pop(0)
        else:
            code, answer = 200, run(body)
        payload = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass


def run(body):
    assert body["language"] == "python"
    started = time.monotonic()
    # What hangs must have its limit, what does not may take longer on a busy machine.
    limit_s = body["run_timeout"] if "while True" in body["code"] else 600
    with subprocess.Popen(
        [sys.executable, "-c", body["code"]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:  # fmt: skip
        first = process.stdout.read(1)  # the time counts from here: it may be long until Python has started
        try:
            output, errors = process.communicate(timeout=limit_s)
            outcome = {"status": "Finished", "return_code": process.returncode, "stderr": errors.decode()}
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            outcome = {"status": "TimeLimitExceeded", "return_code": None, "stderr": ""}
    outcome["stdout"] = (first + output).decode()
    is_good = outcome["status"] == "Finished" and outcome["return_code"] == 0
    return {
        "status": "Success" if is_good else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {**outcome, "execution_time": time.monotonic() - started},
        "executor_pod_name": None,
        "files": {},
    }


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as fake:
        fake.requests, fake.failures = [], []
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        yield fake
        fake.shutdown()


@pytest.fixture
def sandbox(server):
    return Sandbox(url=f"http://127.0.0.1:{server.server_address[1]}/")


def texts(sandbox, cells, **limits):
    async def all_of_them():
        async with sandbox.session(Limits(**limits), seed=3) as session:
            return [(await session.run(cell)).text for cell in cells]

    return asyncio.run(all_of_them())


def test_a_session_remembers(sandbox, server):
    cells = ["x = 2\nprint('once')", "print('a', end='')\nx * 3", "1 / 0", "x", "import random; random.random()"]
    first = texts(sandbox, cells)
    assert first[:2] == ["once", "a\n6"]
    assert first[2].endswith("ZeroDivisionError: division by zero")
    assert 'File "<cell 3>", line 1, in <module>' in first[2]
    assert first[3] == "2"
    assert first == texts(sandbox, cells)  # the seed
    path, body = server.requests[0]
    assert path == "/run_code"
    assert (body["language"], body["run_timeout"], body["memory_limit_MB"]) == ("python", 5.0, 512)


def test_what_goes_wrong_in_a_cell_is_text(sandbox):
    timed_out, kept, ended, flood = texts(
        sandbox,
        ["x = 1\nprint('before', flush=True)\nwhile True: pass", "'x' in globals()", "import os; os._exit(3)",
         "print('0123456789' * 100, end='')"],
        wall_s=1.5, num_output_bytes=100,
    )  # fmt: skip
    assert timed_out == "before\n[timed out after 1.5 s; what this cell did is lost, earlier variables are kept]"
    assert kept == "False"
    assert ended == "[exit status 3; what this cell did is lost, earlier variables are kept]"
    assert flood == "0123456789" * 5 + "\n[... 900 bytes cut ...]\n" + "0123456789" * 5


def test_a_script(sandbox):
    result = asyncio.run(sandbox.run("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)\nsys.exit(4)"))
    assert (result.text, result.exit_status, result.is_error) == ("1\n2\n3", 4, True)
    assert asyncio.run(sandbox.run("print(1)\0")).is_error


def test_an_overloaded_server_is_asked_again(sandbox, server):
    server.failures += [(503, {}), (200, {"status": "SandboxError", "message": "no worker", "run_result": None})]
    assert asyncio.run(sandbox.run("6 * 7")).text == "42"
    assert len(server.requests) == 3


def test_a_server_that_does_not_run_code_is_an_error_of_the_sandbox(sandbox, server):
    server.failures += [(404, {})]
    with pytest.raises(SandboxError, match=r"the sandbox at http://127\.0\.0\.1:\d+/ does not run code: HTTP 404"):
        asyncio.run(sandbox.run("1"))
    server.failures += [(200, {"status": "SandboxError", "message": "no worker"})] * 4
    with pytest.raises(SandboxError, match="no worker"):
        asyncio.run(sandbox.run("1"))


def test_protection_says_who_protects(sandbox, server):
    assert sandbox.protection() == f"SandboxFusion at {sandbox.url}: what protects that machine is its own matter"
    assert len(server.requests) == 1  # it was asked
    server.failures += [(200, run({"language": "python", "code": "print(41)", "run_timeout": 5}))]
    with pytest.raises(SandboxError, match="gave"):
        sandbox.protection()
