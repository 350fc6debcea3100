#!/usr/bin/env python3
"""Run tools/convert/convert.py on damaged checkpoints.

Usage: tests/python tests/fuzz/fuzz_convert.py TARGET SECONDS [SEED]
       tests/python tests/fuzz/fuzz_convert.py --again FOLDER

Damages the bytes or the structure of small checkpoints of every kind that convert.py reads: JSON values, safetensors
headers, the pickle in a zip file, and blocks of a TensorFlow index, whose checksums remain valid. A conversion must
either write a file that moe-info opens, or exit with status 1 after one line on standard error, without leaving a file.
It may take 10 seconds and 768 MB of address space in addition to that of the imported modules.

The targets are `convert` (checkpoints of other programs), `decoder` (folders of decoder-only models with settings,
tokenizer.json or hy.tiktoken, and chat template), `gguf`, and the targets of marian_damage.py, one for each reader of
Marian's files. Error messages must name a file or a tensor, except for layouts of `convert` that are not from Hugging
Face. As all files are small, running out of memory is a bug.

Prints one finding for each place in the source and keeps its checkpoint in build/fuzz/crashes/TARGET-SEED-N.
"""
import glob
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "tests/convert"), os.path.join(ROOT, "tests/fuzz")]

import numpy as np  # noqa: E402

import convert  # noqa: E402
import gnmt_checkpoints as make  # noqa: E402
import make_decoder  # noqa: E402
import make_gguf  # noqa: E402
import make_transformers  # noqa: E402
import marian_damage  # noqa: E402
import test_hf_tokens  # noqa: E402
import test_t5  # noqa: E402
from marian_damage import NUMBERS, damage_bytes  # noqa: E402

INFO = os.path.join(ROOT, os.environ.get("BIN", "."), "moe-info")
MEGABYTES, SECONDS = 768, 10
FOUND = "build/fuzz/crashes"
VALUES = (None, True, False, 0, 1, -1, 2, 3, 1.5, -0.5, 1e300, 1e-300, float("nan"), float("inf"), 1 << 31, 1 << 40,
          1 << 62, 1 << 80, "", "0", "none", "relu", "gelu", "\0", "é" * 3, "a" * 3000, "\ud800", [], [1], [[]], {},
          {"a": 1}, [0] * 50, "model.safetensors", "../x", "/etc/hostname")


# ---- Undamaged checkpoints ----

def undamaged(target, folder):
    """Write undamaged checkpoints; return {name: arguments of convert.py with {} for the folder}."""
    if target == "gguf":
        return undamaged_gguf(folder)
    if target == "decoder":
        return undamaged_decoder(folder)
    if target != "convert":
        for name in marian_damage.CASES[target]:
            os.makedirs(f"{folder}/{name}")
        return {name: make(f"{folder}/{name}") for name, make in marian_damage.CASES[target].items()}
    r = np.random.default_rng(1)
    pieces = ["<pad>", "<unk>", "<s>", "</s>", *(chr(97 + i) + "@@" * (i % 2) for i in range(26))]
    cases = {}

    def case(name, arguments):
        cases[name] = arguments
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        return f"{folder}/{name}"
    for legacy in (False, True):
        path = case("moe-legacy" if legacy else "moe", ["{}/x.pt", "--ids-only"]) + "/x.pt"
        make.write_torch(path, make.random_moe(r, 8, 30), legacy)
    weights = make.random_nvidia(r, 8, len(pieces), 2)
    make.write_torch(case("nvidia", ["--from", "nvidia-gnmt", "{}/x.pt"]) + "/x.pt",
                     make.nvidia_checkpoint(weights, 8, 2, pieces, ["a b", "ab c</w>"]))
    path = case("tf", ["--from", "tf-gnmt", "{}/x", "--vocab", "{}/vocab", "--bpe", "{}/bpe",
                       "--languages", "en", "de"])
    make.write_bundle(path + "/x", {**make.random_tf(r, 8, len(pieces), 2), "global_step": np.array(7, np.int64)})
    vocabulary, merges = ["<unk>", "<s>", "</s>", *pieces[4:], "zz"], ["#version: 0.2", "a b", "ab c</w>"]
    for name, some in (("vocab", vocabulary), ("bpe", merges)):
        with open(f"{path}/{name}", "w", encoding="utf-8") as file:
            file.write("".join(x + "\n" for x in some))
    for kind in ("nllb", "m2m", "marian"):
        case(kind, ["--from", "hf", "{}"])
        test_hf_tokens.Checkpoint(f"{folder}/{kind}", kind)
    for model_type in "t5", "umt5", "switch_transformers":
        test_t5.make_model(case(model_type, ["--from", "hf", "{}"]), model_type)
    for family, layout, dtype, more in (("nllb-moe", "safetensors-sharded", "bf16", ["--experts", "q4"]),
                                        ("marian", "bin", "f16", []), ("nllb", "legacy", "f32", ["--type", "q8"])):
        path = case(f"{family}-{layout}", ["--from", "hf", "{}", "--ids-only", *more])
        make_transformers.make(path, family, layout=layout, dtype=dtype)
    return cases


def undamaged_gguf(folder):
    """Write a GGUF file with a tokeniser for each family, one of them in several parts."""
    cases = {}
    for family in make_gguf.ARCHITECTURES:
        at, config = f"{folder}/{family}", {**make_decoder.CONFIGS[family], "vocab_size": 448}
        os.makedirs(at)
        make_gguf.write(at + "/x.gguf", config, make_decoder.arrays_of(config, 1), {"token_embd.weight": "Q8_0"},
                        pieces=20 * (family == "hy_v3"), tokens=True)
        first = "x-00001-of-00003.gguf" if family == "hy_v3" else "x.gguf"
        cases[family] = ["--from", "gguf", "{}/" + first]
    return cases


TEMPLATE = """{% set about = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<s>' }}{% if about %}{{ about + '\\n' }}{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content | trim }}{% else %}{{ message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
MALICIOUS = ("{% for i in range(10 ** 9) %}{% endfor %}", "{{ 'x' * 10 ** 9 }}", "{% include '/etc/hostname' %}",
        "{{ ''.__class__.__mro__ }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ raise_exception('no') }}",
        "{% set x = [0] %}{% for i in range(99) %}{% set x = x + x %}{% endfor %}", "{{", "{% if %}", "\x00", "\ud800")


def undamaged_decoder(folder):
    """Write a folder for each family, covering all forms of tokenisers and of chat templates, and weights in FP8."""
    cases = {"fp8-" + form: ["--from", "hf", "{}"] for form in make_decoder.FP8}
    for form in make_decoder.FP8:
        os.makedirs(f"{folder}/fp8-{form}")
        make_decoder.write_fp8(f"{folder}/fp8-{form}", "qwen3_moe", form, vocab_size=448)
        make_decoder.write_tokeniser(f"{folder}/fp8-{form}", "C")
    for kind in "llama2", "mistral", "gemma", None:  # tokenisers of characters; None: tokenizer.model
        at = f"{folder}/characters-{kind}"
        os.makedirs(at)
        make_decoder.small(at, "gemma3_text" if kind == "gemma" else "llama", vocab_size=448)
        if kind:
            make_decoder.write_tokeniser(at, kind)
        else:
            with open(at + "/tokenizer.model", "wb") as file:
                file.write(make_decoder.small_pieces())
        cases[f"characters-{kind}"] = ["--from", "hf", "{}"]
    for number, family in enumerate(make_decoder.CONFIGS):
        at = f"{folder}/{family}"
        os.makedirs(at)
        make_decoder.make(at, family, vocab_size=700, shards=1 + number % 2)
        bos = "<|bos|>" if family == "hy_v3" else "<s>"
        template = TEMPLATE.replace("<s>", bos)
        about = {"bos_token": bos, **({"chat_template": template} if number % 2 else {})}
        if family == "hy_v3":
            make_decoder.write_ranks(at)
        else:
            make_decoder.write_tokeniser(at)
            with open(at + "/tokenizer.json", encoding="utf-8") as file:
                tokeniser = json.load(file)
            tokeniser["added_tokens"].append({**tokeniser["added_tokens"][0], "id": 699, "content": "<s>"})
            with open(at + "/tokenizer.json", "w", encoding="utf-8") as file:
                json.dump(tokeniser, file)
        with open(at + "/tokenizer_config.json", "w", encoding="utf-8") as file:
            json.dump(about, file)
        if not number % 2:
            with open(at + "/chat_template.jinja", "w", encoding="utf-8") as file:
                file.write(template)
        cases[family] = ["--from", "hf", "{}"]
    return cases


# ---- Damage ----

def damage_template(r, data):
    """Insert malicious or invalid code into a chat template."""
    text = data.decode("utf-8", "replace")
    at = r.choice([x.end() for x in re.finditer("[%}]}|^", text)])
    return (text[:at] + r.choice(MALICIOUS) + text[at:]).encode("utf-8", "surrogatepass")


def damage_ranks(r, data):
    """Remove, move, duplicate or change a line of hy.tiktoken."""
    lines = data.split(b"\n")
    at, to, kind = r.randrange(len(lines)), r.randrange(len(lines)), r.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines[at], lines[to] = lines[to], lines[at]
    elif kind == 2:
        lines.insert(to, lines[at])
    elif kind == 3:
        lines[at] = lines[at].split(b" ")[0] + b" %d" % r.choice(NUMBERS)
    else:
        lines[at] = damage_bytes(r, lines[at])
    return b"\n".join(lines)


def damage_gguf(r, data):
    """Change, remove or insert bytes in the header of a GGUF file."""
    data, end = bytearray(data), max(data.rfind(b"blk."), 16)
    for _ in range(r.choice((1, 1, 2, 4))):
        at, kind = r.randrange(end), r.randrange(4)
        if kind == 0:
            size = r.choice((4, 8))
            data[at:at + size] = (r.choice(NUMBERS) & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif kind == 1:
            data[at] = r.choice((r.randrange(256), data[at] ^ 1 << r.randrange(8), data[at] + 1 & 255))
        elif kind == 2:
            del data[at:at + r.randrange(1, 20)]
        else:
            data[at:at] = data[at:at + r.randrange(1, 40)]
    return bytes(data)


def damage_value(r, value):
    """Return a JSON value with one random change at any depth."""
    if isinstance(value, dict) and value and r.random() < 0.9:
        key = r.choice(list(value))
        value = dict(value)
        kind = r.randrange(10)
        if kind == 0:
            del value[key]
        elif kind == 1:
            value[r.choice([*value, "x", ""])] = value[key]
        else:
            value[key] = damage_value(r, value[key])
        return value
    if isinstance(value, list) and value and r.random() < 0.8:
        at = r.randrange(len(value))
        changed = [] if r.random() < 0.2 else [damage_value(r, value[at])] * r.choice((1, 1, 2))
        return value[:at] + changed + value[at + 1:]
    if isinstance(value, int) and r.random() < 0.5:
        return r.choice((value + 1, value - 1, -value, value * 2, r.choice(NUMBERS)))
    return r.choice(VALUES)


def damage_json(r, data):
    try:
        value = json.loads(data)
    except ValueError:
        return damage_bytes(r, data)
    for _ in range(r.choice((1, 1, 2))):
        value = damage_value(r, value)
    return json.dumps(value).encode()


def damage_safetensors(r, data):
    length = struct.unpack("<Q", data[:8].ljust(8, b"\0"))[0]
    head = damage_json(r, data[8:8 + length])
    return struct.pack("<Q", len(head)) + head + data[8 + length:]


def damage_zip(r, data):
    """Damage one member of a zip file; rarely drop or compress other members. The archive remains valid."""
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            names = old.namelist()
            chosen = "archive/data.pkl" if r.random() < 0.8 and "archive/data.pkl" in names else r.choice(names)
            for name in names:
                content = old.read(name)
                if r.random() < 0.005:
                    continue
                new.writestr(name, damage_bytes(r, content) if name == chosen else content,
                             zipfile.ZIP_DEFLATED if r.random() < 0.02 else zipfile.ZIP_STORED)
    except Exception:  # an earlier change has broken the archive
        return damage_bytes(r, data)
    return out.getvalue()


def damage_index(r, data):
    """Damage a block of a TensorFlow index and correct its checksum; blocks are contiguous."""
    data, ends = bytearray(data), [x.end() for x in re.finditer(rb"\x01\0\0\0\0", data)]
    if not ends:
        return damage_bytes(r, data)
    end = r.choice(ends)
    begin = max([x + 4 for x in ends if x < end], default=0)
    for _ in range(r.choice((1, 1, 3))):
        at = r.randrange(begin, end)
        data[at] = r.choice((r.randrange(256), data[at] ^ 1 << r.randrange(8), data[at] + 1 & 255))
    data[end:end + 4] = struct.pack("<I", make.masked_crc(data[begin:end]))
    return bytes(data)


def damage(r, target, folder):
    """Damage one or two files of a checkpoint; return a description of the damage."""
    if target not in ("convert", "decoder", "gguf"):
        return marian_damage.damage(r, target, folder)
    log = []
    for _ in range(r.choice((1, 1, 1, 2))):
        path = r.choice(sorted(x for x in glob.glob(folder + "/*") if os.path.isfile(x)) or [None])
        if path is None:
            break
        with open(path, "rb") as file:
            data = file.read()
        ways = [damage_bytes]
        if path.endswith(".json"):
            ways += [damage_json] * 5
        if path.endswith(".safetensors"):
            ways += [damage_safetensors] * 3
        if path.endswith(".jinja"):
            ways += [damage_template] * 5
        if path.endswith(".tiktoken"):
            ways += [damage_ranks] * 5
        if data[:4] == b"GGUF":
            ways += [damage_gguf] * 5
        if data[:2] == b"PK":
            ways += [damage_zip] * 5
        if path.endswith(".index"):
            ways += [damage_index] * 4
        way = r.choice(ways)
        if r.random() < 0.02:
            os.unlink(path)
        else:
            with open(path, "wb") as file:
                file.write(way(r, data))
        log.append(f"{way.__name__} {os.path.basename(path)}")
    return ", ".join(log)


# ---- One conversion ----

def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def child(arguments, complaints):
    """Run convert.py in this forked process and exit with its status."""
    limit = address_space() + (MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.open(complaints, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(out, 2)
    sys.argv = ["convert.py", *arguments]
    status = 0
    try:
        convert.main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # print the traceback as Python does
        import traceback
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def wait_for(process):
    """Wait for a process; return (exit status, resource usage), or None after the time limit."""
    begin = time.monotonic()
    while time.monotonic() - begin < SECONDS * 6:  # wait longer than the limit, which is processor time
        done, status, used = os.wait4(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), used
        with open(f"/proc/{process}/stat") as file:
            ticks = file.read().rsplit(")", 1)[1].split()[11:13]
        if sum(map(int, ticks)) > SECONDS * os.sysconf("SC_CLK_TCK"):
            break
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None, None


# Lines on standard error that are notes, not errors
NOTES = re.compile(r"^(no (tokeniser|prompt): .*|ignoring end token .*|limiting (positions|sources) to .*|"
                   r"converting \S+ to Q4 quantises twice .*|unknown licence: .*|no decoder\.yml or .*|"
                   r"each text begins with .*|ignoring the scales of .*|skipping .*|\S+ lacks eos_token_id: .*|"
                   r".*: continuing without a shortlist)\n", re.M)


def judge(folder, arguments):
    """Run a conversion; return (bug or None, error message)."""
    out, complaints = folder + ".out", folder + ".stderr"
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    process = os.fork()
    if not process:
        child([x.replace("{}", folder) for x in arguments] + ["-o", out + "/model.bin"], complaints)
    status, _ = wait_for(process)
    with open(complaints, encoding="utf-8", errors="replace") as file:
        log = NOTES.sub("", file.read())
    left = os.listdir(out)
    if status is None:
        return f"no result after {SECONDS} s", log
    if "Traceback" in log:
        frames = re.findall(r'File "[^"]*/([^/"]+)", line (\d+), in (\S+)', log)
        ours = [x for x in frames if os.path.exists(f"{ROOT}/tools/convert/{x[0]}")]
        last = ours[-1] if ours else ("?", "?", "?")
        return "traceback: %s:%s %s: %s" % (*last, log.strip().split("\n")[-1][:160]), log
    if status == 0:
        if left != ["model.bin"]:
            return f"status 0, but the folder contains {left}", log
        info = subprocess.run([INFO, "--check", out + "/model.bin"], capture_output=True, text=True, errors="replace")
        return (None if info.returncode == 0 else "moe-info rejects the file: "
                + re.sub(r"^.*model.bin: ", "", info.stderr.strip())), log
    if status != 1:
        return f"status {status}", log
    if left:
        return f"status 1, but {sorted(re.sub('[0-9]+', 'N', x) for x in left)} left over", log
    if log.count("\n") != 1 or not log.strip():
        return f"{log.count(chr(10))} lines on standard error", log
    if "out of memory" in log:
        return "out of memory", log
    named = log.replace(f"convert.py: {folder}: ", "")
    if "gguf" in arguments and not re.search(r"x\S*\.gguf|tensor |model\.layers", log):
        return "the message names no file: " + log.strip(), log
    if "hf" in arguments and not re.search(re.escape(folder) + r"\b|tensor |model\.|lm_head", log):
        return "the message names no file: " + log.strip(), log
    if "marian" in arguments and not re.search(re.escape(folder) + r"\b|model\.(bin|npz)|\.spm is|tensor ",
                                             named):
        return "the message names no file: " + named.strip(), log
    return None, log


# ---- Campaigns ----

def campaign(target, seconds, seed):
    begin, found, outcomes, runs = time.monotonic(), {}, {}, 0
    os.makedirs(FOUND, exist_ok=True)
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        cases = undamaged(target, folder + "/undamaged")
        for name, arguments in cases.items():
            wrong, log = judge(shutil.copytree(f"{folder}/undamaged/{name}", f"{folder}/copy-{name}"), arguments)
            if wrong or log:
                print(f"{name}: the undamaged checkpoint fails: {wrong}\n{log}")
                return 1
        while time.monotonic() - begin < seconds:
            r = random.Random(f"{seed} {runs}")
            name = r.choice(list(cases))
            shutil.rmtree(folder + "/now", ignore_errors=True)
            shutil.copytree(f"{folder}/undamaged/{name}", folder + "/now")
            how = damage(r, target, folder + "/now")
            wrong, log = judge(folder + "/now", cases[name])
            runs += 1
            line = re.sub(r"'[^']*'|\"[^\"]*\"|[-0-9.]+|\S*/\S*", "*", (wrong or log).split("\n")[0])[:80]
            outcomes[line] = outcomes.get(line, 0) + 1
            if not wrong:
                continue
            key = re.sub(r"0x[0-9a-f]+|\b\d{3,}\b|'[^']*'", "*", wrong)[:120]
            found[key] = found.get(key, 0) + 1
            if found[key] == 1:
                keep = f"{FOUND}/{target}-{seed}-{runs}"
                shutil.rmtree(keep, ignore_errors=True)
                shutil.copytree(folder + "/now", keep, symlinks=True, ignore=special)
                with open(keep + "/arguments.json", "w", encoding="utf-8") as file:
                    json.dump(cases[name], file)
                print(f"FINDING {keep} ({name}, {how}): {wrong}", flush=True)
    print("fuzz-%-17s %6.0f s %10d executions, %d different messages: %s" % (
        target, time.monotonic() - begin, runs, len(outcomes),
        f"{len(found)} FINDINGS in {sum(found.values())} runs" if found else "nothing found"))
    return int(bool(found))


def special(folder, names):
    """Return the pipes in a folder, for copytree to ignore because it cannot copy them."""
    return [x for x in names if stat.S_ISFIFO(os.lstat(os.path.join(folder, x)).st_mode)]


def again(folder):
    with open(folder + "/arguments.json", encoding="utf-8") as file:
        arguments = json.load(file)
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(folder, place + "/now", symlinks=True, ignore=shutil.ignore_patterns("arguments.json"))
        wrong, log = judge(copy, arguments)
    print(f"{wrong or 'no finding'}\n{log}")
    return int(bool(wrong))


def main():
    os.chdir(ROOT)
    if len(sys.argv) == 3 and sys.argv[1] == "--again":
        return again(sys.argv[2])
    targets = ["convert", "decoder", "gguf", *marian_damage.CASES]
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in targets or not sys.argv[2].isdigit():
        print(__doc__, f"Targets: {' '.join(targets)}", sep="\n", file=sys.stderr)
        return 2
    return campaign(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else int(time.time()))


if __name__ == "__main__":
    sys.exit(main())
