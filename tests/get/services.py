#!/usr/bin/env python3
"""Answer like Firefox's model storage and Hugging Face, on local ports, with scripted faults.

    with Services() as services:
        services.fault("*.bin.gz", cut=1000, times=1)
        run_client(env={**os.environ, **services.environment()})
        assert services.requests("*.bin.gz")[1].headers["range"] == "bytes=1000-"

Written from public descriptions of both services, without knowledge of the client. README.md lists the listeners,
contents and faults. As a program: tests/python tests/get/services.py --help
"""
import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import http.server
import itertools
import json
import os
import re
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import urllib.parse
import zlib

import certificates
import contents
from contents import git_blob, is_large, sha256

PIECE = 1 << 16
ENDLESS = 1 << 30  # an endless answer ends here, so that a broken client cannot fill the disk
READER, STRANGER = "hf_reader", "hf_stranger"  # tokens with and without access to gated and private repositories


# ---- Requests and answers --------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Request:
    """A request as it arrived; the log contains these."""
    services: object = dataclasses.field(repr=False)
    listener: str
    method: str
    target: str  # as sent: with the query, and with scheme and host if the client uses us as a proxy
    headers: dict  # names in lower case
    status: int = 0  # of the answer
    sent: int = 0  # bytes of the answer's body

    def as_dict(self):
        return {x.name: getattr(self, x.name) for x in dataclasses.fields(self)[1:]} | {"path": self.path}

    @functools.cached_property
    def url(self):
        return urllib.parse.urlsplit(self.target)

    @functools.cached_property
    def path(self):
        return urllib.parse.unquote(self.url.path)

    @functools.cached_property
    def relative(self):
        return urllib.parse.urlunsplit(("", "", *self.url[2:]))

    @functools.cached_property
    def query(self):
        return dict(urllib.parse.parse_qsl(self.url.query, keep_blank_values=True))


@dataclasses.dataclass
class Answer:
    body: bytes = b""
    headers: dict = dataclasses.field(default_factory=dict)
    status: int = 200
    # Changed by faults only:
    ranges: bool = True
    content_range: str = None
    cut: int = None
    reset: bool = False
    rate: int = None
    delay: float = 0
    endless: bool = False

    def cut_range(self, request):
        """Reduce the answer to the Range of the request (RFC 9110, section 14)."""
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        other = request.headers.get("if-range", self.headers.get("ETag")) != self.headers.get("ETag")
        if self.status != 200 or not self.ranges or not asked or asked[0] == "bytes=-" or other:
            return
        total = len(self.body)
        first = int(asked[1]) if asked[1] else max(total - int(asked[2]), 0)
        last = min(int(asked[2]), total - 1) if asked[1] and asked[2] else total - 1
        if first > last:
            self.status, self.body, self.headers["Content-Range"] = 416, b"", f"bytes */{total}"
            return
        self.status, self.body = 206, memoryview(self.body)[first:last + 1]
        self.headers["Content-Range"] = self.content_range or f"bytes {first}-{last}/{total}"


def as_json(value, status=200, **headers):
    return Answer(json.dumps(value, indent=2).encode(), {"Content-Type": "application/json; charset=utf-8", **headers},
                  status)


# ---- Faults ----------------------------------------------------------------------------------------------------------

class Faults:
    """Each function changes an answer; README.md has a table. Several faults of one answer apply in this order."""

    def status(answer, number, request):
        answer.status, answer.body = number, b'{"error": "scripted"}'
        answer.headers = {"Content-Type": "application/json"}

    def redirect(answer, to, request):
        there = to if "://" in to else request.services.url(to) + request.relative
        answer.status, answer.body, answer.headers = 302, b"", {"Location": there}

    def body(answer, text, request):
        answer.status, answer.body = 200, text if isinstance(text, bytes) else text.encode()

    def bomb(answer, unpacked, request):
        answer.body = zeros_in_gzip(unpacked)

    def replace(answer, old_and_new, request):
        old, new = (x.encode() for x in old_and_new)
        assert old in answer.body, f"{request.path} does not contain {old}"
        answer.body = answer.body.replace(old, new)

    def names(answer, added, request):
        info = json.loads(answer.body)
        info["siblings"] += [{"rfilename": name, "size": 2, "blobId": git_blob(b"{}")} for name in added]
        answer.body = json.dumps(info).encode()

    def huge(answer, size, request):
        answer.body = b'{"padding": "' + b"x" * size + b'",' + answer.body[1:]

    def corrupt(answer, at, request):
        changed = bytearray(answer.body)
        changed[at] ^= 1
        answer.body = bytes(changed)

    def resize(answer, by, request):
        answer.body = answer.body[:by] if by < 0 else answer.body + bytes(by)

    def headers(answer, values, request):
        answer.headers.update(values)

    def ignore_ranges(answer, yes, request):
        answer.ranges = not yes

    def content_range(answer, text, request):
        answer.content_range = text

    def endless(answer, yes, request):
        answer.endless = yes

    def delay(answer, seconds, request):
        answer.delay = seconds

    def rate(answer, bytes_per_second, request):
        answer.rate = bytes_per_second

    def cut(answer, after, request):
        answer.cut = after

    def reset(answer, after, request):
        answer.cut, answer.reset = after, True


FAULTS = {name: function for name, function in vars(Faults).items() if not name.startswith("_")}
# For `names`: files that a client must not write. To those with "outside" the services answer `{}`, with any path.
HOSTILE_NAMES = ["../outside.json", "a/../../outside.json", "/tmp/outside.json", "./outside.json", "a//outside.json",
                 "outside/", "..\\outside.json", "C:\\outside.json", "\\\\outside\\share.json", "~/outside.json",
                 "a\noutside.json", "a\u0000outside.json", "\u202eoutside.json", "..", ".", "", "NUL", "x" * 300]


@functools.cache
def zeros_in_gzip(size):
    """Return a .gz file of one member with `size` zero bytes, without compressing all of them."""
    packer, zeros = zlib.compressobj(9, wbits=-15), bytes(1 << 20)
    packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)  # as often as wanted: refers to nothing before it
    count, rest, crc = size >> 20, bytes(size & (1 << 20) - 1), 0
    for part in [*itertools.repeat(zeros, count), rest]:
        crc = zlib.crc32(part, crc)
    last = zlib.compressobj(9, wbits=-15)
    return (b"\x1f\x8b\x08" + bytes(7) + block * count + last.compress(rest) + last.flush()
            + struct.pack("<II", crc, size & 0xffffffff))


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

class Refused(Exception):
    """The service refuses a request; `answer` says why."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        more = {"X-Error-Code": code} if code else {}
        self.answer = as_json({"error": message}, status, **{"X-Error-Message": message, **more})


class Hub:
    """Hugging Face's API, files, and the host that LFS files are redirected to."""

    def __init__(self):
        self.repositories = contents.repositories()

    def answer(self, request):
        """Return the answer, or None if the service does not have this path."""
        for old, new in contents.RENAMED.items():
            if f"/{old}" in request.relative:
                return Answer(headers={"Location": request.relative.replace(old, new)}, status=307)
        for form, function in ((r"/api/models", self.search),
                               (r"/api/models/(NAME)(?:/revision/(.+))?", self.info),
                               (r"/(NAME)/resolve/([^/]+)/(.+)", self.resolve),
                               (r"/api/resolve-cache/models/(NAME)/([^/]+)/(.+)", self.resolve_cache),
                               (r"/cdn/(NAME)/(.+)", self.cdn)):
            if found := re.fullmatch(form.replace("NAME", "[^/]+/[^/]+"), request.path, re.S):
                try:
                    return function(request, *found.groups())
                except Refused as why:
                    return why.answer
        return None

    def repository(self, request, name, download):
        """Return a repository if the request may read its description, or with `download` its files."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in ("", READER, STRANGER):
            raise Refused(401, "Invalid credentials in Authorization header")
        found = self.repositories.get(name)
        if not found or found.private and token != READER:
            if not token:  # the service does not tell anonymous clients whether a repository is private or missing
                raise Refused(401, "Invalid username or password.")
            raise Refused(404, "Repository not found", "RepoNotFound")
        if download and found.gated and token != READER:
            if not token:
                raise Refused(401, f"Access to model {name} is restricted. You must have access to it and be "
                              "authenticated to access it. Please log in.", "GatedRepo")
            raise Refused(403, f"Access to model {name} is restricted and you are not in the authorized list. Visit "
                          f"https://huggingface.co/{name} to ask for access.", "GatedRepo")
        return found

    def commit(self, request, name, revision, download):
        """Return (repository, commit, files)."""
        found = self.repository(request, name, download)
        if not (there := found.files(revision)):
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found, *there

    def search(self, request):
        """List repositories. The Link header has the address of the next page."""
        words, author = (request.query.get(x, "").lower() for x in ("search", "author"))
        found = [summary(name, x) for name, x in self.repositories.items()
                 if words in name.lower() and name.lower().startswith(author) and not x.private]
        found.sort(key=lambda x: -x["downloads"])
        begin, limit = int(request.query.get("cursor", 0)), int(request.query.get("limit", 1000))
        more = {}
        if begin + limit < len(found):
            query = urllib.parse.urlencode({**request.query, "cursor": begin + limit})
            more = {"Link": f'<{request.services.url(request.listener)}/api/models?{query}>; rel="next"'}
        return as_json(found[begin:begin + limit], **more)

    def info(self, request, name, revision):
        found, commit, files = self.commit(request, name, revision or "main", download=False)
        blobs = request.query.get("blobs", "").lower() in ("1", "true")
        config = json.loads(files.get("config.json", b"{}"))
        return as_json({**summary(name, found), "author": name.split("/")[0], "sha": commit, "gated": found.gated,
                        "lastModified": "2026-05-26T08:00:00.000Z", "disabled": False, "model-index": None,
                        "config": {key: config[key] for key in ("architectures", "model_type") if key in config},
                        "cardData": {"license": found.licence, "language": ["en"]}, "spaces": [],
                        "siblings": [sibling(*x) if blobs else {"rfilename": x[0]} for x in sorted(files.items())]})

    def resolve(self, request, name, revision, file):
        """Redirect large files to another host, small ones to resolve_cache."""
        _, commit, files = self.commit(request, name, revision, download=True)
        if file not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        data, quoted = files[file], urllib.parse.quote(file)
        about = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "Content-Type": "text/plain; charset=utf-8"}
        if is_large(file, data):
            there = f"{request.services.url(other(request.listener))}/cdn/{name}/{quoted}?sha256={sha256(data)}"
            return Answer(b"Found", {**about, "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256(data)}"',
                                     "Location": there + "&Expires=1893456000&Signature=s~1_"}, 302)
        here = f"/api/resolve-cache/models/{name}/{commit}/{quoted}?etag=%22{git_blob(data)}%22"
        return Answer(b"Temporary Redirect", {**about, "ETag": f'"{git_blob(data)}"', "Location": here}, 307)

    def resolve_cache(self, request, name, revision, file):
        _, commit, files = self.commit(request, name, revision, download=True)
        if file not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        return Answer(files[file], {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "Content-Type": "text/plain",
                                    "ETag": f'"{git_blob(files[file])}"'})

    def cdn(self, request, name, file):
        """Answer as the host of large files, which accepts signed addresses only, and no token (like S3)."""
        if "authorization" in request.headers:
            raise Refused(400, "Only one auth mechanism allowed")
        found = self.repositories.get(name)
        for files in found.commits if found else ():
            data = b"" if callable(files) else files.get(file, b"")
            if sha256(data) == request.query.get("sha256") and "Signature" in request.query:
                return Answer(data, {"ETag": f'"{sha256(data[::-1])}"', "Accept-Ranges": "bytes",  # not the file's hash
                                     "Content-Type": "application/octet-stream"})
        raise Refused(403, "AccessDenied")


def summary(name, found):
    """Return what a list contains about a repository."""
    return {"_id": sha256(name.encode())[:24], "id": name, "modelId": name, "private": found.private, "likes": 7,
            "downloads": found.downloads, "tags": ["transformers", "en", f"license:{found.licence}", "region:us"],
            "pipeline_tag": "translation", "library_name": "transformers", "createdAt": "2026-03-02T23:29:04.000Z"}


def sibling(name, data):
    row = {"rfilename": name, "blobId": git_blob(data), "size": len(data)}
    if is_large(name, data):
        row["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 135}
    return row


# ---- Listeners -------------------------------------------------------------------------------------------------------

# name: (host, certificate or None)
LISTENERS = {"http": ("127.0.0.1", None), "http-away": ("localhost", None), "https": ("127.0.0.1", "good"),
             "https-away": ("localhost", "good"), "https-host": ("127.0.0.1", "host"),
             "https-expired": ("127.0.0.1", "expired"), "https-early": ("127.0.0.1", "early"),
             "https-unknown": ("127.0.0.1", "unknown")}


def other(listener):
    """Return the listener of another host that large files are redirected to."""
    return "https-away" if listener.startswith("https") else "http-away"


class Listener(http.server.ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 64

    def __init__(self, services, name):
        super().__init__(("127.0.0.1", 0), Handler)
        self.services, self.name, self.context = services, name, None
        host, certificate = LISTENERS[name]
        self.url = f"{'https' if certificate else 'http'}://{host}:{self.server_port}"
        if certificate:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            at = os.path.join(certificates.folder(), certificate)
            self.context.load_cert_chain(at + ".pem", at + ".key")
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def finish_request(self, request, client_address):
        if not self.context:
            return super().finish_request(request, client_address)
        with self.context.wrap_socket(request, server_side=True) as wrapped:  # here, since the handshake takes time
            return super().finish_request(wrapped, client_address)

    def handle_error(self, request, client_address):
        problem = sys.exc_info()[1]
        if not isinstance(problem, OSError):  # such as a client that rejects a certificate or stops reading
            self.services.problems.append(repr(problem))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *arguments):
        pass

    def respond(self):
        services = self.server.services
        self.asked = Request(services, self.server.name, self.command, self.path,
                             {name.lower(): value for name, value in self.headers.items()})
        self.send(services.answer(self.asked, self.rfile.read(int(self.headers.get("Content-Length", 0)))))

    do_GET = do_HEAD = do_POST = do_DELETE = respond

    def send(self, answer):
        services = self.server.services
        services.stopping.wait(answer.delay)
        if answer.cut == -1:
            return self.drop(answer)
        answer.cut_range(self.asked)
        self.asked.status = answer.status
        self.send_response(answer.status)
        how = {"Transfer-Encoding": "chunked"} if answer.endless else {"Content-Length": str(len(answer.body))}
        for name, value in {**how, **answer.headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.close_connection |= answer.headers.get("Content-Length", str(len(answer.body))) != str(len(answer.body))
        if self.command == "HEAD":
            return None
        for piece in pieces(answer):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.endless else piece)
            self.asked.sent += len(piece)
            if services.stopping.wait(len(piece) / answer.rate if answer.rate else 0):
                return self.drop(answer)
        return self.drop(answer) if answer.endless or answer.cut is not None else None

    def drop(self, answer):
        """Close the connection at once, without the end of TLS."""
        self.close_connection = True
        if answer.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())

    def do_CONNECT(self):
        """Connect as a proxy, to listeners only."""
        services = self.server.services
        if not any(x.url.endswith(f"//{self.path}") for x in list(services.listeners.values())):
            return self.send_error(403, f"no listener at {self.path}")
        services.log.append(Request(services, self.server.name, self.command, self.path, dict(self.headers), 200))
        with socket.create_connection(("127.0.0.1", int(self.path.rsplit(":", 1)[1]))) as there:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: there, there: self.connection}
            while not services.stopping.is_set():
                for end in select.select(list(ends), [], [], 0.1)[0]:
                    data = end.recv(PIECE)
                    if not data:
                        self.close_connection = True
                        return None
                    ends[end].sendall(data)
        return None


def pieces(answer):
    """Yield the parts of a body; with `rate`, ten a second."""
    if answer.endless:
        return itertools.islice(itertools.repeat((answer.body or b"\0") * (PIECE // (len(answer.body) or 1) + 1)),
                                ENDLESS // PIECE)
    body = memoryview(answer.body)[:answer.cut]
    size = max(answer.rate // 10, 1) if answer.rate else PIECE
    return (body[at:at + size] for at in range(0, len(body), size))


class Services:
    """All listeners, which have the same contents, the faults and the log. Close with close() or `with`."""

    def __init__(self, faults=(), wheel=False):
        self.log, self.problems, self.listeners = [], [], {}
        self.lock, self.stopping = threading.RLock(), threading.Event()
        self.files, self.models = contents.firefox(contents.wheels_students() if wheel else None)
        self.hub, self.faults = Hub(), []
        for row in faults:
            self.fault(**row)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close()
        assert kind or not self.problems, self.problems

    def close(self):
        self.stopping.set()
        for listener in self.listeners.values():
            listener.shutdown()
            listener.server_close()

    def url(self, name="http"):
        """Return the address of a listener; start it if necessary."""
        with self.lock:
            if name not in self.listeners:
                self.listeners[name] = Listener(self, name)
            return self.listeners[name].url

    def environment(self, name="http"):
        """Return the variables that make a client use a listener."""
        more = {"SSL_CERT_FILE": certificates.authority()} if name.startswith("https") else {}
        return {"MOE_FIREFOX_INDEX": f"{self.url(name)}/db/models.json", "HF_ENDPOINT": self.url(name), **more}

    def fault(self, path, times=None, **settings):
        """Disturb the next `times` answers (default: all) for paths that match a pattern. FAULTS has the settings."""
        unknown = set(settings) - set(FAULTS)
        assert settings and not unknown, f"unknown faults: {unknown or 'none given'}"
        with self.lock:
            self.faults.append({"path": path, "times": times, "settings": settings})

    def heal(self):
        """Remove all faults."""
        with self.lock:
            self.faults.clear()

    def publish(self, name, files, **about):
        """Add a commit to a repository of Hugging Face, or create it."""
        if name not in self.hub.repositories:
            self.hub.repositories[name] = contents.Repository(**{"licence": "mit", "commits": [], **about})
        self.hub.repositories[name].commits.append(files)

    def requests(self, path="*", listener="*"):
        """Return the logged requests with matching path and listener."""
        with self.lock:
            return [x for x in self.log if fnmatch.fnmatchcase(x.path, path)
                    and fnmatch.fnmatchcase(x.listener, listener)]

    def answer(self, request, sent=b""):
        if request.path.startswith("/control/"):
            return self.control(request, sent)
        with self.lock:
            self.log.append(request)
            answer = self.healthy(request)
            for row in self.faults:
                if row["times"] != 0 and fnmatch.fnmatchcase(request.path, row["path"]):
                    row["times"] = row["times"] and row["times"] - 1
                    for name in filter(row["settings"].__contains__, FAULTS):
                        FAULTS[name](answer, row["settings"][name], request)
            return answer

    def healthy(self, request):
        """Return the answer without faults."""
        if request.method not in ("GET", "HEAD"):
            return as_json({"error": "method not allowed"}, 405)
        if "outside" in request.path:
            return Answer(b"{}")
        if request.path == "/db/models.json":
            return as_json({"generated": "2026-11-01T03:00:00Z", "baseUrl": self.url(request.listener),
                            "models": self.models})
        data = self.files.get(request.path)
        if data is None:
            return self.hub.answer(request) or Answer(
                b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>NoSuchKey</Code></Error>",
                {"Content-Type": "application/xml; charset=UTF-8"}, 404)
        if callable(data):
            self.files[request.path] = data = data()
        return Answer(data, {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes",
                             "ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def control(self, request, sent):
        """Control the faults from other processes."""
        what = f"{request.method} {request.path}"
        try:
            if what == "POST /control/faults":
                return as_json(self.fault(**json.loads(sent)))
            if what == "DELETE /control/faults":
                return as_json(self.heal())
            if what == "GET /control/log":
                return as_json([x.as_dict() for x in self.log])
        except (AssertionError, TypeError, ValueError) as problem:
            return as_json({"error": str(problem)}, 400)
        return as_json({"error": "not found"}, 404)


def main():
    parser = argparse.ArgumentParser(description="Serve until ^C, and print the variables that make a client use it; or "
                                     "run a command with these variables.")
    parser.add_argument("--listener", default="http", choices=LISTENERS, metavar="NAME", help=", ".join(LISTENERS))
    parser.add_argument("--wheel", action="store_true", help="serve the real en-pt and pt-en (downloads 35 MB)")
    parser.add_argument("--fault", action="append", default=[], type=json.loads, metavar="JSON",
                        help='e.g. \'{"path": "*.gz", "cut": 1000, "times": 1}\'')
    parser.add_argument("command", nargs="*", help="after --")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt), Services(arguments.fault, arguments.wheel) as services:
        variables = services.environment(arguments.listener)
        if arguments.command:
            for path, data in services.files.items():
                if "/en-pt/" in path and callable(data):
                    services.files[path] = data()  # compress it before the command's clock runs
            return subprocess.call(arguments.command, env={**os.environ, **variables})
        for name, value in variables.items():
            print(f"export {name}={value}", flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
