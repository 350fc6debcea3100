# make test            install what the tests need, build and run the short suites
# make test-long       run the suites that take minutes or need PyTorch
# make test-all        run all parts of tests/gate that .ci/run leaves out, before an issue is closed
# make test-fresh      make demo and make test on a new Debian: SUITE=bookworm or trixie (as root)
# make test-transformers   compare converted models with PyTorch and transformers
# make test-spark      test the Python package in a local Spark, with a killed worker (600 MB)
# make test-mpi        test moe-translate as 2 to 4 processes, with a killed one (requires OpenMPI)
# make test-hashes     compile for 32 bits and static musl: same results as here; the fuzzer's seeds (a minute)
# make test-targets    the same for ARM, RISC-V, Windows and WebAssembly
# make test-dist       build and run the programs of make dist (minutes)
# make test-web        build moe-web and test it in node and Chromium (minutes)
# make test-arm        compile for AArch64; run kernels and whole models under qemu (SLOW=: all rounds)
# make bench           build moe-bench and moe-make-random, which measure speed (tests/bench/README.md)
# make check           check the C sources: exported names, tables of contents, layout
# make asan            run the C suites with the address and undefined-behaviour sanitizers
# make tsan            run the tests of threads with the thread sanitizer
# make valgrind        run the C suites under valgrind (VALGRIND_SUITES=...: some of them)
# make coverage        print which lines of moe.c its tests reach; fails below 96 %
# make tidy            run clang-tidy with .clang-tidy
# make fuzz SECONDS=N  run every fuzz target for N seconds; make fuzz-NAME: one target (tests/fuzz/README.md)
# make fuzz-coverage   print which lines of moe.c the inputs of make fuzz-model reach
# tests/gate           run parts of both gates by name (tests/gate --help)
# tests/cuda/gpu-check     on a machine with a GPU: a table of bytes, races and speed of the CUDA build

.PHONY: bench test test-all test-transformers test-long test-fresh test-arm test-hashes test-targets test-dist test-web \
	test-spark test-mpi check asan tsan valgrind c-suites coverage tidy fuzz fuzz-coverage

vpath %.c tests/engine tests/text tests/get tests/convert tests/programs tests/cuda tests/cross tests/fuzz tests/bench

# tests/*/test_*.c are cmocka programs. Those that include moe.c take nothing from libmoe.a. tests/*/test_*.py and .sh
# print ok and FAIL lines.
TEST_SOURCES = $(notdir $(wildcard tests/*/test_*.c))
TEST_PROGRAMS = $(TEST_SOURCES:%.c=$(BUILD)/%) $(EMULATED_PROGRAMS)
TEST_SCRIPTS = $(filter-out tests/package/test_spark.py tests/programs/test_ranks.py,\
	$(wildcard tests/*/test_*.py tests/*/test_*.sh))

# Programs that emulate AMX and AVX-VNNI, which few machines have.
EMULATED_PROGRAMS = $(if $(filter x86_64% amd64%,$(shell $(CC) -dumpmachine 2>/dev/null || uname -m)),\
	$(BUILD)/test_kernels-emulated $(BUILD)/test_session-emulated)

$(BUILD)/%-emulated.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CC) $(C_FLAGS) -include tests/engine/isa_emu.h -c $< -o $@

# Compile moe-cuda.cu for the CPU, with tests/cuda/cuda_emu.h instead of CUDA.
$(BUILD)/cuda_emu.o: moe-cuda.cu $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CXX) $(CXX_FLAGS) -DMOE_CUDA_EMULATOR -include tests/cuda/cuda_emu.h -x c++ -c $< -o $@

$(BUILD)/test_cuda.o $(BUILD)/emulated-moe.o: C_FLAGS += -DMOE_CUDA
$(BUILD)/test_cuda: $(BUILD)/cuda_emu.o

# Suites that include moe.c with portable kernels only. They do not compare kernels, which are slow to compile.
PORTABLE = bank_reads test_bank test_cache test_cuda test_file test_gating test_golden test_ranks test_search \
	test_session test_system emulated-moe
$(patsubst %,$(BUILD)/%.o,$(filter-out $(FULL),$(PORTABLE))): C_FLAGS += -DMOE_PORTABLE

$(TEST_PROGRAMS:%=%.o): | $(BUILD)/.deps-test

$(TEST_PROGRAMS): %: %.o $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -lcmocka -o $@

$(BUILD)/test_sources: $(GET_OBJECTS)
$(BUILD)/test_sources: TEXT_LIBS += -lcurl

# Variants of moe.o with other flags, for moe-translate-emulated and test-mpi.
$(addprefix $(BUILD)/,emulated-moe.o moe-plain.o moe-engine.o): moe.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -c $< -o $@

$(BUILD)/moe-translate-emulated: $(addprefix $(BUILD)/,moe-translate.o emulated-moe.o cuda_emu.o libtext.a)
	$(LINK) $(TEXT_LIBS) -o $@

# Text scanners that count their steps.
$(BUILD)/%-counted.o: %.c tests/text/counted.h $(BUILD)/.flags | $(BUILD)/.deps-test
	$(CC) $(C_FLAGS) -U_FORTIFY_SOURCE -fsanitize-coverage=trace-pc -include tests/text/counted.h -c $< -o $@

$(BUILD)/test_linear: $(patsubst %,$(BUILD)/%-counted.o,spans sentences messages lost quotes words protect html bytes \
    json text glossary address stops bpe prompt suspicion align)
# test_linear without counted steps, for tests/bench/growth.py.
$(BUILD)/test_linear-plain: $(addprefix $(BUILD)/,test_linear.o address.o stops.o libtext.a) $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -lcmocka -o $@
$(BUILD)/test_glossary: $(patsubst %,$(BUILD)/%-counted.o,glossary spans bytes)

# Library that tests/programs/test_io.py preloads.
$(BUILD)/short_io.so: tests/programs/short_io.c | $(BUILD)/.deps-test
	$(CC) -std=c11 $(WARN) $(WERROR) -O1 -fPIC -shared $< -ldl -o $@

# Library that tests/server/test_service.py preloads into moe-server.
$(BUILD)/stuck.so: tests/server/stuck.c | $(BUILD)/.deps-test
	$(CC) -std=c11 -D_GNU_SOURCE $(WARN) $(WERROR) -O1 -fPIC -shared $< -o $@

# Program for tests/convert/test_byte_bpe.py and long_byte_bpe.py.
$(BUILD)/bpe_lines: $(addprefix $(BUILD)/,bpe_lines.o bpe.o bytes.o)
	$(LINK) $(TEXT_LIBS) -o $@

# Program for tests/convert/test_marian_c.py and test_decoder_c.py.
$(BUILD)/convert_here: $(BUILD)/convert_here.o $(BUILD)/libtext.a $(LIBRARY)
	$(LINK) $(TEXT_LIBS) -o $@

# Programs that include moe.c, for tests/convert/test_predictor.py and for tests/bench.
$(BUILD)/predict_here $(BUILD)/draft_bench: %: %.o
	$(LINK) -lm -o $@

# Programs that are not installed. moe-bench includes moe.c.
BENCH_PROGRAMS = $(BIN)/moe-bench $(BIN)/moe-make-random
bench: $(BENCH_PROGRAMS)

$(BUILD)/moe-bench.o: SPEED = $(if $(findstring -O,$(EXTRA)),,-O3)
$(BIN)/moe-bench: $(addprefix $(BUILD)/,moe-bench.o options.o settings.o rows.o json.o bytes.o memory.o)
	$(LINK) -lm -o $@

$(BIN)/moe-make-random: $(addprefix $(BUILD)/,moe-make-random.o options.o settings.o rows.o bytes.o memory.o) $(LIBRARY)
	$(LINK) -lm $(CUDA_LIBS) -o $@

# Program for tests/bench/belady.py.
$(BUILD)/bank_reads: $(BUILD)/bank_reads.o
	$(LINK) -lm -o $@

# Programs for tests/engine/parity.py, for tests/cuda/gpu-check on a machine with a GPU, and for tests/bench.
$(BUILD)/parity $(BUILD)/gpu_run: %: %.o $(LIBRARY)
	$(LINK) -lm $(CUDA_LIBS) -o $@

# Suites that take minutes or need PyTorch. test_kernels-emulated repeats test_kernels, test_session-emulated repeats
# test_session with kernels. test-long repeats LONGER_SUITES with more input (MOE_TEST_LONG). The longest suites start
# first, so that no core is idle at the end.
LONGER_SUITES = $(addprefix tests/,programs/test_cli.py programs/test_keeping.py server/test_server.py \
	server/test_structured.py cuda/test_cuda_golden.sh)
TRANSFORMERS_SUITES = $(addprefix tests/,convert/test_decoder.py convert/test_transformers.py \
	convert/test_hf_tokens.py golden/test_fixtures.py)
LONG_SUITES = tests/convert/test_damage.py tests/convert/test_smollm2.py tests/convert/test_gemma.py \
	tests/convert/test_ct2_peer.py tests/convert/test_cohere.py \
	tests/server/test_fair.py \
	$(addprefix tests/,convert/test_shortlist.py convert/test_marian.py convert/test_gnmt.py convert/test_prune.py) \
	tests/programs/test_allocations.py tests/programs/test_pruning.py \
	$(BUILD)/test_linear $(BUILD)/test_cuda $(BUILD)/test_memory $(TRANSFORMERS_SUITES) \
	tests/package/long_formats.py tests/server/test_abuse.py tests/package/test_linear.py \
	tests/package/long_documents.py tests/train/test_gating.py tests/train/test_curve.py \
	tests/train/test_mixtures.py tests/train/test_speech.py tests/train/test_finetune.py \
	tests/convert/long_byte_bpe.py tests/convert/test_marian_real.py tests/convert/test_keys.py \
	tests/convert/test_commands.py \
	tests/server/test_page.py tests/server/test_nginx.py tests/programs/test_robustness.py tests/bench/test_belady.py \
	tests/bench/test_bench.py tests/bench/test_limited.py tests/package/test_wheel.py \
	$(if $(EMULATED_PROGRAMS),$(BUILD)/test_kernels $(BUILD)/test_session-emulated)
FIRST_SUITES = $(LONGER_SUITES) \
	$(addprefix tests/,programs/test_cli_gating.py package/test_translator.py install/test_install.py) \
	$(addprefix $(BUILD)/,test_session test_kernels-emulated test_kernels)
SUITES = $(filter-out $(LONG_SUITES),$(TEST_PROGRAMS) $(TEST_SCRIPTS))
# Programs of other targets; make test only checks that they compile.
CHECKED = $(patsubst %.c,$(BUILD)/%.read,$(notdir $(wildcard tests/fuzz/fuzz_*.c tests/bench/moe-bench.c)))
$(CHECKED): $(BUILD)/%.read: %.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -fsyntax-only -MT $@ -MF $@.d $<
	@touch $@

NEEDED_BY_TESTS = all $(BIN)/moe-make-random $(addprefix $(BUILD)/,moe-translate-emulated bpe_lines convert_here \
	predict_here short_io.so stuck.so test_file test_damage test_output) # test_io.py runs the last three
RUN_SUITES = BIN="$(BIN)" BUILD="$(BUILD)" python3 tests/run -j $(JOBS)

test: $(BUILD)/.deps-test $(NEEDED_BY_TESTS) $(CHECKED) $(filter $(BUILD)/%,$(SUITES))
	@$(RUN_SUITES) tests/check-source $(filter $(SUITES),$(FIRST_SUITES)) $(filter-out $(FIRST_SUITES),$(SUITES))
	@echo 'Left for make test-long: $(notdir $(LONG_SUITES))'

test-long: $(BUILD)/.deps-test-long $(NEEDED_BY_TESTS) bench $(BUILD)/bank_reads $(filter $(BUILD)/%,$(LONG_SUITES))
	@MOE_TEST_LONG=1 MOE_TEST_TIMEOUT=1800 $(RUN_SUITES) $(LONG_SUITES) $(LONGER_SUITES)

test-transformers: $(BUILD)/.deps-test-transformers $(NEEDED_BY_TESTS)
	@MOE_TEST_TIMEOUT=1800 $(RUN_SUITES) $(TRANSFORMERS_SUITES)

test-all:
	@tests/gate all

# COMMANDS are quoted commands to run in the new Debian.
SUITE ?= bookworm
test-fresh: $(BUILD)/.deps-fresh
	@tests/fresh $(SUITE) $(COMMANDS)

check: $(BUILD)/moe.o $(patsubst %,$(BUILD)/%.o,$(filter-out ranks,$(basename $(notdir \
    $(wildcard tools/text/*.c tools/text/*.cc tools/server/*.c tools/programs/*.c tools/get/*.c)))))
	@BUILD="$(BUILD)" python3 tests/check-source

# PySpark is too large for make test.
test-spark: $(BUILD)/.deps-test $(BUILD)/.deps-spark all
	@BIN="$(BIN)" python3 tests/run tests/package/test_spark.py

# moe-translate with MPI, also with an -O1 engine and portable kernels, with another engine, and as another program.
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

# Run all C suites, and test programs with small models. LEAVE_OUT=test_cuda saves many minutes.
ASAN_SCRIPTS = $(addprefix tests/programs/test_,versions.py routing.py several.py)
asan:
	@$(MAKE) --no-print-directory BUILD=build/asan BIN=build/asan \
	    EXTRA='-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer' c-suites

# Sanitizers do not affect the counts of test_linear. test_memory has its own allocator, like the sanitizers.
C_SUITES = $(filter-out %/test_linear %/test_memory $(LEAVE_OUT:%=$(BUILD)/%),$(TEST_PROGRAMS))
c-suites: $(BUILD)/.deps-test $(PROGRAMS) $(C_SUITES)
	@BIN="$(BIN)" BUILD="$(BUILD)" MOE_TEST_TIMEOUT=1800 python3 tests/run -j $(JOBS) $(C_SUITES) $(ASAN_SCRIPTS)

# Test threads that share a model, and sessions with threads. Kernels do not use threads. SLOW= tests all sizes of
# budgets and ranks, instead of the few that run under valgrind.
tsan: $(BUILD)/.deps-test
	@$(MAKE) --no-print-directory BUILD=build/tsan BIN=build/tsan PORTABLE="$(PORTABLE) moe" \
	    EXTRA='-O1 -fsanitize=thread -fno-omit-frame-pointer' build/tsan/test_threads build/tsan/test_bank \
	    build/tsan/test_ranks
	@VALGRIND=$(SLOW) TSAN_OPTIONS=halt_on_error=1 python3 tests/run -j $(JOBS) build/tsan/test_bank \
	    build/tsan/test_ranks "env VALGRIND= build/tsan/test_threads"

# Compile with -O1, because kernels take minutes at -O0. test_session and test_kernels-emulated reach all lines that
# test_session-emulated and test_kernels reach.
COVERAGE = $(filter-out %/test_cuda %/test_session-emulated $(if $(EMULATED_PROGRAMS),%/test_kernels),\
	$(patsubst tests/engine/%.c,build/coverage/%,$(wildcard tests/engine/test_*.c)) \
	$(EMULATED_PROGRAMS:$(BUILD)/%=build/coverage/%))
coverage: $(BUILD)/.deps-test
	@$(MAKE) --no-print-directory BUILD=build/coverage BIN=build/coverage FULL='$(PORTABLE)' \
	    EXTRA='-O1 --coverage' $(COVERAGE)
	@JOBS=$(JOBS) tests/coverage build/coverage $(COVERAGE)

# valgrind supports neither instruction sets after AVX2 nor the fibres of tests/cuda/cuda_emu.h.
VALGRIND_SUITES ?= $(patsubst $(BUILD)/%,%,$(filter-out %/test_cuda %/test_linear,$(TEST_PROGRAMS)))
valgrind: $(BUILD)/.deps-test $(BUILD)/.deps-valgrind $(VALGRIND_SUITES:%=$(BUILD)/%)
	@BIN="$(BIN)" BUILD="$(BUILD)" VALGRIND=1 MOE_TEST_WRAP="valgrind -q --error-exitcode=99 \
	    --child-silent-after-fork=yes --leak-check=full \
	    --errors-for-leak-kinds=definite,indirect,possible" python3 tests/run -j $(JOBS) $(VALGRIND_SUITES:%=$(BUILD)/%)

TIDY ?= $(firstword $(shell command -v clang-tidy-14) clang-tidy)
tidy: $(BUILD)/.deps-build $(BUILD)/.deps-tidy $(BUILD)/routing-html.inc $(BUILD)/server-html.inc $(BUILD)/spec-json.inc \
    $(BUILD)/prompts-json.inc
	@printf '%s\n' "moe.c --checks=-clang-analyzer-core.*" \
	    $(filter-out tools/windows/% tools/web/% tools/dist/fingerprints.c,$(wildcard tools/*/*.c)) \
	    tests/bench/moe-make-random.c | \
	    xargs -P $(JOBS) -L 1 sh -c '$(TIDY) --quiet "$$@" -- -std=c11 -pthread -I. -I$(BUILD) $(SYSTEM) 2>/dev/null' tidy

# ---- Fuzzing: tests/fuzz/README.md ----
# Fuzz with clang's libFuzzer. A second make builds the instrumented objects. Kernels, and the engine of all targets
# except `model`, are $(CC)'s normal build.
FUZZ_CC ?= $(firstword $(shell command -v clang-14) clang)
FUZZ_PYTHON = documents convert decoder gguf marian-bin marian-npz marian-yml marian-spm shortlist
FUZZ_TARGETS = model prompts kernels kernels-emulated text bpe lines units routing idx marian checkpoint get server \
	$(FUZZ_PYTHON)
SECONDS ?= 20
FUZZ_SANITIZE = -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize=pointer-overflow,object-size \
	-fno-sanitize-recover=all -Wno-pass-failed
FUZZ_LINK = $(CXX) $(EXTRA) -fsanitize=fuzzer -pthread $(filter %.o,$^) $(filter %.a,$^)

# Build all targets, then run JOBS at a time.
FUZZ_SANITIZED = model prompts text bpe lines units routing idx marian checkpoint get server
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

$(FUZZ_PYTHON:%=build/fuzz/%): all ; # not linked from the objects with these names

$(BUILD)/fuzz_kernels.o $(BUILD)/fuzz_kernels-emulated.o: SPEED = -O3

$(BUILD)/fuzz_model.o: C_FLAGS += $(if $(findstring clang,$(CC)),-fno-sanitize-coverage=trace-cmp)
$(BUILD)/fuzz_model $(BUILD)/fuzz_prompts: %: %.o
	$(FUZZ_LINK) -lm -o $@

$(BUILD)/fuzz_text $(BUILD)/fuzz_bpe $(BUILD)/fuzz_lines $(BUILD)/fuzz_units \
$(BUILD)/fuzz_routing $(BUILD)/fuzz_idx $(BUILD)/fuzz_marian $(BUILD)/fuzz_checkpoint: %: %.o $(BUILD)/libtext.a $(LIBRARY)
	$(FUZZ_LINK) $(TEXT_LIBS) -o $@

$(BUILD)/fuzz_server: $(BUILD)/fuzz_server.o $(SERVER_OBJECTS) $(BUILD)/libtext.a $(LIBRARY)
	$(FUZZ_LINK) -lmicrohttpd $(TEXT_LIBS) -o $@

$(BUILD)/fuzz_routing.o $(BUILD)/fuzz_routing.read: C_FLAGS += -I$(BUILD)
$(BUILD)/fuzz_routing.o $(BUILD)/fuzz_routing.read: $(BUILD)/routing-html.inc

$(BUILD)/fuzz_get: $(BUILD)/fuzz_get.o $(GET_OBJECTS) $(BUILD)/libtext.a $(LIBRARY)
	$(FUZZ_LINK) -lcurl $(TEXT_LIBS) -o $@

$(BUILD)/seeds: $(BUILD)/seeds.o $(LIBRARY)
	$(LINK) -lm -o $@

# Print which lines of the sections that read model files are reached by the inputs that fuzz-model has kept.
fuzz-coverage:
	@$(MAKE) --no-print-directory BUILD=build/fuzz-coverage EXTRA='-O1 --coverage' build/fuzz-coverage/replay
	@tests/coverage --least 95 --sections 'Model file: reader,Layers,Kinds of layers' build/fuzz-coverage \
	    'build/fuzz-coverage/replay build/fuzz/corpus/model build/fuzz/seeds-model'

$(BUILD)/replay: $(BUILD)/replay.o $(BUILD)/fuzz_model.o
	$(LINK) -lm -o $@

# Targets for text without libFuzzer; those for WebAssembly are linked with REPLAY=wasm.
REPLAY_OBJECTS = $(if $(filter wasm,$(REPLAY)),$(TEXT_OBJECTS) $(MOE_OBJECTS),$(SERVER_OBJECTS) $(GET_OBJECTS) \
	$(BUILD)/libtext.a $(LIBRARY))
REPLAY_LINK = $(if $(filter wasm,$(REPLAY)),-sNODERAWFS=1 -sALLOW_MEMORY_GROWTH=1,-lmicrohttpd -lcurl)
$(BUILD)/replay-%: $(BUILD)/fuzz_%.o $(BUILD)/replay.o $(REPLAY_OBJECTS)
	$(LINK) $(REPLAY_LINK) $(TEXT_LIBS) -o $@

# Compare kernels on emulated processors, with and without matrix and dot products, with portable kernels, and whole
# models with this machine. tests/cross/cmocka.h replaces cmocka, and programs are static, so a cross compiler and qemu
# suffice. qemu is slow; SLOW= runs all rounds, instead of the few that run under valgrind.
ARM_CC ?= aarch64-linux-gnu-gcc
SLOW   ?= 1

$(BUILD)/arm-%.o: %.c $(BUILD)/.flags | $(BUILD)/.deps-test-arm
	$(ARM_CC) -Itests/cross $(C_FLAGS) -c $< -o $@

$(BUILD)/arm-moe.o: SPEED = -O3

$(BUILD)/arm-test_kernels: $(BUILD)/arm-test_kernels.o
	$(ARM_CC) -static $(EXTRA) -pthread $^ -lm -o $@

$(BUILD)/arm-translate_ids: $(BUILD)/arm-translate_ids.o $(BUILD)/arm-moe.o
	$(ARM_CC) -static $(EXTRA) -pthread $^ -lm -o $@

$(BUILD)/translate_ids: $(BUILD)/translate_ids.o $(BUILD)/moe.o
	$(LINK) -lm -o $@

test-arm: $(addprefix $(BUILD)/,arm-test_kernels arm-translate_ids translate_ids)
	@VALGRIND=$(SLOW) python3 tests/run -j $(JOBS) \
	    "python3 tests/cross/translations.py $(BUILD)/translate_ids $(BUILD)/arm-translate_ids" \
	    $(foreach cpu,max neoverse-n1 cortex-a53,"qemu-aarch64 -cpu $(cpu) $(BUILD)/arm-test_kernels")

# Other targets, engine only: they must give the results of tests/golden/hashes.txt.
build/cross/en-pt.bin: $(BUILD)/convert_here | $(BUILD)/.deps-hashes
	tests/python tests/cross/targets.py --model

run_targets = MOE_TEST_TIMEOUT=1800 $(RUN_SUITES) $(foreach target,$(1),"tests/python tests/cross/targets.py $(target)")
test-hashes: $(BUILD)/translate_ids $(BUILD)/seeds $(BIN)/moe-translate build/cross/en-pt.bin
	@$(call run_targets,i386 x86_64-musl fuzz-i386 here)

# The module and the page of `make web`.
test-web: all web $(BUILD)/seeds $(BUILD)/translate_ids build/cross/en-pt.bin | $(BUILD)/.deps-targets $(BUILD)/.deps-test-long
	@MOE_TEST_TIMEOUT=1800 $(RUN_SUITES) "tests/python tests/web/web.py"

# Programs of `make dist` against those of this machine; wheels and the Debian package in new roots.
test-dist: all dist build/cross/en-pt.bin | $(BUILD)/.deps-targets $(BUILD)/.deps-fresh
	@MOE_TEST_TIMEOUT=3600 $(RUN_SUITES) "tests/python tests/cross/windows.py one_program" \
	    $(foreach target,$(filter-out windows%,$(DIST_TARGETS)),"tests/python tests/dist/programs.py $(target)") \
	    "tests/python tests/dist/wheels.py" "tests/python tests/dist/deb.py"

test-targets: $(BUILD)/translate_ids $(BIN)/moe-translate $(BIN)/moe-quantize build/cross/en-pt.bin | \
    $(BUILD)/.deps-targets $(BUILD)/.deps-dist $(BUILD)/.deps-test
	@$(call run_targets,riscv64 armhf aarch64-musl windows windows-avx2 wasi wasi-simd128 kernels-wasi fuzz-text-i386 \
	    fuzz-text-wasm) \
	    "tests/python tests/cross/windows.py"
