/* moe-bench - measure the speed of single layers and whole models relative to the limits of this machine (see --help).
 *
 * Contents
 *   1. Options      values of the command line
 *   2. Results      medians, JSON lines, the table
 *   3. Machine      measured bandwidths and peaks
 *   4. Bounds       the minimum time of a graph's nodes on this machine
 *   5. Layers       single layers with random weights as graphs of the engine
 *   6. Models       whole translations with forced lengths
 *   7. Main
 *
 * This file includes moe.c: its builders build layers, its planner places them and its executor runs them. Bounds are
 * computed from the same nodes.
 */
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE

#include "moe.c"

#include "tools/programs/options.h"
#include "tools/text/json.h"
#include "tools/text/memory.h"

#include <errno.h>
#include <math.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

enum { EXIT_DONE = 0, EXIT_USAGE = 2, EXIT_MODEL = 3, EXIT_INPUT_OUTPUT = 4 };

/* ==== 1. Options ========================================================================================= */

enum { MAX_LIST = 16 };

typedef struct int_list {
    int values[MAX_LIST];
    size_t count;
} int_list;

typedef struct text_list {
    const char *values[MAX_LIST];
    char text[256]; /* the list, with NULs in place of commas */
    size_t count;
} text_list;

typedef struct sentence {
    const int32_t *ids; /* [n] complete encoder input; generated sentences have only text pieces */
    size_t n;
    int32_t force; /* the first token of the target, or -1 */
    int target;    /* length of the target in tokens */
} sentence;

typedef struct sentences {
    sentence *all; /* [count] */
    size_t count;
    int32_t *ids; /* ids of all sentences */
    int longest_source, longest_target;
    double sources, targets; /* total numbers of tokens */
} sentences;

typedef struct options {
    const char *models[MAX_LIST];
    size_t n_models;
    text_list layers, types, isas;
    int_list rows, batch, beam;
    int experts, k, width, hidden, vocabulary, src_len, tgt_len, threads, reps, profile, no_mmap, blocks;
    size_t expert_memory; /* 0 if the models are mapped */
    sentences given;      /* --sentences */
} options;

static const option_program program;

static int bad_value(const char *name, const char *text, const char *wanted) {
    return option_refuse(&program, "invalid value '%s' for --%s: expected %s", text, name, wanted);
}

/* Parse words separated by commas. */
static int take_texts(void *user, const option_row *row, const char *text) {
    text_list *out = (text_list *)(void *)((char *)user + row->at);
    char *at = out->text;
    if (strlen(text) >= sizeof out->text) return bad_value(row->name, text, "a shorter list");
    snprintf(out->text, sizeof out->text, "%s", text);
    for (out->count = 0; at; out->count++) {
        char *comma = strchr(at, ',');
        if (out->count == MAX_LIST || !*at || *at == ',')
            return bad_value(row->name, text, "1 to 16 words separated by commas");
        out->values[out->count] = at;
        if (comma) *comma++ = '\0';
        at = comma;
    }
    return -1;
}

static int take_ints(void *user, const option_row *row, const char *text) {
    int_list *out = (int_list *)(void *)((char *)user + row->at);
    for (out->count = 0;; text++) {
        char *end;
        long v;
        errno = 0;
        v = strtol(text, &end, 10);
        if (out->count == MAX_LIST || end == text || errno || (double)v < row->low || (double)v > row->high ||
            (*end && *end != ','))
            return option_refuse(&program,
                                 "invalid value '%s' for --%s: expected 1 to %d numbers from %.0f to %.0f "
                                 "separated by commas",
                                 text, row->name, MAX_LIST, row->low, row->high);
        out->values[out->count++] = (int)v;
        if (!*end) return -1;
        text = end;
    }
}

static void free_sentences(sentences *s) {
    free(s->all);
    free(s->ids);
    *s = (sentences){ .all = NULL };
}

/* Parse the numbers of a line. Return 0 if the line is invalid. */
static int parse_sentence(char *line, sentence *s, int32_t *ids) {
    long v[2] = { 0, 0 };
    *s = (sentence){ .ids = ids };
    for (int i = 0;; i++) {
        char *end;
        long number;
        errno = 0;
        number = strtol(line, &end, 10);
        if (end == line) break;
        if (errno || number < -1 || number > INT32_MAX) return 0;
        if (i < 2) v[i] = number;
        else ids[s->n++] = (int32_t)number;
        line = end;
    }
    s->target = (int)v[0];
    s->force = (int32_t)v[1];
    return line[strspn(line, " \r\n")] == '\0' && s->n > 0 && s->n < 1 << 16 && v[0] > 1 && v[0] < 1 << 16;
}

/* Read --sentences. A file has at most one number per two bytes. */
static int read_sentences(void *user, const option_row *row, const char *path) {
    sentences *out = &((options *)user)->given;
    FILE *file = fopen(path, "r");
    struct stat info;
    char *line = NULL;
    size_t room = 0, n = 0, size;
    int good = file && fstat(fileno(file), &info) == 0;
    size = good && info.st_size > 0 ? (size_t)info.st_size / 2 + 1 : 1;
    (void)row;
    free_sentences(out);
    out->all = calloc(size, sizeof *out->all);
    out->ids = calloc(size, sizeof *out->ids);
    good = good && out->all && out->ids;
    while (good && n < size && getline(&line, &room, file) > 0) {
        sentence *s = &out->all[out->count++];
        good = parse_sentence(line, s, out->ids + n);
        n += s->n;
        out->longest_source = (int)moe_max((size_t)out->longest_source, s->n);
        out->longest_target = (int)moe_max((size_t)out->longest_target, (size_t)s->target);
        out->sources += (double)s->n;
        out->targets += s->target;
    }
    if (!good || !out->count)
        fprintf(stderr, "moe-bench: %s: line %zu is missing or invalid; see --sentences in moe-bench --help\n", path,
                moe_max(1, out->count));
    free(line);
    if (file) fclose(file);
    return good && out->count ? -1 : EXIT_USAGE;
}

/* ==== 2. Results ========================================================================================= */

static double seconds_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double now(void) { return seconds_of(CLOCK_MONOTONIC); }
static double processor_time(void) { return seconds_of(CLOCK_PROCESS_CPUTIME_ID); }

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct timing {
    double median, least; /* seconds */
} timing;

static timing sum_up(double *seconds, size_t count) {
    qsort(seconds, count, sizeof *seconds, compare_doubles);
    return (timing){ (seconds[(count - 1) / 2] + seconds[count / 2]) / 2, seconds[0] };
}

typedef struct report {
    int table;  /* 1 to print the table because stderr is a terminal */
    int failed; /* 1 if writing to stdout failed */
} report;

/* A JSON line of output. */
typedef struct record {
    json json;
    text_bytes bytes;
} record;

static void begin_record(record *l, const char *what) {
    *l = (record){ .json.out = &l->bytes };
    json_open(&l->json, NULL, '{');
    json_text(&l->json, "what", what);
}

static void end_record(report *r, record *l) {
    json_close(&l->json, '}');
    if (l->bytes.failed || puts(l->bytes.data) == EOF || fflush(stdout)) r->failed = 1;
    text_bytes_free(&l->bytes);
}

static void clear(const report *r) {
    if (r->table) fputs("\r\033[K", stderr);
}

MOE_PRINTF(2, 3)
static void progress(const report *r, const char *format, ...) {
    va_list args;
    if (!r->table) return;
    clear(r);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

/* Copy a name for a terminal, with question marks for control characters. */
static void plain(const char *text, size_t length, char *out, size_t size) {
    size_t n = 0;
    for (; n < length && n + 1 < size; n++) out[n] = (unsigned char)text[n] < 32 || text[n] == 127 ? '?' : text[n];
    out[n] = '\0';
}

static int out_of_memory(void) {
    fputs("moe-bench: out of memory; use fewer rows, a smaller batch or a smaller layer\n", stderr);
    return EXIT_MODEL;
}

/* ==== 3. Machine ======================================================================================= */

typedef struct machine {
    const moe_kernels *kernels;
    char cpu[96];
    size_t threads, l2_bytes, cache_bytes; /* second-level cache of a core, last-level cache */
    double l2, cache, dram;                /* bytes per second, all threads                   */
    double integer, floating;              /* operations per second, all threads              */
} machine;

/* Loops of independent instructions. Most are in assembly, because compilers would hoist the products out of a C loop,
 * and because assembly needs no target attribute. */
typedef struct peak {
    const char *isa;               /* prefix of kernel names */
    double integer_ops, float_ops; /* operations per iteration */
    void (*integer)(size_t turns), (*floating)(size_t turns);
} peak;

enum { DOT = 256 };

/* Multiply and add in plain C on data in the first-level cache. */
static void integer_portable(size_t turns) {
    int8_t x[DOT] = { 0 }, y[DOT] = { 0 };
    volatile int32_t sink;
    int32_t sum = 0;
    for (size_t t = 0; t < turns; t++) {
        __asm__ volatile("" : : "r"(x), "r"(y) : "memory");
        for (size_t i = 0; i < DOT; i++) sum += x[i] * y[i];
    }
    sink = sum;
    (void)sink;
}
static void float_portable(size_t turns) {
    float x[DOT] = { 0 }, y[DOT] = { 0 }, lane[MOE_LANES] = { 0 };
    volatile float sink;
    for (size_t t = 0; t < turns; t++) {
        __asm__ volatile("" : : "r"(x), "r"(y) : "memory");
        for (size_t i = 0; i < DOT; i += MOE_LANES)
            for (size_t l = 0; l < MOE_LANES; l++) lane[l] += x[i + l] * y[i + l];
    }
    sink = moe_join_lanes(lane);
    (void)sink;
}

#if MOE_X86
#define LOW_REGISTERS "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7"
#define REGISTERS LOW_REGISTERS, "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"
/* Clear all registers, run `body` `turns` times, and clear the upper halves. */
#define ASM_LOOP(body)                                                        \
    __asm__ volatile("vzeroall\n1:\n\t" body "dec %0\n\tjnz 1b\n\tvzeroupper" \
                     : "+r"(turns)                                            \
                     :                                                        \
                     : "cc", "memory", REGISTERS)

#define MADDUBS(t, a)                                                                                           \
    "vpmaddubsw %%ymm14, %%ymm13, %%ymm" #t "\n\tvpmaddwd %%ymm15, %%ymm" #t ", %%ymm" #t "\n\tvpaddd %%ymm" #t \
    ", %%ymm" #a ", %%ymm" #a "\n\t"
static void integer_avx2(size_t turns) {
    ASM_LOOP(MADDUBS(7, 0) MADDUBS(8, 1) MADDUBS(9, 2) MADDUBS(10, 3) MADDUBS(11, 4) MADDUBS(12, 5));
}
#define MULADD(a, b) "vmulps %%ymm14, %%ymm" #a ", %%ymm" #a "\n\tvaddps %%ymm15, %%ymm" #b ", %%ymm" #b "\n\t"
static void float_avx2(size_t turns) {
    ASM_LOOP(MULADD(0, 6) MULADD(1, 7) MULADD(2, 8) MULADD(3, 9) MULADD(4, 10) MULADD(5, 11));
}
#define DPBUSD_VEX(a) "%{vex%} vpdpbusd %%ymm14, %%ymm15, %%ymm" #a "\n\t"
static void integer_avxvnni(size_t turns) {
    ASM_LOOP(DPBUSD_VEX(0) DPBUSD_VEX(1) DPBUSD_VEX(2) DPBUSD_VEX(3) DPBUSD_VEX(4) DPBUSD_VEX(5) DPBUSD_VEX(6)
                 DPBUSD_VEX(7) DPBUSD_VEX(8) DPBUSD_VEX(9) DPBUSD_VEX(10) DPBUSD_VEX(11));
}
#define DPBUSD(a) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #a "\n\t"
static void integer_avx512(size_t turns) {
    ASM_LOOP(DPBUSD(0) DPBUSD(1) DPBUSD(2) DPBUSD(3) DPBUSD(4) DPBUSD(5) DPBUSD(6) DPBUSD(7) DPBUSD(8) DPBUSD(9)
                 DPBUSD(10) DPBUSD(11));
}
/* Products precede sums, because alternating them is 15% slower on Zen 4, which splits 64-byte registers. */
#define MUL(a) "vmulps %%zmm14, %%zmm" #a ", %%zmm" #a "\n\t"
#define ADD(a) "vaddps %%zmm15, %%zmm" #a ", %%zmm" #a "\n\t"
static void float_avx512(size_t turns) {
    ASM_LOOP(MUL(0) MUL(1) MUL(2) MUL(3) MUL(4) MUL(5) ADD(6) ADD(7) ADD(8) ADD(9) ADD(10) ADD(11));
}
/* Use eight tiles of 16 rows of 64 bytes: four sums, two left and two right operands. The kernels have already
 * requested permission to use tiles. */
#define TDPB(a, l, r) "tdpbssd %%tmm" #r ", %%tmm" #l ", %%tmm" #a "\n\t"
static void integer_amx(size_t turns) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } shape = { .palette = 1 };
    for (size_t i = 0; i < 8; i++) {
        shape.columns[i] = 64;
        shape.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %1\n\t"
                     "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
                     "tilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7\n"
                     "1:\n\t" TDPB(0, 4, 6) TDPB(1, 4, 7) TDPB(2, 5, 6) TDPB(3, 5, 7) "dec %0\n\tjnz 1b\n\ttilerelease"
                     : "+r"(turns)
                     : "m"(shape)
                     : "cc", "memory");
}
#endif

#if defined(__aarch64__)
#define NEON_REGISTERS "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16", "v17"
#define NEON_LOOP(first, body) \
    __asm__ volatile(first "1:\n\t" body "subs %0, %0, #1\n\tb.ne 1b" : "+r"(turns) : : "cc", "memory", NEON_REGISTERS)
#define NEON_ZERO                                                                                                    \
    "movi v0.4s, #0\n\tmovi v1.4s, #0\n\tmovi v2.4s, #0\n\tmovi v3.4s, #0\n\tmovi v4.4s, #0\n\tmovi v5.4s, #0\n\t"   \
    "movi v6.4s, #0\n\tmovi v7.4s, #0\n\tmovi v8.4s, #0\n\tmovi v9.4s, #0\n\tmovi v10.4s, #0\n\tmovi v11.4s, #0\n\t" \
    "movi v16.4s, #0\n\tmovi v17.4s, #0\n\t"
#define SMULL(t, a) "smull v" #t ".8h, v16.8b, v17.8b\n\tsadalp v" #a ".4s, v" #t ".8h\n\t"
static void integer_neon(size_t turns) {
    NEON_LOOP(NEON_ZERO, SMULL(6, 0) SMULL(7, 1) SMULL(8, 2) SMULL(9, 3) SMULL(10, 4) SMULL(11, 5));
}
/* Encodings of sdot and smmla va.4s, v16.16b, v17.16b, which assemblers accept only for Armv8.2 and 8.6. */
#define SDOT(a) ".inst 0x4e919600 + " #a "\n\t"
static void integer_dot(size_t turns) {
    NEON_LOOP(NEON_ZERO,
              SDOT(0) SDOT(1) SDOT(2) SDOT(3) SDOT(4) SDOT(5) SDOT(6) SDOT(7) SDOT(8) SDOT(9) SDOT(10) SDOT(11));
}
#define SMMLA(a) ".inst 0x4e91a600 + " #a "\n\t"
static void integer_i8mm(size_t turns) {
    NEON_LOOP(NEON_ZERO, SMMLA(0) SMMLA(1) SMMLA(2) SMMLA(3) SMMLA(4) SMMLA(5) SMMLA(6) SMMLA(7) SMMLA(8) SMMLA(9)
                             SMMLA(10) SMMLA(11));
}
#define FMULADD(a, b) "fmul v" #a ".4s, v" #a ".4s, v16.4s\n\tfadd v" #b ".4s, v" #b ".4s, v17.4s\n\t"
static void float_neon(size_t turns) {
    NEON_LOOP(NEON_ZERO, FMULADD(0, 6) FMULADD(1, 7) FMULADD(2, 8) FMULADD(3, 9) FMULADD(4, 10) FMULADD(5, 11));
}
#endif

/* peak_of uses the first entry whose `isa` is a prefix of the kernels' name. */
static const peak peaks[] = {
#if MOE_X86
    { "amx", 4 * 32768, 6 * 32, integer_amx, float_avx512 },
    { "avx512", 12 * 128, 6 * 32, integer_avx512, float_avx512 },
    { "avxvnni", 12 * 64, 6 * 16, integer_avxvnni, float_avx2 },
    { "avx2", 6 * 64, 6 * 16, integer_avx2, float_avx2 },
#endif
#if defined(__aarch64__)
    { "i8mm", 12 * 64, 6 * 8, integer_i8mm, float_neon },
    { "dotprod", 12 * 32, 6 * 8, integer_dot, float_neon },
    { "neon", 6 * 16, 6 * 8, integer_neon, float_neon },
#endif
    { "", 2 * DOT, 2 * DOT, integer_portable, float_portable },
};

static const peak *peak_of(const char *isa) {
    size_t i = 0;
    while (strncmp(peaks[i].isa, isa, strlen(peaks[i].isa)) != 0) i++;
    return &peaks[i];
}

typedef struct machine_job {
    void (*loop)(size_t turns);
    size_t turns;
    const char *data; /* [all] if `loop` is NULL; each attempt reads the next `bytes` bytes per task */
    size_t bytes, all;
    int wide;                     /* 1 to use 32-byte registers */
    double busy[MOE_MAX_THREADS]; /* CPU time of each task */
} machine_job;

static int wide_registers(void) {
#if MOE_X86
    return moe_isa_available("avx2");
#else
    return 0;
#endif
}

/* Read `bytes`, a multiple of 512, as fast as possible. */
static void read_bytes(const char *data, size_t bytes, int wide) {
#if MOE_X86
#define LOADS(at)                                                                                                     \
    "vmovdqa " #at "(%0), %%ymm0\n\tvmovdqa " #at "+32(%0), %%ymm1\n\tvmovdqa " #at "+64(%0), %%ymm2\n\tvmovdqa " #at \
    "+96(%0), %%ymm3\n\t"
    size_t turns = bytes / 512;
    if (wide) {
        __asm__ volatile("1:\n\t" LOADS(0) LOADS(128) LOADS(256)
                             LOADS(384) "add $512, %0\n\tdec %1\n\tjnz 1b\n\tvzeroupper"
                         : "+r"(data), "+r"(turns)
                         :
                         : "cc", "memory", LOW_REGISTERS);
        return;
    }
#endif
    uint64_t sums[8] = { 0 };
    volatile uint64_t sink;
    const uint64_t *at = (const uint64_t *)(const void *)data;
    (void)wide;
    for (size_t i = 0; i < bytes / 8; i += 8)
        for (size_t l = 0; l < 8; l++) sums[l] ^= at[i + l];
    sink = sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
    (void)sink;
}

static void machine_task(void *arg, size_t task, size_t thread) {
    machine_job *job = arg;
    const double begin = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    (void)thread;
    if (job->loop) job->loop(job->turns);
    else
        for (size_t t = 0; t < job->turns; t++) read_bytes(job->data + task * job->bytes, job->bytes, job->wide);
    job->busy[task] = seconds_of(CLOCK_THREAD_CPUTIME_ID) - begin;
}

/* Return iterations per second of all threads, the best of many short attempts, because on a shared machine only short
 * attempts run on all processors at once. If each processor has its own resource (`own`), measure CPU time. */
static double most_turns(moe_pool *pool, machine_job *job, int own) {
    const double threads = (double)pool->count, processors = (double)sysconf(_SC_NPROCESSORS_ONLN), start = now();
    const char *data = job->data;
    double best = 0;
    size_t at = 0;
    job->turns = 1;
    for (int attempts = 0; attempts < 1000 && (attempts < 16 || now() - start < 0.25);) {
        double seconds = 0, begin;
        if (job->all) {
            at = at + 2 * job->bytes * pool->count > job->all ? 0 : at + job->bytes * pool->count;
            job->data = data + at;
        }
        begin = now();
        moe_pool_run(pool, pool->count, machine_task, job);
        if (own)
            for (size_t i = 0; i < pool->count; i++) seconds += job->busy[i] / threads;
        else seconds = now() - begin;
        if (seconds < 0.5e-3 && !job->all && job->turns < SIZE_MAX / 4) { /* too short for the clock */
            job->turns *= 2;
            best = 0;
            continue;
        }
        if (best == 0 || seconds < best) best = seconds;
        attempts++;
    }
    job->data = data;
    return threads * (double)job->turns / best * (own ? fmin(1, processors / threads) : 1);
}

static void name_cpu(char *out, size_t size) {
    char line[256] = "";
#ifdef __APPLE__
    size_t length = sizeof line - 1;
    if (sysctlbyname("machdep.cpu.brand_string", line, &length, NULL, 0)) line[0] = '\0';
#else
    FILE *info = fopen("/proc/cpuinfo", "r");
    while (info && fgets(line, sizeof line, info)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            memmove(line, colon + 2, strlen(colon + 2) + 1);
            break;
        }
        line[0] = '\0';
    }
    if (info) fclose(info);
#endif
    line[strcspn(line, "\n")] = '\0';
    plain(*line ? line : "unknown", strlen(*line ? line : "unknown"), out, size);
}

/* Return a cache size as reported by the kernel; the C library's value assumes cores that a virtual machine lacks. */
static size_t cache_size(int level, size_t fallback) {
#ifdef __APPLE__
    uint64_t bytes = 0;
    size_t length = sizeof bytes;
    if (sysctlbyname(level == 2 ? "hw.l2cachesize" : "hw.l3cachesize", &bytes, &length, NULL, 0) || !bytes)
        return fallback;
    return (size_t)bytes;
#else
    char path[80];
    unsigned long kilobytes = 0;
    FILE *f;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", level);
    f = fopen(path, "r");
    if (f && fscanf(f, "%luK", &kilobytes) != 1) kilobytes = 0;
    if (f) fclose(f);
    return kilobytes ? (size_t)kilobytes * 1024 : fallback;
#endif
}

/* Measure the bandwidths, which do not depend on the kernels. Return 0 on failure. */
static int measure_bandwidth(machine *m, moe_pool *pool) {
    const size_t threads = m->threads, mega = 1u << 20;
    const size_t part = 32 * mega / threads / 512 * 512;
    size_t all, small;
    char *block, *data;
    name_cpu(m->cpu, sizeof m->cpu);
    m->l2_bytes = cache_size(2, mega);
    m->cache_bytes = cache_size(3, 16 * mega);
    small = moe_max(4096, moe_min(part, m->l2_bytes / 2) / 512 * 512);
    all = moe_min(moe_max(256 * mega, 4 * m->cache_bytes), 1024 * mega);
    block = malloc(all + 4096);
    if (!block) return 0;
    data = block + (4096 - (uintptr_t)block % 4096);
    memset(data, 1, all);
    {
        machine_job job = { .data = data, .bytes = part, .all = all, .wide = wide_registers() };
        m->dram = (double)part * most_turns(pool, &job, 0);
        job.all = 0;
        job.bytes = part / 2;
        m->cache = (double)(part / 2) * most_turns(pool, &job, 0);
        job.bytes = small;
        m->l2 = (double)small * most_turns(pool, &job, 1);
    }
    free(block);
    /* noise can make an inner level seem slower */
    if (m->cache < m->dram) m->cache = m->dram;
    if (m->l2 < m->cache) m->l2 = m->cache;
    return 1;
}

static void measure_peaks(machine *m, moe_pool *pool) {
    const peak *p = peak_of(m->kernels->name);
    machine_job integer = { .loop = p->integer }, floating = { .loop = p->floating };
    m->integer = p->integer_ops * most_turns(pool, &integer, 1);
    m->floating = p->float_ops * most_turns(pool, &floating, 1);
}

static void report_machine(report *r, const machine *m) {
    record l;
    begin_record(&l, "machine");
    json_text(&l.json, "cpu", m->cpu);
    json_text(&l.json, "isa", m->kernels->name);
    json_whole(&l.json, "threads", (int64_t)m->threads);
    json_fixed(&l.json, "dram_gbytes_s", m->dram * 1e-9, 2);
    json_fixed(&l.json, "cache_gbytes_s", m->cache * 1e-9, 2);
    json_fixed(&l.json, "l2_gbytes_s", m->l2 * 1e-9, 2);
    json_whole(&l.json, "cache_bytes", (int64_t)m->cache_bytes);
    json_whole(&l.json, "l2_bytes", (int64_t)m->l2_bytes);
    json_fixed(&l.json, "integer_gops", m->integer * 1e-9, 1);
    json_fixed(&l.json, "float_gops", m->floating * 1e-9, 1);
    end_record(r, &l);
    clear(r);
    if (r->table)
        fprintf(stderr,
                "%s, %zu threads, %s: memory %.1f, cache %.1f, L2 %.1f GB/s; integers %.0f, floats %.0f Gop/s\n",
                m->cpu, m->threads, m->kernels->name, m->dram * 1e-9, m->cache * 1e-9, m->l2 * 1e-9, m->integer * 1e-9,
                m->floating * 1e-9);
}

/* ==== 4. Bounds ======================================================================================== */

enum { FUNCTION = 30 }; /* float operations per exp, tanh or sigmoid */

/* The work of a graph run. */
typedef struct load {
    double rows, steps, sentences, source; /* rows per tensor, encoder steps, sentences, source tokens */
    double target;                         /* decoded tokens */
    double resident;                       /* bytes of weights that each run reads */
} load;

typedef struct cost {
    double integer, floating, weights, inputs; /* operations, bytes */
    double seconds;                            /* minimum time */
} cost;

static double bandwidth_of(const machine *m, double bytes) {
    if (bytes <= (double)(m->l2_bytes * m->threads)) return m->l2;
    return bytes <= (double)m->cache_bytes ? m->cache : m->dram;
}

static double matrix_bytes(const moe_matrix *w) { return (double)moe_matrix_bytes(w->type, w->rows, w->cols); }

static void add_product(cost *c, const moe_matrix *w, double rows) {
    const double ops = 2 * rows * (double)w->rows * (double)w->cols;
    if (moe_type_quantised(w->type)) c->integer += ops;
    else c->floating += ops;
    c->weights += matrix_bytes(w);
}

static double slab_bytes(const moe_experts *e) { return matrix_bytes(&e->up) + matrix_bytes(&e->down); }

/* Return the size in bytes of all weights that a node may read. */
static double node_weights(const moe_node *t) {
    switch (t->op) {
    case MOE_OP_LINEAR: return matrix_bytes(t->linear.w);
    case MOE_OP_OUTPUT: return matrix_bytes(t->output.w);
    case MOE_OP_LSTM_STEP: return matrix_bytes(&t->lstm.cell->w_x) + matrix_bytes(&t->lstm.cell->w_r);
    case MOE_OP_LSTM_LAYER: return matrix_bytes(&t->lstm.cell->w_r) + matrix_bytes(&t->lstm.cell->w_proj);
    case MOE_OP_EXPERTS: return (double)t->experts->count * slab_bytes(t->experts);
    default: return 0;
    }
}

static double graph_weights(const moe_graph *g) {
    double bytes = 0;
    for (size_t i = 0; i < g->count; i++) bytes += node_weights(&g->nodes[i]);
    return bytes;
}

/* Return the number of experts per row according to the gate's settings. */
static double wanted_experts(const moe_node *gate) {
    const moe_gating *gating = gate->gate.gating;
    const double own = (double)(moe_gate_is_dense(gate->gate.kind) ? gating->level : gating->k);
    return gate->gate.grouped ? own * wanted_experts(gate->src[1]) : own;
}

static cost node_cost(const machine *m, const moe_node *t, const load *l) {
    const double rows = l->rows, cols = (double)t->cols;
    double resident = l->resident, times = 1, compute, memory;
    cost c = { 0, 0, 0, 0, 0 };
    for (size_t s = 0; s < MOE_COUNT(t->src); s++)
        if (t->src[s] && t->op != MOE_OP_VIEW)
            c.inputs += rows * (double)t->src[s]->cols * (moe_is_codes(t->src[s]) ? 1 : 4);
    switch (t->op) {
    case MOE_OP_EMBED: c.inputs += rows * matrix_bytes(t->embed.table) / (double)t->embed.table->rows; break;
    case MOE_OP_GATHER: c.inputs += rows * cols * 4; break;
    case MOE_OP_QUANTISE: c.floating += rows * cols * 6; break;
    case MOE_OP_LINEAR: add_product(&c, t->linear.w, rows); break;
    case MOE_OP_POINTWISE: c.floating += rows * cols; break;
    case MOE_OP_NORM: c.floating += rows * cols * 9; break;
    case MOE_OP_UNARY: c.floating += rows * cols * (double)FUNCTION; break;
    case MOE_OP_LSTM_STEP:
        add_product(&c, &t->lstm.cell->w_x, rows);
        add_product(&c, &t->lstm.cell->w_r, rows);
        c.floating += rows * (double)t->lstm.cell->hidden * (5 * FUNCTION + 4);
        break;
    case MOE_OP_LSTM_LAYER: /* each of the l->steps steps processes all sentences */
        times = l->steps;
        resident = node_weights(t);
        add_product(&c, &t->lstm.cell->w_r, l->sentences);
        add_product(&c, &t->lstm.cell->w_proj, l->sentences);
        c.floating += l->sentences * (double)t->lstm.cell->hidden * (5 * FUNCTION + 4);
        c.inputs /= times;
        break;
    case MOE_OP_ATTENTION: {
        const double size = (double)t->src[0]->cols;
        c.floating += rows * l->source * (size * (double)(FUNCTION + 3) + (double)FUNCTION + 2 * cols);
        c.inputs += l->sentences * l->source * (size + cols) * 4;
        break;
    }
    case MOE_OP_HEADS: { /* a lower bound, as if the hypotheses of a sentence shared all tokens */
        const double seen = t->heads.rows && t->heads.within ? l->target : l->source;
        c.floating += rows * seen * (4 * cols + (double)t->heads.heads * (FUNCTION + 3));
        c.inputs += l->sentences * seen * 2 * cols * 4;
        break;
    }
    case MOE_OP_GATE:
        c.floating += rows * cols * 2;
        if (!t->gate.grouped) break;
        c.floating += rows * wanted_experts(t->src[1]) * 2 * (double)t->gate.gating->level * (double)t->src[0]->cols;
        c.weights += matrix_bytes(&t->gate.gating->weight); /* an upper bound, as if all groups were selected */
        break;
    case MOE_OP_MIX: c.floating += rows * 2 * (double)t->src[0]->cols; break;
    case MOE_OP_EXPERTS: {
        const double n = (double)t->experts->count, k = fmin(n, wanted_experts(t->src[1]));
        const double hidden = (double)t->experts->hidden;
        const double ops = rows * k * 2 * (double)(t->experts->up.rows + t->experts->hidden) * cols;
        if (moe_type_quantised(t->experts->up.type)) c.integer += ops;
        else c.floating += ops;
        c.floating += rows * k * (hidden * 7 + cols * 2);
        c.weights += n * (1 - pow(1 - k / n, rows)) * slab_bytes(t->experts);
        break;
    }
    case MOE_OP_OUTPUT:
        add_product(&c, t->output.w, rows);
        c.floating += rows * cols * (FUNCTION + 2);
        break;
    default: break; /* copies */
    }
    compute = c.integer / m->integer + c.floating / m->floating;
    memory = c.weights / bandwidth_of(m, resident) + c.inputs / bandwidth_of(m, c.inputs);
    c.seconds = times * fmax(compute, memory);
    c.integer *= times;
    c.floating *= times;
    c.weights *= times;
    c.inputs *= times;
    return c;
}

/* Return 1 if the nodes differ only in their layer number. */
static int same_kind(const moe_node *a, const moe_node *b) {
    const char *x = a->name, *y = b->name;
    for (; a->op == b->op && *x == *y && *x; x++, y++) {
        if (*x != '.') continue;
        x += strspn(x + 1, "0123456789");
        y += strspn(y + 1, "0123456789");
    }
    return a->op == b->op && *x == *y;
}

/* Return the total cost of the nodes from `first` on. Unless `like` is NULL, count only nodes of its kind. */
static cost graph_cost(const machine *m, const moe_graph *g, size_t first, const moe_node *like, const load *l) {
    cost sum = { 0, 0, 0, 0, 0 };
    for (size_t i = first; i < g->count; i++) {
        if (like && !same_kind(&g->nodes[i], like)) continue;
        const cost c = node_cost(m, &g->nodes[i], l);
        sum.integer += c.integer;
        sum.floating += c.floating;
        sum.weights += c.weights;
        sum.inputs += c.inputs;
        sum.seconds += c.seconds;
    }
    return sum;
}

/* ==== 5. Layers ======================================================================================== */

enum { LAYER_NODES = 24, POOL_ROWS = 256, MIN_CALL_SECONDS_PER_REP = 20 /* ms */ };

/* Weights of a layer in one number format, with inputs and states. */
typedef struct stack {
    const char *what;
    moe_type type;
    size_t width, hidden;
    moe_layer layer; /* moe */
    moe_cell cell;
    moe_matrix dense, output;
    moe_attention_op attention;
    float *x, *r, *c; /* [pool, cols] inputs and states; each call uses other rows */
    size_t pool, sentences;
    void *owned[12];
    size_t n_owned;
    const char *most; /* largest block of weights */
    size_t most_bytes;
} stack;

/* A configuration to measure. */
typedef struct layer_bench {
    stack *of;
    const machine *machine;
    size_t rows, inputs; /* inputs: number of input nodes at the start, which are not timed */
    moe_graph graph;
    void *arena;
    int32_t *ints; /* parents, `want`, best tokens */
    float *floats;
    size_t *sizes;
    moe_frame frame;
    double *seconds; /* [reps] mean time of a call */
    double *streams; /* [reps] memory bandwidth right after the repetition, bytes per second */
    size_t calls, call;
    double wall, busy; /* time and CPU time of all repetitions */
    double begin;      /* time when the inputs were ready */
    size_t seen;
} layer_bench;

static void *own(stack *s, size_t bytes) {
    void *memory = NULL;
    if (s->n_owned == MOE_COUNT(s->owned) || posix_memalign(&memory, 4096, moe_max(bytes, 1))) return NULL;
    memset(memory, 0, bytes);
    if (bytes > s->most_bytes) s->most = memory, s->most_bytes = bytes;
    return s->owned[s->n_owned++] = memory;
}

static void free_stack(stack *s) {
    while (s->n_owned) free(s->owned[--s->n_owned]);
}

/* Fill with uniform random numbers in [-spread, spread]. */
static void fill_random(uint64_t *random, float spread, float *out, size_t n) {
    for (size_t i = 0; i < n; i++) {
        *random = *random * 6364136223846793005u + 1442695040888963407u;
        out[i] = ((float)(*random >> 40) - 8388608.0f) / 8388608.0f * spread;
    }
}

static int pack_matrix(moe_type type, size_t rows, size_t cols, float spread, uint64_t *random, void *blob) {
    float *row = malloc(cols * sizeof *row);
    int8_t *scratch = malloc(2 * moe_round_up(cols, MOE_Q8_COLS));
    for (size_t r = 0; row && scratch && r < rows; r++) {
        fill_random(random, spread / sqrtf((float)cols), row, cols);
        moe_pack_row(type, rows, cols, r, row, blob, scratch);
    }
    free(row);
    free(scratch);
    return row && scratch;
}

static int make_matrix(stack *s, moe_type type, size_t rows, size_t cols, float spread, uint64_t *random,
                       moe_matrix *out) {
    void *blob = own(s, (size_t)moe_matrix_bytes(type, rows, cols));
    if (!blob || !pack_matrix(type, rows, cols, spread, random, blob)) return 0;
    *out = moe_matrix_view(type, rows, cols, blob);
    return 1;
}

static float *make_floats(stack *s, size_t n, float spread, uint64_t *random) {
    float *out = own(s, n * sizeof *out);
    if (out) fill_random(random, spread, out, n);
    return out;
}

static int make_stack(const options *o, const char *what, moe_type type, stack *s) {
    const size_t width = (size_t)o->width, hidden = (size_t)o->hidden, beam = (size_t)o->beam.values[0];
    size_t most = 1;
    uint64_t random = 1;
    memset(s, 0, sizeof *s);
    s->what = what;
    s->type = type;
    for (size_t i = 0; i < o->rows.count; i++) most = moe_max(most, (size_t)o->rows.values[i]);
    s->pool = moe_round_up(POOL_ROWS, most) * 2;
    s->sentences = moe_divide_up(most, beam);
    s->width = width;
    s->hidden = hidden;
    if (!(s->x = make_floats(s, s->pool * width, 1, &random))) return 0;
    if (strcmp(what, "dense") == 0) return make_matrix(s, type, hidden, width, 2, &random, &s->dense);
    if (strcmp(what, "softmax") == 0) return make_matrix(s, type, (size_t)o->vocabulary, width, 4, &random, &s->output);
    if (strcmp(what, "attention") == 0) {
        const size_t tokens = s->sentences * (size_t)o->src_len;
        s->attention.keys = make_floats(s, tokens * width, 1, &random);
        s->attention.values = make_floats(s, tokens * width, 1, &random);
        s->attention.v = make_floats(s, width, 0.1f, &random);
        return s->attention.keys && s->attention.values && s->attention.v;
    }
    if (strcmp(what, "lstm") == 0) {
        moe_cell *w = &s->cell;
        w->hidden = hidden;
        w->state = width;
        w->bias = make_floats(s, 4 * hidden, 1, &random);
        s->r = make_floats(s, s->pool * width, 1, &random);
        s->c = make_floats(s, s->pool * hidden, 1, &random);
        return w->bias && s->r && s->c && make_matrix(s, type, 4 * hidden, width, 2, &random, &w->w_x) &&
               make_matrix(s, type, 4 * hidden, width, 2, &random, &w->w_r) &&
               make_matrix(s, type, width, hidden, 2, &random, &w->w_proj);
    } else {
        const size_t experts = (size_t)o->experts;
        moe_mixture_layer *m = &s->layer.mixture;
        uint64_t down = 0;
        const size_t slab = (size_t)moe_slab_bytes(type, 1, hidden, width, &down);
        char *slabs = own(s, experts * slab);
        if (!slabs) return 0;
        s->layer.type = &moe_mixture_type;
        snprintf(s->layer.name, sizeof s->layer.name, "%s", what);
        s->layer.hidden = hidden;
        s->layer.residual = m->sigmoid = 1;
        m->gate = (moe_gating){ .kind = MOE_GATE_TOPK, .level = experts, .k = (size_t)o->k };
        m->experts = (moe_experts){ .count = experts, .hidden = hidden, .scale = 1, .stride = slab };
        m->experts.up = moe_matrix_view(type, hidden, width, slabs);
        m->experts.down = moe_matrix_view(type, width, hidden, slabs + down);
        if (!make_matrix(s, MOE_TYPE_F32, experts, width, 4, &random, &m->gate.weight)) return 0;
        if (!pack_matrix(type, hidden, width, 2, &random, slabs)) return 0;
        if (!pack_matrix(type, width, hidden, 2, &random, slabs + down)) return 0;
        for (size_t e = 1; e < experts; e++) /* all experts are copies of the first */
            memcpy(slabs + e * slab, slabs, slab);
        return 1;
    }
}

/* Build the layer's input nodes, then the layer as in the encoder or decoder. */
static void build_layer(layer_bench *b) {
    stack *s = b->of;
    moe_graph *g = &b->graph;
    const moe_output_op output = { .w = &s->output };
    moe_builder builder = { .g = g, .layers = &s->layer };
    moe_node *x = moe_op_gather(g, s->x, s->width, "input");
    if (strcmp(s->what, "lstm") == 0) {
        moe_node *r = moe_op_gather(g, s->r, s->width, "lstm.r"), *c = moe_op_gather(g, s->c, s->hidden, "lstm.c"), *z;
        b->inputs = 3;
        z = moe_op_lstm_step(g, &s->cell, x, r, c, "lstm.cell");
        c = moe_op_view(g, z, s->hidden, s->hidden, "lstm.c_next");
        r = moe_op_view(g, z, 0, s->hidden, "lstm.h");
        r = moe_op_linear(g, &s->cell.w_proj, r, NULL, "lstm.r_next");
        moe_op_store(g, r, MOE_BY_PARENT, s->r, "lstm.r_store");
        moe_op_store(g, c, MOE_BY_PARENT, s->c, "lstm.c_store");
        return;
    }
    b->inputs = 1;
    if (strcmp(s->what, "moe") == 0) moe_build_layer(&builder, &s->layer, x);
    else if (strcmp(s->what, "attention") == 0) moe_op_attention(g, &s->attention, x, NULL, s->width, "attention");
    else if (strcmp(s->what, "softmax") == 0) moe_op_output(g, &output, x);
    else moe_op_linear(g, &s->dense, x, NULL, s->what);
}

/* Start the clock after the last input node. */
static void note_inputs(void *watcher, const moe_node *t, int after) {
    layer_bench *b = watcher;
    (void)t;
    if (after && ++b->seen == b->inputs) b->begin = now();
}

static void free_layer_bench(layer_bench *b) {
    free(b->graph.nodes);
    free(b->arena);
    free(b->ints);
    free(b->floats);
    free(b->sizes);
    free(b->seconds);
    free(b->streams);
}

static int make_layer_bench(const options *o, stack *s, const machine *m, size_t rows, layer_bench *b) {
    const size_t beam = (size_t)o->beam.values[0], tokens = (size_t)o->vocabulary;
    const size_t top = strcmp(s->what, "softmax") ? 1 : moe_min(beam + 1, tokens);
    moe_error e;
    *b = (layer_bench){ .of = s, .machine = m, .rows = rows };
    b->graph = (moe_graph){ .nodes = calloc(LAYER_NODES, sizeof(moe_node)),
                            .capacity = LAYER_NODES,
                            .rows = rows,
                            .threads = m->threads,
                            .sentences = s->sentences,
                            .max_source = (size_t)o->src_len,
                            .top = top,
                            .blocks = o->blocks,
                            .watch = note_inputs,
                            .watcher = b };
    b->ints = calloc(rows * (2 + top), sizeof *b->ints);
    b->floats = calloc(rows * (1 + top), sizeof *b->floats);
    b->sizes = calloc(rows * 2, sizeof *b->sizes);
    b->seconds = calloc((size_t)o->reps, sizeof *b->seconds);
    b->streams = calloc((size_t)o->reps, sizeof *b->streams);
    if (!b->graph.nodes || !b->ints || !b->floats || !b->sizes || !b->seconds || !b->streams) return 0;
    build_layer(b);
    if (moe_graph_plan(&b->graph, &e) || posix_memalign(&b->arena, 4096, b->graph.bytes)) return 0;
    memset(b->arena, 0, b->graph.bytes);
    moe_graph_place(&b->graph, b->arena);
    b->frame = (moe_frame){ .rows = rows,
                            .beam = { .parents = b->ints,
                                      .want = b->ints + rows,
                                      .top_ids = b->ints + 2 * rows,
                                      .want_logprob = b->floats,
                                      .top_logprobs = b->floats + rows,
                                      .segment = b->sizes,
                                      .length = b->sizes + rows } };
    for (size_t r = 0; r < rows; r++) {
        b->ints[rows + r] = -1;
        b->sizes[r] = r / beam * (size_t)o->src_len;
        b->sizes[rows + r] = (size_t)o->src_len;
    }
    return 1;
}

/* Return the seconds of one call. */
static double call_layer(layer_bench *b, moe_pool *pool) {
    const moe_run run = { b->machine->kernels, pool, &b->graph, &b->frame, 0 };
    for (size_t r = 0; r < b->rows; r++) b->ints[r] = (int32_t)((b->call * b->rows + r) % b->of->pool);
    b->call++;
    b->seen = 0;
    moe_graph_run(&run, NULL, NULL);
    return now() - b->begin;
}

/* Run a repetition; return the mean seconds per call. */
static double time_layer(layer_bench *b, moe_pool *pool) {
    const double wall = now(), busy = processor_time();
    double sum = 0;
    for (size_t i = 0; i < b->calls; i++) sum += call_layer(b, pool);
    b->wall += now() - wall;
    b->busy += processor_time() - busy;
    return sum / (double)b->calls;
}

static int in_memory(const layer_bench *b) { return graph_weights(&b->graph) > (double)b->machine->cache_bytes; }

/* Read the part of the weights that belongs to repetition `rep`; return the bandwidth. */
static double time_stream(const layer_bench *b, moe_pool *pool, size_t rep) {
    const stack *s = b->of;
    const size_t bytes = moe_min(32u << 20, s->most_bytes / 2) / pool->count / 512 * 512, all = bytes * pool->count;
    machine_job job = { .turns = 1,
                        .data = s->most + rep % (s->most_bytes / all) * all,
                        .bytes = bytes,
                        .wide = wide_registers() };
    const double begin = now();
    moe_pool_run(pool, pool->count, machine_task, &job);
    return (double)all / (now() - begin);
}

static void report_layer(report *r, const options *o, layer_bench *b) {
    const stack *s = b->of;
    const load at = { (double)b->rows,    1, (double)moe_divide_up(b->rows, (size_t)o->beam.values[0]),
                      (double)o->src_len, 1, graph_weights(&b->graph) };
    const cost c = graph_cost(b->machine, &b->graph, b->inputs, NULL, &at);
    const size_t vocabulary = s->output.rows;
    record out;
    timing t;
    double gops, gbytes, share = NAN; /* share of the memory bandwidth, unless the weights fit in the cache */
    if (in_memory(b)) {               /* must precede sum_up, which sorts the seconds */
        for (int rep = 0; rep < o->reps; rep++)
            b->streams[rep] = (c.weights + c.inputs) / b->seconds[rep] / b->streams[rep];
        share = sum_up(b->streams, (size_t)o->reps).median;
    }
    t = sum_up(b->seconds, (size_t)o->reps);
    gops = (c.integer + c.floating) / t.median * 1e-9;
    gbytes = (c.weights + c.inputs) / t.median * 1e-9;
    begin_record(&out, s->what);
    json_text(&out.json, "type", moe_type_name(s->type));
    json_text(&out.json, "isa", b->machine->kernels->name);
    json_whole(&out.json, "threads", (int64_t)b->machine->threads);
    json_whole(&out.json, "rows", (int64_t)b->rows);
    json_whole(&out.json, "experts", (int64_t)s->layer.mixture.experts.count);
    json_whole(&out.json, "k", (int64_t)s->layer.mixture.gate.k);
    json_whole(&out.json, "d", (int64_t)s->width);
    json_whole(&out.json, "hidden", vocabulary || s->attention.keys ? 0 : (int64_t)s->hidden);
    json_whole(&out.json, "vocabulary", (int64_t)vocabulary);
    json_whole(&out.json, "src_len", s->attention.keys ? o->src_len : 0);
    json_digits(&out.json, "ms_median", t.median * 1e3, 5);
    json_digits(&out.json, "ms_min", t.least * 1e3, 5);
    json_digits(&out.json, "gops", gops, 4);
    json_digits(&out.json, "gbytes_s", gbytes, 4);
    json_fixed(&out.json, "roofline_share", c.seconds / t.median, 3);
    json_fixed(&out.json, "dram_share", share, 3);
    json_fixed(&out.json, "cpu_share", b->busy / b->wall / (double)b->machine->threads, 2);
    end_record(r, &out);
    if (r->table)
        fprintf(stderr, "%-10s %-5s %-10s %6zu %11.4f %11.4f %9.1f %8.2f %8.0f %%\n", s->what, moe_type_name(s->type),
                b->machine->kernels->name, b->rows, t.median * 1e3, t.least * 1e3, gops, gbytes,
                100 * c.seconds / t.median);
}

static int bench_layers(report *r, const options *o, const machine *machines, moe_pool *pool) {
    const size_t n_stacks = o->layers.count * o->types.count, n = n_stacks * o->isas.count * o->rows.count;
    stack *stacks = calloc(n_stacks, sizeof *stacks);
    layer_bench *benches = calloc(n, sizeof *benches);
    size_t at = 0;
    int ok = stacks && benches;
    for (size_t i = 0; ok && i < n_stacks; i++) {
        moe_type type = MOE_TYPE_Q8;
        moe_type_parse(o->types.values[i % o->types.count], &type);
        progress(r, "making weights, %zu of %zu", i + 1, n_stacks);
        ok = make_stack(o, o->layers.values[i / o->types.count], type, &stacks[i]);
        for (size_t k = 0; ok && k < o->isas.count; k++)
            for (size_t j = 0; ok && j < o->rows.count; j++)
                ok = make_layer_bench(o, &stacks[i], &machines[k], (size_t)o->rows.values[j], &benches[at++]);
    }
    for (size_t i = 0; ok && i < n; i++) { /* warm up, and choose the number of calls per repetition */
        double second;
        progress(r, "warming up, %zu of %zu", i + 1, n);
        call_layer(&benches[i], pool);
        second = call_layer(&benches[i], pool);
        benches[i].calls = 1 + (size_t)((double)MIN_CALL_SECONDS_PER_REP * 1e-3 / (second + 1e-9));
    }
    for (int rep = 0; ok && rep < o->reps; rep++)
        for (size_t i = 0; i < n; i++) {
            progress(r, "repetition %d of %d, %zu of %zu", rep + 1, o->reps, i + 1, n);
            benches[i].seconds[rep] = time_layer(&benches[i], pool);
            if (in_memory(&benches[i])) benches[i].streams[rep] = time_stream(&benches[i], pool, (size_t)rep);
        }
    clear(r);
    if (ok && r->table)
        fprintf(stderr, "%-10s %-5s %-10s %6s %11s %11s %9s %8s %10s\n", "layer", "type", "kernels", "rows",
                "ms median", "ms min", "Gop/s", "GB/s", "of bound");
    for (size_t i = 0; ok && i < n; i++) report_layer(r, o, &benches[i]);
    for (size_t i = 0; benches && i < n; i++) free_layer_bench(&benches[i]);
    for (size_t i = 0; stacks && i < n_stacks; i++) free_stack(&stacks[i]);
    free(benches);
    free(stacks);
    return ok ? EXIT_DONE : out_of_memory();
}

/* ==== 6. Models ======================================================================================== */

/* The time per kind of node in a session's graphs. */
typedef struct profile {
    struct {
        moe_node like;
        double seconds;
    } nodes[256];
    size_t count;
    double begin; /* start of the current node, seconds */
} profile;

typedef struct model_bench {
    const char *path;
    const moe_model *model;
    const machine *machine;
    moe_session *session;
    int batch, beam;
    sentences made;
    const sentences *text; /* `made` or the sentences of --sentences */
    size_t sent, tokens, shorter;
    int broken, only_prompts; /* only_prompts: 1 if targets have one token */
    uint64_t random;          /* state for sampling tokens of targets */
    profile *profile;         /* results of a profiled run, or NULL */
    double *seconds, *prompt_seconds;
    double visits, read; /* expert visits; mean number of experts per decoder run without prompts */
    double wall, busy, steps, rss_mb;
    double hits, fetched; /* in the last run: visits to cached experts, bytes of fetched experts */
} model_bench;

static void note_node(profile *p, const moe_node *t, int after) {
    const double at = now();
    size_t i = 0;
    if (!after) {
        p->begin = at;
        return;
    }
    while (i < p->count && !same_kind(&p->nodes[i].like, t)) i++;
    if (i == MOE_COUNT(p->nodes)) return;
    if (i == p->count) p->nodes[p->count++].like = *t; /* add this kind with 0 seconds */
    p->nodes[i].seconds += at - p->begin;
}

/* Replace each row's best token with a random one. With random weights, greedy search soon repeats tokens, which would
 * select the same experts again. */
static void draw_tokens(model_bench *b) {
    const moe_session *s = b->session;
    const moe_beam *f = &s->frames[MOE_DECODER].beam;
    for (size_t r = 0; r < s->frames[MOE_DECODER].rows; r++) {
        int32_t *id = f->top_ids + r * s->graphs[MOE_DECODER].top;
        b->random = b->random * 6364136223846793005u + 1442695040888963407u;
        *id = (int32_t)((b->random >> 33) % (uint64_t)b->model->vocabulary);
        while (moe_is_end(&s->search, *id)) *id = (*id + 1) % (int32_t)b->model->vocabulary;
    }
}

static void watch_node(void *watcher, const moe_node *t, int after) {
    model_bench *b = watcher;
    if (b->profile) note_node(b->profile, t, after);
    if (after && t->op == MOE_OP_OUTPUT && b->text == &b->made && moe_model_prompted(b->model)) draw_tokens(b);
}

/* Pull the next sentence and set the session's length limit for it, because requests have no limits of their own. */
static int pull_source(void *user, int wait, moe_request *q) {
    model_bench *b = user;
    const sentence *next;
    (void)wait;
    if (b->sent == b->text->count) return MOE_PULL_END;
    next = &b->text->all[b->sent++];
    q->source = next->ids;
    q->n_source = next->n;
    q->raw = b->text != &b->made;
    q->force = next->force;
    q->user = (void *)(uintptr_t)next;
    b->session->params.max_len_offset = b->only_prompts ? 1 : next->target;
    return MOE_PULL_REQUEST;
}

static void count_result(void *user, const moe_result *result) {
    model_bench *b = user;
    const moe_hypothesis *h = result->hypotheses;
    const sentence *of = result->user;
    size_t tokens;
    if (result->status != MOE_OK || !result->n_hypotheses) {
        if (!b->broken) fprintf(stderr, "moe-bench: %s: %s\n", b->path, result->message);
        b->broken = 1;
        return;
    }
    tokens = h->n_ids + (size_t)h->finished + (size_t)(b->text == &b->made && b->model->forced_tag);
    b->tokens += tokens;
    b->shorter += !b->only_prompts && tokens < (size_t)of->target;
}

/* Translate all sentences once; return the seconds, or a negative number on failure. */
static double translate_batch(model_bench *b) {
    const moe_stats before = moe_session_stats(b->session);
    moe_error e;
    double begin = now(), busy = processor_time();
    b->sent = 0;
    b->tokens = b->shorter = 0;
    if (moe_translate(b->session, pull_source, count_result, b, &e)) {
        fprintf(stderr, "moe-bench: %s: %s\n", b->path, e.message);
        return -1;
    }
    begin = now() - begin;
    b->wall += begin;
    b->busy += processor_time() - busy;
    const moe_stats after = moe_session_stats(b->session);
    b->steps = (double)(after.steps - before.steps);
    b->visits = (double)(after.expert_visits - before.expert_visits);
    b->hits = (double)(after.expert_hits - before.expert_hits);
    b->fetched = (double)(after.expert_fetch_bytes - before.expert_fetch_bytes);
    return b->broken ? -1 : begin;
}

/* Translate all sentences. If the model is prompted, first measure the prompts alone. */
static int translate_twice(model_bench *b, int rep) {
    b->only_prompts = moe_model_prompted(b->model);
    b->steps = b->visits = 0;
    if (b->only_prompts) b->prompt_seconds[rep] = translate_batch(b);
    const double steps = b->steps, visits = b->visits;
    b->only_prompts = 0;
    b->seconds[rep] = translate_batch(b);
    b->read = (b->visits - visits) / (b->steps - steps);
    return b->seconds[rep] >= 0 && b->prompt_seconds[rep] >= 0;
}

/* Generate a batch of random sentences. */
static moe_status make_sentences(const options *o, const model_bench *b, sentences *out, moe_error *e) {
    const moe_model *m = b->model;
    const int extra = m->source_tag + m->source_bos + m->source_eos;
    const size_t count = (size_t)b->batch, pieces = (size_t)(o->src_len - extra);
    uint64_t random = 7;
    if (o->src_len <= extra)
        return moe_fail(e, MOE_ERROR_ARGUMENT, "src-len", "--src-len must be above %d for this model", extra);
    *out = (sentences){ .all = calloc(count, sizeof *out->all),
                        .count = count,
                        .ids = calloc(count * pieces, sizeof *out->ids),
                        .longest_source = (int)moe_max(2, (size_t)o->src_len),
                        .longest_target = o->tgt_len,
                        .sources = (double)count * o->src_len,
                        .targets = (double)count * o->tgt_len };
    if (!out->all || !out->ids) return moe_fail(e, MOE_ERROR_MEMORY, "batch", "memory ran out");
    for (size_t i = 0; i < count; i++) out->all[i] = (sentence){ out->ids + i * pieces, pieces, -1, o->tgt_len };
    for (size_t i = 0; i < count * pieces; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        out->ids[i] = (int32_t)((random >> 33) % (uint64_t)m->source_vocabulary);
    }
    return MOE_OK;
}

static moe_status make_model_bench(const options *o, model_bench *b, moe_error *e) {
    moe_session_params p = moe_session_params_default(b->model);
    const moe_model *m = b->model;
    b->text = o->given.count ? &o->given : &b->made;
    if (!o->given.count) MOE_TRY(make_sentences(o, b, &b->made, e));
    b->seconds = calloc((size_t)o->reps, sizeof *b->seconds);
    b->prompt_seconds = calloc((size_t)o->reps, sizeof *b->prompt_seconds);
    if (!b->seconds || !b->prompt_seconds) return moe_fail(e, MOE_ERROR_MEMORY, "batch", "memory ran out");
    p.threads = (int)b->machine->threads;
    p.batch = b->batch;
    p.beam = b->beam;
    p.nbest = 1;
    p.max_source = b->text->longest_source;
    p.max_target = p.min_target = p.max_len_offset = b->text->longest_target;
    p.max_len_factor = 0;
    p.prune = p.rerank = 0;
    p.isa = b->machine->kernels->name;
    p.expert_memory = o->expert_memory;
    if (m->source_tag && p.target_tag < 0) p.target_tag = m->tags ? (int32_t)moe_meta_int(m->tags, 0) : 0;
    MOE_TRY(moe_session_new(m, &p, &b->session, e));
    b->session->shares = 0; /* compute each prompt anew even if an earlier one was equal */
    for (int g = 0; g < MOE_GRAPHS; g++) b->session->graphs[g].watch = watch_node, b->session->graphs[g].watcher = b;
    return MOE_OK;
}

static void free_model_bench(model_bench *b) {
    moe_session_free(b->session);
    free_sentences(&b->made);
    free(b->seconds);
    free(b->prompt_seconds);
    b->session = NULL;
    b->seconds = b->prompt_seconds = NULL;
}

static moe_status open_model(const options *o, const char *path, moe_model **out, moe_error *e) {
    const moe_model_params params = { .copy = o->no_mmap, .stream = o->expert_memory != 0 };
    const moe_status status = moe_model_open(path, &params, out, e);
    if (status == MOE_OK) (*out)->n_ends = 1; /* a forced length is supported with a single end token */
    return status;
}

/* Return the peak memory of a process that opens the model, creates the session and translates once, or 0 on failure.
 * The process also reads the file into the page cache. */
static double probe_memory(const options *o, const model_bench *like) {
    struct rusage used;
    int status;
    pid_t child = fork();
    if (child < 0) return 0;
    if (child == 0) {
        model_bench b = *like;
        moe_model *m;
        moe_error e;
        if (open_model(o, b.path, &m, &e)) _exit(1);
        b.model = m;
        _exit(make_model_bench(o, &b, &e) || translate_batch(&b) < 0);
    }
    if (wait4(child, &status, 0, &used) < 0 || status) return 0;
#ifdef __APPLE__
    return (double)used.ru_maxrss / 1048576;
#else
    return (double)used.ru_maxrss / 1024;
#endif
}

/* Return the minimum time of all nodes for all sentences, or only of nodes of the same kind as `like`. The encoder runs
 * on the groups that the session would form. The decoder's first step has a row per sentence, later steps one row per
 * hypothesis. All sentences have the mean length, in full batches. */
static double model_bound(const model_bench *b, const moe_node *like) {
    const moe_session *s = b->session;
    const double all = (double)b->text->count, source = b->text->sources / all, target = b->text->targets / all;
    const double batch = fmin(all, b->batch),
                 most = floor((double)(s->encode_tokens - (size_t)s->params.max_source) / source) + 1;
    double seconds = 0;
    load at = { 0, source, 0, source, 0, graph_weights(&s->graphs[MOE_ENCODER]) };
    for (double done = 0; done < all; done += most) {
        at.sentences = fmin(most, all - done);
        at.rows = at.sentences * source;
        seconds += graph_cost(b->machine, &s->graphs[MOE_ENCODER], 0, like, &at).seconds;
    }
    at.resident = graph_weights(&s->graphs[MOE_DECODER]);
    at.sentences = batch;
    const double prompt = moe_model_prompted(b->model) ? source - 1 : 0, room = (double)s->search.ahead;
    for (double done = 0, rows = prompt * batch; done < rows && room > 0; done += room) {
        at.rows = fmin(room, rows - done);
        at.target = prompt / 2;
        seconds += all / batch * graph_cost(b->machine, &s->graphs[MOE_DECODER], 0, like, &at).seconds;
    }
    for (double step = 0; step < target; step++) {
        const double part = fmin(1, target - step) * all / batch;
        at.rows = batch * (step > 0 ? b->beam : 1);
        at.target = prompt + step + 1;
        seconds += part * graph_cost(b->machine, &s->graphs[MOE_DECODER], 0, like, &at).seconds;
    }
    return seconds;
}

/* Write the number format of the output layer, and the format of the experts if they use another. */
static void name_types(const moe_model *m, char *out, size_t size) {
    const char *type = moe_type_name(m->output.type), *experts = type;
    for (size_t i = 0; i < m->n_decoder; i++)
        if (m->decoder[i].type == &moe_mixture_type) experts = moe_type_name(m->decoder[i].mixture.experts.up.type);
    snprintf(out, size, strcmp(type, experts) ? "%s/%s" : "%s", type, experts);
}

static void name_model(const char *path, char *out, size_t size) {
    const char *slash = strrchr(path, '/');
    if (slash && slash[1]) path = slash + 1;
    plain(path, strlen(path), out, size);
}

/* Write the name of a kind of node, such as decoder.*.units. */
static void name_kind(const moe_node *t, char *out) {
    for (const char *x = t->name; *x; x++) {
        const size_t digits = *x == '.' ? strspn(x + 1, "0123456789") : 0;
        *out++ = *x;
        if (digits) *out++ = '*';
        x += digits;
    }
    *out = '\0';
}

static void report_node(report *r, const model_bench *b, const char *node, const char *op, double seconds, double whole,
                        double bound) {
    char model[128];
    record out;
    name_model(b->path, model, sizeof model);
    begin_record(&out, "profile");
    json_text(&out.json, "model", model);
    json_text(&out.json, "isa", b->machine->kernels->name);
    json_whole(&out.json, "batch", b->batch);
    json_whole(&out.json, "beam", b->beam);
    json_text(&out.json, "node", node);
    json_text(&out.json, "op", op);
    json_digits(&out.json, "ms", seconds * 1e3, 4);
    json_fixed(&out.json, "share", seconds / whole, 4);
    json_fixed(&out.json, "roofline_share", bound / seconds, 3);
    end_record(r, &out);
    if (r->table)
        fprintf(stderr, "  %5.1f %%  %10.3f ms  %4.0f %% of bound  %-10s %s\n", 100 * seconds / whole, seconds * 1e3,
                100 * bound / seconds, op, node);
}

/* Run once more and report the time of each kind of node; the remaining time is spent on the search and the queue. */
static int profile_model(report *r, model_bench *b) {
    profile *p = calloc(1, sizeof *p);
    double whole, rest, small = 0, small_bound = 0;
    if (!p) return out_of_memory();
    b->profile = p;
    whole = translate_batch(b);
    b->profile = NULL;
    if (whole < 0) {
        free(p);
        return EXIT_MODEL;
    }
    rest = whole;
    for (size_t i = 0; i < p->count; i++) rest -= p->nodes[i].seconds;
    if (r->table)
        fprintf(stderr, "\n%s, batch %d, beam %d, %s: %.2f ms\n", b->path, b->batch, b->beam, b->machine->kernels->name,
                whole * 1e3);
    for (size_t i = 0; i < p->count; i++) {
        const moe_node *t = &p->nodes[i].like;
        const double seconds = p->nodes[i].seconds, bound = model_bound(b, t);
        char name[2 * sizeof t->name];
        name_kind(t, name);
        if (seconds < 0.002 * whole) small += seconds, small_bound += bound;
        else report_node(r, b, name, moe_ops[t->op].name, seconds, whole, bound);
    }
    report_node(r, b, "smaller ones", "all", small, whole, small_bound);
    report_node(r, b, "search and queue", "none", rest, whole, 0);
    free(p);
    return EXIT_DONE;
}

/* A thread that reads random slabs like the readers of a session. */
typedef struct disk_reader {
    const moe_bank *bank;
    char *slab;
    uint64_t random;
    double end, bytes, busy; /* busy: CPU time in seconds */
    pthread_t thread;
} disk_reader;

static void *read_slabs(void *user) {
    disk_reader *d = user;
    moe_error e;
    while (now() < d->end) {
        d->random = d->random * 6364136223846793005u + 1442695040888963407u;
        const size_t number = (size_t)(d->random >> 33) % d->bank->experts;
        const moe_bank_layer *layer = d->bank->layers;
        while (number >= layer->cache.first + layer->cache.count) layer++;
        const moe_tensor_info *t = &d->bank->file->tensors[layer->experts->tensor];
        if (moe_read_expert(d->bank->file, t, number - layer->cache.first, d->slab, &e)) return d->bytes = 0, NULL;
        d->bytes += (double)layer->experts->stride;
    }
    d->busy = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    return NULL;
}

/* Return the bytes per second, or 0 on failure. Set *busy to CPU seconds per 10^9 bytes. */
static double measure_disk(const moe_bank *bank, double *busy) {
    disk_reader readers[MOE_READERS];
    const double begin = now();
    double bytes = 0;
    *busy = 0;
    size_t n = 0;
    for (; n < MOE_READERS; n++) {
        disk_reader *d = &readers[n];
        void *slab = NULL;
        *d = (disk_reader){ .bank = bank, .random = n + 1, .end = begin + 2 };
        const size_t held = moe_round_up(bank->slot_bytes, 1 << 21); /* sessions allocate slots of this size */
        if (posix_memalign(&slab, 1 << 21, held)) break;
        moe_advise_huge_pages(slab, held);
        memset(slab, 0, held);
        d->slab = slab;
        if (pthread_create(&d->thread, NULL, read_slabs, d)) {
            free(slab);
            break;
        }
    }
    for (size_t i = 0; i < n; i++)
        pthread_join(readers[i].thread, NULL), bytes += readers[i].bytes, *busy += readers[i].busy;
    for (size_t i = 0; i < n; i++) free(readers[i].slab);
    if (n < MOE_READERS) bytes = 0;
    *busy = bytes > 0 ? *busy * 1e9 / bytes : 0;
    return bytes / (now() - begin);
}

/* If the model reads experts from its file, report them in the record and in a second line of the table. */
static void report_experts(report *r, record *out, const model_bench *b, double seconds) {
    double busy;
    const double disk = measure_disk(&b->session->bank, &busy), read = disk > 0 ? b->fetched / disk : 0,
                 least = fmax(read, model_bound(b, NULL)), per_token = b->fetched / (double)b->tokens;
    json_whole(&out->json, "experts", (int64_t)b->session->bank.experts);
    json_whole(&out->json, "experts_held", (int64_t)b->session->bank.slots);
    json_fixed(&out->json, "hit_rate", b->hits / fmax(b->visits, 1), 4);
    json_digits(&out->json, "bytes_token", per_token, 5);
    json_fixed(&out->json, "disk_gb_s", disk * 1e-9, 3);
    json_fixed(&out->json, "disk_cpu_s_gb", busy, 4);
    json_fixed(&out->json, "read_share", read / seconds, 3);
    json_fixed(&out->json, "bound_share", least / seconds, 3);
    if (r->table)
        fprintf(stderr,
                "%33s hits %.1f %%, %.2f MB a token, disk %.2f GB/s, %.2f s/GB, %.0f %% of max(read, compute)\n", "",
                100 * b->hits / fmax(b->visits, 1), per_token * 1e-6, disk * 1e-9, busy, 100 * least / seconds);
}

static void report_model(report *r, const options *o, model_bench *b) {
    const timing t = sum_up(b->seconds, (size_t)o->reps);
    const double share = model_bound(b, NULL) / t.median, tok_s = (double)b->tokens / t.median;
    const double ms_per_step = t.median * 1e3 / b->steps, cpu_share = b->busy / b->wall / (double)b->machine->threads;
    const double prompts = sum_up(b->prompt_seconds, (size_t)o->reps).median; /* 0 if the model has an encoder */
    const double prompt_tok_s = b->text->sources / prompts,
                 decode_tok_s = ((double)b->tokens - (double)b->text->count) / (t.median - prompts);
    const size_t mixtures = moe_model_mixture_count(b->model);
    const char *isa = b->machine->kernels->name;
    char model[128], type[16];
    record out;
    name_model(b->path, model, sizeof model);
    name_types(b->model, type, sizeof type);
    begin_record(&out, "model");
    json_text(&out.json, "model", model);
    json_text(&out.json, "type", type);
    json_text(&out.json, "isa", isa);
    json_whole(&out.json, "threads", (int64_t)b->machine->threads);
    json_whole(&out.json, "batch", b->batch);
    json_whole(&out.json, "beam", b->beam);
    json_whole(&out.json, "sentences", (int64_t)b->text->count);
    json_digits(&out.json, "src_len", b->text->sources / (double)b->text->count, 4);
    json_digits(&out.json, "tgt_len", b->text->targets / (double)b->text->count, 4);
    json_digits(&out.json, "tok_s", tok_s, 5);
    if (prompts > 0) json_digits(&out.json, "prompt_tok_s", prompt_tok_s, 5);
    if (prompts > 0) json_digits(&out.json, "decode_tok_s", decode_tok_s, 5);
    if (mixtures) json_digits(&out.json, "experts_read", b->read / (double)mixtures, 4);
    json_digits(&out.json, "ms_per_step", ms_per_step, 4);
    json_digits(&out.json, "ms_median", t.median * 1e3, 5);
    json_digits(&out.json, "ms_min", t.least * 1e3, 5);
    json_fixed(&out.json, "session_mb", (double)b->session->stats.bytes / 1048576, 1);
    json_fixed(&out.json, "rss_mb", b->rss_mb, 1);
    json_fixed(&out.json, "roofline_share", share, 3);
    json_fixed(&out.json, "cpu_share", cpu_share, 2);
    if (b->session->bank.file) report_experts(r, &out, b, t.median);
    end_record(r, &out);
    if (r->table)
        fprintf(stderr, "%-24s %-6s %-10s %5d %4d %9.1f %9.3f %10.2f %8.1f %7.0f %%\n", model, type, isa, b->batch,
                b->beam, tok_s, ms_per_step, t.least * 1e3, b->rss_mb, 100 * share);
    if (r->table && prompts > 0)
        fprintf(stderr, "%33s prompts %.1f tok/s, then %.1f tok/s\n", "", prompt_tok_s, decode_tok_s);
    if (b->shorter)
        fprintf(stderr, "moe-bench: %s: %zu of %zu translations are shorter than requested\n", model, b->shorter,
                b->text->count);
}

/* Open all models and create all sessions before measuring, so that errors appear early. */
static int open_models(report *r, const options *o, moe_model **models, model_bench *benches, size_t n) {
    moe_error e;
    for (size_t i = 0; i < o->n_models; i++)
        if (open_model(o, o->models[i], &models[i], &e)) {
            clear(r);
            return fprintf(stderr, "moe-bench: %s: %s\n", o->models[i], e.message), EXIT_MODEL;
        }
    for (size_t i = 0; i < n; i++) {
        benches[i].model = models[i / (n / o->n_models)];
        progress(r, "session %zu of %zu", i + 1, n);
        if (make_model_bench(o, &benches[i], &e)) {
            clear(r);
            fprintf(stderr, "moe-bench: %s: %s\n", benches[i].path, e.message);
            return e.code == MOE_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_MODEL;
        }
    }
    return EXIT_DONE;
}

static int bench_models(report *r, const options *o, model_bench *benches, size_t n) {
    int code = EXIT_DONE;
    for (size_t i = 0; i < n && !code; i++) {
        progress(r, "warming up, %zu of %zu", i + 1, n);
        if (!translate_twice(&benches[i], 0)) code = EXIT_MODEL;
        benches[i].wall = benches[i].busy = 0;
    }
    for (int rep = 0; rep < o->reps && !code; rep++)
        for (size_t i = 0; i < n && !code; i++) {
            progress(r, "repetition %d of %d, %zu of %zu", rep + 1, o->reps, i + 1, n);
            if (!translate_twice(&benches[i], rep)) code = EXIT_MODEL;
        }
    clear(r);
    if (!code && r->table)
        fprintf(stderr, "%-24s %-6s %-10s %5s %4s %9s %9s %10s %8s %9s\n", "model", "type", "kernels", "batch", "beam",
                "tok/s", "ms/step", "ms min", "MB", "of bound");
    for (size_t i = 0; i < n && !code; i++) report_model(r, o, &benches[i]);
    for (size_t i = 0; i < n && !code && o->profile; i++) code = profile_model(r, &benches[i]);
    return code;
}

/* ==== 7. Main ============================================================================================ */

static int take_model(void *user, const option_row *row, const char *path) {
    options *o = user;
    if (o->n_models == MAX_LIST) return option_refuse(&program, "more than %d --%s", MAX_LIST, row->name);
    o->models[o->n_models++] = path;
    return -1;
}

#define MODELS "Whole models"
#define LAYERS "Layers"
#define BOTH "Both"
#define LIST_OF(take_, member) .kind = ROW_CALL, .take = (take_), .at = offsetof(options, member)

static const char every_layer[] = "moe,lstm,dense,softmax,attention";

static const option_row own_rows[] = {
    { "model", "FILE", "model file; may be repeated to alternate between models", .letter = 'm', .group = MODELS,
      .kind = ROW_CALL, .take = take_model, .repeated = 1 },
    { "batch", "LIST", "sentences decoded at once (default: 1,8,32,128)", .group = MODELS, LIST_OF(take_ints, batch),
      .low = 1, .high = 1 << 16 },
    { "beam", "LIST", "beam sizes (default: 1,4; 4 for layers)", .group = MODELS, LIST_OF(take_ints, beam), .low = 1,
      .high = MOE_MAX_BEAM,
      .more =
          ". In layers, softmax selects beam + 1 tokens, and the attention of all rows of a beam reads one sentence" },
    { "src-len", "N", "source tokens, including tag and end (default: 25)", .group = MODELS,
      OPTION_INT(src_len, 1, 1 << 16) },
    { "tgt-len", "N", "exact number of target tokens (default: 25)", .group = MODELS, OPTION_INT(tgt_len, 2, 1 << 16) },
    { "sentences", "FILE", "translate the sentences in FILE instead, --batch at a time", .group = MODELS,
      .kind = ROW_CALL, .take = read_sentences,
      .more =
          ". Each line of FILE contains numbers: the length of the target, its first token (-1: the model's choice), "
          "and the ids that the encoder reads" },
    { "no-mmap", NULL, "read the models into private memory", .group = MODELS, OPTION_FLAG(no_mmap) },
    { "expert-memory", "SIZE", "memory for experts, e.g. 4G; other experts are read from the file", .group = MODELS,
      OPTION_MEMBER(ROW_SIZE, expert_memory), .values = "a size such as 512M or 4G",
      .more =
          ". Also prints the share of visits that found their expert, bytes read per token, the disk speed for random "
          "slabs of the file with the same number of readers, their CPU time per 10^9 bytes, and "
          "max(read time, compute time) / measured time" },
    { "profile", NULL, "measure the time of each kind of node in one more run of each model", .group = MODELS,
      OPTION_FLAG(profile) },
    { "layer", "LIST",
      "moe (gate and experts), lstm (one step of a cell with its products), dense (one product, width "
      "to hidden), softmax (output product and the best tokens), attention; or all",
      .group = LAYERS, LIST_OF(take_texts, layers) },
    { "rows", "LIST", "rows per call (default: 1,8,32,128,512)", .group = LAYERS, LIST_OF(take_ints, rows), .low = 1,
      .high = 1 << 20 },
    { "type", "LIST", "types of weights: " MOE_TYPE_NAMES " (default: q8)", .group = LAYERS,
      LIST_OF(take_texts, types) },
    { "experts", "N", "number of experts (default: 32)", .group = LAYERS, OPTION_INT(experts, 1, 1 << 16) },
    { "k", "N", "experts per row (default: 4)", .group = LAYERS, OPTION_INT(k, 1, 1 << 16) },
    { "width", "N", "width of the model (default: 512)", .group = LAYERS, OPTION_INT(width, 1, 1 << 16) },
    { "hidden", "N", "hidden units (default: 2048)", .group = LAYERS, OPTION_INT(hidden, 1, 1 << 16) },
    { "vocabulary", "N", "number of tokens for softmax (default: 32000)", .group = LAYERS,
      OPTION_INT(vocabulary, 2, 1 << 20) },
    { "blocks", NULL, "give activations one scale per 64 columns, as in Hy-MT2", .group = LAYERS, OPTION_FLAG(blocks) },
    { "isa", "LIST", "instruction sets of the kernels; auto is the best one available (default: MOE_ISA, else auto)",
      .group = BOTH, LIST_OF(take_texts, isas) },
    { "threads", "N", "number of threads (default: one per processor)", .group = BOTH,
      OPTION_INT(threads, 1, MOE_MAX_THREADS) },
    { "reps", "N", "repetitions of all configurations, after a warm-up (default: 5)", .group = BOTH,
      OPTION_INT(reps, 1, 10000) },
    { 0 },
};

static const option_program program = {
    .name = "moe-bench",
    .usage = "--layer LIST [OPTION]...     single layers with random weights\n"
             "-m FILE [OPTION]...          whole models, forced lengths\n"
             "                             the machine only",
    .about = "Measure layers and models: one JSON object per line, a table on a terminal.\n"
             "\n"
             "Results are printed to standard output, the table and progress to standard error if it is a terminal. "
             "Commas separate the elements of a LIST.",
    OPTION_LISTS(OPTION_OWN),
    .notes = "The first lines have \"what\": \"machine\", with measurements of the same run, with the same threads:\n"
             "  dram_gbytes_s, cache_gbytes_s, l2_gbytes_s\n"
             "                       10^9 bytes per second, reading a buffer far larger than\n"
             "                       the last cache, one of 16 MB, and one of half of a\n"
             "                       core's second-level cache\n"
             "  integer_gops         multiply-adds of the instruction set's own instruction in\n"
             "                       registers; each counts as two operations\n"
             "  float_gops           float multiplications and additions, each rounded (the\n"
             "                       engine never fuses them)\n"
             "The best of many short attempts counts. Peaks and L2 are measured per CPU time, times the processors in "
             "use.\n"
             "\n"
             "Layers: ms_median and ms_min are the time of one call; gops is 10^9 operations per second; gbytes_s is "
             "the bytes of weights and inputs that must be read per second, in 10^9. Every call has different rows, so "
             "that the experts change as in a model; inputs are in memory beforehand.\n"
             "\n"
             "Models: tok_s is target tokens of best hypotheses per second of the median repetition, encoder "
             "included; ms_per_step is its time per decoder step; rss_mb is the peak memory of a process that does "
             "only this, mapped model included. With --sentences src_len and tgt_len are means. A model without an "
             "encoder has prompt_tok_s, prompt tokens per second until the first target token, and decode_tok_s, later "
             "target tokens per second; target tokens are random. experts_read is the mean number of experts that a "
             "mixture reads in a decoder run, without prompts. --profile adds lines with \"what\": \"profile\": one "
             "for each kind of node that took at least 0.2 % of a run, one for all others, and one for the time "
             "outside of nodes. Nodes with the same name in all layers are one kind: decoder.*.units.\n"
             "\n"
             "roofline_share is bound / ms_median. The bound of a call is the sum over its nodes of max(integer "
             "operations / integer peak + float operations / float peak, weights / bandwidth of the level that holds "
             "the working set + inputs / bandwidth of the level that holds the inputs). The working set is all "
             "weights of the graph (a layer, a decoder step); of the recurrence inside an encoder layer it is its two "
             "matrices. exp, tanh and sigmoid count as 30 float operations. The experts that a call reads are "
             "estimated for random routing: E (1 - (1 - k/E)^rows). Quantised products count as integer operations, "
             "others as float.\n"
             "\n"
             "dram_share is for layers larger than the last cache: gbytes_s divided by the speed of reading the same "
             "memory in order. That speed is measured again after every repetition, since memory speed changes on a "
             "shared machine; the median of these pairs counts. Weights that every call reads, such as those of a "
             "gate, can still be in a cache.\n"
             "\n"
             "cpu_share is CPU time / (time * threads). A value well under 1 means that other processes used the "
             "machine, or that the work was too small for this number of threads.\n"
             "\n"
             "Exit status: 0 done, 2 usage error, 3 model or memory error, 4 output error.\n",
};

static void set_list(options *o, const char *name, const char *text) {
    const option_row *row = own_rows;
    while (strcmp(row->name, name) != 0) row++;
    row->take(o, row, text);
}

static int check_layer(const char *name) {
    for (const char *at = every_layer; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strcspn(at, ",") == strlen(name) && strncmp(at, name, strlen(name)) == 0) return -1;
    return bad_value("layer", name, "moe, lstm, dense, softmax, attention or all");
}

static int parse_options(int argc, char **argv, options *o) {
    const char *isa = getenv("MOE_ISA");
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int status;
    memset(o, 0, sizeof *o);
    o->experts = 32, o->k = 4, o->width = 512, o->hidden = 2048, o->vocabulary = 32000;
    o->src_len = o->tgt_len = 25;
    o->reps = 5;
    o->threads = processors < 1 ? 1 : processors > MOE_MAX_THREADS ? MOE_MAX_THREADS : (int)processors;
    set_list(o, "rows", "1,8,32,128,512");
    set_list(o, "batch", "1,8,32,128");
    set_list(o, "type", "q8");
    set_list(o, "isa", isa && *isa ? isa : "auto");
    if ((status = option_parse(&program, argc, argv, o)) >= 0) return status;
    if (o->n_models && o->layers.count) return option_refuse(&program, "--layer cannot be combined with --model");
    if (o->k > o->experts) return option_refuse(&program, "--k is larger than --experts");
    if (!o->beam.count) set_list(o, "beam", o->n_models ? "1,4" : "4");
    if (o->layers.count == 1 && strcmp(o->layers.values[0], "all") == 0) set_list(o, "layer", every_layer);
    for (size_t i = 0; i < o->types.count; i++) {
        moe_type type;
        if (!moe_type_parse(o->types.values[i], &type)) return bad_value("type", o->types.values[i], MOE_TYPE_NAMES);
    }
    for (size_t i = 0; i < o->layers.count && status < 0; i++) status = check_layer(o->layers.values[i]);
    return status;
}

int main(int argc, char **argv) {
    static options o; /* must not be copied, because o.text_list contains pointers into itself */
    machine machines[MAX_LIST];
    report r = { isatty(2), 0 };
    model_bench *benches = NULL;
    moe_model *models[MAX_LIST] = { NULL };
    moe_pool *pool = NULL;
    moe_error e;
    size_t n;
    int code;
    if ((code = parse_options(argc, argv, &o)) >= 0) return code;
    code = EXIT_DONE;
    memset(machines, 0, sizeof machines);
    for (size_t i = 0; i < o.isas.count; i++) {
        machines[i].threads = (size_t)o.threads;
        if (moe_choose_kernels(o.isas.values[i], &machines[i].kernels, &e))
            return fprintf(stderr, "moe-bench: %s\n", e.message), EXIT_USAGE;
    }
    /* Measure memory first, while this process is small and has no threads. */
    n = o.n_models * o.batch.count * o.beam.count * o.isas.count;
    if (n && !(benches = calloc(n, sizeof *benches))) return out_of_memory();
    for (size_t i = 0; i < n; i++) {
        size_t at = i / o.isas.count;
        benches[i].machine = &machines[i % o.isas.count];
        benches[i].beam = o.beam.values[at % o.beam.count];
        at /= o.beam.count;
        benches[i].batch = o.batch.values[at % o.batch.count];
        benches[i].path = o.models[at / o.batch.count];
        progress(&r, "memory, %zu of %zu", i + 1, n);
        benches[i].rss_mb = probe_memory(&o, &benches[i]);
    }
    code = open_models(&r, &o, models, benches, n);
    if (!code && (!(pool = calloc(1, sizeof *pool)) || moe_pool_start(pool, (size_t)o.threads, &e)))
        code = out_of_memory();
    progress(&r, "measuring this machine");
    if (!code && !measure_bandwidth(&machines[0], pool)) code = out_of_memory();
    for (size_t i = 0; i < o.isas.count && !code; i++) {
        const moe_kernels *kernels = machines[i].kernels;
        machines[i] = machines[0];
        machines[i].kernels = kernels;
        measure_peaks(&machines[i], pool);
        report_machine(&r, &machines[i]);
    }
    if (!code && o.layers.count) code = bench_layers(&r, &o, machines, pool);
    else if (!code && n) code = bench_models(&r, &o, benches, n);
    for (size_t i = 0; i < n; i++) free_model_bench(&benches[i]);
    for (size_t i = 0; i < o.n_models; i++) moe_model_close(models[i]);
    free_sentences(&o.given);
    if (pool) moe_pool_free(pool, pool->count);
    free(pool);
    free(benches);
    if (!code && (r.failed || fflush(stdout))) {
        fputs("moe-bench: cannot write the results\n", stderr);
        code = EXIT_INPUT_OUTPUT;
    }
    return code;
}
