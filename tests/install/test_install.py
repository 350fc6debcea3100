#!/usr/bin/env python3
"""Test `make install` into an empty prefix, using each installed file from another folder.

Usage: tests/python tests/install/test_install.py
Prints `ok NAME` or `FAIL NAME` per test. Requires only the standard library. BIN and BUILD are the folders of the
build. Compiles the examples of tools/text/examples with the flags of pkg-config.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

from suite import Skip, Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN, BUILD = os.environ.get("BIN", "."), os.environ.get("BUILD", "build")
EXAMPLES = os.path.join(ROOT, "tools/text/examples")
MAC = sys.platform == "darwin"
SUFFIX = "dylib" if MAC else "so"
WORK = tempfile.mkdtemp()
PREFIX = WORK + "/prefix"
GERMAN = "Guten Morgen, mein Freund.\nWo ist mein Buch?\n"
NOWHERE_ELSE = not any(os.path.exists(x + "/share/moe/en-de-fr-es.bin") for x in ("/usr", "/usr/local"))
test = Suite()


KEPT = "HOME", "LANG", "TMPDIR", "ASAN_OPTIONS", "LSAN_OPTIONS", "XDG_DATA_HOME"


def run(*command, data="", status=0, cwd=WORK, **more):
    """Run a program outside the repository, with a clean environment; return its output."""
    clean = {k: v for k, v in os.environ.items() if k in KEPT}
    env = {**clean, "PATH": PREFIX + "/bin:" + os.environ["PATH"], "PKG_CONFIG_PATH": PREFIX + "/lib/pkgconfig", **more}
    done = subprocess.run(command, input=data.encode(), cwd=cwd, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=300)
    out, complaint = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == status, (command, done.returncode, out[-500:], complaint[-1500:])
    return out + (complaint if status else "")


def served(**more):
    """Return the model that moe-server serves by default."""
    env = {**os.environ, "PATH": PREFIX + "/bin:" + os.environ["PATH"], **more}
    if "MOE_MODEL" not in more:
        env.pop("MOE_MODEL", None)
    with subprocess.Popen(["moe-server", "--port", "0"], env=env, cwd=WORK, stderr=subprocess.PIPE) as server:
        log = server.stderr.readline().decode()
        server.terminate()
    return log.removeprefix("moe-server: ").split(" at http")[0]


def make(target, prefix, **variables):
    """Run make without rebuilding (`-o all`), because the build may have used other flags; return the output."""
    return run("make", "-s", "-o", "all", target, "PREFIX=" + prefix, "BIN=" + BIN, "BUILD=" + BUILD,
               *(f"{k}={v}" for k, v in variables.items()), cwd=ROOT)


def files_in(folder):
    return sorted(os.path.relpath(os.path.join(path, name), folder) for path, _, names in os.walk(folder)
                  for name in names)


def exports(library, *flags):
    out = run("nm", *flags, library)
    return {f[-1].lstrip("_") for f in map(str.split, out.splitlines()) if len(f) == 3 and f[1] in "TDBRCWV"}


def is_sanitized():
    return "__asan_init" in run("nm", os.path.join(ROOT, BIN, "libmoe.a"))


def compiled(source, package, static=False):
    """Compile an example with the flags of pkg-config; return the program's path."""
    if not shutil.which("pkg-config"):
        raise Skip("no pkg-config here")
    plus = source.endswith(".cc")
    out = os.path.join(WORK, source + (".static" if static else ""))
    words = run("pkg-config", "--cflags", "--libs", *(["--static"] if static else []), package).split()
    if static:  # replace moe's shared libraries with its archives
        words = [f"{PREFIX}/lib/lib{w[2:]}.a" if w in ("-lmoe", "-lmoetext") else w for w in words]
    sanitize = ["-fsanitize=address,undefined"] if is_sanitized() else []
    compiler = os.environ.get("CXX" if plus else "CC") or ("c++" if plus else "cc")
    run(*compiler.split(), "-std=c++17" if plus else "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", *sanitize,
        os.path.join(EXAMPLES, source), *words, "-Wl,-rpath," + PREFIX + "/lib", "-o", out)
    return out


# ---- Files ----------------------------------------------------------------------------------------------------------


@test
def installing_into_an_empty_prefix_lists_the_files():
    make("install", PREFIX)
    listed = [x for x in open(PREFIX + "/share/moe/installed").read().split("\n") if x]
    assert [x for x in listed if not os.path.isdir(os.path.join(PREFIX, x))] == \
        [x for x in files_in(PREFIX) if x != "share/moe/installed"]
    assert len(set(listed)) == len(listed) and listed == sorted(listed)
    for name in ("bin/moe-translate", "bin/moe-documents", "bin/moe-evaluate",
                 "share/moe/python/moe_translate/program.py", "share/moe/python/moe_translate/py.typed",
                 "include/moe.h", "include/moetext.h", "lib/libmoe.a", "lib/libmoetext.a", "lib/libmoe." + SUFFIX, "lib/libmoetext." + SUFFIX, "share/moe/en-de-fr-es.bin"):
        assert name in listed, name


@test
def staged_files_name_only_the_final_prefix():
    make("install", "/opt/moe", DESTDIR=WORK + "/stage")
    assert files_in(WORK + "/stage/opt/moe") == files_in(PREFIX)
    assert os.listdir(WORK + "/stage") == ["opt"] and os.listdir(WORK + "/stage/opt") == ["moe"]
    text = open(WORK + "/stage/opt/moe/lib/pkgconfig/moetext.pc").read()
    assert "prefix=/opt/moe\n" in text and WORK not in text
    moved = run(WORK + "/stage/opt/moe/bin/moe-translate", "-t", "de", "Good morning!")
    assert moved == "Guten Morgen!\n", moved
    assert run(WORK + "/stage/opt/moe/bin/moe-documents", "-t", "de", "-f", "text", "-", data="Good morning!\n") == moved


@test
def LIBDIR_selects_the_folder_of_libraries():
    usual = [x for x in files_in(PREFIX) if x.startswith("lib/")]
    for libdir in "/opt/moe/lib/x86_64-linux-gnu", "/usr/lib64":
        stage = WORK + "/stage" + os.path.basename(libdir)
        make("install", "/opt/moe", DESTDIR=stage, LIBDIR=libdir)
        assert ["lib/" + x for x in files_in(stage + libdir)] == usual, files_in(stage)
        assert len(files_in(stage)) == len(files_in(PREFIX)), files_in(stage)
        for name in "moe", "moetext":
            with open(f"{stage}{libdir}/pkgconfig/{name}.pc", encoding="utf-8") as file:
                assert f"libdir={libdir.replace('/opt/moe', '${prefix}')}\n" in file.read()
        assert run(stage + "/opt/moe/bin/moe-translate", "-t", "de", "Good morning!") == "Guten Morgen!\n"
        make("uninstall", "/opt/moe", DESTDIR=stage)
        assert files_in(stage) == [] and not os.path.exists(stage + libdir), files_in(stage)
    log = run("make", "-s", "-o", "all", "install", "PREFIX=/opt/moe", "DESTDIR=" + WORK, "LIBDIR=lib64",
              cwd=ROOT, status=2)
    assert "LIBDIR must be an absolute path" in log, log


@test
def shared_libraries_have_a_version_and_export_only_their_api():
    version = re.search(r'MOE_VERSION "(.*)"', open(PREFIX + "/include/moe.h").read())[1]
    number = re.match(r"0\.\d+|[1-9]\d*", version)[0]
    for name, wanted in ("libmoe", {"moe_translate"}), ("libmoetext", {"moe_translate", "moetext_translate"}):
        links = [f"{name}.{SUFFIX}", f"{name}.{number}.{SUFFIX}" if MAC else f"{name}.{SUFFIX}.{number}"]
        real = f"{name}.{version}.{SUFFIX}" if MAC else f"{name}.{SUFFIX}.{version}"
        for link in links:
            assert os.readlink(f"{PREFIX}/lib/{link}") == real, link
        if not MAC:
            assert f"[{name}.so.{number}]" in run("readelf", "-d", f"{PREFIX}/lib/{real}")
        found = exports(f"{PREFIX}/lib/{real}", *(["-gU"] if MAC else ["-D", "--defined-only"]))
        foreign = {x for x in found if not x.startswith(("moe_", "moetext_")) and "asan" not in x and "ubsan" not in x}
        assert wanted <= found and not foreign, foreign
        assert not any(x.startswith("moetext_") for x in found) or name == "libmoetext"
    archived = exports(PREFIX + "/lib/libmoetext.a", "-g", "--defined-only")
    mine = {x for x in archived if re.match(r"(text|spm|json|is|grown|settings)_", x)}
    assert "moetext_translate" in archived and not mine, mine


@test
def headers_declare_all_exported_functions():
    for library, headers in (("libmoe", ["moe.h"]), ("libmoetext", ["moe.h", "moetext.h"])):
        text = "".join(open(f"{PREFIX}/include/{h}").read() for h in headers)
        text = re.sub(r"/\*.*?\*/|^static inline .*?^}", "", text, flags=re.S | re.M)
        declared = set(re.findall(r"^[a-z][\w \*]*?\b(moe(?:text)?_\w+)\(", text, re.M))
        found = exports(f"{PREFIX}/lib/{library}.{SUFFIX}", *(["-gU"] if MAC else ["-D", "--defined-only"]))
        assert declared - {"moe_cuda"} == {x for x in found if x.startswith("moe")} - {"moe_cuda"}, declared ^ found


# ---- Programs -------------------------------------------------------------------------------------------------------


@test
def moe_translate_finds_its_model_and_accepts_words():
    assert run("moe-translate", "-t", "de", "Good morning, my friend.") == GERMAN.split("\n")[0] + "\n"
    assert run("moe-translate", "-t", "de", "Where", "is", "my", "book?") == GERMAN.split("\n")[1] + "\n"
    assert run("moe-translate", "-t", "de", "Good morning, my friend.\nWhere is my book?") == GERMAN
    assert run("moe-translate", "-t", "de", data="Good morning, my friend.\nWhere is my book?\n") == GERMAN
    assert run("moe-translate", "-t", "de", "") == "\n"
    assert "Guten" in run("moe-translate", "-t", "de", "--json", "Good morning!")
    named = os.path.join(ROOT, "tests/golden/model-base.bin")
    assert "tokeniser" in run("moe-translate", "-t", "xa", "Good morning!", MOE_MODEL=named, status=3)
    assert run("moe-translate", "-t", "xa", "--ids", "5 6", MOE_MODEL=named).strip()
    assert "No such file" in run("moe-translate", "-t", "de", "Hello", MOE_MODEL="/no/such/model", status=3)
    assert "unexpected argument" in run("moe-translate", "-t", "de", "-i", "/dev/null", "Hello", status=2)


@test
def all_programs_find_the_same_model():
    """Test the other programs. Other tests cover moe-translate and programs that are linked with the library."""
    installed = PREFIX + "/share/moe/en-de-fr-es.bin"
    named = os.path.join(ROOT, "models/en-de-fr-es.bin")
    assert served() == installed and served(MOE_MODEL=named) == named
    package = {"PYTHONPATH": os.path.join(ROOT, "tools/python"), "MOE_LIBRARY": f"{PREFIX}/lib/libmoetext.{SUFFIX}"}
    code = "import moe_translate as m; t = m.Translator(target='de'); print(t.model.path, t.translate('It rains.'))"
    assert run(sys.executable, "-c", code, **package) == installed + " Es regnet.\n"
    documents = [sys.executable, "-m", "moe_translate.program", "-t", "de", "-f", "text", "-"]
    assert run(*documents, data="Where is my book?\n", **package) == "Wo ist mein Buch?\n"
    assert "No such file" in run(*documents, status=3, MOE_MODEL="/no/such/model", **package)
    if NOWHERE_ELSE:
        os.mkdir(WORK + "/far")
        far = {**package, "PATH": "", "MOE_LIBRARY": shutil.copy(package["MOE_LIBRARY"], WORK + "/far")}
        assert "MOE_MODEL" in run(*documents, status=2, **far)
        for program in "moe-server", "moe-translate":
            assert "MOE_MODEL" in run(shutil.copy(f"{PREFIX}/bin/{program}", WORK + "/far"), status=2, PATH="")


@test
def every_program_runs():
    model, out = PREFIX + "/share/moe/en-de-fr-es.bin", WORK + "/out.bin"
    assert "passed, 0 failed" in run("moe-translate", "--self-test")
    assert run("moe-align", "-s", "en", "-t", "de", data="my book\tmein Buch\n") == "0-0 1-1\n"
    assert "en de fr es" in run("moe-info", model)
    lm, digits = ROOT + "/models/lm-en.bin", ROOT + "/models/digits.bin"
    assert len(run("moe-score", "-q", "-m", lm, data="A sentence.\n").split("\t")) == 3
    assert run("moe-classify", "-m", digits, data=" ".join(["0"] * 1296) + "\n").strip()
    run("moe-quantize", digits, out, "q8")
    pairs = WORK + "/pairs.tsv"
    with open(pairs, "w", encoding="utf-8") as file:
        file.write("en\tde\tWhere is my book?\tWo ist mein Buch?\n" * 8)
    run("moe-calibrate", "-q", "-m", model, "-o", WORK + "/thresholds.bin", "--text", pairs)
    run("moe-translate", "-t", "de", "--routing", WORK + "/r.jsonl", "Thank you!")
    run("moe-routing", WORK + "/r.jsonl", "-o", WORK + "/page.html")
    assert run("moe-documents", "-t", "de", "-f", "text", "-", data="Where is my book?\n") == "Wo ist mein Buch?\n"
    assert "REFERENCE" in run("moe-evaluate", "--help") and run("moe-evaluate", "-V").startswith("moe-evaluate ")
    assert "<html" in open(WORK + "/page.html", encoding="utf-8").read()
    for program in set(glob.glob(PREFIX + "/bin/*")) - {PREFIX + f"/bin/moe-{x}" for x in ("documents", "evaluate")}:
        assert not re.search(r"\.debug_info", run("readelf", "-S", program)) if not MAC else True, program


# ---- Embedding ------------------------------------------------------------------------------------------------------


@test
def the_example_with_text_prints_the_translations():
    assert run(compiled("text.c", "moetext")) == GERMAN
    static = compiled("text.c", "moetext", static=True)
    assert run(static, MOE_MODEL=PREFIX + "/share/moe/en-de-fr-es.bin") == GERMAN
    assert run(static) == GERMAN  # finds the model via PATH, although the program is outside the prefix
    if NOWHERE_ELSE:
        for nowhere in "", "bin:./bin", PREFIX + "/no/bin":
            assert "MOE_MODEL" in run(static, status=1, cwd=PREFIX, PATH=nowhere), nowhere


@test
def the_example_with_ids_prints_ids():
    model = PREFIX + "/share/moe/en-de-fr-es.bin"
    for package in "moe", "moetext":
        for static in False, True:
            assert run(compiled("ids.c", package, static), model, "de").split() == \
                "1747 392 4731 266 1680 2962 264".split(), (package, static)


@test
def the_cxx_example_prints_lines_as_they_are_finished():
    program = compiled("stream.cc", "moetext")
    out = run(program, "target=fr;beam=2;rerank=0", data="Where is my book?\nThank you!\n\n")
    assert sorted(out.splitlines()) == ["1\tOù est mon livre ?", "2\tMerci !", "3\t"], out
    assert "invalid value 'many' for option beam" in run(program, "beam=many", status=1)


# ---- Completions and manual -----------------------------------------------------------------------------------------


def completed(program, *words):
    return run("bash", "-c", 'source "$1"; shift; f=$1; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); $f; '
               'printf "%s\\n" "${COMPREPLY[@]}"', "bash", f"{PREFIX}/share/bash-completion/completions/{program}",
               "_" + program.replace("-", "_"), program, *words).split()


@test
def bash_completes_options_and_files():
    assert completed("moe-translate", "--be") == ["--beam"]
    assert sorted(completed("moe-translate", "--no")) == ["--no-cache", "--no-mmap", "--no-protect", "--no-verify",
                                                      "--noise"]
    assert completed("moe-translate", "-m", PREFIX + "/share/moe/en") == [PREFIX + "/share/moe/en-de-fr-es.bin"]
    assert completed("moe-translate", "--beam", "") == []
    for path in glob.glob(PREFIX + "/share/bash-completion/completions/*"):
        run("bash", "-n", path)
        program = os.path.basename(path)
        names = set(re.findall(r"^  (?:-., |    )(--[a-z-]+)", run(program, "--help"), re.M))
        assert names <= set(completed(program, "-")), (program, names - set(completed(program, "-")))


@test
def zsh_and_fish_have_the_same_options():
    for path in glob.glob(PREFIX + "/share/bash-completion/completions/*"):
        program = os.path.basename(path)
        names = {x for x in completed(program, "-") if x.startswith("--")}
        zsh = open(f"{PREFIX}/share/zsh/site-functions/_{program}", encoding="utf-8").read()
        fish = open(f"{PREFIX}/share/fish/vendor_completions.d/{program}.fish", encoding="utf-8").read()
        assert set(re.findall(r"(--[a-z-]+)[=\[}]", zsh)) == names, program
        assert {"--" + x for x in re.findall(r" -l ([a-z-]+)", fish)} == names, program
        for shell, extension in ("zsh", zsh), ("fish", fish):
            if shutil.which(shell):
                run(shell, "-n", data=extension)


@test
def every_program_has_a_manual_page():
    if not shutil.which("help2man"):
        raise Skip("no help2man here")
    for program in os.listdir(PREFIX + "/bin"):
        page = open(f"{PREFIX}/share/man/man1/{program}.1", encoding="utf-8").read()
        assert page.count(".SH") >= 3 and "--help" in page.replace("\\-", "-"), program


# ---- Again, uninstall -----------------------------------------------------------------------------------------------


@test
def uninstalling_removes_only_installed_files():
    def everything():
        return sorted(os.path.join(path, x) for path, folders, names in os.walk(other) for x in folders + names)

    other = WORK + "/other"
    for name in "bin/mine", "lib/pkgconfig/mine.pc", "share/moe/mine.bin":
        os.makedirs(os.path.dirname(f"{other}/{name}"), exist_ok=True)
        open(f"{other}/{name}", "w").close()
    os.makedirs(other + "/include")
    before = everything()
    for _ in range(2):  # the second installation overwrites the first
        make("install", other)
    make("uninstall", other)
    assert everything() == before, set(everything()) ^ set(before)
    run("make", "-s", "uninstall", "PREFIX=" + other, cwd=ROOT, status=2)
    make("uninstall", PREFIX)
    assert os.listdir(PREFIX) == [], os.listdir(PREFIX)


if __name__ == "__main__":
    try:
        sys.exit(test.run(*sys.argv[1:]))
    finally:
        shutil.rmtree(WORK)
