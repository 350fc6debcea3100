# moe - inference for Mixture-of-Experts translation models.   `make help` lists the targets.
#
# Variables: CC, CXX, CFLAGS, LDFLAGS as usual; PREFIX, LIBDIR, UNITDIR, DESTDIR for install; MODEL for demo;
# BUILD (objects) and BIN (programs) let variants such as `make asan` live beside the normal build;
# JOBS (as many as there are cores) says how many compilers, suites or fuzz targets run at a time;
# CUDA=1 builds programs that use a GPU where there is one, CUDA_HOME, NVCC, CUDA_ARCH for it.

PREFIX ?= /usr/local
BUILD  ?= build
BIN    ?= .
MODEL  ?= models/en-de-fr-es.bin
DEPS   ?= tools/install-deps
JOBS   ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
OBJCOPY ?= objcopy

# `make` alone compiles on all cores. A make below another one shares its jobs; make 3.81 would not take it from here.
ifeq ($(MAKELEVEL)$(findstring output-sync,$(.FEATURES)),0output-sync)
MAKEFLAGS += -j$(JOBS)
endif

ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),$(subst clang,clang++,$(CC)),g++)
endif

# A baseline build: no -march=native, moe.c picks its kernels when it runs. -ffp-contract=off because a fused
# multiply-add in one build and not in another would give other bytes.
CFLAGS  ?= -g -O2
WARN     = -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror
# -fPIC and hidden names: the same objects make the programs and the shared libraries, which export what moe.h and
# moetext.h declare and nothing else.
COMMON   = $(WARN) -I. $(SYSTEM) $(CFLAGS) $(HARDEN) -ffp-contract=off -fPIC -fvisibility=hidden -pthread -MMD -MP \
	   $(EXTRA)
C_FLAGS  = -std=c11 $(COMMON) $(SPEED)
CXX_FLAGS = -std=c++17 $(COMMON)
LINK     = $(CXX) $(EXTRA) $(LDFLAGS) $(HARDEN_LINK) -pthread $(filter %.o,$^) $(filter %.a,$^)
TEXT_LIBS = $(SYSTEM_LIBS) -lcjson -lsentencepiece -lexttextcat-2.0 -lutf8proc -lm $(CUDA_LIBS)

# What turns an error that slipped through into an end: checked copies (glibc's level 3 where it knows that), a guard
# below every array on the stack, addresses that nobody can guess, tables of the linker read-only. HARDEN= leaves it
# out, as the sanitizers do, which check more. The level is asked for once, in the first recipe that compiles: when this
# file is read there may be no compiler yet, and it would stay out.
ifeq ($(findstring sanitize,$(EXTRA)),)
FORTIFY = $(eval FORTIFY := $(shell for level in 3 2; do \
    [ "$$(printf '\043include <string.h>\n' | $(CC) $(CFLAGS) -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$$level -E - 2>&1 \
          >/dev/null)" ] || { echo "-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$$level"; break; }; done))$(FORTIFY)
HARDEN  ?= $(FORTIFY) -fstack-protector-strong
ifeq ($(shell uname -s),Linux)
HARDEN_LINK ?= $(if $(HARDEN),-pie -z relro -z now)
endif
endif

# Homebrew keeps its headers and libraries where compilers do not look.
ifeq ($(shell uname -s),Darwin)
BREW := $(shell brew --prefix 2>/dev/null || echo /opt/homebrew)
SYSTEM = -isystem $(BREW)/include
SYSTEM_LIBS = -L$(BREW)/lib
endif

# The library's objects: with CUDA=1 moe.c knows moe-cuda.cu. cuBLAS comes from the toolkit, else from .cublas, where
# tools/install-deps --cuda puts PyPI's wheel. nvcc's own runtime is linked statically, cuBLAS (400 MB) is not.
MOE_OBJECTS = $(BUILD)/moe.o
ifneq ($(filter-out 0,$(CUDA)),)
NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(strip $(NVCC)),)
$(error CUDA=1 needs nvcc: install the CUDA toolkit, put nvcc on PATH or say CUDA_HOME=...)
endif
CUDA_ROOT := $(realpath $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#[$$] TOP=//p'))
CUDA_KNOWN := $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch))
CUDA_ARCH ?= $(filter $(CUDA_KNOWN),75 80 86 89 90 100 120)
CUDA_CODE = $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
	-gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH))
CUBLAS = $(if $(wildcard $(CUDA_ROOT)/include/cublas_v2.h),$(CUDA_ROOT),$(CURDIR)/.cublas)
CUBLAS_LIB = $(firstword $(wildcard $(CUBLAS)/lib64 $(CUBLAS)/lib) $(CUBLAS)/lib)
CUDA_LIBS = -L$(CUBLAS_LIB) -Wl,-rpath,$(CUBLAS_LIB) -Wl,--no-as-needed -lcublas -lcublasLt -Wl,--as-needed \
	-L$(firstword $(wildcard $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib) $(CUDA_ROOT)/lib64) -lcudart_static -ldl -lrt
MOE_OBJECTS = $(BUILD)/moe-with-cuda.o $(BUILD)/moe-cuda.o
endif

# Libraries: libmoe is the engine, libmoetext the engine with text in and out.
LIBRARY  = $(BIN)/libmoe.a
TEXT_LIBRARY = $(BIN)/libmoetext.a
VERSION := $(shell sed -n 's/^\#define MOE_VERSION "\(.*\)"/\1/p' moe.h)
# Until 1.0 any minor version may change structs: 0.MINOR is the number of the shared libraries, from 1 on MAJOR alone.
SONUMBER = $(patsubst 0,0.$(word 2,$(subst ., ,$(VERSION))),$(firstword $(subst ., ,$(VERSION))))
ifeq ($(shell uname -s),Darwin)
shared_name = $(1)$(2:%=.%).dylib
SHARED = -dynamiclib -install_name @rpath/$(call shared_name,$(1),$(SONUMBER)) -current_version $(VERSION) \
	-Wl,-exported_symbol,'_moe*'
else
shared_name = $(1).so$(2:%=.%)
SHARED = -shared -Wl,-soname,$(call shared_name,$(1),$(SONUMBER)) -Wl,--version-script,$(BUILD)/exports
endif
SHARED_LIBRARIES = $(foreach l,libmoe libmoetext,$(BIN)/$(call shared_name,$(l)))
TEXT_PROGRAMS = $(addprefix $(BIN)/moe-,translate score classify info quantize calibrate routing align)
PROGRAMS = $(TEXT_PROGRAMS) $(BIN)/moe-server $(BIN)/moe-make-random $(BIN)/moe-bench

# ---- Build ---------------------------------------------------------------------------------------------------

.PHONY: all help demo wheel test test-long test-fresh test-arm test-spark check install uninstall clean asan tsan \
	 valgrind c-suites coverage tidy fuzz fuzz-coverage FORCE
.DEFAULT_GOAL := all

all: $(PROGRAMS) $(LIBRARY) $(TEXT_LIBRARY) $(SHARED_LIBRARIES)

# $(call note,TEXT): a file that changes when TEXT does.
note = @mkdir -p $(@D); echo '$(subst ','\'',$(1))' | cmp -s - $@ || echo '$(subst ','\'',$(1))' > $@

# Libraries that are missing are installed once, before the first compilation; see tools/install-deps --help.
$(BUILD)/.compilers: FORCE
	$(call note,$(CC) $(CXX))

# One at a time: apt-get and pip stop where another one is at work.
LOCKED = $(if $(shell command -v flock),flock $(BUILD)/.lock)
$(BUILD)/.deps-%: tools/install-deps $(BUILD)/.compilers
	@mkdir -p $(BUILD)
	@CC="$(CC)" CXX="$(CXX)" NVCC="$(NVCC)" $(LOCKED) $(DEPS) $(filter-out --build,--$*)
	@touch $@

# Where sources are; -MMD notes which headers each of them reads.
vpath %.c . tools/programs tools/server tools/text tests/engine tests/text tests/cuda tests/cross tests/fuzz
vpath %.cc tools/text
-include $(wildcard $(BUILD)/*.d)

# Objects that other flags made are made again.
$(BUILD)/.flags: FORCE | $(BUILD)/.deps-build
	$(call note,$(CC) $(CXX) $(WARN) $(SYSTEM) $(CFLAGS) $(HARDEN) $(EXTRA))

$(BUILD)/%.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -c $< -o $@

$(BUILD)/%.o: %.cc $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CXX) $(CXX_FLAGS) -c $< -o $@

# The engine, and what has it inside it.
$(BUILD)/moe.o $(BUILD)/moe-with-cuda.o $(BUILD)/moe-bench.o: SPEED = $(if $(findstring -O,$(EXTRA)),,-O3)

$(BUILD)/moe-with-cuda.o: moe.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -DMOE_CUDA -c $< -o $@

# -fmad=false: as with -ffp-contract above.
$(BUILD)/moe-cuda.o: moe-cuda.cu moe.c moe.h | $(BUILD)/.deps-cuda
	$(NVCC) -std=c++17 -O2 -fmad=false $(CUDA_CODE) -I. -I$(CUBLAS)/include -c $< -o $@

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

$(BUILD)/moe-routing.o $(BUILD)/api.o: C_FLAGS += -I$(BUILD)
$(BUILD)/moe-routing.o: $(BUILD)/routing-html.inc
$(BUILD)/api.o: $(BUILD)/server-html.inc $(BUILD)/spec-json.inc

# Programs are linked again when the build with and the build without CUDA take turns.
$(BUILD)/.objects: FORCE
	$(call note,$(MOE_OBJECTS))

$(LIBRARY): $(MOE_OBJECTS) $(BUILD)/.objects
	rm -f $@
	$(AR) rcs $@ $(MOE_OBJECTS)

TEXT_OBJECTS = $(addprefix $(BUILD)/,moetext.o places.o settings.o memory.o align.o detect.o words.o stream.o text.o \
	sentences.o lost.o spans.o messages.o glossary.o protect.o spm.o bytes.o)

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
	$(filter-out -pie,$(LINK)) $(call SHARED,libmoetext) $(SYSTEM_LIBS) -lsentencepiece -lexttextcat-2.0 -lutf8proc -lm \
	    $(CUDA_LIBS) -o $@
	ln -sf $(@F) $(BIN)/$(call shared_name,libmoetext,$(SONUMBER))

# What a program with text in and out is made of beside its own object.
$(BUILD)/libtext.a: $(addprefix $(BUILD)/,program.o options.o routing.o json.o) $(TEXT_OBJECTS)
	rm -f $@
	$(AR) rcs $@ $^

$(TEXT_PROGRAMS): $(BIN)/%: $(BUILD)/%.o $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -o $@

# The rooms of moe-server, but for its main.
SERVER_OBJECTS = $(addprefix $(BUILD)/,http.o address.o log.o requests.o reading.o api.o deepl.o files.o html.o \
	experts.o)
$(BIN)/moe-server: $(BUILD)/moe-server.o $(SERVER_OBJECTS) $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) -lmicrohttpd $(TEXT_LIBS) -o $@

$(BIN)/moe-make-random: $(addprefix $(BUILD)/,moe-make-random.o options.o) $(LIBRARY)
	$(LINK) -lm $(CUDA_LIBS) -o $@

$(BIN)/moe-bench: $(addprefix $(BUILD)/,moe-bench.o options.o json.o bytes.o)
	$(LINK) -lm -o $@

# ---- Use -----------------------------------------------------------------------------------------------------

help:
	@echo 'make                  build libmoe, libmoetext (static and shared) and ./moe-translate ./moe-score'
	@echo '                      ./moe-classify ./moe-info ./moe-quantize'
	@echo '                      ./moe-calibrate ./moe-make-random ./moe-bench ./moe-routing ./moe-align'
	@echo '                      ./moe-server'
	@echo 'make CUDA=1           the same with moe-cuda.cu: on a GPU where there is one (needs nvcc)'
	@echo 'make demo             translate a few sentences with the model in models/'
	@echo 'make test             install what the tests need, build and run them'
	@echo 'make test-long        the others: long ones, and those that need PyTorch or transformers'
	@echo 'make test-fresh       make demo and make test on a new Debian: SUITE=bookworm or trixie (as root)'
	@echo 'tests/cuda/gpu-check       on a machine with a GPU: bytes, races and speed of the CUDA build in one table'
	@echo 'make check            quick checks of the source: exported names, table of contents'
	@echo 'make asan             run the C suites with the address and undefined-behaviour sanitizers'
	@echo 'make tsan             run the tests of threads with the thread sanitizer'
	@echo 'make fuzz SECONDS=N   run every fuzz target for N seconds; make fuzz-NAME one of them: tests/fuzz/README.md'
	@echo 'make fuzz-coverage    say which lines of moe.c the inputs reach that make fuzz-model found'
	@echo 'make test-spark       the Python package on a Spark of this machine, a worker killed (needs 600 MB)'
	@echo 'make test-arm         compile for AArch64 and run kernels and whole models under qemu (SLOW= for all rounds)'
	@echo 'make valgrind         run the C suites under valgrind (VALGRIND_SUITES=... some of them)'
	@echo 'make coverage         say which lines of moe.c its tests reach; fails below 96 %'
	@echo 'make tidy             look for mistakes with clang-tidy, as .clang-tidy says'
	@echo 'make install          install all of it, the model and completions under PREFIX ($(PREFIX)), with DESTDIR'
	@echo '                      UNITDIR=/etc/systemd/system: a unit of moe-server for systemd too'
	@echo 'make wheel            a wheel of the Python package in $(BUILD)/wheel, with all libraries in it (Linux)'
	@echo 'make uninstall        remove what make install put there'
	@echo 'make clean            remove what was built'
	@echo
	@echo 'Missing libraries are installed by tools/install-deps (it says which). make CC=clang works too.'

# $(call show,FROM,TO,SENTENCE...): each sentence with its translation. No commas: make would split there.
define show
	@printf '\n%s -> %s\n' $(1) $(2); printf '%s\n' $(3) > $(BUILD)/demo.txt; \
	$(BIN)/moe-translate -m $(MODEL) -t $(2) -i $(BUILD)/demo.txt -o $(BUILD)/demo.out && \
	paste -d '\n' $(BUILD)/demo.txt $(BUILD)/demo.out | sed -e 's/^/  /' -e 'n' -e 's/^/    = /'
endef

demo: all
	@test -f $(MODEL) || { echo '$(MODEL) is missing; git checkout it, or say MODEL=FILE' >&2; exit 1; }
	$(call show,en,de,'The weather is beautiful today.' 'Where is the train station?' \
	    'She has been reading since this morning.')
	$(call show,en,fr,'I would like a cup of coffee.' 'We have known each other for ten years.')
	$(call show,de,en,'Ich habe meinen Schlüssel verloren.' 'Kannst du mir bei den Hausaufgaben helfen?')
	$(call show,fr,es,'Je ne sais pas quoi faire.' 'Nous allons à la plage demain.')
	$(call show,es,de,'El niño juega en el jardín.' '¿Cuánto cuesta este libro?')
	@printf '\nYour turn:  ./moe-translate -m %s -t de      (one sentence per line, ^D ends)\n' $(MODEL)

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
	rm -rf build $(PROGRAMS) $(LIBRARY) $(TEXT_LIBRARY) $(SHARED_LIBRARIES) $(SHARED_LIBRARIES:=.$(SONUMBER))

# ---- Tests ---------------------------------------------------------------------------------------------------

# tests/*/test_*.c are cmocka programs. One that includes moe.c has the library inside it and takes nothing from
# libmoe.a; one that does not links with it. tests/*/test_*.py and .sh print ok and FAIL lines.
TEST_SOURCES = $(notdir $(wildcard tests/*/test_*.c))
TEST_PROGRAMS = $(TEST_SOURCES:%.c=$(BUILD)/%) $(EMULATED_PROGRAMS)
TEST_SCRIPTS = $(filter-out tests/package/test_spark.py,$(wildcard tests/*/test_*.py tests/*/test_*.sh))

# Hardly a machine has AMX, and many lack AVX-VNNI: these have both as emulations.
EMULATED_PROGRAMS = $(if $(filter x86_64% amd64%,$(shell $(CC) -dumpmachine 2>/dev/null || uname -m)),\
	$(BUILD)/test_kernels-emulated $(BUILD)/test_session-emulated)

$(BUILD)/%-emulated.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CC) $(C_FLAGS) -include tests/engine/isa_emu.h -c $< -o $@

# moe-cuda.cu on the processor: tests/cuda/cuda_emu.h is all of CUDA that it sees.
$(BUILD)/cuda_emu.o: moe-cuda.cu $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CXX) $(CXX_FLAGS) -DMOE_CUDA_EMULATOR -include tests/cuda/cuda_emu.h -x c++ -c $< -o $@

$(BUILD)/test_cuda.o: C_FLAGS += -DMOE_CUDA
$(BUILD)/test_cuda: $(BUILD)/cuda_emu.o

$(TEST_PROGRAMS:%=%.o): | $(BUILD)/.deps-test

$(TEST_PROGRAMS): %: %.o $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -lcmocka -o $@

$(BUILD)/moe-translate-emulated: $(addprefix $(BUILD)/,moe-translate.o moe-with-cuda.o cuda_emu.o libtext.a)
	$(LINK) $(TEXT_LIBS) -o $@

# The scanners of text with their steps counted.
$(BUILD)/%-counted.o: %.c tests/text/counted.h $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CC) $(C_FLAGS) -U_FORTIFY_SOURCE -fsanitize-coverage=trace-pc -include tests/text/counted.h -c $< -o $@

$(BUILD)/test_linear: $(patsubst %,$(BUILD)/%-counted.o,spans sentences messages lost words protect html bytes \
    json)
$(BUILD)/test_glossary: $(patsubst %,$(BUILD)/%-counted.o,glossary spans bytes)

# Put before programs by tests/programs/test_io.py.
$(BUILD)/short_io.so: tests/programs/short_io.c | $(BUILD)/.deps-test
	$(CC) -std=c11 $(WARN) -O1 -fPIC -shared $< -ldl -o $@

# Put before moe-server by tests/server/test_service.py.
$(BUILD)/stuck.so: tests/server/stuck.c | $(BUILD)/.deps-test
	$(CC) -std=c11 -D_GNU_SOURCE $(WARN) -O1 -fPIC -shared $< -o $@

# For tests/engine/parity.py, and for tests/cuda/gpu-check on a machine with a GPU.
$(BUILD)/parity $(BUILD)/gpu_run: %: %.o $(LIBRARY)
	$(LINK) -lm $(CUDA_LIBS) -o $@

# What needs PyTorch or transformers, or takes minutes, waits for test-long; test_cuda_golden.sh is the emulated GPU's
# short part. In both the longest begin first, so that no core is idle at the end.
LONG_SUITES = tests/convert/test_transformers.py tests/train/test_gating.py $(BUILD)/test_cuda \
	$(BUILD)/test_linear \
	tests/train/test_curve.py tests/train/test_mixtures.py tests/train/test_speech.py tests/train/test_finetune.py \
	tests/package/long_formats.py tests/package/long_documents.py tests/convert/test_hf_tokens.py \
	tests/golden/test_fixtures.py tests/convert/test_keys.py tests/train/test_mutations.py tests/server/test_page.py \
	tests/programs/test_robustness.py
FIRST_SUITES = $(addprefix tests/,cuda/test_cuda_golden.sh programs/test_cli.py server/test_server.py \
	programs/test_cli_gating.py convert/test_damage.py convert/test_gnmt.py programs/test_allocations.py \
	package/test_translator.py) \
	$(addprefix $(BUILD)/,test_memory test_session test_session-emulated test_kernels-emulated test_kernels)
SUITES = $(filter-out $(LONG_SUITES),$(TEST_PROGRAMS) $(TEST_SCRIPTS))
NEEDED_BY_TESTS = all $(TEST_PROGRAMS) $(BUILD)/moe-translate-emulated $(BUILD)/short_io.so $(BUILD)/stuck.so
RUN_SUITES = BIN="$(BIN)" BUILD="$(BUILD)" python3 tests/run -j $(JOBS)

test: $(BUILD)/.deps-test $(NEEDED_BY_TESTS)
	@$(RUN_SUITES) tests/check-source $(filter $(SUITES),$(FIRST_SUITES)) $(filter-out $(FIRST_SUITES),$(SUITES))
	@echo 'Left for make test-long: $(notdir $(LONG_SUITES))'

test-long: $(BUILD)/.deps-test-long $(NEEDED_BY_TESTS)
	@MOE_TEST_TIMEOUT=1800 $(RUN_SUITES) $(LONG_SUITES)

# COMMANDS: what is run there, in quotes.
SUITE ?= bookworm
test-fresh: $(BUILD)/.deps-fresh
	@tests/fresh $(SUITE) $(COMMANDS)

check: $(BUILD)/moe.o
	@BUILD="$(BUILD)" python3 tests/check-source

# PySpark is large: `make test` does without.
test-spark: $(BUILD)/.deps-test $(BUILD)/.deps-spark all
	@BIN="$(BIN)" python3 tests/run tests/package/test_spark.py

# All C suites, and what programs do with small models. LEAVE_OUT=test_cuda saves many minutes.
ASAN_SCRIPTS = $(addprefix tests/programs/test_,versions.py cli_gating.py routing.py)
asan:
	@$(MAKE) --no-print-directory BUILD=build/asan BIN=build/asan \
	    EXTRA='-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer' c-suites

# test_linear counts, which sanitizers change nothing of.
c-suites: $(BUILD)/.deps-test $(PROGRAMS) $(filter-out %/test_linear,$(TEST_PROGRAMS))
	@BIN="$(BIN)" BUILD="$(BUILD)" MOE_TEST_TIMEOUT=1800 python3 tests/run -j $(JOBS) \
	    $(filter-out %/test_linear $(LEAVE_OUT:%=$(BUILD)/%),$(TEST_PROGRAMS)) $(ASAN_SCRIPTS)

# Threads that share a model, and sessions with threads of their own.
tsan: $(BUILD)/.deps-test
	@$(MAKE) --no-print-directory BUILD=build/tsan BIN=build/tsan \
	    EXTRA='-O1 -fsanitize=thread -fno-omit-frame-pointer' build/tsan/test_threads
	@TSAN_OPTIONS=halt_on_error=1 python3 tests/run build/tsan/test_threads

# Lines of moe.c that its tests reach. -O1: at -O0 kernels take minutes.
COVERAGE = $(filter-out %/test_cuda,$(patsubst tests/engine/%.c,build/coverage/%,$(wildcard tests/engine/test_*.c)) \
	$(EMULATED_PROGRAMS:$(BUILD)/%=build/coverage/%))
coverage: $(BUILD)/.deps-test
	@$(MAKE) --no-print-directory BUILD=build/coverage BIN=build/coverage EXTRA='-O1 --coverage' $(COVERAGE)
	@JOBS=$(JOBS) tests/coverage build/coverage $(COVERAGE)

# valgrind knows no instruction set beyond AVX2, and nothing of the fibres in tests/cuda/cuda_emu.h.
VALGRIND_SUITES ?= $(patsubst $(BUILD)/%,%,$(filter-out %/test_cuda %/test_linear,$(TEST_PROGRAMS)))
valgrind: $(BUILD)/.deps-test $(BUILD)/.deps-valgrind $(VALGRIND_SUITES:%=$(BUILD)/%)
	@BIN="$(BIN)" BUILD="$(BUILD)" VALGRIND=1 MOE_TEST_WRAP="valgrind -q --error-exitcode=99 \
	    --child-silent-after-fork=yes --leak-check=full \
	    --errors-for-leak-kinds=definite,indirect,possible" python3 tests/run -j $(JOBS) $(VALGRIND_SUITES:%=$(BUILD)/%)

# What a compiler does not see: .clang-tidy says what is looked for.
TIDY ?= $(firstword $(shell command -v clang-tidy-14) clang-tidy)
tidy: $(BUILD)/.deps-build $(BUILD)/.deps-tidy $(BUILD)/routing-html.inc $(BUILD)/server-html.inc $(BUILD)/spec-json.inc
	@$(TIDY) --quiet --checks='-clang-analyzer-core.*' moe.c -- -std=c11 -I. $(SYSTEM) 2>/dev/null
	@printf '%s\n' $(filter-out %/moe-bench.c,$(wildcard tools/*/*.c)) | xargs -P $(JOBS) -I FILE \
	    $(TIDY) --quiet FILE -- -std=c11 -I. -I$(BUILD) $(SYSTEM) 2>/dev/null

# ---- Fuzzing: tests/fuzz/README.md ----
# clang's libFuzzer; a second make builds what it instruments. The kernels are those of a release, by $(CC), and so is
# the engine below the text programs, which `model` has to itself.
FUZZ_CC ?= $(firstword $(shell command -v clang-14) clang)
FUZZ_TARGETS = model kernels kernels-emulated text lines routing idx server convert
SECONDS ?= 20
FUZZ_SANITIZE = -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize=pointer-overflow,object-size \
	-fno-sanitize-recover=all -Wno-pass-failed
FUZZ_LINK = $(CXX) $(EXTRA) -fsanitize=fuzzer -pthread $(filter %.o,$^) $(filter %.a,$^)

# All of them are built first, then JOBS at a time run.
FUZZ_SANITIZED = model text lines routing idx server
fuzz: $(addprefix build/fuzz/,$(filter-out $(FUZZ_SANITIZED),$(FUZZ_TARGETS))) $(BUILD)/moe.o
	+@$(call make_fuzz,$(FUZZ_SANITIZED:%=build/fuzz/fuzz_%))
	@printf '%s\n' $(FUZZ_TARGETS) | xargs -P $(JOBS) -I TARGET tests/python tests/fuzz/run TARGET $(SECONDS) $(SEED)

# $(call make_fuzz,PROGRAM...)
make_fuzz = $(MAKE) --no-print-directory BUILD=build/fuzz BIN=build/fuzz CC=$(FUZZ_CC) EXTRA='$(FUZZ_SANITIZE)' \
	    MOE_OBJECTS=$(BUILD)/moe.o $(1) build/fuzz/seeds

$(FUZZ_TARGETS:%=fuzz-%): fuzz-%: build/fuzz/%
	@tests/python tests/fuzz/run $* $(SECONDS) $(SEED)

$(FUZZ_SANITIZED:%=build/fuzz/%): build/fuzz/%: $(BUILD)/moe.o FORCE | $(BUILD)/.deps-fuzz
	+@$(call make_fuzz,build/fuzz/fuzz_$*)

build/fuzz/kernels build/fuzz/kernels-emulated: build/fuzz/%: $(BUILD)/fuzz_%.o FORCE | $(BUILD)/.deps-fuzz
	@mkdir -p build/fuzz
	$(subst clang,clang++,$(FUZZ_CC)) -fsanitize=fuzzer -pthread $(filter %.o,$^) -lm -o build/fuzz/fuzz_$*

build/fuzz/convert: all

$(BUILD)/fuzz_kernels.o $(BUILD)/fuzz_kernels-emulated.o: SPEED = -O3

$(BUILD)/fuzz_model.o: C_FLAGS += $(if $(findstring clang,$(CC)),-fno-sanitize-coverage=trace-cmp)
$(BUILD)/fuzz_model: $(BUILD)/fuzz_model.o
	$(FUZZ_LINK) -lm -o $@

$(BUILD)/fuzz_text $(BUILD)/fuzz_lines $(BUILD)/fuzz_routing $(BUILD)/fuzz_idx: %: %.o $(BUILD)/libtext.a $(LIBRARY)
	$(FUZZ_LINK) $(TEXT_LIBS) -o $@

$(BUILD)/fuzz_server: $(BUILD)/fuzz_server.o $(SERVER_OBJECTS) $(BUILD)/libtext.a $(LIBRARY)
	$(FUZZ_LINK) -lmicrohttpd $(TEXT_LIBS) -o $@

$(BUILD)/fuzz_routing.o: C_FLAGS += -I$(BUILD)
$(BUILD)/fuzz_routing.o: $(BUILD)/routing-html.inc

$(BUILD)/seeds: $(BUILD)/seeds.o $(LIBRARY)
	$(LINK) -lm -o $@

# What the inputs reach that fuzz-model has kept so far, in the rooms that read what a file says.
fuzz-coverage:
	@$(MAKE) --no-print-directory BUILD=build/fuzz-coverage EXTRA='-O1 --coverage' build/fuzz-coverage/replay
	@tests/coverage --least 95 --rooms 'Model file: reader,Layers' build/fuzz-coverage \
	    'build/fuzz-coverage/replay build/fuzz/corpus/model build/fuzz/seeds-model'

$(BUILD)/replay: $(BUILD)/replay.o $(BUILD)/fuzz_model.o
	$(LINK) -lm -o $@

# AArch64 on another machine: kernels against portable on a processor with everything, one without matrix products and
# one without dot products, then whole models against this machine. One baseline build for all of them.
# tests/cross/cmocka.h stands in for cmocka, and programs are static, so that a cross compiler and qemu are all it
# takes. qemu is slow: fewer rounds, as under valgrind, unless SLOW is empty.
ARM_CC ?= aarch64-linux-gnu-gcc
SLOW   ?= 1

$(BUILD)/arm-%.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-test-arm
	$(ARM_CC) -Itests/cross $(C_FLAGS) -c $< -o $@

$(BUILD)/arm-moe.o: SPEED = -O3

$(BUILD)/arm-test_kernels: $(BUILD)/arm-test_kernels.o
	$(ARM_CC) -static $(EXTRA) -pthread $^ -lm -o $@

$(BUILD)/arm-translate: $(BUILD)/arm-translate.o $(BUILD)/arm-moe.o
	$(ARM_CC) -static $(EXTRA) -pthread $^ -lm -o $@

$(BUILD)/translate: $(BUILD)/translate.o $(BUILD)/moe.o
	$(LINK) -lm -o $@

test-arm: $(addprefix $(BUILD)/,arm-test_kernels arm-translate translate)
	@VALGRIND=$(SLOW) python3 tests/run \
	    $(foreach cpu,max neoverse-n1 cortex-a53,"qemu-aarch64 -cpu $(cpu) $(BUILD)/arm-test_kernels") \
	    "python3 tests/cross/translations.py $(BUILD)/translate $(BUILD)/arm-translate"
