# make test            install what the tests need, build and run them
# make test-long       the others: long ones, and those that need PyTorch or transformers
# make test-fresh      make demo and make test on a new Debian: SUITE=bookworm or trixie (as root)
# make test-spark      the Python package on a Spark of this machine, a worker killed (needs 600 MB)
# make test-mpi        moe-translate as 2 to 4 processes that share experts, one of them killed (needs OpenMPI)
# make test-arm        compile for AArch64 and run kernels and whole models under qemu (SLOW= for all rounds)
# make bench           build moe-bench and moe-make-random, which measure speed (tests/bench/README.md)
# make check           quick checks of the source: exported names, tables of contents, layout
# make asan            run the C suites with the address and undefined-behaviour sanitizers
# make tsan            run the tests of threads with the thread sanitizer
# make valgrind        run the C suites under valgrind (VALGRIND_SUITES=... some of them)
# make coverage        say which lines of moe.c its tests reach; fails below 96 %
# make tidy            look for mistakes with clang-tidy, as .clang-tidy says
# make fuzz SECONDS=N  run every fuzz target for N seconds; make fuzz-NAME one of them: tests/fuzz/README.md
# make fuzz-coverage   say which lines of moe.c the inputs reach that make fuzz-model found
# tests/cuda/gpu-check     on a machine with a GPU: bytes, races and speed of the CUDA build in one table

.PHONY: bench test test-long test-fresh test-arm test-spark test-mpi check asan tsan valgrind c-suites coverage tidy \
	fuzz fuzz-coverage

vpath %.c tests/engine tests/text tests/convert tests/programs tests/cuda tests/cross tests/fuzz tests/bench

# tests/*/test_*.c are cmocka programs. One that includes moe.c has the library inside it and takes nothing from
# libmoe.a; one that does not links with it. tests/*/test_*.py and .sh print ok and FAIL lines.
TEST_SOURCES = $(notdir $(wildcard tests/*/test_*.c))
TEST_PROGRAMS = $(TEST_SOURCES:%.c=$(BUILD)/%) $(EMULATED_PROGRAMS)
TEST_SCRIPTS = $(filter-out tests/package/test_spark.py tests/programs/test_ranks.py,\
	$(wildcard tests/*/test_*.py tests/*/test_*.sh))

# Hardly a machine has AMX, and many lack AVX-VNNI: these have both as emulations.
EMULATED_PROGRAMS = $(if $(filter x86_64% amd64%,$(shell $(CC) -dumpmachine 2>/dev/null || uname -m)),\
	$(BUILD)/test_kernels-emulated $(BUILD)/test_session-emulated)

$(BUILD)/%-emulated.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CC) $(C_FLAGS) -include tests/engine/isa_emu.h -c $< -o $@

# moe-cuda.cu on the processor: tests/cuda/cuda_emu.h is all of CUDA that it sees.
$(BUILD)/cuda_emu.o: moe-cuda.cu $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CXX) $(CXX_FLAGS) -DMOE_CUDA_EMULATOR -include tests/cuda/cuda_emu.h -x c++ -c $< -o $@

$(BUILD)/test_cuda.o $(BUILD)/emulated-moe.o: C_FLAGS += -DMOE_CUDA
$(BUILD)/test_cuda: $(BUILD)/cuda_emu.o

# These have moe.c inside them for sections other than the kernels, which take most of the time to compile.
PORTABLE = bank_reads test_bank test_cache test_cuda test_ranks test_search emulated-moe
$(PORTABLE:%=$(BUILD)/%.o): C_FLAGS += -DMOE_PORTABLE

$(TEST_PROGRAMS:%=%.o): | $(BUILD)/.deps-test

$(TEST_PROGRAMS): %: %.o $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -lcmocka -o $@

# moe.c with other settings, here and for test-mpi.
$(addprefix $(BUILD)/,emulated-moe.o moe-plain.o moe-engine.o): moe.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -c $< -o $@

$(BUILD)/moe-translate-emulated: $(addprefix $(BUILD)/,moe-translate.o emulated-moe.o cuda_emu.o libtext.a)
	$(LINK) $(TEXT_LIBS) -o $@

# The scanners of text with their steps counted.
$(BUILD)/%-counted.o: %.c tests/text/counted.h $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CC) $(C_FLAGS) -U_FORTIFY_SOURCE -fsanitize-coverage=trace-pc -include tests/text/counted.h -c $< -o $@

$(BUILD)/test_linear: $(patsubst %,$(BUILD)/%-counted.o,spans sentences messages lost words protect html bytes \
    json text glossary address stops bpe prompt suspicion align)
# The same as they are, for tests/bench/growth.py.
$(BUILD)/test_linear-plain: $(addprefix $(BUILD)/,test_linear.o address.o stops.o libtext.a) $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -lcmocka -o $@
$(BUILD)/test_glossary: $(patsubst %,$(BUILD)/%-counted.o,glossary spans bytes)

# Put before programs by tests/programs/test_io.py.
$(BUILD)/short_io.so: tests/programs/short_io.c | $(BUILD)/.deps-test
	$(CC) -std=c11 $(WARN) $(WERROR) -O1 -fPIC -shared $< -ldl -o $@

# Put before moe-server by tests/server/test_service.py.
$(BUILD)/stuck.so: tests/server/stuck.c | $(BUILD)/.deps-test
	$(CC) -std=c11 -D_GNU_SOURCE $(WARN) $(WERROR) -O1 -fPIC -shared $< -o $@

# For tests/convert/test_byte_bpe.py and long_byte_bpe.py.
$(BUILD)/bpe_lines: $(addprefix $(BUILD)/,bpe_lines.o bpe.o bytes.o)
	$(LINK) $(TEXT_LIBS) -o $@

# Not installed. moe-bench includes moe.c.
BENCH_PROGRAMS = $(BIN)/moe-bench $(BIN)/moe-make-random
bench: $(BENCH_PROGRAMS)

$(BUILD)/moe-bench.o: SPEED = $(if $(findstring -O,$(EXTRA)),,-O3)
$(BIN)/moe-bench: $(addprefix $(BUILD)/,moe-bench.o options.o settings.o rows.o json.o bytes.o memory.o)
	$(LINK) -lm -o $@

$(BIN)/moe-make-random: $(addprefix $(BUILD)/,moe-make-random.o options.o settings.o rows.o bytes.o memory.o) $(LIBRARY)
	$(LINK) -lm $(CUDA_LIBS) -o $@

# For tests/bench/belady.py.
$(BUILD)/bank_reads: $(BUILD)/bank_reads.o
	$(LINK) -lm -o $@

# For tests/engine/parity.py, and for tests/cuda/gpu-check on a machine with a GPU.
$(BUILD)/parity $(BUILD)/gpu_run: %: %.o $(LIBRARY)
	$(LINK) -lm $(CUDA_LIBS) -o $@

# What needs PyTorch or transformers, or takes minutes, waits for test-long; test_cuda_golden.sh is the emulated GPU's
# short part. In both the longest begin first, so that no core is idle at the end.
LONG_SUITES = tests/convert/test_smollm2.py tests/server/test_fair.py $(BUILD)/test_linear $(BUILD)/test_cuda \
	$(BUILD)/test_memory tests/convert/test_decoder.py tests/package/long_formats.py \
	tests/convert/test_transformers.py tests/server/test_abuse.py tests/package/test_linear.py \
	tests/package/long_documents.py tests/train/test_gating.py tests/train/test_curve.py \
	tests/train/test_mixtures.py tests/train/test_speech.py tests/train/test_finetune.py \
	tests/convert/test_hf_tokens.py tests/convert/long_byte_bpe.py tests/convert/test_marian_real.py \
	tests/golden/test_fixtures.py tests/convert/test_keys.py tests/train/test_mutations.py \
	tests/server/test_page.py tests/programs/test_robustness.py tests/bench/test_belady.py \
	tests/bench/test_limited.py
FIRST_SUITES = $(addprefix tests/,cuda/test_cuda_golden.sh programs/test_cli.py server/test_server.py \
	programs/test_cli_gating.py convert/test_damage.py convert/test_gnmt.py \
	programs/test_allocations.py package/test_translator.py) \
	$(addprefix $(BUILD)/,test_session test_session-emulated test_kernels-emulated test_kernels)
SUITES = $(filter-out $(LONG_SUITES),$(TEST_PROGRAMS) $(TEST_SCRIPTS))
# Fuzz targets run elsewhere, but what they use changes here: the compiler only reads them.
FUZZ_READ = $(patsubst tests/fuzz/%.c,$(BUILD)/%.read,$(wildcard tests/fuzz/fuzz_*.c))
$(FUZZ_READ): $(BUILD)/%.read: %.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -fsyntax-only -MT $@ -MF $@.d $<
	@touch $@

NEEDED_BY_TESTS = all $(BENCH_PROGRAMS) $(addprefix $(BUILD)/,moe-translate-emulated bpe_lines short_io.so stuck.so \
	test_file test_damage test_output) # the last three for test_io.py
RUN_SUITES = BIN="$(BIN)" BUILD="$(BUILD)" python3 tests/run -j $(JOBS)

test: $(BUILD)/.deps-test $(NEEDED_BY_TESTS) $(FUZZ_READ) $(filter $(BUILD)/%,$(SUITES))
	@$(RUN_SUITES) tests/check-source $(filter $(SUITES),$(FIRST_SUITES)) $(filter-out $(FIRST_SUITES),$(SUITES))
	@echo 'Left for make test-long: $(notdir $(LONG_SUITES))'

test-long: $(BUILD)/.deps-test-long $(NEEDED_BY_TESTS) $(BUILD)/bank_reads $(filter $(BUILD)/%,$(LONG_SUITES))
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

# Programs of their own, since not every machine has an MPI. Beside them ranks whose engine has the portable kernels and
# was optimised less, and ranks of another engine or another program.
MPI_PROGRAMS = $(addprefix $(BUILD)/moe-translate,-plain -engine -program)
$(BUILD)/moe-plain.o $(BUILD)/moe-engine.o: SPEED = -O1
$(BUILD)/moe-plain.o: C_FLAGS += -DMOE_PORTABLE -DMOE_SOURCE=$(MOE_SOURCE)
$(BUILD)/moe-engine.o: C_FLAGS += -DMOE_PORTABLE -DMOE_SOURCE=1u
$(BUILD)/ranks-program.o: C_FLAGS += -DRANKS_SOURCE=1u
$(BUILD)/ranks-program.o: tools/programs/ranks.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -c $< -o $@
$(BUILD)/moe-translate-plain: $(BUILD)/moe-plain.o $(BUILD)/ranks.o
$(BUILD)/moe-translate-engine: $(BUILD)/moe-engine.o $(BUILD)/ranks.o
$(BUILD)/moe-translate-program: $(MOE_OBJECTS) $(BUILD)/ranks-program.o
$(MPI_PROGRAMS): $(BUILD)/moe-translate.o $(BUILD)/libtext.a
	$(LINK) $(TEXT_LIBS) -o $@

test-mpi: $(BUILD)/.deps-test $(BUILD)/.deps-mpi $(BUILD)/moe.o
	@$(MAKE) --no-print-directory MPI=1 BUILD=build/mpi BIN=build/mpi MOE_OBJECTS=$(BUILD)/moe.o \
	    $(addprefix build/mpi/moe-,translate translate-plain translate-engine translate-program calibrate)
	@MPI_BIN=build/mpi python3 tests/run tests/programs/test_ranks.py

# All C suites, and what programs do with small models. LEAVE_OUT=test_cuda saves many minutes.
ASAN_SCRIPTS = $(addprefix tests/programs/test_,versions.py routing.py several.py)
asan:
	@$(MAKE) --no-print-directory BUILD=build/asan BIN=build/asan \
	    PORTABLE="$(PORTABLE) test_file test_gating test_golden" \
	    EXTRA='-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer' c-suites

# test_linear counts, which sanitizers change nothing of; test_memory has an allocator of its own, as they have.
C_SUITES = $(filter-out %/test_linear %/test_memory $(LEAVE_OUT:%=$(BUILD)/%),$(TEST_PROGRAMS))
c-suites: $(BUILD)/.deps-test $(PROGRAMS) $(C_SUITES)
	@BIN="$(BIN)" BUILD="$(BUILD)" MOE_TEST_TIMEOUT=1800 python3 tests/run -j $(JOBS) $(C_SUITES) $(ASAN_SCRIPTS)

# Threads that share a model, and sessions with threads of their own. No kernel knows of threads. Fewer sizes of
# budgets and ranks, as under valgrind, unless SLOW is empty.
tsan: $(BUILD)/.deps-test
	@$(MAKE) --no-print-directory BUILD=build/tsan BIN=build/tsan PORTABLE="$(PORTABLE) moe" \
	    EXTRA='-O1 -fsanitize=thread -fno-omit-frame-pointer' build/tsan/test_threads build/tsan/test_bank \
	    build/tsan/test_ranks
	@VALGRIND=$(SLOW) TSAN_OPTIONS=halt_on_error=1 python3 tests/run -j $(JOBS) build/tsan/test_bank \
	    build/tsan/test_ranks "env VALGRIND= build/tsan/test_threads"

# Lines of moe.c that its tests reach. -O1: at -O0 kernels take minutes.
# test_session-emulated reaches none that the others do not, nor does test_kernels where it runs emulated, too.
COVERAGE = $(filter-out %/test_cuda %/test_session-emulated $(if $(EMULATED_PROGRAMS),%/test_kernels),\
	$(patsubst tests/engine/%.c,build/coverage/%,$(wildcard tests/engine/test_*.c)) \
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
	@printf '%s\n' "moe.c --checks=-clang-analyzer-core.*" $(wildcard tools/*/*.c) tests/bench/moe-make-random.c | \
	    xargs -P $(JOBS) -L 1 sh -c '$(TIDY) --quiet "$$@" -- -std=c11 -I. -I$(BUILD) $(SYSTEM) 2>/dev/null' tidy

# ---- Fuzzing: tests/fuzz/README.md ----
# clang's libFuzzer; a second make builds what it instruments. The kernels are those of a release, by $(CC), and so is
# the engine below the text programs, which `model` has to itself.
FUZZ_CC ?= $(firstword $(shell command -v clang-14) clang)
FUZZ_PYTHON = convert decoder gguf marian-bin marian-npz marian-yml marian-spm shortlist
FUZZ_TARGETS = model kernels kernels-emulated text bpe lines routing idx server $(FUZZ_PYTHON)
SECONDS ?= 20
FUZZ_SANITIZE = -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize=pointer-overflow,object-size \
	-fno-sanitize-recover=all -Wno-pass-failed
FUZZ_LINK = $(CXX) $(EXTRA) -fsanitize=fuzzer -pthread $(filter %.o,$^) $(filter %.a,$^)

# All of them are built first, then JOBS at a time run.
FUZZ_SANITIZED = model text bpe lines routing idx server
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

$(FUZZ_PYTHON:%=build/fuzz/%): all

$(BUILD)/fuzz_kernels.o $(BUILD)/fuzz_kernels-emulated.o: SPEED = -O3

$(BUILD)/fuzz_model.o: C_FLAGS += $(if $(findstring clang,$(CC)),-fno-sanitize-coverage=trace-cmp)
$(BUILD)/fuzz_model: $(BUILD)/fuzz_model.o
	$(FUZZ_LINK) -lm -o $@

$(BUILD)/fuzz_text $(BUILD)/fuzz_bpe $(BUILD)/fuzz_lines \
$(BUILD)/fuzz_routing $(BUILD)/fuzz_idx: %: %.o $(BUILD)/libtext.a $(LIBRARY)
	$(FUZZ_LINK) $(TEXT_LIBS) -o $@

$(BUILD)/fuzz_server: $(BUILD)/fuzz_server.o $(SERVER_OBJECTS) $(BUILD)/libtext.a $(LIBRARY)
	$(FUZZ_LINK) -lmicrohttpd $(TEXT_LIBS) -o $@

$(BUILD)/fuzz_routing.o $(BUILD)/fuzz_routing.read: C_FLAGS += -I$(BUILD)
$(BUILD)/fuzz_routing.o $(BUILD)/fuzz_routing.read: $(BUILD)/routing-html.inc

$(BUILD)/seeds: $(BUILD)/seeds.o $(LIBRARY)
	$(LINK) -lm -o $@

# What the inputs reach that fuzz-model has kept so far, in the sections that read the file.
fuzz-coverage:
	@$(MAKE) --no-print-directory BUILD=build/fuzz-coverage EXTRA='-O1 --coverage' build/fuzz-coverage/replay
	@tests/coverage --least 95 --sections 'Model file: reader,Layers,Kinds of layers' build/fuzz-coverage \
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
	@VALGRIND=$(SLOW) python3 tests/run -j $(JOBS) \
	    "python3 tests/cross/translations.py $(BUILD)/translate $(BUILD)/arm-translate" \
	    $(foreach cpu,max neoverse-n1 cortex-a53,"qemu-aarch64 -cpu $(cpu) $(BUILD)/arm-test_kernels")
