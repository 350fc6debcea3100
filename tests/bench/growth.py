#!/usr/bin/env python3
"""Count the instructions of each scanner of text, HTML and HTTP, with callgrind,
for 256 KB, 512 KB and 1 MB of the scanner's most expensive input.

    make moe-server build/test_linear build/test_linear-plain
    tests/bench/growth.py

build/test_linear finds this input by counting steps, and checks that doubling
the text multiplies the steps by at most 2.3; this script counts instructions,
even those of libraries. `http` measures how moe-server reads request bodies:
each trigger in JSON, a form, and multipart. Requires valgrind and a quarter of
an hour on one processor.
"""
import argparse
import contextlib
import glob
import http.client
import os
import re
import subprocess
import sys
import tempfile

SCANNERS = ("spans sentences clauses halves cells signs messages messages_shown message_lines loops names answers "
            "links languages guards constraints terms glossaries cases lines json_strings html_of_texts "
            "html_of_markup html_of_numbers xml_of_markup addresses stop_texts tokens").split()
MOST = 2.3
CALLGRIND = ["valgrind", "--tool=callgrind"]
JSON = '{"source":"en","target":"xx",%s}'  # rejected after the body was read
MULTIPART = '--xx\r\nContent-Disposition: form-data; name="q"\r\n\r\n%s\r\n--xx--\r\n'
FILE = MULTIPART.replace('"q"', '"file"; filename="a.html"')
NAME = MULTIPART.replace("%s", "a b").replace('"q"', '"file"; filename="%s.txt"')
BODIES = {  # address -> (content type, frame, repeated parts); \1 in a part is the number of the repetition
    "/translate": (
        ("application/json", JSON % '"q":"%s"', ["a", "\\n", "\\u0041", "\\\\", '\\"', "é", "\\ud83d\\ude00", "//",
                                                 "\\u0000"]),
        ("application/json", JSON % '"q":[%s"a"]', ['"a",', '"",', '"\\n",', "1,", "[],", "{},", "null,"]),
        ("application/json", JSON % '"q":"a",%s"x":1', ['"a":1,', '"\1":1,', '"q":"a",', '"glossary":{},', '"x":"y",']),
        ("application/json", JSON % '"q":"a","glossary":{%s"x":"y"}', ['"a":"b",', '"\1":"b",', '"":"",']),
        ("application/json", JSON % '"q":"a","context":"%s"', ["a", "\\n"]),
        ("application/json", "%s", ["[", "{", '{"a":', '"', " ", "\n", ",", "1", "-", "1e", "[1,", "tru", "\\", "}"]),
        ("application/x-www-form-urlencoded", "source=en&target=xx&q=%s",
         ["a", "%41", "+", "%", "%4", "&q=a", "&", "=", "&a=b", "%00", "&&", "&\1=b", "\r\n"]),
        ("application/x-www-form-urlencoded", "q=a&context=%s", ["a", "+", "&context="]),
        ("multipart/form-data; boundary=xx", MULTIPART,
         ["a", "\r", "\n", "\r\n", "-", "\r\n-", "\r\n--", "--xx", "\r\n--x", " "]),
        ("multipart/form-data; boundary=xx", "--xx\r\n%s",
         ["a", "a: b\r\n", "\r\n--xx\r\n", "Content-Disposition: form-data; ", "--xx\r\n", "\r\n", "--xx--\r\n",
          '; name="a"']),
    ),
    "/translate_file": (
        ("multipart/form-data; boundary=xx", FILE, ["<b>x", "\r\n", "a "]),
        ("multipart/form-data; boundary=xx", NAME, ["a", "/", ".", '\\"']),
    ),
    "/v2/translate": (
        ("application/json", '{"target_lang":"XX","text":[%s"a"]}', ['"a",', '"",', '"\\n",']),
        ("application/json", '{"target_lang":"XX","tag_handling":"%s","text":["a"]}', ["html ", "\\u0020"]),
        ("application/x-www-form-urlencoded", "target_lang=XX%s", ["&text=a", "&text=", "&tag_handling=xml", "&a"]),
    ),
    "/v1/chat/completions": (
        ("application/json", '{"messages":[%s{"role":"user","content":"a"}]}',
         ['{"role":"user","content":"a"},', '{"role":"x","content":"a"},', "{},", "[],", "1,",
          '{"role":"user","content":[{"type":"text","text":"a"}]},']),
        ("application/json", '{"messages":[{"role":"user","content":"%s"}]}', ["a", "\\n", "<", "é"]),
        ("application/json", '{"messages":[{"role":"user","content":[%s{"type":"text","text":"a"}]}]}',
         ['{"type":"text","text":"a"},', "{},", "["]),
        ("application/json", '{"messages":[{"role":"%s","content":"a"}]}', ["a", "user"]),
        ("application/json", '{"stop":[%s"a"],"messages":[]}', ['"a",', "[", "1,", '"\1",']),
        ("application/json", '{"stop":"%s","messages":[]}', ["a"]),
        ("application/json", '{%s"messages":[{"role":"user","content":"a"}]}',
         ['"a":1,', '"\1":1,', '"stop":"a",', '"seed":1,', '"messages":[],', '"stream_options":{},']),
    ),
    "/imme": (("application/json", '{"target_lang":"xx","text_list":[%s"a"]}', ['"a",', '"\\n",']),),
}


def worst(program, scanner):
    """Find a scanner's most expensive input; return (steps per byte, "TRIGGER BEGINNING")."""
    run = subprocess.run([program, scanner], capture_output=True, text=True, check=True,
                         env=dict(os.environ, MOE_TEST_TRIGGER="all"))
    size, steps, trigger = re.search(r"most steps for (\d+) bytes: (\d+), by trigger (.+)",
                                     run.stdout + run.stderr).groups()
    return int(steps) / int(size), trigger


def instructions(program, scanner, trigger, size):
    done = subprocess.run([*CALLGRIND, "--callgrind-out-file=/dev/null", "--toggle-collect=grow*", program, scanner],
                          capture_output=True, text=True, check=True,
                          env=dict(os.environ, MOE_TEST_LINEAR=str(size), MOE_TEST_TRIGGER=trigger))
    return int(re.search(r"Collected : (\d+)", done.stderr).group(1))


def of_text(args, scanner, sizes):
    steps, trigger = worst(args.program, scanner)
    yield f"{trigger} | {steps:.0f}", [instructions(args.program + "-plain", scanner, trigger, n) for n in sizes]


def body_of(around, unit, size):
    before, after = around.split("%s")
    if "\1" in unit:
        inside = "".join(unit.replace("\1", str(i)) for i in range(size // (len(unit) + 6)))
    else:
        inside = unit * ((size - len(around)) // len(unit.encode()))
    return (before + inside + after).encode()


@contextlib.contextmanager
def reading_server(server, folder):
    """Run moe-server under callgrind, which writes the number of instructions per body to a file; yield the port."""
    command = [*CALLGRIND, f"--callgrind-out-file={folder}/out", "--toggle-collect=read_body", "--dump-after=read_body",
               server, "--port", "0", "--threads", "1", "--max-body", "2048", "--read-timeout", "3000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        port = next(int(found[1]) for line in process.stderr if (found := re.search(r"http://[\d.]+:(\d+)/", line)))
        yield port
        process.terminate()
        process.stderr.read()


def of_bodies(args, _, sizes):
    with tempfile.TemporaryDirectory() as folder, reading_server(args.server, folder) as port:
        for address, bodies in BODIES.items():
            for kind, around, unit in ((kind, around, unit) for kind, around, units in bodies for unit in units):
                counts = []
                for size in sizes:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3000)
                    connection.request("POST", address, body_of(around, unit, size), {"Content-Type": kind})
                    connection.getresponse().read()
                    connection.close()
                    newest = max(glob.glob(folder + "/out.*"), key=lambda name: int(name.rsplit(".", 1)[1]))
                    with open(newest, encoding="utf-8") as file:
                        counts.append(int(re.search(r"^(?:totals|summary): (\d+)", file.read(), re.M).group(1)))
                place = around.replace("%s", "...")[-40:]
                yield f"{address}: `{unit!r}` in `{place!r}` |", counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scanners", nargs="*", metavar="SCANNER", help="http, %s (all)" % ", ".join(SCANNERS))
    parser.add_argument("--size", type=int, default=256, metavar="KB", help="the first size (%(default)s)")
    parser.add_argument("--program", default="build/test_linear")
    parser.add_argument("--server", default="./moe-server")
    args = parser.parse_args()
    sizes, steep = [args.size << 10 + i for i in range(3)], 0
    print("| scanner | trigger | steps a byte |" + "".join(f" {args.size << i} KB |" for i in range(3)) + " growth |")
    print("|---|---|---|---|---|---|---|")
    for scanner in args.scanners or (*SCANNERS, "http"):
        for trigger, counts in (of_bodies if scanner == "http" else of_text)(args, scanner, sizes):
            growth = max(b / a for a, b in zip(counts, counts[1:]))
            steep += growth > MOST
            print(f"| {scanner} | {trigger} | " + " | ".join(f"{x / 1e6:,.2f} M" for x in counts) +
                  f" | {growth:.2f} |", flush=True)
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main())
