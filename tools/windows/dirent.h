#include "tools/windows/posix.h"
