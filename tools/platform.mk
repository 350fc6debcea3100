# Differences of systems and compilers. Included by the Makefile.

# Hardening: fortified libc calls (level 3 if glibc has it), stack protector, PIE, RELRO. HARDEN= disables it, as do
# sanitizers, which check more. The level is tested once, in the first recipe that compiles, because the compiler may
# not be installed when make reads this file.
ifeq ($(findstring sanitize,$(EXTRA)),)
FORTIFY = $(eval FORTIFY := $(shell for level in 3 2; do \
    [ "$$(printf '\043include <string.h>\n' | $(CC) $(CFLAGS) -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$$level -E - 2>&1 \
          >/dev/null)" ] || { echo "-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$$level"; break; }; done))$(FORTIFY)
HARDEN  ?= $(FORTIFY) -fstack-protector-strong
ifeq ($(shell uname -s),Linux)
HARDEN_LINK ?= $(if $(HARDEN),-pie -z relro -z now)
endif
endif

# Compilers do not search Homebrew's folders by default.
ifeq ($(shell uname -s),Darwin)
BREW := $(shell brew --prefix 2>/dev/null || echo /opt/homebrew)
SYSTEM = -isystem $(BREW)/include
SYSTEM_LIBS = -L$(BREW)/lib
endif

# Windows: tools/ uses POSIX's functions, which tools/windows provides. MinGW's gcc aligns the stack to 16 bytes only, so
# the assembler must not use instructions that require more.
WINDOWS ?= $(findstring mingw,$(CC))
ifneq ($(WINDOWS),)
EXE = .exe
POSIX = -std=gnu11 -Itools/windows -include tools/windows/posix.h -DPCRE2_STATIC -DUTF8PROC_STATIC -DCURL_STATICLIB \
	-DCJSON_HIDE_SYMBOLS
POSIX_OBJECTS = posix.o
START = $(BUILD)/start.o
HARDEN =
HARDEN_LINK =
WARN += -Wno-float-conversion -Wa,-muse-unaligned-vector-move
LINK += -municode -static -Wl,--no-insert-timestamp
END_LIBS = -lws2_32 -lbcrypt -lcrypt32 -ladvapi32
endif

# $(call shared_name,NAME,NUMBER): the file name of a shared library. $(call SHARED,NAME): its linker flags.
ifeq ($(shell uname -s),Darwin)
shared_name = $(1)$(2:%=.%).dylib
SHARED = -dynamiclib -install_name @rpath/$(call shared_name,$(1),$(SONUMBER)) -current_version $(VERSION) \
	-Wl,-exported_symbol,'_moe*'
else ifneq ($(WINDOWS),)
shared_name = $(1)$(2:%=-%).dll
SHARED = -shared -Wl,--version-script,$(BUILD)/exports
else
shared_name = $(1).so$(2:%=.%)
SHARED = -shared -Wl,-soname,$(call shared_name,$(1),$(SONUMBER)) -Wl,--version-script,$(BUILD)/exports
endif
