#pragma GCC system_header
#include "tools/windows/socket.h"
#include_next <microhttpd.h>
#define MHD_add_connection(daemon, fd, address, size) MHD_add_connection(daemon, posix_raw(fd), address, size)
