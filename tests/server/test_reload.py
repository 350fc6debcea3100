#!/usr/bin/env python3
"""moe-server reloads its configuration, keys, limits and models and hands over to another server without lost requests.

Usage: tests/python tests/server/test_reload.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`. SECONDS (default: 4) is the time under
load.
"""
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import several_models
from suite import Skip, Suite
from test_server import BIN, FAST, MANY, MODEL, Server, figure, post, read_all, serving, wait_for
from test_service import lines_of

test = Suite()
SECONDS = float(os.environ.get("SECONDS", "4"))
TEXT = {"q": "It rains.", "source": "en", "target": "de"}


def reload(*options):
    """Run moe-server --reload; return its exit status and messages."""
    done = subprocess.run([BIN / "moe-server", "--reload", *map(str, options)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@contextlib.contextmanager
def configured(text, *options, **files):
    """Run a server with a configuration in a folder; yield (server, folder, function that reloads)."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file, content in files.items():
            (folder / file).write_text(content)
        (folder / "conf").write_text(text.replace("DIR", name))
        pid = ["--pid-file", folder / "pid"]
        with serving("--config", str(folder / "conf"), *map(str, pid), *options) as server:
            yield server, folder, lambda: reload(*pid)


@test
def keys_limits_and_the_log_are_reloaded():
    with configured("# a comment\n\napi-keys = DIR/keys\nmax-texts=3\n", keys="old\t100\nboth\t100\tname\n") as (
            server, folder, again):
        def ask(key, q=TEXT["q"]):
            return server.ask("/translate", {**TEXT, "q": q, "api_key": key})[0]

        assert [ask("old"), ask("both"), ask("new"), ask("both", ["a"] * 4)] == [200, 200, 403, 413]
        (folder / "keys").write_text("# rotated\nboth\t20\nnew\n")
        (folder / "conf").write_text(f"api-keys = {folder}/keys\nmax-texts = 5\nlog = {folder}/log\n")
        assert again() == (0, "")
        assert [ask("old"), ask("new"), ask("both", ["a"] * 4), ask("both", ["a"] * 6)] == [403, 200, 200, 413]
        usage = server.ask("/v2/usage?auth_key=both")[1]
        assert usage == {"character_count": 13, "character_limit": 20}, usage  # counts survive
        assert ask("both", "a" * 8) == 429 and ask("both", "a" * 7) == 200
        wait_for(lambda: len(lines_of(folder / "log")) == 7)
        (folder / "log").rename(folder / "log.1")
        server.process.send_signal(signal.SIGHUP)
        wait_for((folder / "log").exists)
        (folder / "conf").write_text("")
        assert again()[0] == 0 and ask("unknown") == 200  # keys are no longer required
        assert (folder / "log").read_text() == ""


@test
def a_failed_reload_changes_nothing():
    with configured("api-keys = DIR/keys\n", keys="key\n") as (server, folder, again):
        good = (folder / "conf").read_text()
        for config, keys, said in (
            ("max-texts = none\n", "key\n", "invalid value 'none' for --max-texts"),
            ("api-keys\n", "key\n", "api-keys requires a value"),
            ("bogus = 1\n", "key\n", "unrecognized option '--bogus'"),
            (f"{good}port = 1\n", "key\n", None),  # --port 0 on the command line has priority
            (f"{good}host = 127.0.0.2\n", "new\n", "--host cannot change"),
            (f"{good}log = /nowhere/log\n", "new\n", "--log /nowhere/log"),
            (f"{good}set = beam=0\n", "new\n", "beam"),
            (good, "new\nwith space\n", "line 2: keys cannot contain spaces"),
            (good, "", "contains no keys"),
        ):
            (folder / "conf").write_text(config)
            (folder / "keys").write_text(keys)
            status, message = again()
            assert status == (3 if said else 0) and ("the reload failed" in message) == (said is not None), message
            for key, wanted in ("key", 200), ("new", 403):
                assert server.ask("/translate", {**TEXT, "api_key": key})[0] == wanted, (config, key)
        status = server.stop()
        assert status == 0


@test
def models_are_replaced_without_a_loss():
    with tempfile.TemporaryDirectory() as name:
        one, two = (several_models.one_way(pathlib.Path(name) / x, pair) for x, pair in (("1", "en-de"), ("2", "en-fr")))
        path = pathlib.Path(name) / "m.bin"
        shutil.copy(one / "en-de.bin", path)
        pid = pathlib.Path(name) / "pid"
        with serving("--pid-file", str(pid), "--timeout", "900", "--set", "batch=4", model=path) as server:
            assert server.translate("It rains.", "de")[0] == 200 and server.translate("It rains.", "fr")[0] == 400
            raw = post(server, {**TEXT, "q": MANY[:40], "stream": True})
            raw.recv(1)
            began = figure(server, "start_time_seconds")
            time.sleep(1)
            assert reload("--pid-file", pid)[0] == 0 and figure(server, "start_time_seconds") == began  # unchanged
            shutil.copy(two / "en-fr.bin", path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
            assert reload("--pid-file", pid)[0] == 0 and figure(server, "start_time_seconds") > began
            assert server.translate("It rains.", "fr")[0] == 200 and server.translate("It rains.", "de")[0] == 400
            reply = read_all(raw)  # the old model ends the stream
            assert reply.count(b'"translatedText"') == 40 and reply.endswith(b"0\r\n\r\n"), reply[-300:]
            wait_for(lambda: figure(server, "translators") == 1)
            maps = pathlib.Path(f"/proc/{server.process.pid}/maps")
            if maps.exists():
                wait_for(lambda: "m.bin (deleted)" not in maps.read_text())
            path.with_suffix(".new").write_bytes(b"nothing")
            path.with_suffix(".new").rename(path)
            assert reload("--pid-file", pid)[0] == 3 and server.translate("It rains.", "fr")[0] == 200


@test
def configuration_files_are_checked():
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name) / "conf"
        for text, status, said in (
            ("port = 99999\n", 2, "--port"),
            ("\n\nport = x # y\n", 2, "line 3 of"),
            ("port\n", 2, "port requires a value"),
            ("quiet = maybe\n", 2, "expected 0 or 1"),
            ("prot = 1\n", 2, "did you mean --port"),
            ("port = 1\nport = 2\n", 2, "given twice"),
            ("= 1\n", 2, "missing name"),
            ("config = x\n", 2, "cannot include another"),
            ("help = 1\n", 2, "unrecognized option"),
            ("threads = x\n", 2, "line 1 of"),
            ("listen = unix:/x\nport = 1\n", 2, "cannot be combined"),
            ("port = 1\0\n", 4, "NUL"),
            (None, 4, "No such file"),
        ):
            path.write_text(text) if text is not None else path.unlink()
            done = subprocess.run([BIN / "moe-server", "-m", MODEL, "--config", path], capture_output=True, text=True,
                                  timeout=30)
            assert done.returncode == status and said in done.stderr, (text, done)
    with configured("\ufeff  model =  /nowhere\t\r\n threads = 9\nset = beam=7\nset = nbest=2\nquiet = 0\n"
                    "allow-origin = https://a.example\n#log = /nowhere/x\nserver-name = a.example\n") as (server, _, _):
        answer = server.translate("It rains.", alternatives=3)  # options on the command line have priority
        assert answer[0] == 200 and len(answer[1]["alternatives"]) == 1, answer


@test
def the_reload_command_names_its_problem():
    with tempfile.TemporaryDirectory() as name:
        pid = pathlib.Path(name) / "pid"
        assert reload("--pid-file", pid) == (4, f"moe-server: no server found with {pid}; give its --port or --pid-file\n")
        pid.write_text("1\n")  # nobody holds its lock
        assert reload("--pid-file", pid)[0] == 4
        server = Server("--pid-file", str(pid))
        assert int(pid.read_text()) == server.process.pid
        assert reload("--pid-file", pid) == (0, "")
        server.process.kill()
        server.process.wait()
        server.process.stderr.close()
        assert pid.exists() and reload("--pid-file", pid)[0] == 4  # left over
        with serving("--pid-file", str(pid)):
            assert reload("--pid-file", pid)[0] == 0
        assert not pid.exists()
        environment = {**os.environ, "XDG_RUNTIME_DIR": name, "RUNTIME_DIRECTORY": name}
        os.environ.update(environment)
        try:
            with serving() as server:
                assert reload("--port", server.port)[0] == 0 and reload("--port", server.port + 1)[0] == 4
        finally:
            del os.environ["RUNTIME_DIRECTORY"]
        done = subprocess.run([BIN / "moe-server", "-m", MODEL, "--port", "0", "--pid-file", "/nowhere/pid"],
                              capture_output=True, text=True, timeout=30)
        assert done.returncode == 4 and "--pid-file /nowhere/pid: No such file" in done.stderr, done


# ---- Under load ----


class Load:
    """16 clients, half of them with persistent connections, that count wrong and lost answers."""

    def __init__(self, port):
        self.port, self.ends, self.answers, self.lost = port, False, 0, []
        self.threads = [threading.Thread(target=self.run, args=(i % 2,)) for i in range(16)]
        for thread in self.threads:
            thread.start()

    def run(self, keeps):
        body = json.dumps(TEXT).encode()
        connection = None
        while not self.ends:
            connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                answer = reply.status, json.loads(reply.read())
                if answer == (200, {"translatedText": "Es regnet."}):
                    self.answers += 1
                else:
                    self.lost.append(answer)
                if not keeps or reply.will_close:
                    connection.close()
                    connection = None
            except (OSError, http.client.HTTPException) as problem:
                self.lost.append(repr(problem))
                connection.close()
                connection = None

    def stop(self):
        self.ends = True
        for thread in self.threads:
            thread.join()


@test
def reloads_under_load_lose_nothing():
    with tempfile.TemporaryDirectory() as name:
        path, pid = pathlib.Path(name) / "m.bin", pathlib.Path(name) / "pid"
        shutil.copy(MODEL, path)
        with serving("--pid-file", str(pid), "--max-address", "1000", model=path) as server:
            load, end, n = Load(server.port), time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                if n % 2:
                    shutil.copy(path, path.with_suffix(".new"))
                    path.with_suffix(".new").rename(path)
                assert reload("--pid-file", pid)[0] == 0
                n += 1
                time.sleep(0.5)
            load.stop()
            assert not load.lost and load.answers >= 16 and n > 1, (load.answers, n, load.lost[:3])
            assert figure(server, "reloads_total") == n and figure(server, "reloads_failed_total") == 0


def start(port, *options, **more):
    process = subprocess.Popen([BIN / "moe-server", "-m", MODEL, *FAST, "--port", str(port), *options],
                               stderr=subprocess.PIPE, text=True, **more)
    assert "http://127.0.0.1" in (line := process.stderr.readline()), line
    return process


def stop(process):
    process.terminate()
    message = process.stderr.read()
    assert process.wait(30) == 0 and not message, message
    process.stderr.close()


@test
def another_server_takes_over_the_port():
    if sys.platform != "linux":
        raise Skip("SO_REUSEPORT shares connections only on Linux")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    old, end, n = start(port, "--reuse-port"), time.monotonic() + SECONDS, 0
    load = Load(port)
    while time.monotonic() < end:
        new = start(port, "--reuse-port")
        time.sleep(0.3)
        stop(old)
        old, n = new, n + 1
    load.stop()
    stop(old)
    assert not load.lost and load.answers >= 16 and n > 0, (load.answers, n, load.lost[:3])


@test
def a_server_restarts_behind_the_socket_of_a_supervisor():
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        port = listening.getsockname()[1]

        def under_supervisor():
            script = f"import os; os.dup2({listening.fileno()}, 3); os.environ.update(LISTEN_FDS='1', " \
                     f"LISTEN_PID=str(os.getpid())); os.execv({str(BIN / 'moe-server')!r}, " \
                     f"{['moe-server', '-m', str(MODEL), *FAST]!r})"
            process = subprocess.Popen([sys.executable, "-c", script], pass_fds=[listening.fileno(), 3] if
                                       listening.fileno() != 3 else [3], stderr=subprocess.PIPE, text=True)
            assert f"http://127.0.0.1:{port}/" in (line := process.stderr.readline()), line
            return process

        server, end, n = under_supervisor(), time.monotonic() + SECONDS, 0
        load = Load(port)
        while time.monotonic() < end:
            time.sleep(0.3)
            stop(server)
            server, n = under_supervisor(), n + 1
        load.stop()
        stop(server)
        assert not load.lost and load.answers >= 16 and n > 0, (load.answers, n, load.lost[:3])
    environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_PID": "0"}
    with serving() as server:
        assert server.translate("It rains.")[0] == 200 and environment  # without LISTEN_PID the socket is not used


# ---- State, prefix, metrics ----


@test
def ready_reports_translations_that_fail():
    with tempfile.TemporaryDirectory() as name:
        models = several_models.one_way(pathlib.Path(name) / "models", "en-de", "de-fr")
        with serving(model=models) as server:
            model = models / "de-fr.bin"  # not opened yet
            kept = model.read_bytes()
            model.write_bytes(kept[:1000])
            status, answer = server.ask("/translate", {"q": "Wo ist es?", "source": "de", "target": "fr"})
            assert status == 500 and name not in answer["error"] and "log" in answer["error"], answer
            assert server.translate("It rains.")[0] == 200
            status, answer = server.ask("/ready")
            assert (status, answer["status"]) == (503, "failed") and server.ask("/health")[0] == 200, answer
            model.write_bytes(kept)
            assert server.ask("/ready")[1]["status"] == "ready"
            assert figure(server, 'model_texts_failed_total{model="models",source="de",target="fr"}') >= 1


@test
def a_prefix_is_part_of_addresses():
    text = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nIt rains.\r\n' + b"".join(
        b'--xx\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % x for x in ((b"source", b"en"), (b"target", b"de"))
    ) + b"--xx--\r\n"
    with serving("--url-prefix", "/moe", "--trust-proxy", "127.0.0.9") as server:
        for path in "/moe/languages", "/languages", "/moe/", "/", "/moe/health":
            assert server.ask(path)[0] == 200, path
        assert server.ask("/moex/languages")[0] == 404 and server.ask("/moe/moe/languages")[0] == 404
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/moe")
        reply = connection.getresponse()
        assert (reply.status, reply.headers["Location"]) == (308, "/moe/") and not reply.read()
        for source, scheme in ("127.0.0.1", "http"), ("127.0.0.9", "https"):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60, source_address=(source, 0))
            connection.request("POST", "/moe/translate_file", text, {
                "Content-Type": "multipart/form-data; boundary=xx", "X-Forwarded-Proto": "https"})
            answer = json.loads(connection.getresponse().read())
            address = answer.get("translatedFileUrl", str(answer))
            assert address.startswith(f"{scheme}://127.0.0.1:{server.port}/moe/download_file/"), address
            assert server.ask(address[address.index("/moe/"):]) == (200, "Es regnet.")
    for prefix in "moe", "/moe/", "/", "/a//b", "/a?b":
        done = subprocess.run([BIN / "moe-server", "-m", MODEL, "--url-prefix", prefix], capture_output=True, text=True,
                              timeout=30)
        assert done.returncode == 2 and f"'{prefix}' for --url-prefix" in done.stderr, done


@test
def metrics_and_the_description_are_valid():
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write('one\t100\t"my" \\ key\ntwo\n')
        keys.flush()
        with serving("--api-keys", keys.name) as server:
            for q in "It rains.", "Where is my book?":
                server.translate(q, api_key="one")
            server.translate(q, api_key="three")
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("GET", "/metrics", headers={"Authorization": "Bearer two"})
            reply = connection.getresponse()
            text, version = reply.read().decode(), re.search(r"[\d.]+", server.ask("/health")[1]["version"])[0]
            assert reply.headers["Server"] == f"moe-server/{version}", reply.headers
            description = server.ask("/spec")[1]
    for wanted in ('moe_key_characters_total{line="1",key="\\"my\\" \\\\ key"} 26', 'moe_key_requests_total{line="2",key="line 2"} 1',
                   'moe_key_characters_limit{line="1",key="\\"my\\" \\\\ key"} 100', 'moe_responses_total{code="403"} 1',
                   f'moe_build_info{{version="{version}"}} 1', 'source="en",target="de"} 2'):
        assert wanted in text, (wanted, text)
    named = set(re.findall(r"^(moe_\w+?)(?:_bucket|_sum|_count)?[ {]", text, re.M))
    for name in named:
        assert f"# HELP {name} " in text and f"# TYPE {name} " in text, name
    assert description["openapi"].startswith("3.")
    for path in ("/translate", "/detect", "/v1/chat/completions", "/v1/models", "/v2/translate", "/imme", "/metrics",
                 "/health", "/ready", "/spec"):
        assert path in description["paths"], path
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stdout + done.stderr, done
    try:
        import openapi_spec_validator
    except ImportError:
        return
    openapi_spec_validator.validate(description)


if __name__ == "__main__":
    sys.exit(test.run(sys.argv[1] if len(sys.argv) > 1 else ""))
