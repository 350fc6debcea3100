/* ranks.c - see ranks.h. The only file that knows MPI.
 *
 * Contents
 *   1. Wire      the three collective calls of moe.h
 *   2. Lines     what rank 0 reads, cut into a part for each rank
 *   3. Rounds    parts go out, translations come back
 */
#define _POSIX_C_SOURCE 200809L /* pread */

#include "tools/programs/ranks.h"

#ifdef MOE_MPI

#include "tools/text/spans.h"

#include <errno.h>
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ==== 1. Wire =========================================================================================== */

static struct {
    int begun, rank, ranks;
    MPI_Comm wire;                                            /* of sessions, apart from that of lines */
    int *send_bytes, *send_from, *receive_bytes, *receive_at; /* [ranks] */
} all = { .ranks = 1 };

static _Noreturn void give_up(const char *what) {
    program_complain("rank %d: %s", all.rank, what);
    MPI_Abort(MPI_COMM_WORLD, EXIT_INPUT_OUTPUT);
    abort();
}

static moe_status agree(void *user, int64_t *values, size_t n, moe_error *error) {
    (void)user, (void)error;
    MPI_Allreduce(MPI_IN_PLACE, values, (int)n, MPI_INT64_T, MPI_MAX, all.wire);
    return MOE_OK;
}

static moe_status counts(void *user, const uint32_t *send, uint32_t *recv, size_t each, moe_error *error) {
    (void)user, (void)error;
    MPI_Alltoall(send, (int)each, MPI_UINT32_T, recv, (int)each, MPI_UINT32_T, all.wire);
    return MOE_OK;
}

/* Sizes as MPI has them, and where each piece begins. */
static void places(const size_t *bytes, int *sizes, int *at) {
    int next = 0;
    for (int i = 0; i < all.ranks; next += sizes[i++]) at[i] = next, sizes[i] = (int)bytes[i];
}

static moe_status swap(void *user, const void *send, const size_t *send_bytes, void *recv, const size_t *recv_bytes,
                       moe_error *error) {
    (void)user, (void)error;
    places(send_bytes, all.send_bytes, all.send_from);
    places(recv_bytes, all.receive_bytes, all.receive_at);
    MPI_Alltoallv(send, all.send_bytes, all.send_from, MPI_BYTE, recv, all.receive_bytes, all.receive_at, MPI_BYTE,
                  all.wire);
    return MOE_OK;
}

/* Whether all ranks are made of the same sources: others may cut lines into other tokens, or wait for other messages.
 * In all builds this is what ranks say first. */
static int alike(void) {
    int64_t own = RANKS_SOURCE, values[2];
    for (const char *at = SPM_LIBRARY_VERSION; *at; at++) own = (own * 31 + *at) % UINT32_MAX;
    values[0] = own, values[1] = -own;
    MPI_Allreduce(MPI_IN_PLACE, values, 2, MPI_INT64_T, MPI_MAX, all.wire);
    return values[0] == -values[1];
}

/* Processes that mpirun did not start are alone, and need not wait for MPI. */
int ranks_begin(void) {
    int level;
    if (!getenv("OMPI_COMM_WORLD_SIZE") && !getenv("PMI_SIZE") && !getenv("PMIX_RANK")) return 1;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &all.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &all.ranks);
    MPI_Comm_dup(MPI_COMM_WORLD, &all.wire);
    all.begun = 1;
    all.send_bytes = calloc((size_t)all.ranks * 4, sizeof *all.send_bytes);
    if (!all.send_bytes) give_up("out of memory");
    all.send_from = all.send_bytes + all.ranks;
    all.receive_bytes = all.send_from + all.ranks;
    all.receive_at = all.receive_bytes + all.ranks;
    if (level < MPI_THREAD_FUNNELED) give_up("this MPI is not for programs with threads");
    if (alike()) return all.ranks;
    program_complain("rank %d: the ranks run different builds of moe-translate: all need the same", all.rank);
    return 0;
}

void ranks_end(void) {
    if (all.begun) MPI_Finalize();
    free(all.send_bytes);
}

const moe_wire *ranks_wire(void) {
    static moe_wire wire;
    wire = (moe_wire){ NULL, all.rank, all.ranks, agree, counts, swap };
    return all.ranks > 1 ? &wire : NULL;
}

int ranks_status(int status) {
    if (all.ranks > 1) MPI_Allreduce(MPI_IN_PLACE, &status, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return status;
}

/* ==== 2. Lines ========================================================================================== */

enum { MOST_BYTES = 1 << 28, MESSAGE_LINES = 64 }; /* of a round; that a message of ICU may go over, as in program.c */

/* The input of rank 0, as bytes: what the program that translates a part reads is as it was. */
typedef struct source {
    int fd, at_end; /* -1: all of it is in the buffer */
    text_bytes buffer;
    int error;
    size_t at, looked, lines, held; /* measured so far: bytes of whole lines, bytes looked at, lines, lines of a message
                                       that still count as its own */
} source;

/* Go on to measure until there are so many lines. Their bytes, or 0 if more must be read. A cut does not go through the
 * lines of a message. */
static size_t measure(source *s, size_t lines) {
    while (s->at < s->buffer.length && (s->lines < lines || s->held)) {
        const char *data = s->buffer.data, *end;
        int open = 0;
        if (s->looked < s->at) s->looked = s->at;
        end = memchr(data + s->looked, '\n', s->buffer.length - s->looked);
        s->looked = end ? (size_t)(end - data) : s->buffer.length;
        if (!end && !s->at_end) break;
        const size_t length = s->looked - s->at;
        if (length <= TEXT_MAX_LINE) text_message_lines(data + s->at, length, length, &open);
        s->held = open ? MESSAGE_LINES : s->held - (s->held > 0);
        s->at = s->looked + (end != NULL);
        s->lines++;
    }
    return (s->lines < lines || s->held) && !s->at_end ? 0 : s->at;
}

/* Read until the buffer has the lines of a round; gives their bytes. */
static size_t read_round(source *s, size_t lines) {
    size_t bytes;
    while (!(bytes = measure(s, lines)) && !s->at_end && !s->error && !program_signal) {
        if (s->buffer.length > MOST_BYTES || !text_room(&s->buffer, 1 << 16)) {
            s->error = ENOMEM;
            break;
        }
        const ssize_t got = read(s->fd, s->buffer.data + s->buffer.length, 1 << 16);
        if (got < 0 && errno != EINTR) s->error = errno;
        if (got == 0) s->at_end = 1;
        if (got > 0) s->buffer.length += (size_t)got;
    }
    return bytes;
}

/* ==== 3. Rounds ========================================================================================= */

/* What a rank gets and what it gives, beside the bytes. */
typedef struct ticket {
    int64_t bytes, before, lines, failed;
} ticket;

static void must(int condition, const char *what) {
    if (!condition) give_up(what);
}

/* Translate `bytes` through files that stand in for the standard streams; *out gets what came. */
static int translate_part(ranks_part *part, const char *bytes, size_t n, text_bytes *out) {
    FILE *in = tmpfile(), *to = tmpfile();
    must(in && to && fwrite(bytes, 1, n, in) == n && !fflush(in), "no temporary file");
    must(lseek(fileno(in), 0, SEEK_SET) == 0 && dup2(fileno(in), STDIN_FILENO) >= 0, "no temporary file");
    must(dup2(fileno(to), STDOUT_FILENO) >= 0, "no temporary file");
    const int status = part->translate(part->user, part);
    const off_t length = lseek(fileno(to), 0, SEEK_END);
    text_clear(out);
    must(length >= 0 && length < INT_MAX && text_room(out, (size_t)length + 1), "out of memory");
    must(pread(fileno(to), out->data, (size_t)length, 0) == (ssize_t)length, "a temporary file cannot be read");
    out->length = (size_t)length;
    fclose(in);
    fclose(to);
    return status;
}

/* Cut the bytes of a round into parts of about the same length. */
static void cut(const source *s, size_t bytes, uint64_t before, ticket *tickets) {
    size_t at = 0;
    for (int i = 0; i < all.ranks; i++) {
        const size_t aim = bytes * (size_t)(i + 1) / (size_t)all.ranks;
        tickets[i] = (ticket){ .before = (int64_t)before };
        while (at < bytes && (at < aim || i == all.ranks - 1)) {
            source rest = { .at_end = 1, .buffer = { .data = s->buffer.data + at, .length = bytes - at } };
            const size_t more = measure(&rest, 1);
            tickets[i].bytes += (int64_t)more;
            before += rest.lines;
            at += more;
        }
    }
}

/* Hand out a round of `bytes` bytes, translate, and bring it home. Gives the exit status of all. */
static int one_round(source *s, size_t bytes, ranks_part *part, ticket *tickets, program_output *out, ranks_part *sum) {
    int *sizes = all.send_bytes, *at = all.send_from;
    ticket own = { 0 };
    text_bytes mine = { 0 }, translated = { 0 }, home = { 0 };
    if (all.rank == 0) cut(s, bytes, sum->before, tickets);
    MPI_Scatter(tickets, sizeof own, MPI_BYTE, &own, sizeof own, MPI_BYTE, 0, MPI_COMM_WORLD);
    must(text_room(&mine, (size_t)own.bytes + 1), "out of memory");
    int next = 0;
    for (int i = 0; i < all.ranks && all.rank == 0; next += sizes[i++]) at[i] = next, sizes[i] = (int)tickets[i].bytes;
    MPI_Scatterv(s->buffer.data, sizes, at, MPI_BYTE, mine.data, (int)own.bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    part->before = (uint64_t)own.before;
    part->lines = part->failed = 0;
    const int status = translate_part(part, mine.data, (size_t)own.bytes, &translated);
    own = (ticket){ (int64_t)translated.length, 0, (int64_t)part->lines, (int64_t)part->failed };
    MPI_Gather(&own, sizeof own, MPI_BYTE, tickets, sizeof own, MPI_BYTE, 0, MPI_COMM_WORLD);
    next = 0;
    for (int i = 0; i < all.ranks && all.rank == 0; next += sizes[i++]) {
        at[i] = next, sizes[i] = (int)tickets[i].bytes;
        sum->lines += (uint64_t)tickets[i].lines, sum->failed += (uint64_t)tickets[i].failed;
    }
    must(text_room(&home, (size_t)next + 1), "out of memory");
    MPI_Gatherv(translated.data, (int)own.bytes, MPI_BYTE, home.data, sizes, at, MPI_BYTE, 0, MPI_COMM_WORLD);
    const int worst = ranks_status(status);
    if (all.rank == 0 && worst <= EXIT_SOME_LINES) program_write(out, home.data, (size_t)next);
    if (all.rank == 0) sum->before = sum->lines;
    text_bytes_free(&mine), text_bytes_free(&translated), text_bytes_free(&home);
    return worst;
}

/* What ended the input or the output of rank 0; gives the exit status. */
static int failure(const program_common *o, const source *s, const program_output *out) {
    if (out->error)
        program_complain("%s: %s; %llu whole lines were written", out->name, strerror(out->error),
                         (unsigned long long)out->lines);
    else if (s->error) program_complain("%s: %s", o->input ? o->input : "standard input", strerror(s->error));
    return out->error || s->error ? EXIT_INPUT_OUTPUT : program_signal ? program_stopped(o, out) : -1;
}

int ranks_translate(const program_common *o, size_t lines, ranks_part *part) {
    ticket *tickets = calloc((size_t)all.ranks, sizeof *tickets);
    program_output out = { .fd = -1 };
    source s = { .fd = -1 };
    ranks_part sum = { .lines = 0 };
    int in = -1, status = EXIT_DONE, opened = -1;
    must(tickets != NULL, "out of memory");
    if (all.rank == 0) opened = program_open_streams(o, &in, &out);
    if (all.rank == 0 && opened < 0) {
        s.fd = o->text ? -1 : dup(in);
        if (!o->output) out.fd = dup(STDOUT_FILENO);
        if (o->text) text_append_string(&s.buffer, o->text), s.at_end = 1;
        must((o->text ? !s.buffer.failed : s.fd >= 0) && out.fd >= 0, "no descriptors or memory left");
    }
    opened = ranks_status(opened);
    while (opened < 0) {
        int64_t next[2] = { -1, 0 }; /* a failure's status; the bytes of this round */
        if (all.rank == 0) next[1] = (int64_t)read_round(&s, lines * (size_t)all.ranks);
        if (all.rank == 0) next[0] = failure(o, &s, &out);
        MPI_Bcast(next, 2, MPI_INT64_T, 0, MPI_COMM_WORLD);
        if (next[0] >= 0) status = (int)next[0];
        if (next[0] >= 0 || !next[1]) break;
        const int worst = one_round(&s, (size_t)next[1], part, tickets, &out, &sum);
        if (worst > status) status = worst;
        if (status > EXIT_SOME_LINES && all.rank == 0 && program_signal) program_stopped(o, &out);
        if (status > EXIT_SOME_LINES) break;
        if (all.rank != 0) continue;
        memmove(s.buffer.data, s.buffer.data + next[1], s.buffer.length -= (size_t)next[1]);
        s.at = s.looked = s.lines = s.held = 0;
    }
    if (all.rank == 0 && opened < 0) {
        if (sum.failed && status <= EXIT_SOME_LINES)
            program_complain("%llu of %llu lines could not be translated", (unsigned long long)sum.failed,
                             (unsigned long long)sum.lines);
        status = program_close_streams(o, in, &out, status);
    }
    text_bytes_free(&s.buffer);
    free(tickets);
    return ranks_status(opened < 0 ? status : opened);
}

#endif
