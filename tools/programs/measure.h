/* measure.h - measure the quality loss of a changed model, for moe-quantize and moe-prune. */
#ifndef MEASURE_H
#define MEASURE_H

#include "tools/text/text.h"

/* Compare the model file `out` with `in` on a sample, tokenised by `in` (text_sample_read; every line needs a target).
 * Print the losses and the share of equal translations to standard error, and store them in `out` for moe-info. Errors:
 * those of sessions, text_sample_read and moe_model_save; MOE_ERROR_ARGUMENT (no line can be scored),
 * MOE_ERROR_NUMERIC. */
moe_status measure_loss(const text_front *in, const char *out, const char *sample, int ids, moe_error *error);

#endif
