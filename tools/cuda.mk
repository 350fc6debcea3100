# The build with CUDA=1: moe.c knows moe-cuda.cu. The Makefile includes this.
#
# Variables: NVCC, or CUDA_HOME for the toolkit; CUDA_ARCH: the compute capabilities (75 90), the oldest first.
# cuBLAS comes from the toolkit, else from .cublas, where tools/install-deps --cuda puts PyPI's wheel. nvcc's own
# runtime is linked statically, cuBLAS (400 MB) is not.

NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(strip $(NVCC)),)
$(error CUDA=1 needs nvcc: install the CUDA toolkit, put nvcc on PATH or say CUDA_HOME=...)
endif
CUDA_ROOT := $(realpath $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#[$$] TOP=//p'))
CUDA_KNOWN := $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch))
CUDA_ARCH ?= $(filter $(CUDA_KNOWN),75 80 86 89 90 100 120)

# Machine code for each of the list. A GPU that is not in it starts by PTX, which the driver compiles: that of the
# oldest for those between, that of the newest for newer ones.
CUDA_PTX = $(sort $(firstword $(CUDA_ARCH)) $(lastword $(CUDA_ARCH)))
CUDA_CODE = $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
	$(foreach a,$(CUDA_PTX),-gencode arch=compute_$(a),code=compute_$(a))

CUBLAS = $(if $(wildcard $(CUDA_ROOT)/include/cublas_v2.h),$(CUDA_ROOT),$(CURDIR)/.cublas)
CUBLAS_LIB = $(firstword $(wildcard $(CUBLAS)/lib64 $(CUBLAS)/lib) $(CUBLAS)/lib)
CUDA_LIBS = -L$(CUBLAS_LIB) -Wl,-rpath,$(CUBLAS_LIB) -Wl,--no-as-needed -lcublas -lcublasLt -Wl,--as-needed \
	-L$(firstword $(wildcard $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib) $(CUDA_ROOT)/lib64) -lcudart_static -ldl -lrt
MOE_OBJECTS = $(BUILD)/moe-with-cuda.o $(BUILD)/moe-cuda.o

# -fmad=false: as with -ffp-contract in the Makefile.
$(BUILD)/moe-cuda.o: moe-cuda.cu moe.c moe.h | $(BUILD)/.deps-cuda
	$(NVCC) -std=c++17 -O2 -fmad=false $(CUDA_CODE) -I. -I$(CUBLAS)/include -c $< -o $@
