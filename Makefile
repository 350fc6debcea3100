# moe - inference for Mixture-of-Experts translation models
#
# make                 build the programs ./moe-*, libmoe and libmoetext (static and shared)
# make deps            install missing packages (tools/install-deps)
# make demo            build, then translate a few sentences with the model in models/; MODEL=FILE: another model
# make install         install programs, libraries, a model and completions in PREFIX=/usr/local; LIBDIR=, DESTDIR=;
#                      UNITDIR=/etc/systemd/system: also a systemd unit of moe-server
# make uninstall       remove what make install installed
# make clean           remove what make built
# make CUDA=1          programs that can use a GPU (requires nvcc; variables: tools/cuda.mk)
# make MPI=1           programs that can share a model's experts: mpirun -n 4 ./moe-translate ... (requires OpenMPI)
#
# Variables: CC, CXX, CFLAGS, LDFLAGS; HARDEN= disables hardening; WERROR=-Werror turns warnings into errors (set in
# CI); BUILD (objects) and BIN (programs) keep variants such as `make asan` apart; JOBS is the number of compilers,
# suites or fuzz targets that run at a time (default: all cores); DEPS=true skips the check for packages.
# A missing package is printed with the command that installs it; demo and test install it, as root or with sudo.

PREFIX ?= /usr/local
BUILD  ?= build
BIN    ?= .
MODEL  ?= models/en-de-fr-es.bin
JOBS   ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
OBJCOPY ?= objcopy
WERROR ?= $(if $(CI),-Werror)
DEPS   ?= tools/install-deps$(if $(filter deps demo test,$(MAKECMDGOALS)),, --say)

# Compile on all cores. A recursive make shares the jobs of its parent; make 3.81 ignores MAKEFLAGS set here.
ifeq ($(MAKELEVEL)$(findstring output-sync,$(.FEATURES)),0output-sync)
MAKEFLAGS += -j$(JOBS)
endif

ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),$(subst clang,clang++,$(CC)),g++)
endif

# No -march=native: moe.c selects its kernels at run time. -ffp-contract=off, because fused multiply-adds would make the
# output depend on the compiler. -g1, because -g takes 1.5 times as long to compile moe.c.
CFLAGS  ?= -g1 -O2
WARN     = -Wall -Wextra -Wpedantic -Wconversion -Wshadow
# -fPIC and hidden symbols: programs and shared libraries use the same objects, and the libraries export only what moe.h
# and moetext.h declare.
COMMON   = $(WARN) $(WERROR) -I. $(SYSTEM) $(CFLAGS) $(HARDEN) -ffp-contract=off -fPIC -fvisibility=hidden -pthread \
	   -MMD -MP $(EXTRA)
C_FLAGS  = -std=c11 $(COMMON) $(POSIX) $(SPEED)
CXX_FLAGS = -std=c++17 $(COMMON)
LINK     = $(CXX) $(EXTRA) $(LDFLAGS) $(HARDEN_LINK) -pthread $(filter %.o,$^) $(filter %.a,$^)
TEXT_LIBS = $(SYSTEM_LIBS) -lcjson -lsentencepiece -lpcre2-8 -lexttextcat-2.0 -lutf8proc -lz -lm $(CUDA_LIBS) $(END_LIBS)

# HARDEN and HARDEN_LINK, Homebrew, Windows, names and flags of shared libraries; MPI=1.
include tools/platform.mk tools/mpi.mk

MOE_OBJECTS = $(BUILD)/moe.o
include $(if $(filter-out 0,$(CUDA)),tools/cuda.mk)

# libmoe is the engine; libmoetext adds text input and output.
LIBRARY  = $(BIN)/libmoe.a
TEXT_LIBRARY = $(BIN)/libmoetext.a
VERSION := $(shell sed -n 's/^\#define MOE_VERSION "\(.*\)"/\1/p' moe.h)
# Until 1.0 every minor version may change structs, so the soname has 0.MINOR, later MAJOR.
SONUMBER = $(patsubst 0,0.$(word 2,$(subst ., ,$(VERSION))),$(firstword $(subst ., ,$(VERSION))))
SHARED_LIBRARIES = $(foreach l,libmoe libmoetext,$(BIN)/$(call shared_name,$(l)))
TEXT_PROGRAMS = $(patsubst %,$(BIN)/moe-%$(EXE),translate score classify info quantize calibrate prune routing align)
PROGRAMS = $(TEXT_PROGRAMS) $(BIN)/moe-server$(EXE) $(BIN)/moe-get$(EXE)
PYTHON_PROGRAMS = $(BIN)/moe-documents $(BIN)/moe-evaluate

# ---- Build ---------------------------------------------------------------------------------------------------

.PHONY: all deps help demo install uninstall clean FORCE
.DEFAULT_GOAL := all

all: $(PROGRAMS) $(PYTHON_PROGRAMS) $(LIBRARY) $(TEXT_LIBRARY) $(SHARED_LIBRARIES)

# $(call note,TEXT): a file that changes when TEXT does.
note = @mkdir -p $(@D); echo '$(subst ','\'',$(1))' | cmp -s - $@ || echo '$(subst ','\'',$(1))' > $@

deps:
	@CC="$(CC)" CXX="$(CXX)" $(DEPS)

# Check the compilers and libraries once, before the first compilation.
$(BUILD)/.compilers: FORCE
	$(call note,$(CC) $(CXX))

# apt-get and pip cannot run twice at a time.
LOCKED = $(if $(shell command -v flock),flock $(BUILD)/.lock)
$(BUILD)/.deps-%: tools/install-deps $(BUILD)/.compilers
	@mkdir -p $(BUILD)
	@CC="$(CC)" CXX="$(CXX)" NVCC="$(NVCC)" $(LOCKED) $(DEPS) $(filter-out --build,--$*)
	@touch $@

# -MMD writes each object's headers to a .d file.
vpath %.c . tools/programs tools/server tools/text tools/convert tools/get tools/dist tools/web tools/windows
vpath %.cc tools/text
-include $(wildcard $(BUILD)/*.d)

# Recompile everything when the flags change.
$(BUILD)/.flags: FORCE | $(BUILD)/.deps-build
	$(call note,$(CC) $(CXX) $(WARN) $(SYSTEM) $(CFLAGS) $(HARDEN) $(EXTRA))

$(BUILD)/%.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -c $< -o $@

$(BUILD)/%.o: %.cc $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CXX) $(CXX_FLAGS) -c $< -o $@

$(BUILD)/moe.o: POSIX =
$(BUILD)/moe.o $(BUILD)/moe-with-cuda.o: SPEED = $(if $(findstring -O,$(EXTRA)),,-O3)

$(BUILD)/moe-with-cuda.o: moe.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -DMOE_CUDA -c $< -o $@

# SentencePiece's headers do not contain its version.
SPM_VERSION = $(or $(shell pkg-config --modversion sentencepiece 2>/dev/null || \
	cat /usr/lib/*/pkgconfig/sentencepiece.pc /usr/lib/pkgconfig/sentencepiece.pc 2>/dev/null | \
	sed -n 's/^Version: *//p'),unknown)
$(BUILD)/spm.o: CXX_FLAGS += -DSPM_LIBRARY_VERSION='"$(firstword $(SPM_VERSION))"'

# A page as C strings, so that its program needs no other file. \? because ?? starts a trigraph.
$(BUILD)/routing-html.inc: tools/programs/routing.html
$(BUILD)/server-html.inc: tools/server/server.html
$(BUILD)/spec-json.inc: tools/server/spec.json
$(BUILD)/prompts-json.inc: tools/convert/prompts.json
$(BUILD)/routing-html.inc $(BUILD)/server-html.inc $(BUILD)/spec-json.inc $(BUILD)/prompts-json.inc: | $(BUILD)/.deps-build
	{ echo '/* made from $< by the Makefile */'; \
	  echo 'static const char *const $(subst -,_,$(basename $(@F)))[] = {'; \
	  sed -e 's/[\\"?]/\\&/g' -e 's/^/    "/' -e 's/$$/\\n",/' $<; echo '};'; } > $@.new
	@mv $@.new $@

$(BUILD)/moe-routing.o $(BUILD)/status.o $(BUILD)/libre.o $(BUILD)/prompts.o: C_FLAGS += -I$(BUILD)
$(BUILD)/prompts.o: $(BUILD)/prompts-json.inc
$(BUILD)/moe-routing.o: $(BUILD)/routing-html.inc
$(BUILD)/status.o: $(BUILD)/server-html.inc
$(BUILD)/libre.o: $(BUILD)/spec-json.inc

# Relink when CUDA=1 is added or removed.
$(BUILD)/.objects: FORCE
	$(call note,$(MOE_OBJECTS))

$(LIBRARY): $(MOE_OBJECTS) $(BUILD)/.objects
	rm -f $@
	$(AR) rcs $@ $(MOE_OBJECTS)

# Readers of published checkpoints.
CONVERT_OBJECTS = $(addprefix $(BUILD)/,convert.o making.o marian.o marian_bin.o pieces.o yaml.o packed.o sha256.o \
	gguf.o hub.o conf.o safetensors.o decoder.o builder.o stored.o bpe_pack.o prompts.o tiktoken.o ct2.o archive.o)

TEXT_OBJECTS = $(addprefix $(BUILD)/,choice.o moetext.o several.o models.o places.o settings.o memory.o align.o \
	detect.o html.o words.o stream.o drafts.o live.o guarded.o prompted.o jobs.o attempt.o open.o text.o sentences.o lost.o \
	quotes.o spans.o contained.o marks.o messages.o glossary.o heading.o plurals.o terms.o protect.o prompt.o suspicion.o \
	recall.o repair.o units.o rows.o confidence.o spm.o unigram.o bpe.o bytes.o published.o $(POSIX_OBJECTS)) $(CONVERT_OBJECTS)

# One object whose internal symbols are local, except on Windows, where symbols have no visibility. $(LD), not $(CC):
# EXTRA may contain sanitizers.
$(BUILD)/libmoetext.o: $(TEXT_OBJECTS)
ifeq ($(shell uname -s),Darwin)
	$(LD) -r -exported_symbol '_moetext_*' $^ -o $@
else
	$(LD) -r $^ -o $@
	$(OBJCOPY) --localize-hidden $@
endif

$(TEXT_LIBRARY): $(if $(WINDOWS),$(TEXT_OBJECTS),$(BUILD)/libmoetext.o) $(MOE_OBJECTS) $(BUILD)/.objects
	rm -f $@
	$(AR) rcs $@ $(filter %.o,$^)

# -fvisibility does not hide C++ templates.
$(BUILD)/exports: | $(BUILD)/.deps-build
	echo '{ global: moe*; local: *; };' > $@

$(SHARED_LIBRARIES): $(BUILD)/exports

$(BIN)/$(call shared_name,libmoe): $(MOE_OBJECTS) $(BUILD)/.objects
	$(filter-out -pie,$(LINK)) $(call SHARED,libmoe) $(SYSTEM_LIBS) -lm $(CUDA_LIBS) -o $@
	ln -sf $(@F) $(BIN)/$(call shared_name,libmoe,$(SONUMBER))

$(BIN)/$(call shared_name,libmoetext): $(TEXT_OBJECTS) $(MOE_OBJECTS) $(BUILD)/.objects
	$(filter-out -pie,$(LINK)) $(call SHARED,libmoetext) $(SYSTEM_LIBS) -lcjson -lz -lsentencepiece -lpcre2-8 -lexttextcat-2.0 \
	    -lutf8proc -lm $(CUDA_LIBS) $(END_LIBS) -o $@
	ln -sf $(@F) $(BIN)/$(call shared_name,libmoetext,$(SONUMBER))

# Objects that programs for text share.
$(BUILD)/libtext.a: $(addprefix $(BUILD)/,console.o program.o lines.o live_lines.o cues.o options.o output.o routing.o json.o measure.o \
	passes.o calibration.o reliability.o ranking.o) $(TEXT_OBJECTS)
	rm -f $@
	$(AR) rcs $@ $^

$(TEXT_PROGRAMS): $(BIN)/%$(EXE): $(BUILD)/%.o $(BUILD)/libtext.a $(START) $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -o $@

# The files of moe-server, except its main.
SERVER_OBJECTS = $(patsubst tools/server/%.c,$(BUILD)/%.o,$(filter-out %/moe-server.c,$(wildcard tools/server/*.c)))
$(BIN)/moe-server$(EXE): $(BUILD)/moe-server.o $(SERVER_OBJECTS) $(addprefix $(BUILD)/,console.o options.o json.o) \
    $(TEXT_OBJECTS) $(START) $(LIBRARY)
	$(LINK) -lmicrohttpd $(TEXT_LIBS) -o $@

GET_OBJECTS = $(addprefix $(BUILD)/,fetch.o sources.o store.o)
$(BIN)/moe-get$(EXE): $(BUILD)/moe-get.o $(GET_OBJECTS) $(BUILD)/libtext.a $(START) $(LIBRARY)
	$(LINK) -lcurl $(TEXT_LIBS) -o $@

# Programs of the Python package.
FOLDER = $(if $(filter .,$(BIN)),,$(CURDIR)/)
$(BIN)/moe-documents: MODULE = program
$(BIN)/moe-evaluate: MODULE = evaluate
$(PYTHON_PROGRAMS): tools/python/start Makefile
	sed 's|@MODULE@|$(MODULE)|; s|@PACKAGE@|$(FOLDER)tools/python|; s|@PYTHON@|$(FOLDER).venv/bin/python|; s|@LIBRARY@|$(call \
	    shared_name,libmoetext)|' $< > $@.new && chmod +x $@.new && mv $@.new $@

# ---- Use -----------------------------------------------------------------------------------------------------

# Print the first comments of this file and the files that it includes.
help:
	@for file in Makefile $(wildcard tools/dist/dist.mk tools/web/web.mk tools/python/package.mk tests/rules.mk); do \
	    sed -n -e '/^#/!q' -e 's/^# \{0,1\}//p' $$file; echo; done

demo: all
	@BIN='$(BIN)' MODEL='$(MODEL)' tools/demo

install: all
	@PREFIX='$(PREFIX)' LIBDIR='$(LIBDIR)' UNITDIR='$(UNITDIR)' DESTDIR='$(DESTDIR)' BIN='$(BIN)' \
	    PROGRAMS='$(notdir $(PROGRAMS))' CUDA_LIBS='$(CUDA_LIBS)' tools/install install

uninstall:
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' tools/install uninstall

clean:
	rm -rf build $(PYTHON_PROGRAMS) $(PROGRAMS) $(BENCH_PROGRAMS) $(LIBRARY) $(TEXT_LIBRARY) $(SHARED_LIBRARIES:=*)

-include tools/python/package.mk tools/dist/dist.mk tools/web/web.mk tests/rules.mk
