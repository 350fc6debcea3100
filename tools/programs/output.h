/* output.h - write files as safely as the library writes model files.
 *
 *   - A new or regular file is written under a temporary name in the same folder, ".moe-...", then flushed to disk and
 *     renamed. The file therefore appears complete or not at all, and several programs can safely write a file of the
 *     same name. Symbolic links are preserved. A new file inherits the permissions of the file that it replaces.
 *   - A device or a pipe is written directly.
 *   - Exceeding RLIMIT_FSIZE causes an error, not a signal.
 *   - SIGHUP, SIGINT and SIGTERM, if they have their default action, are blocked in the calling thread until the file
 *     is closed. After such a signal the next write fails with MOE_ERROR_CANCELLED, and closing removes the
 *     file before the signal ends the process. The temporary file remains if another thread receives the signal.
 *     Open, write and close a file in the same thread.
 * Errors: MOE_ERROR_IO, MOE_ERROR_MEMORY, MOE_ERROR_CANCELLED. These functions never print or exit.
 */
#ifndef OUTPUT_H
#define OUTPUT_H

#include "moe.h"

enum { OUTPUT_REASON = 256 };

typedef struct output_file output_file;

moe_status output_open(const char *path, output_file **out, moe_error *error);
moe_status output_write(output_file *file, const void *data, size_t bytes, moe_error *error);
/* Finish the file (keep 1) or remove it (keep 0), then free `file`, which may be NULL. */
moe_status output_close(output_file *file, int keep, moe_error *error);
/* Write the reason for a failure to open `path` with errno `number` to `out`: a missing folder is named. */
void output_reason(const char *path, int number, char out[OUTPUT_REASON]);
/* Return the temporary name, which a signal handler may unlink, or NULL if the target itself is written. */
const char *output_temporary(const output_file *file);

#endif
