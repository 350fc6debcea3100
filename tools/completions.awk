# Completions of a shell for a program, made of its --help:
#     moe-translate --help | awk -v shell=bash -v program=moe-translate -f tools/completions.awk
# shell: bash, zsh or fish. An option is a line such as "  -m, --model FILE   the model (default: ...)"; its description
# goes on in the lines below and is used up to its first sentence, bracket or semicolon.

/^  (-[a-zA-Z]|    --[a-zA-Z])/ {
    n++
    short[n] = long[n] = value[n] = ""
    for (i = 1; i <= NF && ($i ~ /^-/ || $i ~ /^[A-Z][A-Z0-9|:.]*$/); i++) {
        word = $i
        sub(/,$/, "", word)
        if (word ~ /^--/) long[n] = word
        else if (word ~ /^-/) short[n] = word
        else value[n] = word
    }
    if (sub(/\[=.*/, "", long[n])) value[n] = "" # it may have a value, and need not
    text[n] = ""
    for (; i <= NF; i++) add($i)
    open = 1
    next
}
/^                    +[^ ]/ && open {
    for (i = 1; i <= NF; i++) add($i)
    next
}
{ open = 0 }

function add(word) { text[n] = text[n] (text[n] ? " " : "") word }
function quoted(s) { gsub(/'/, "'\\''", s); return "'" s "'" }
function is_file(i) { return value[i] ~ /FILE|MODEL/ || short[i] ~ /^-[imo]$/ }
function names(i, between) { return short[i] (short[i] && long[i] ? between : "") long[i] }

function bash(    i, all, files, others, f) {
    f = "_" program
    gsub(/-/, "_", f)
    for (i = 1; i <= n; i++) {
        all = all (all ? " " : "") names(i, " ")
        if (value[i] && is_file(i)) files = files (files ? "|" : "") names(i, "|")
        else if (value[i]) others = others (others ? "|" : "") names(i, "|")
    }
    print f "() {"
    print "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}"
    print "    COMPREPLY=()"
    print "    case $before in"
    if (others) print "    " others ") return ;;"
    if (files) print "    " files ") ;;"
    print "    *)"
    print "        if [[ $word == -* ]]; then"
    print "            mapfile -t COMPREPLY < <(compgen -W '" all "' -- \"$word\")"
    print "            return"
    print "        fi ;;"
    print "    esac"
    print "    mapfile -t COMPREPLY < <(compgen -f -- \"$word\")"
    print "}"
    print "complete -o filenames -F " f " " program
}

function zsh(    i, told, line) {
    print "#compdef " program
    print "_arguments -s \\"
    for (i = 1; i <= n; i++) {
        told = text[i]
        gsub(/[\[\]:\\]/, "\\\\&", told)
        told = "[" told "]" (value[i] ? ":" value[i] ":" (is_file(i) ? "_files" : "") : "")
        line = short[i] (short[i] && value[i] ? "+" : "") # FILE may follow at once
        if (line && long[i]) line = line ","
        line = line long[i] (long[i] && value[i] ? "=" : "")
        if (short[i] && long[i]) print "    '(" names(i, " ") ")'{" line "}" quoted(told) " \\"
        else print "    " quoted(line told) " \\"
    }
    print "    '*:file:_files'"
}

function fish(    i, line) {
    for (i = 1; i <= n; i++) {
        line = "complete -c " program
        if (short[i]) line = line " -s " substr(short[i], 2)
        if (long[i]) line = line " -l " substr(long[i], 3)
        if (value[i]) line = line (is_file(i) ? " -r -F" : " -x")
        print line " -d " quoted(text[i])
    }
}

END {
    for (i = 1; i <= n; i++) {
        sub(/[.;] .*/, "", text[i])
        sub(/ \(.*/, "", text[i])
        sub(/[.:]$/, "", text[i])
    }
    if (shell == "bash") bash()
    else if (shell == "zsh") zsh()
    else if (shell == "fish") fish()
    else exit 2
}
