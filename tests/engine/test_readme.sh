#!/bin/sh
# Check README.md: its embedding examples are those of tools/text/examples, compile without warnings and print the
# output shown. The README's command compiles the example with ids; tests/install runs other commands. The demo and
# commands with output in the README are run too. BIN is the folder of the programs.
set -u
cc=${CC:-cc}
bin=${BIN:-.}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
readme=README.md
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' $readme > "$work/app.c"
awk '/^```console$/ { inside = 1; next } /^```$/ { inside = 0 } inside' $readme > "$work/console"
ln -s "$PWD/moe.c" "$PWD/moe.h" "$PWD/models" "$PWD/tools" "$work/"

check() { # NAME COMMAND...
    name=$1
    shift
    if "$@" > "$work/out" 2>&1; then echo "ok $name"; else echo "FAIL $name"; cat "$work/out"; fi
}

# Print the README's output for the command that starts with $1, up to a blank line or the next command.
shown() {
    awk -v command="\$ $1" 'index($0, command) == 1 { inside = 1; next } /^\$|^$/ { inside = 0 } inside' "$work/console"
}

# Print the README's command that starts with $1.
command() { sed -n "s|^\\\$ \\($1.*\\)|\\1|p" "$work/console"; }

# Run a command of the README and compare its output.
as_shown() { # BEGINNING
    line=$(command "$1")
    [ -n "$line" ] || { echo "$readme has no command $1"; return 1; }
    shown "$1" > "$work/shown"
    [ -s "$work/shown" ] || { echo "$readme shows no output of $line"; return 1; }
    (cd "$work" && eval "$line" > printed) && echo >> "$work/printed" &&
        sed -e 's/ *$//' -e '/^$/d' "$work/printed" > "$work/lines" && diff "$work/shown" "$work/lines"
}

# The sanitizers of the build's static libraries.
sanitize=
! nm "$bin/libmoe.a" | grep -q __asan_init || sanitize=-fsanitize=address,undefined

# Compile with the static library of the build.
text_compiles() {
    # shellcheck disable=SC2086 # lists of words
    $cc $sanitize -std=c11 -Wall -Wextra -Werror -I. -Itools/text "$work/app.c" "$bin/libmoetext.a" \
        -lsentencepiece -lpcre2-8 -lexttextcat-2.0 -lutf8proc -lcjson -lz -lstdc++ -lm -pthread -o "$work/app"
}

# Run the example of moe.h, which must print the same as the README's example.
header() {
    { printf '#include "moe.h"\n#include <stdio.h>\n'
      sed -n '/^ \*     int main/,/^ \*     }/s/^ \* *//p' moe.h; } > "$work/header.c"
    # shellcheck disable=SC2086 # lists of words
    $cc $sanitize -std=c11 -Wall -Wextra -Werror -I. "$work/header.c" "$bin/libmoe.a" -lm -pthread -o "$work/header" &&
        [ "$("$work/header")" = "$("$work/ids" models/en-de-fr-es.bin fr)" ]
}

compiles() {
    line=$(command "cc -O2 ")
    [ -n "$line" ] && case $line in *-O2*) ;; *) false ;; esac && (cd "$work" && eval "$cc ${line#cc }")
}

# Check every "FROM -> TO", "  sentence", "    = translation" of the README with the program.
demo() {
    awk '/^\$/ { inside = $0 == "$ make demo"; next } inside' "$work/console" > "$work/demo"
    grep -c '^    = ' "$work/demo" > /dev/null || { echo "$readme shows no demo"; return 1; }
    while IFS= read -r line; do
        case $line in
        *' -> '*) to=${line#* -> } ;;
        '    = '*)
            translated=$(printf '%s\n' "$sentence" | "$bin/moe-translate" -m models/en-de-fr-es.bin -t "$to") &&
                [ "$line" = "    = $translated" ] || { echo "$sentence: $translated"; return 1; } ;;
        '  '*) sentence=${line#  } ;;
        esac
    done < "$work/demo"
}

refused() { # use a language and tokens that the tests' small model lacks
    "$work/ids" tests/golden/model-base.bin xa > "$work/none" 2> "$work/errors"
    [ ! -s "$work/none" ] && grep -q '^source token 1964 is outside the vocabulary' "$work/errors"
}

check 'the example with text is short' test "$(wc -l < "$work/app.c")" -le 16
check 'it is the example that tests/install compiles' cmp "$work/app.c" tools/text/examples/text.c
check 'it compiles without a warning' text_compiles
export MOE_MODEL="$PWD/models/en-de-fr-es.bin"
check 'it prints the translations that the README shows' as_shown './app'
unset MOE_MODEL
check 'the example with ids has no warnings' $cc -std=c11 -Wall -Wextra -Werror -I. -fsyntax-only \
    tools/text/examples/ids.c
check 'it compiles with moe.c alone, by the command of the README' compiles
check 'it prints the ids that the README shows' as_shown './ids'
check 'the example of moe.h prints the same' header
check 'it says why a request was refused' refused
for name in "$bin"/moe-*; do [ ! -x "$name" ] || ln -sf "$(realpath "$name")" "$work/"; done
check 'the first command prints what the README shows' as_shown 'echo '
check 'the demo gives the translations of the README' demo
