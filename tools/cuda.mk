# The build with CUDA=1, which adds moe-cuda.cu to the engine. Included by the Makefile.
#
# Variables: NVCC, or CUDA_HOME for the toolkit; CUDA_ARCH: compute capabilities (75 90), oldest first. cuBLAS comes
# from the toolkit or from .cublas, where tools/install-deps --cuda unpacks PyPI's wheel. nvcc's runtime is linked
# statically, cuBLAS (400 MB) dynamically.

NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(strip $(NVCC)),)
$(error CUDA=1 requires nvcc: install the CUDA toolkit, add nvcc to PATH or set CUDA_HOME)
endif
CUDA_ROOT := $(realpath $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#[$$] TOP=//p'))
CUDA_KNOWN := $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch))
CUDA_ARCH ?= $(filter $(CUDA_KNOWN),75 80 86 89 90 100 120)

# Machine code for each architecture listed. For other GPUs the driver compiles PTX: the oldest architecture's for those
# between, the newest's for newer ones.
CUDA_PTX = $(sort $(firstword $(CUDA_ARCH)) $(lastword $(CUDA_ARCH)))
CUDA_CODE = $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
	$(foreach a,$(CUDA_PTX),-gencode arch=compute_$(a),code=compute_$(a))

CUBLAS = $(if $(wildcard $(CUDA_ROOT)/include/cublas_v2.h),$(CUDA_ROOT),$(CURDIR)/.cublas)
CUBLAS_LIB = $(firstword $(wildcard $(CUBLAS)/lib64 $(CUBLAS)/lib) $(CUBLAS)/lib)
CUDA_LIBS = -L$(CUBLAS_LIB) -Wl,-rpath,$(CUBLAS_LIB) -Wl,--no-as-needed -lcublas -lcublasLt -Wl,--as-needed \
	-L$(firstword $(wildcard $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib) $(CUDA_ROOT)/lib64) -lcudart_static -ldl -lrt
MOE_OBJECTS = $(BUILD)/moe-with-cuda.o $(BUILD)/moe-cuda.o

# -fmad=false for the same reason as -ffp-contract in the Makefile.
$(BUILD)/moe-cuda.o: moe-cuda.cu moe.c moe.h | $(BUILD)/.deps-cuda
	$(NVCC) -std=c++17 -O2 -fmad=false $(CUDA_CODE) -I. -I$(CUBLAS)/include -c $< -o $@
