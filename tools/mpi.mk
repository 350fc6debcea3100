# The build with MPI=1, which adds tools/programs/ranks.c to moe-translate, with the flags of mpicc. Included by the
# Makefile.

# Rebuild its object after a build with another MPI setting.
$(BUILD)/.mpi: FORCE
	$(call note,$(MPI))
$(BUILD)/moe-translate.o: $(BUILD)/.mpi

# Identifies the source, so that ranks can detect different ones. $(call checksum,FILES)
checksum = $(firstword $(shell cat $(1) | cksum))u
$(BUILD)/moe.o $(BUILD)/moe-with-cuda.o: C_FLAGS += -DMOE_SOURCE=$(MOE_SOURCE)
MOE_SOURCE = $(call checksum,moe.c moe.h)

ifneq ($(filter-out 0,$(MPI)),)
MPICC ?= mpicc
# Output also depends on the code that reads, splits and writes lines.
RANKS_SOURCE = $(call checksum,moe.c moe.h $(sort $(wildcard tools/text/*.[ch] tools/text/*.cc tools/programs/*.[ch])))
$(BUILD)/.sources: FORCE
	$(call note,$(RANKS_SOURCE) $(SPM_VERSION))
$(BUILD)/ranks.o: $(BUILD)/.sources
$(BUILD)/ranks.o: C_FLAGS += -DRANKS_SOURCE=$(RANKS_SOURCE)
$(BUILD)/ranks.o $(BUILD)/ranks-%.o: C_FLAGS += -DSPM_LIBRARY_VERSION='"$(firstword $(SPM_VERSION))"'
$(BUILD)/moe-translate.o $(BUILD)/ranks.o $(BUILD)/ranks-%.o: C_FLAGS += -DMOE_MPI \
	$(patsubst -I%,-isystem %,$(shell $(MPICC) --showme:compile))
$(BUILD)/moe-translate.o $(BUILD)/ranks.o: | $(BUILD)/.deps-mpi
$(BIN)/moe-translate: $(BUILD)/ranks.o
$(BIN)/moe-translate $(BIN)/moe-translate-%: TEXT_LIBS += $(shell $(MPICC) --showme:link)
endif
