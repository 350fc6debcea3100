# Generate shell completions for a program from its --help:
#     moe-translate --help | awk -v shell=bash -v program=moe-translate -f tools/completions.awk
# shell: bash, zsh or fish. An option is a line such as "  -m, --model FILE   model file (default: ...)". Its
# description continues in the following lines and is used up to its first sentence, bracket or semicolon.

/^  (-[a-zA-Z]|    --[a-zA-Z])/ {
    n++
    short[n] = long[n] = value[n] = ""
    head = $0
    sub(/^ +/, "", head)
    rest = sub(/  +/, "\t", head) ? substr(head, index(head, "\t") + 1) : ""
    sub(/\t.*/, "", head)
    words = split(head, word, /,? /)
    for (i = 1; i <= words; i++) {
        if (word[i] ~ /^--/) long[n] = word[i]
        else if (word[i] ~ /^-/) short[n] = word[i]
        else value[n] = word[i]
    }
    if (sub(/\[=.*/, "", long[n])) value[n] = "" # its value is optional
    text[n] = rest
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
function is_file(i) { return value[i] ~ /FILE|MODEL|DIR/ || short[i] ~ /^-[imo]$/ }
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
        gsub(/:/, "\\:", value[i])
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
        sub(/(\. [A-Z]|;).*/, "", text[i])
        sub(/ \(.*/, "", text[i])
        sub(/[.:]$/, "", text[i])
    }
    if (shell == "bash") bash()
    else if (shell == "zsh") zsh()
    else if (shell == "fish") fish()
    else exit 2
}
