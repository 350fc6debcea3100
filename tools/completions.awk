# Completions of a shell for a program, made of its --help:
#     moe-translate --help | awk -v shell=bash -v program=moe-translate -f tools/completions.awk
# shell: bash, zsh or fish. An option is a line such as "  -m, --model FILE   the model (default: ...)"; its description
# goes on in the lines below and is used up to its first sentence, bracket or semicolon.

/^  (-[a-zA-Z], |    )?--?[a-zA-Z]/ {
    line = substr($0, 3)
    sub(/^ +/, "", line)
    at = match(line, /  +/)
    spelled = at ? substr(line, 1, at - 1) : line
    ++n
    text[n] = at ? substr(line, at) : ""
    sub(/^ +/, "", text[n])
    short[n] = long[n] = value[n] = ""
    count = split(spelled, part, /,? /)
    for (i = 1; i <= count; i++) {
        if (part[i] ~ /^--/) long[n] = part[i]
        else if (part[i] ~ /^-/) short[n] = part[i]
        else value[n] = part[i]
    }
    if (sub(/\[=.*/, "", long[n])) value[n] = "" # it may have a value, and need not
    open = 1
    next
}
/^                    +[^ ]/ && open { line = $0; sub(/^ +/, "", line); text[n] = text[n] (text[n] ? " " : "") line; next }
{ open = 0 }

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

function zsh(    i, told, after, line) {
    print "#compdef " program
    print "_arguments -s \\"
    for (i = 1; i <= n; i++) {
        told = text[i]
        gsub(/[\[\]:\\]/, "\\\\&", told)
        after = "[" told "]" (value[i] ? ":" value[i] ":" (is_file(i) ? "_files" : "") : "")
        line = short[i] && long[i] ? "'(" names(i, " ") ")'{" short[i] (value[i] ? "+" : "") "," long[i] (value[i] ? "=" : "") "}" quoted(after) : \
            quoted((long[i] ? long[i] (value[i] ? "=" : "") : short[i] (value[i] ? "+" : "")) after)
        print "    " line " \\"
    }
    print "    '*:file:_files'"
}

function fish(    i) {
    for (i = 1; i <= n; i++)
        print "complete -c " program (short[i] ? " -s " substr(short[i], 2) : "") (long[i] ? " -l " substr(long[i], 3) : "") \
            (value[i] ? (is_file(i) ? " -r -F" : " -x") : "") " -d " quoted(text[i])
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
