#include "tools/windows/socket.h"
