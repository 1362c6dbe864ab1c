# Each target sets up what it needs: on a fresh machine `make demo` is the only command.
# Needed beforehand: Python 3.11 to 3.13 with venv, a C++ compiler, cmake and make.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
NP ?= 2
NATIVE := $(shell find tfposeidon/native datacache/native -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name '*.inc')
LIBRARY := tfposeidon/native/_ops.so
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help setup demo test test-fast test-rest test-all test-versions test-keras test-clusters check check-native docs format bench clean native-address native-thread native-gpu

help:
	@echo "make demo    set up, train on NP=2 ranks, and compare schemes on a slow network"
	@echo "make test    set up and run the fast tests, and the core on 2 and 2 x 2 ranks"
	@echo "make test-fast  those that start no jobs, on all processors"
	@echo "make test-rest  those that make test leaves out"
	@echo "make test-all  all tests, with the minutes they took"
	@echo "make test-versions  a part of them on every supported Python and TensorFlow that is here"
	@echo "make test-keras  Keras's own tests, with our optimizer around theirs"
	@echo "make test-clusters  examples/cluster with a real Ray and SLURM, and against schemas (root, and a network)"
	@echo "make check   set up and run the static checks, that of the documentation too"
	@echo "make docs    set up and build the documentation in build/docs"
	@echo "make check-native  run the C++ tests under sanitizers"
	@echo "make format  put the sources into their form"
	@echo "make bench   set up and run short benchmarks, with plots in build/bench"
	@echo "make clean   remove the environment (the cache of built wheels stays)"

setup: $(VENV)/.ready $(LIBRARY)

NO_DEPS := tests/requirements-no-deps.txt
$(VENV)/.ready: pyproject.toml setup.py build_backend.py tfposeidon/commands/install.py tfposeidon/commands/corrections.py tfposeidon/commands/versions.py $(NO_DEPS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14) and "Python 3.11, 3.12 or 3.13 is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m tfposeidon install
	$(BIN)/python -m pip --disable-pip-version-check install -q -e '.[dev]'
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps -r $(NO_DEPS)
	touch $@

$(LIBRARY): $(NATIVE) setup.py | $(VENV)/.ready
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

# TensorFlow announces oneDNN in lines that no log level hides; the digits need no oneDNN.
demo: export TF_ENABLE_ONEDNN_OPTS ?= 0
demo: setup
	$(BIN)/horovodrun -np $(NP) $(BIN)/python examples/keras_digits.py
	-$(BIN)/python -m pip --disable-pip-version-check install -q -e '.[plots]'
	$(BIN)/python -m tfposeidon demo --plot build/demo.png

test: setup
	$(BIN)/python -m pytest $(TESTS) -m "fast or core"

test-fast: setup
	$(BIN)/python -m pytest -m fast -n auto

test-rest: setup
	$(BIN)/python -m pytest $(TESTS) -m "not fast and not core"

test-all: setup
	python3 tests/budget.py test test-rest

# An environment of 2 GB for each pair, with Horovod built for it; pairs that have passed are not run again.
test-versions: setup
	$(BIN)/python -m tests.versions

# The wheel of Keras brings its tests; those that are left out are listed in tests/keras_suite.py.
test-keras: setup
	$(BIN)/python -m tests.keras_suite
	$(BIN)/horovodrun -np 2 $(BIN)/python -m tests.keras_suite trainers callbacks

# Packages of platforms lie in folders of their own: Ray's protobuf is not TensorFlow's.
CLUSTERS := build/clusters
SITE_PACKAGES = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
test-clusters: setup
	$(BIN)/python -m pip install -q --target $(CLUSTERS)/schemas kubernetes-validate kubeflow-trainer-api
	PYTHONPATH=$(CLUSTERS)/schemas $(BIN)/python tests/clusters/schemas.py
	$(BIN)/python -m pip install -q --target $(CLUSTERS)/ray 'ray[train]'
	PYTHONPATH=.:$(SITE_PACKAGES):$(CURDIR)/$(CLUSTERS)/ray $(BIN)/python tests/clusters/ray_train.py
	PATH=$(CURDIR)/$(BIN):$$PATH bash tests/clusters/slurm.sh

NATIVE_SOURCES = $(shell git ls-files '*.c' '*.cc' '*.cu' '*.h' '*.inc')
SPHINX := $(BIN)/python -m sphinx -W --keep-going -q -b html docs
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(SPHINX) build/docs
	$(BIN)/python -m benchmarks.structure

docs: setup
	$(SPHINX) build/docs
	@echo "open build/docs/index.html"

# The library alone, without TensorFlow: once for stray reads, writes and arithmetic, once for races.
SANITIZERS := address thread
COMMA := ,
NATIVE_TEST := tests/native/lib_test.cc $(wildcard tfposeidon/native/lib/*.cc)
NATIVE_FLAGS := -std=c++17 -O1 -g -Wall -Wextra -Werror -Wno-psabi -ffp-contract=off -fno-strict-aliasing -I. -pthread
# The passes for GPUs run on the CPU in their test, and on a GPU where there is one. Thrust comes with the CUDA toolkit,
# and itself binds null.
CUDA := $(or $(HOROVOD_CUDA_HOME),/usr/local/cuda)
CCCL := $(firstword $(wildcard $(CUDA)/include/cccl))
THRUST_FLAGS := -DTHRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP -isystem $(CCCL)
GPU_TEST := tests/native/gpu_test.cc tfposeidon/native/lib/norms.cc tfposeidon/native/lib/thresholds.cc
NATIVE_TESTS = $(SANITIZERS:%=native-%)$(if $(CCCL), native-gpu)
check-native:
	@mkdir -p build/native
	@$(MAKE) --no-print-directory -j2 -O $(NATIVE_TESTS)

native-address native-thread:
	$(CXX) $(NATIVE_FLAGS) -fsanitize=$(if $(findstring address,$@),address$(COMMA)undefined,thread) -fno-sanitize-recover=all $(NATIVE_TEST) -o build/native/lib_test-$@
	build/native/lib_test-$@ 20

native-gpu:
	$(CXX) $(NATIVE_FLAGS) -fsanitize=address,undefined -fno-sanitize=null -fno-sanitize-recover=all $(THRUST_FLAGS) $(GPU_TEST) \
	  -o build/native/gpu_test
	build/native/gpu_test 20
ifneq ($(shell command -v nvidia-smi),)
	$(CUDA)/bin/nvcc -std=c++17 -O3 --fmad=false -arch=native -I. -DTFPOSEIDON_ON_GPU $(GPU_TEST) tfposeidon/native/lib/gpu/gpu.cu \
	  -o build/native/gpu_test-cuda
	build/native/gpu_test-cuda 300
endif

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

# Short versions, an hour; --full in place of --results ... gives those of docs/results.md.
BENCH := build/bench
bench: setup
	$(BIN)/python -m pip --disable-pip-version-check install -q -e '.[dev,plots]'
	$(BIN)/python -m benchmarks.wrapper --results $(BENCH)/wrapper.json
	$(BIN)/python -m benchmarks.exchange --results $(BENCH)/exchange.json
	$(BIN)/python -m benchmarks.scaling --results $(BENCH)/scaling.json
	$(BIN)/python -m benchmarks.accuracy --results $(BENCH)/accuracy.json
	$(BIN)/python -m benchmarks.selection --results $(BENCH)/selection.json
	$(BIN)/python -m benchmarks.poseidon --results $(BENCH)/poseidon.json
	$(BIN)/python -m benchmarks.memory --layouts 2x1 --results $(BENCH)/memory.json
	$(BIN)/python -m benchmarks.reading --results $(BENCH)/reading.json
	$(BIN)/python -m benchmarks.norms --results $(BENCH)/norms.json
	$(BIN)/python -m benchmarks.large_batch --results $(BENCH)/large_batch.json
	$(BIN)/python -m benchmarks.hitopk_steps --results $(BENCH)/hitopk_steps.json

clean:
	rm -rf $(VENV) build *.egg-info
