#!/bin/sh
# Test golden sentences of the bundled model with moe-cuda.cu on the emulated device, and the program's messages on
# devices.
program=${BUILD:-build}/moe-translate-emulated
model=models/en-de-fr-es.bin
if [ ! -f "$model" ]; then echo "skip $model is missing"; exit 0; fi
verdict() { if [ "$2" = 0 ]; then echo "ok $1"; else echo "FAIL $1"; fi; }

if [ -n "${MOE_TEST_LONG:-}" ]; then # takes minutes
    "$program" -m "$model" --self-test --device cuda --batch 16 >/dev/null 2>&1
    verdict "golden sentences on the emulated device" $?
fi
said=$(echo | "$program" -m "$model" -t de --stats -v 2>&1)
case $said in *"cuda:0 emulated"*"device           cuda:0 emulated"*"device memory"*) status=0 ;; *) status=1 ;; esac
verdict "--verbose and --stats name the GPU" $status
said=$(echo | "$program" -m "$model" -t de --device cuda --gpu-memory 1 2>&1)
test $? = 3 && case $said in *"needs at least "*" MB"*"1 MB are allowed"*"--device cpu"*) true ;; *) false ;; esac
verdict "--gpu-memory that is too small is an error with advice" $?
enough=$("$program" -m "$model" --self-test --device cuda --batch 16 --gpu-memory 1 2>&1 |
    sed -n 's/.* needs at least \([0-9]*\) MB.*/\1/p')
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
printf '%s\n' 'Good morning.' 'Where is my book?' 'She has been reading since this morning.' >"$work/in"
"${BIN:-.}/moe-translate" -m "$model" -t de --no-protect --device cpu -i "$work/in" -o "$work/cpu"
said=$("$program" -m "$model" -t de --no-protect --batch 16 --device cuda --gpu-memory "${enough:-1}" --stats \
    -i "$work/in" -o "$work/cuda" 2>&1)
[ "$(wc -l <"$work/cpu")" = 3 ] && cmp -s "$work/cpu" "$work/cuda"
verdict "the same bytes with the least --gpu-memory, which fetches experts" $?
case $said in
*"tokens per visit"*"experts held     "*" of 64"*"experts fetched  "*" times"*) status=0 ;;
*) status=1 ;;
esac
case $said in *"experts held     64"*) status=1 ;; esac
verdict "--stats says how many experts are held and fetched" $status
said=$(echo 'Good morning.' | "$program" -m "$model" -t de --device cuda --stats 2>&1)
case $said in *"experts fetched"*) status=1 ;; *"experts held     64 of 64"*) status=0 ;; *) status=1 ;; esac
verdict "nothing is fetched where all experts fit" $status
said=$(echo | "${BIN:-.}/moe-translate" -m "$model" -t de --device tpu 2>&1)
test $? = 2 && case $said in *"unknown device 'tpu'"*) true ;; *) false ;; esac
verdict "an unknown device is a usage error" $?
