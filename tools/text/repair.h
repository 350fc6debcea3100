/* repair.h - repairs the translation of a fuzzy match (Ortega et al. 2016) with a model that has an encoder.
 *
 * A word of the memory's translation belongs to the change if the model finds it less probable for the new text than
 * for the memory's text. The model translates the new text, beginning with the words before the change. Each beginning
 * of that translation, followed by the memory's words after the change, is a candidate; the best one is used if few
 * words changed and it keeps numbers, placeholders and signs. All other words are the memory's.
 */
#ifndef TEXT_REPAIR_H
#define TEXT_REPAIR_H

#include "tools/text/jobs.h"

#define TEXT_REPAIR_SHARE 0.5f  /* maximum share of the words that the change may concern */
#define TEXT_REPAIR_WEIGHT 2.0f /* of the similarity to the memory's translation, in nats per token */

/* Complete the next request for a repair. *asks is 0 if the job needs none, or no more. Errors: MOE_ERROR_MEMORY. */
moe_status text_repair_request(const text_front *front, text_job *job, moe_request *request, int *asks,
                               moe_error *error);
/* Use the result of such a request; *used is 0 if the result is of another one. After the last one the job has the
 * repaired translation in `recalled`, and match.kind is TEXT_MATCH_REPAIRED; else nothing has changed. Errors:
 * MOE_ERROR_MEMORY and those of the tokeniser. */
moe_status text_repair_take(const text_front *front, text_job *job, const moe_result *result, int *used,
                            moe_error *error);
int text_repair_is_busy(const text_repair *repair); /* 1 if the job's current request is for a repair */
void text_repair_clear(text_repair *repair);        /* reset for reuse; may be NULL */
void text_repair_free(text_repair *repair);         /* may be NULL */

#endif
