/* ranks.c - see ranks.h. This is the only file that uses MPI. */
#define _POSIX_C_SOURCE 200809L /* sigset_t */

#include "tools/programs/ranks.h"

#ifdef MOE_MPI

#include "tools/text/several.h"

#include <mpi.h>
#include <stdlib.h>

/* ---- 1. Wire ------------------------------------------------------------------------------------------- */

static struct {
    int begun, rank, ranks;
    MPI_Comm wire;                                            /* communicator used only by sessions */
    int *send_bytes, *send_from, *receive_bytes, *receive_at; /* [ranks] */
} all = { .ranks = 1 };

static _Noreturn void give_up(const char *what) {
    program_error("rank %d: %s", all.rank, what);
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

/* Convert sizes to int for MPI, and compute the offset of each piece. */
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

/* Return 1 if all ranks were built from the same sources. Different builds might tokenise differently or exchange
 * different messages, so every version must begin with this exchange. */
static int alike(void) {
    int64_t own = RANKS_SOURCE, values[2];
    for (const char *at = SPM_LIBRARY_VERSION; *at; at++) own = (own * 31 + *at) % UINT32_MAX;
    values[0] = own, values[1] = -own;
    MPI_Allreduce(MPI_IN_PLACE, values, 2, MPI_INT64_T, MPI_MAX, all.wire);
    return values[0] == -values[1];
}

/* Skip the initialisation of MPI, which takes time, in processes that mpirun did not start. */
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
    if (level < MPI_THREAD_FUNNELED) give_up("this MPI library does not support threads");
    if (alike()) return all.ranks;
    program_error("rank %d: the ranks run different builds of moe-translate: use the same build", all.rank);
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

int ranks_agree(const int64_t *values, size_t n) {
    int64_t both[2 * RANKS_VALUES];
    int same = 1;
    for (size_t i = 0; i < n; i++) both[2 * i] = values[i], both[2 * i + 1] = -values[i];
    MPI_Allreduce(MPI_IN_PLACE, both, (int)(2 * n), MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
    for (size_t i = 0; i < n; i++) same &= both[2 * i] == -both[2 * i + 1];
    return same;
}

/* ---- 2. Rounds ----------------------------------------------------------------------------------------- */

enum { MOST_BYTES = 1 << 30 }; /* limit for the texts of a round, and for its translations */

/* Sizes of a rank's part of a round: bytes of its texts or its output, bytes of its routing, numbers of lines. */
typedef struct ticket {
    int64_t bytes, routing, lines, failed;
} ticket;

static void must(int condition, const char *what) {
    if (!condition) give_up(what);
}

/* Divide the records of a round into parts of nearly equal length. */
static void divide(const text_bytes *packed, ticket *tickets) {
    size_t at = 0;
    for (int i = 0; i < all.ranks; i++) {
        const size_t begin = at, aim = packed->length * (size_t)(i + 1) / (size_t)all.ranks;
        while (at < packed->length && (at < aim || i == all.ranks - 1)) at += program_record_bytes(packed->data + at);
        tickets[i] = (ticket){ .bytes = (int64_t)(at - begin) };
    }
}

/* Send each rank its part of `packed`; each rank stores its part in `mine`. */
static void scatter(const text_bytes *packed, ticket *tickets, text_bytes *mine) {
    int *sizes = all.send_bytes, *at = all.send_from, next = 0;
    ticket own;
    if (all.rank == 0) divide(packed, tickets);
    MPI_Scatter(tickets, sizeof own, MPI_BYTE, &own, sizeof own, MPI_BYTE, 0, MPI_COMM_WORLD);
    must(text_room(mine, (size_t)own.bytes + 1), "out of memory");
    for (int i = 0; i < all.ranks && all.rank == 0; next += sizes[i++]) at[i] = next, sizes[i] = (int)tickets[i].bytes;
    MPI_Scatterv(packed->data, sizes, at, MPI_BYTE, mine->data, (int)own.bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    mine->length = (size_t)own.bytes;
}

/* Concatenate the bytes of all ranks in `home` on rank 0. Only rank 0 needs `sizes` [ranks]. */
static void gather(const text_bytes *mine, const int *sizes, text_bytes *home) {
    int *at = all.send_from, next = 0;
    for (int i = 0; i < all.ranks && all.rank == 0; next += sizes[i++])
        at[i] = next, must(next <= MOST_BYTES, "the translations of a round are too long");
    must(mine->length <= MOST_BYTES && text_room(home, (size_t)next + 1), "out of memory");
    MPI_Gatherv(mine->data, (int)mine->length, MPI_BYTE, home->data, sizes, at, MPI_BYTE, 0, MPI_COMM_WORLD);
    home->length = (size_t)next;
}

/* Write the routing of the other ranks on rank 0, which has already written its own. */
static void gather_routing(program_lines *l, const ticket *tickets) {
    static const text_bytes nothing;
    text_bytes home = { 0 };
    for (int i = 0; i < all.ranks && all.rank == 0; i++) all.send_bytes[i] = (int)tickets[i].routing;
    gather(all.rank ? &l->routing->text : &nothing, all.send_bytes, &home);
    if (all.rank == 0 && home.length) routing_add(l->routing, home.data, home.length, &l->trouble);
    if (all.rank) text_clear(&l->routing->text);
    text_bytes_free(&home);
}

/* Translate the texts of a round and write the output in order. Return the same exit status on all ranks. */
static int one_round(program_lines *l, const text_bytes *packed, ticket *tickets, program_progress *sum) {
    text_bytes mine = { 0 }, home = { 0 };
    scatter(packed, tickets, &mine);
    const int status = program_lines_translate(l, mine.length ? mine.data : "", mine.length);
    const ticket own = { .bytes = (int64_t)l->block.length,
                         .routing = all.rank && l->routing ? (int64_t)l->routing->text.length : 0,
                         .lines = (int64_t)l->progress.lines,
                         .failed = (int64_t)l->progress.failed };
    MPI_Gather(&own, sizeof own, MPI_BYTE, tickets, sizeof own, MPI_BYTE, 0, MPI_COMM_WORLD);
    for (int i = 0; i < all.ranks && all.rank == 0; i++) {
        all.send_bytes[i] = (int)tickets[i].bytes;
        sum->lines += (uint64_t)tickets[i].lines, sum->failed += (uint64_t)tickets[i].failed;
    }
    gather(&l->block, all.send_bytes, &home);
    const int worst = ranks_status(status);
    if (worst == EXIT_DONE && l->routing) gather_routing(l, tickets);
    if (all.rank == 0 && worst == EXIT_DONE) program_write(&l->out, home.data, home.length);
    text_bytes_free(&mine), text_bytes_free(&home);
    return worst;
}

/* Add the totals of all ranks on rank 0. */
static void gather_totals(program_lines *l) {
    program_totals own = l->totals, *each = calloc((size_t)all.ranks, sizeof own);
    must(each != NULL, "out of memory");
    MPI_Gather(&own, sizeof own, MPI_BYTE, each, sizeof own, MPI_BYTE, 0, MPI_COMM_WORLD);
    for (int i = 1; i < all.ranks && all.rank == 0; i++) {
        each[i].stats.isa = each[i].stats.device = NULL; /* these pointers are from another process */
        text_add_stats(&l->totals.stats, &each[i].stats, 0);
        l->totals.pieces += each[i].pieces, l->totals.unknown_pieces += each[i].unknown_pieces;
        l->totals.resident += each[i].resident;
    }
    free(each);
}

/* Run rounds until the input ends. Return the exit status, which is EXIT_DONE even if lines failed. */
static int all_rounds(program_lines *l, size_t texts, program_progress *sum) {
    ticket *tickets = calloc((size_t)all.ranks, sizeof *tickets);
    text_bytes packed = { 0 };
    int status = EXIT_DONE;
    must(tickets != NULL, "out of memory");
    while (status == EXIT_DONE) {
        int64_t next = 0; /* bytes of this round; -1 after an error or a signal */
        text_clear(&packed);
        if (all.rank == 0) program_lines_pack(l, texts * (size_t)all.ranks, &packed);
        must(packed.length <= MOST_BYTES, "the lines of a round are too long");
        if (all.rank == 0)
            next = l->out.error || l->read_error || l->trouble.code || program_signal ? -1 : (int64_t)packed.length;
        MPI_Bcast(&next, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
        if (next <= 0) break;
        status = one_round(l, &packed, tickets, sum);
    }
    text_bytes_free(&packed);
    free(tickets);
    return status;
}

int ranks_translate(program_lines *l, size_t texts) {
    const moe_error none = { .code = MOE_OK };
    program_progress sum = { .lines = 0 };
    const int opened = ranks_status(all.rank == 0 ? program_lines_open(l) : -1);
    l->progress.on = 0;
    int status = opened < 0 ? all_rounds(l, texts, &sum) : opened;
    if (status == EXIT_DONE && l->stats) gather_totals(l);
    l->progress.lines = sum.lines, l->progress.failed = sum.failed;
    const int said = status == EXIT_MODEL || opened >= 0; /* 1 if a rank has already reported the error */
    if (all.rank == 0 && !said) status = program_lines_outcome(l, MOE_OK, &none);
    return ranks_status(program_lines_close(l, all.rank == 0, status));
}

#endif
