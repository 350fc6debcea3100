#!/bin/sh
# The README's embedding example, as a reader would type it: compiled with moe.c alone, without a warning, and run.
set -u
cc=${CC:-cc}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' README.md > "$work/app.c"

check() { # NAME COMMAND...
    name=$1
    shift
    if "$@" > "$work/out" 2>&1 && [ ! -s "$work/err" ]; then echo "ok $name"; else echo "FAIL $name"; cat "$work/out"; fi
}

check 'the example is about twenty lines' test "$(wc -l < "$work/app.c")" -le 28
check 'it compiles with moe.c alone and without warnings' \
    $cc -Wall -Wextra -Werror -I. "$work/app.c" moe.c -lm -pthread -o "$work/app"
check 'and by the bare command of the README' $cc -I. "$work/app.c" moe.c -lm -pthread -o "$work/app"
# the model of the tests has 41 tokens: the ids of the example do not exist there, and the result says so with no output
sed 's/{ 312, 45, 9 }/{ 12, 35, 9 }/' "$work/app.c" > "$work/small.c"
check 'it translates' sh -c '"$1" -I. "$2/small.c" moe.c -lm -pthread -o "$2/small" && "$2/small" tests/golden/model-base.bin xa > "$2/ids" &&
    grep -qE "^([0-9]+ )+$" "$2/ids"' - "$cc" "$work"
