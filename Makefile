# make demo: set up and run the demo. make test: set up and run all checks. Both work on a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CXXFLAGS_SANITIZE := -std=c++17 -O1 -g -fno-omit-frame-pointer -Wall -Wno-maybe-uninitialized -Wno-uninitialized
KERNEL_SOURCES := $(filter-out host_kernels/bindings.cc host_kernels/ffi_cpu.cc,$(wildcard host_kernels/*.cc))
KERNEL_FILES := $(wildcard host_kernels/*.cc host_kernels/*.h)

.PHONY: demo test lint sanitize fuzz soak bench clean

demo: $(STAMP)
	$(BIN)/rapidmoe demo

test: $(STAMP) lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# The kernels, pool, store and jobs under AddressSanitizer + UndefinedBehaviorSanitizer, then ThreadSanitizer.
sanitize: tests/cpp/test_kernels.cc $(KERNEL_FILES)
	mkdir -p build
	$(CXX) $(CXXFLAGS_SANITIZE) -fsanitize=address,undefined -fno-sanitize-recover=all -Ihost_kernels $< $(KERNEL_SOURCES) -pthread -o build/test_asan
	build/test_asan
	$(CXX) $(CXXFLAGS_SANITIZE) -fsanitize=thread -Ihost_kernels $< $(KERNEL_SOURCES) -pthread -o build/test_tsan
	build/test_tsan

# libFuzzer on damaged residual files, FUZZ_SECONDS long; needs clang with its sanitizers. Clang does not know the
# target pragmas, so every instruction set is a file's own option here.
FUZZ_SECONDS ?= 60
CLANG ?= clang++
CXXFLAGS_FUZZ := -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-unknown-pragmas
AVX512 := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
FLAGS_rows_avx2 := -mavx2 -mfma -mf16c
FLAGS_rows_avx512 := $(AVX512)
FLAGS_rows_avx512_bf16 := $(AVX512) -mavx512bf16 -mavx512vbmi
FLAGS_rows_amx := $(AVX512) -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16 -mavx512vbmi
fuzz: $(KERNEL_SOURCES:host_kernels/%.cc=build/fuzz/%.o) tests/cpp/fuzz_records.cc
	$(CLANG) $(CXXFLAGS_FUZZ) -fsanitize=fuzzer -Ihost_kernels $(filter %.cc %.o,$^) -pthread -o build/fuzz_records
	build/fuzz_records -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -len_control=0

build/fuzz/%.o: host_kernels/%.cc $(KERNEL_FILES)
	mkdir -p build/fuzz
	$(CLANG) $(CXXFLAGS_FUZZ) -fsanitize=fuzzer-no-link $(FLAGS_$*) -c $< -o $@

# Corrections at full load, SOAK_SECONDS long: memory must not grow, results must not change, no job may be lost.
SOAK_SECONDS ?= 600
soak: $(STAMP)
	$(BIN)/python tests/bench/soak.py --seconds $(SOAK_SECONDS)

bench: $(STAMP)
	$(BIN)/python tests/bench/bench_kernels.py
	$(BIN)/rapidmoe bench demo

# Editable, so that Python changes need no reinstall; C++ or settings changed: build again.
$(STAMP): pyproject.toml setup.py $(KERNEL_FILES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf build dist *.egg-info src/*.egg-info .venv
