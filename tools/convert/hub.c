/* hub.c - see hub.h */
#include "tools/convert/hub.h"
int hub_convert(making *m, const convert_options *options) { return making_unsupported(m, options->path, "later"); }
