/* rows.c - see rows.h. */
#include "tools/text/rows.h"
#include "tools/text/memory.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Parse an integer, for a row of integers or doubles. */
static row_result set_whole(const option_row *row, void *at, const char *value) {
    char *end;
    errno = 0;
    for (int i = 0; row->names && row->names[i]; i++)
        if (strcmp(row->names[i], value) == 0) return *(int *)at = i, ROW_OK;
    const long long n = strtoll(value, &end, 10);
    if (row->names || end == value || *end) return ROW_INVALID;
    if (errno || (double)n < row->low || (row->kind != ROW_SEED && (double)n > row->high)) return ROW_OUT_OF_RANGE;
    if (row->kind == ROW_INT) *(int *)at = (int)n;
    else if (row->kind == ROW_SEED) *(int64_t *)at = n;
    else *(double *)at = (double)n;
    return ROW_OK;
}

static row_result set_real(const option_row *row, void *at, const char *value) {
    char *end;
    const float x = strtof(value, &end);
    if (end == value || *end || isnan(x)) return ROW_INVALID;
    if (!isfinite(x) || (double)x < row->low || (double)x > row->high) return ROW_OUT_OF_RANGE;
    if (row->kind == ROW_FLOAT) *(float *)at = x;
    else *(double *)at = (double)x;
    return ROW_OK;
}

static row_result set_bytes(const option_row *row, void *at, const char *value) {
    size_t bytes = SIZE_MAX;
    if (row->kind == ROW_SIZE) return text_parse_size(value, at) ? ROW_OK : ROW_INVALID;
    if (strcmp(value, "auto") != 0 && !text_parse_size(value, &bytes)) return ROW_INVALID;
    *(double *)at = bytes < SIZE_MAX ? (double)bytes : row->high;
    return ROW_OK;
}

row_result option_row_set(const option_row *row, void *fields, const char *value) {
    void *at = (char *)fields + row->at;
    if (row->valid && !row->valid(value)) return ROW_INVALID;
    switch (row->kind) {
    case ROW_FLAG: *(int *)at = (int)row->low; return ROW_OK;
    case ROW_FLOAT:
    case ROW_PARAM: return set_real(row, at, value);
    case ROW_BYTES:
    case ROW_SIZE: return set_bytes(row, at, value);
    case ROW_TEXT:
        if (!*value || strlen(value) >= row->size) return ROW_INVALID;
        memcpy(at, value, strlen(value) + 1);
        return ROW_OK;
    case ROW_WORD: *(const char **)at = value; return ROW_OK;
    case ROW_PATH: *(const char **)at = strcmp(value, "-") == 0 ? NULL : value; return ROW_OK;
    default: return set_whole(row, at, value);
    }
}

void option_row_error(const option_row *row, row_result result, const char *before, const char *value, char *message,
                      size_t size) {
    char bounds[64];
    snprintf(bounds, sizeof bounds, "%.10g to %.10g", row->low, row->high);
    snprintf(message, size,
             result == ROW_INVALID ? "invalid value '%.60s' for %s%s: expected %s"
                                   : "value '%.60s' of %s%s is out of range: expected %s",
             value, before, row->name, row->values ? row->values : bounds);
}
