# The build with MPI=1: moe-translate knows tools/programs/ranks.c, and mpicc says how both are compiled and linked. The
# Makefile includes this.

# Its object is made again when the build with and the build without MPI take turns.
$(BUILD)/.mpi: FORCE
	$(call note,$(MPI))
$(BUILD)/moe-translate.o: $(BUILD)/.mpi

ifneq ($(filter-out 0,$(MPI)),)
MPICC ?= mpicc
$(BUILD)/moe-translate.o $(BUILD)/ranks.o: C_FLAGS += -DMOE_MPI \
	$(patsubst -I%,-isystem %,$(shell $(MPICC) --showme:compile))
$(BUILD)/moe-translate.o $(BUILD)/ranks.o: | $(BUILD)/.deps-mpi
$(BIN)/moe-translate: $(BUILD)/ranks.o
$(BIN)/moe-translate: TEXT_LIBS += $(shell $(MPICC) --showme:link)
endif
