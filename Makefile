# make demo: set up and run the demo. make test: set up and run all checks. Both work on a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CXXFLAGS_SANITIZE := -std=c++17 -O1 -g -fno-omit-frame-pointer -Wall -Wno-maybe-uninitialized -Wno-uninitialized
KERNEL_SOURCES := $(filter-out host_kernels/bindings.cc host_kernels/ffi_cpu.cc,$(wildcard host_kernels/*.cc))
KERNEL_FILES := $(wildcard host_kernels/*.cc host_kernels/*.h)

.PHONY: demo test lint sanitize bench clean

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
