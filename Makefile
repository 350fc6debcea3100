# moe - inference for Mixture-of-Experts translation models
#
# make                 build the programs ./moe-*, libmoe and libmoetext (static and shared)
# make deps            install the libraries that it needs where they are missing (tools/install-deps)
# make demo            both, then translate a few sentences with the model in models/ (MODEL=FILE: another)
# make install         install all of it, a model and completions under PREFIX=/usr/local; LIBDIR=, DESTDIR=;
#                      UNITDIR=/etc/systemd/system: a unit of moe-server for systemd too
# make uninstall       remove what make install put there
# make wheel           a wheel of the Python package in build/wheel, with all libraries in it (Linux)
# make clean           remove what was built
# make CUDA=1          the programs use a GPU where there is one (needs nvcc; variables: tools/cuda.mk)
# make MPI=1           mpirun -n 4 ./moe-translate ...: processes that share a model's experts (needs OpenMPI)
#
# Variables: CC, CXX, CFLAGS, LDFLAGS as usual; HARDEN= for no hardening; WERROR=-Werror makes errors of warnings, as CI
# does; BUILD (objects) and BIN (programs) let variants such as `make asan` live beside the normal build; JOBS (as many
# as there are cores): how many compilers, suites or fuzz targets run at a time; DEPS=true: nothing is looked for.
# What is missing is said, with the command that installs it; demo and test install it, as root or with sudo.

PREFIX ?= /usr/local
BUILD  ?= build
BIN    ?= .
MODEL  ?= models/en-de-fr-es.bin
JOBS   ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
OBJCOPY ?= objcopy
WERROR ?= $(if $(CI),-Werror)
DEPS   ?= tools/install-deps$(if $(filter deps demo test,$(MAKECMDGOALS)),, --say)

# `make` alone compiles on all cores. A make below another one shares its jobs; make 3.81 would not take it from here.
ifeq ($(MAKELEVEL)$(findstring output-sync,$(.FEATURES)),0output-sync)
MAKEFLAGS += -j$(JOBS)
endif

ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),$(subst clang,clang++,$(CC)),g++)
endif

# A baseline build: no -march=native, moe.c picks its kernels when it runs. -ffp-contract=off because a fused
# multiply-add in one build and not in another would give other bytes. -g1: with -g moe.c takes half as long again.
CFLAGS  ?= -g1 -O2
WARN     = -Wall -Wextra -Wpedantic -Wconversion -Wshadow
# -fPIC and hidden names: the same objects make the programs and the shared libraries, which export what moe.h and
# moetext.h declare and nothing else.
COMMON   = $(WARN) $(WERROR) -I. $(SYSTEM) $(CFLAGS) $(HARDEN) -ffp-contract=off -fPIC -fvisibility=hidden -pthread \
	   -MMD -MP $(EXTRA)
C_FLAGS  = -std=c11 $(COMMON) $(SPEED)
CXX_FLAGS = -std=c++17 $(COMMON)
LINK     = $(CXX) $(EXTRA) $(LDFLAGS) $(HARDEN_LINK) -pthread $(filter %.o,$^) $(filter %.a,$^)
TEXT_LIBS = $(SYSTEM_LIBS) -lcjson -lsentencepiece -lpcre2-8 -lexttextcat-2.0 -lutf8proc -lm $(CUDA_LIBS)

# HARDEN and HARDEN_LINK, Homebrew, the names and flags of shared libraries; the build with MPI=1.
include tools/platform.mk tools/mpi.mk

MOE_OBJECTS = $(BUILD)/moe.o
include $(if $(filter-out 0,$(CUDA)),tools/cuda.mk)

# Libraries: libmoe is the engine, libmoetext the engine with text in and out.
LIBRARY  = $(BIN)/libmoe.a
TEXT_LIBRARY = $(BIN)/libmoetext.a
VERSION := $(shell sed -n 's/^\#define MOE_VERSION "\(.*\)"/\1/p' moe.h)
# Until 1.0 any minor version may change structs: 0.MINOR is the number of the shared libraries, from 1 on MAJOR alone.
SONUMBER = $(patsubst 0,0.$(word 2,$(subst ., ,$(VERSION))),$(firstword $(subst ., ,$(VERSION))))
SHARED_LIBRARIES = $(foreach l,libmoe libmoetext,$(BIN)/$(call shared_name,$(l)))
TEXT_PROGRAMS = $(addprefix $(BIN)/moe-,translate score classify info quantize calibrate prune routing align)
PROGRAMS = $(TEXT_PROGRAMS) $(BIN)/moe-server

# ---- Build ---------------------------------------------------------------------------------------------------

.PHONY: all deps help demo wheel install uninstall clean FORCE
.DEFAULT_GOAL := all

all: $(PROGRAMS) $(LIBRARY) $(TEXT_LIBRARY) $(SHARED_LIBRARIES)

# $(call note,TEXT): a file that changes when TEXT does.
note = @mkdir -p $(@D); echo '$(subst ','\'',$(1))' | cmp -s - $@ || echo '$(subst ','\'',$(1))' > $@

deps:
	@CC="$(CC)" CXX="$(CXX)" $(DEPS)

# Once, before the first compilation: is all there? See tools/install-deps --help.
$(BUILD)/.compilers: FORCE
	$(call note,$(CC) $(CXX))

# One at a time: apt-get and pip stop where another one is at work.
LOCKED = $(if $(shell command -v flock),flock $(BUILD)/.lock)
$(BUILD)/.deps-%: tools/install-deps $(BUILD)/.compilers
	@mkdir -p $(BUILD)
	@CC="$(CC)" CXX="$(CXX)" NVCC="$(NVCC)" $(LOCKED) $(DEPS) $(filter-out --build,--$*)
	@touch $@

# Where sources are; -MMD notes which headers each of them reads.
vpath %.c . tools/programs tools/server tools/text
vpath %.cc tools/text
-include $(wildcard $(BUILD)/*.d)

# Objects that other flags made are made again.
$(BUILD)/.flags: FORCE | $(BUILD)/.deps-build
	$(call note,$(CC) $(CXX) $(WARN) $(SYSTEM) $(CFLAGS) $(HARDEN) $(EXTRA))

$(BUILD)/%.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -c $< -o $@

$(BUILD)/%.o: %.cc $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CXX) $(CXX_FLAGS) -c $< -o $@

$(BUILD)/moe.o $(BUILD)/moe-with-cuda.o: SPEED = $(if $(findstring -O,$(EXTRA)),,-O3)

$(BUILD)/moe-with-cuda.o: moe.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -DMOE_CUDA -c $< -o $@

# The version of SentencePiece is in no header of it.
SPM_VERSION = $(or $(shell pkg-config --modversion sentencepiece 2>/dev/null || \
	cat /usr/lib/*/pkgconfig/sentencepiece.pc /usr/lib/pkgconfig/sentencepiece.pc 2>/dev/null | \
	sed -n 's/^Version: *//p'),unknown)
$(BUILD)/spm.o: CXX_FLAGS += -DSPM_LIBRARY_VERSION='"$(firstword $(SPM_VERSION))"'

# A page as lines of C strings, so that its program stays one file. \? because ?? begins a trigraph.
$(BUILD)/routing-html.inc: tools/programs/routing.html
$(BUILD)/server-html.inc: tools/server/server.html
$(BUILD)/spec-json.inc: tools/server/spec.json
$(BUILD)/routing-html.inc $(BUILD)/server-html.inc $(BUILD)/spec-json.inc: | $(BUILD)/.deps-build
	{ echo '/* made from $< by the Makefile */'; \
	  echo 'static const char *const $(subst -,_,$(basename $(@F)))[] = {'; \
	  sed -e 's/[\\"?]/\\&/g' -e 's/^/    "/' -e 's/$$/\\n",/' $<; echo '};'; } > $@.new
	@mv $@.new $@

$(BUILD)/moe-routing.o $(BUILD)/status.o $(BUILD)/libre.o: C_FLAGS += -I$(BUILD)
$(BUILD)/moe-routing.o: $(BUILD)/routing-html.inc
$(BUILD)/status.o: $(BUILD)/server-html.inc
$(BUILD)/libre.o: $(BUILD)/spec-json.inc

# Programs are linked again when the build with and the build without CUDA take turns.
$(BUILD)/.objects: FORCE
	$(call note,$(MOE_OBJECTS))

$(LIBRARY): $(MOE_OBJECTS) $(BUILD)/.objects
	rm -f $@
	$(AR) rcs $@ $(MOE_OBJECTS)

TEXT_OBJECTS = $(addprefix $(BUILD)/,moetext.o several.o models.o places.o settings.o memory.o align.o detect.o html.o \
	words.o stream.o guarded.o prompted.o jobs.o attempt.o open.o text.o sentences.o lost.o spans.o messages.o \
	glossary.o protect.o prompt.o suspicion.o rows.o spm.o bpe.o bytes.o)

# One object, whose own names a host program cannot see. Link with $(LD), not $(CC): EXTRA may name sanitizers.
$(BUILD)/libmoetext.o: $(TEXT_OBJECTS)
ifeq ($(shell uname -s),Darwin)
	$(LD) -r -exported_symbol '_moetext_*' $^ -o $@
else
	$(LD) -r $^ -o $@
	$(OBJCOPY) --localize-hidden $@
endif

$(TEXT_LIBRARY): $(BUILD)/libmoetext.o $(MOE_OBJECTS) $(BUILD)/.objects
	rm -f $@
	$(AR) rcs $@ $(filter %.o,$^)

# The templates of C++ are not hidden by -fvisibility.
$(BUILD)/exports: | $(BUILD)/.deps-build
	echo '{ global: moe*; local: *; };' > $@

$(SHARED_LIBRARIES): $(BUILD)/exports

$(BIN)/$(call shared_name,libmoe): $(MOE_OBJECTS) $(BUILD)/.objects
	$(filter-out -pie,$(LINK)) $(call SHARED,libmoe) -lm $(CUDA_LIBS) -o $@
	ln -sf $(@F) $(BIN)/$(call shared_name,libmoe,$(SONUMBER))

$(BIN)/$(call shared_name,libmoetext): $(TEXT_OBJECTS) $(MOE_OBJECTS) $(BUILD)/.objects
	$(filter-out -pie,$(LINK)) $(call SHARED,libmoetext) $(SYSTEM_LIBS) -lsentencepiece -lpcre2-8 -lexttextcat-2.0 \
	    -lutf8proc -lm $(CUDA_LIBS) -o $@
	ln -sf $(@F) $(BIN)/$(call shared_name,libmoetext,$(SONUMBER))

# What a program with text in and out is made of beside its own object.
$(BUILD)/libtext.a: $(addprefix $(BUILD)/,program.o options.o output.o routing.o json.o measure.o passes.o \
	calibration.o ranking.o) $(TEXT_OBJECTS)
	rm -f $@
	$(AR) rcs $@ $^

$(TEXT_PROGRAMS): $(BIN)/%: $(BUILD)/%.o $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -o $@

# The files of moe-server, except its main.
SERVER_OBJECTS = $(patsubst tools/server/%.c,$(BUILD)/%.o,$(filter-out %/moe-server.c,$(wildcard tools/server/*.c)))
$(BIN)/moe-server: $(BUILD)/moe-server.o $(SERVER_OBJECTS) $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) -lmicrohttpd $(TEXT_LIBS) -o $@

# ---- Use -----------------------------------------------------------------------------------------------------

# The comment at the top of this file, and that of tests/rules.mk.
help:
	@for file in Makefile $(wildcard tests/rules.mk); do sed -n -e '/^#/!q' -e 's/^# \{0,1\}//p' $$file; echo; done

demo: all
	@BIN='$(BIN)' MODEL='$(MODEL)' tools/demo

install: all
	@PREFIX='$(PREFIX)' LIBDIR='$(LIBDIR)' UNITDIR='$(UNITDIR)' DESTDIR='$(DESTDIR)' BIN='$(BIN)' \
	    PROGRAMS='$(notdir $(PROGRAMS))' CUDA_LIBS='$(CUDA_LIBS)' tools/install install

# A wheel for any Python 3 of any Linux that has the C library of this one or a newer one, with all libraries in it.
wheel: $(BUILD)/.deps-wheel $(BIN)/$(call shared_name,libmoetext)
	rm -rf $(BUILD)/wheel tools/python/build
	.venv/bin/pip wheel --quiet --no-deps --wheel-dir $(BUILD)/wheel/plain ./tools/python
	PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/auditwheel repair --strip --wheel-dir $(BUILD)/wheel $(BUILD)/wheel/plain/*.whl
	@rm -rf $(BUILD)/wheel/plain tools/python/build
	@ls $(BUILD)/wheel/*.whl

uninstall:
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' tools/install uninstall

clean:
	rm -rf build $(PROGRAMS) $(BENCH_PROGRAMS) $(LIBRARY) $(TEXT_LIBRARY) $(SHARED_LIBRARIES) \
	    $(SHARED_LIBRARIES:=.$(SONUMBER))

-include tests/rules.mk
