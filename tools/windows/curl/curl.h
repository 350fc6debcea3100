#pragma GCC system_header
#include "tools/windows/socket.h"
#include_next <curl/curl.h>
