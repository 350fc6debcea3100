# make dist            programs for machines without a compiler, with the model inside, and packages, in build/dist;
#                      make dist-linux-x86_64, dist-linux-aarch64, dist-windows-x86_64: one program (Debian)

# Included by the Makefile. tools/dist/README.md describes the targets.

DIST_TARGETS = linux-x86_64 linux-aarch64 windows-x86_64
DIST_MODEL = models/en-de-fr-es.bin
.PHONY: dist $(addprefix dist-,$(DIST_TARGETS))

dist: $(addprefix dist-,$(DIST_TARGETS)) wheels sdist deb

# A make with the target's compilers builds $(BIN)/moe; tools/dist/pack writes the archive. The recipe avoids
# $(MAKE), because make -n would run that.
$(addprefix dist-,$(DIST_TARGETS)): dist-%: $(BUILD)/.deps-dist
	mkdir -p build/dist/$*/programs
	variables=$$(tools/dist/libraries --variables $*) && \
	    eval env -u MAKEFLAGS -u MAKELEVEL make -j$(JOBS) "$$variables" \
	    BUILD=build/dist/$*/objects BIN=build/dist/$*/programs \
	    build/dist/$*/programs/moe$(if $(findstring windows,$*),.exe)
	tools/dist/pack $* $(VERSION)

# All programs' main functions, each under its own name.
DIST_MAINS = $(patsubst $(BIN)/moe-%$(EXE),$(BUILD)/main-%.o,$(PROGRAMS))
$(BUILD)/main-%.o: moe-%.c $(BUILD)/.flags | $(BUILD)/.deps-build
	$(CC) $(C_FLAGS) -Dmain=moe_$*_main -c $< -o $@

$(BUILD)/main-routing.o: C_FLAGS += -I$(BUILD)
$(BUILD)/main-routing.o: $(BUILD)/routing-html.inc

$(BUILD)/moe-alone$(EXE): $(BUILD)/main.o $(DIST_MAINS) $(SERVER_OBJECTS) $(GET_OBJECTS) $(BUILD)/libtext.a \
    $(START) $(LIBRARY)
	$(LINK) -s -lmicrohttpd -lcurl $(TEXT_LIBS) -o $@

$(BIN)/moe$(EXE): $(BUILD)/moe-alone$(EXE) $(DIST_MODEL) tools/dist/append
	tools/dist/append $< $(DIST_MODEL) $@
