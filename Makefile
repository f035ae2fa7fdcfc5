# Every target does its own set-up in .venv; the network is needed only for packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.dev
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: all venv build demo demo-storm test red-team e2e e2e-all programs gpu-check lint dist format bench bench-hooks bench-pacer bench-escapes bench-tier fuzz storm storm-moves sanitize clean

all: build

venv: $(DEV)

# What the programs and the demo run on. What is missing on this machine is said before anything is downloaded.
$(STAMP): setup.cfg pyproject.toml
	@CC="$(CC)" $(PYTHON) libvgpu/needs.py
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) install "setuptools>=77" wheel "cffi>=2.0" "nvidia-cuda-runtime>=13.3" nvidia-nvml-dev
	@VGPU_BUILD=later $(PIP) install --no-build-isolation -e .
	@touch $@

# What tests and lint need besides.
$(DEV): $(STAMP)
	@VGPU_BUILD=later $(PIP) install --no-build-isolation -e '.[dev,helm]'
	@touch $@

# SIM_RUNTIME_CHECK: the simulator of a developer's tree, which CUDA runtimes accept; no wheel and no image has it.
build: $(STAMP)
	@SIM_RUNTIME_CHECK=1 VGPU_SHOW=1 $(BIN)/python libvgpu/build.py

demo: build
	@$(BIN)/vgpu demo

# 50 pods while the agent and the scheduler are killed 20 times, at random.
demo-storm: build
	@$(BIN)/vgpu demo --pods 50 --kills 20

test: build $(DEV)
	@$(BIN)/pytest -n 2 --dist loadgroup --max-worker-restart 1 -q

# Ways out of a managed container, made for real with namespaces: none may give one byte more.
red-team: build $(DEV)
	@PYTHONPATH=tests $(BIN)/python tests/redteam/attack.py

# A real Kubernetes node in namespaces of its own, with the chart on it; needs root, Go and apt.
e2e: build $(DEV)
	@$(BIN)/python -m tests.cluster

# The same on all sets of versions: an hour and a half, and the first time another hour, in which Kubernetes is built.
e2e-all: e2e
	@$(BIN)/python -m tests.cluster --set 1.34
	@$(BIN)/python -m tests.cluster --set 1.37
	@$(BIN)/python -m tests.cluster --set 1.30

# Programs that others made, under the library on a simulated card; their packages go into the user's cache folder.
programs: build $(DEV)
	@$(BIN)/python tests/programs/run.py

# The promises on this machine's NVIDIA card, within 8 minutes; no root, no container, no network. SIMULATED=1 (or a profile): on a simulated card.
# ONLY=TEXT: checks with this in their name. GPU_PYTHON=PROGRAM: whose frameworks are meant. QUICK=1: short windows. DOCS=1: writes a page to docs/gpu.
gpu-check: build $(DEV)
	@$(BIN)/python benchmarks/gpu/check.py $(if $(SIMULATED),--simulate $(if $(filter 1,$(SIMULATED)),H100,$(SIMULATED))) $(if $(ONLY),--only "$(ONLY)") $(if $(GPU_PYTHON),--python "$(GPU_PYTHON)") $(if $(QUICK),--quick) $(if $(DOCS),--docs docs/gpu)

lint: build $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $$(find benchmarks libvgpu tests -name '*.[ch]')
	$(BIN)/shellcheck .ci/run

# The files of a release in dist/: sdist, wheels for both machines, chart, SBOM, checksums.
dist: build $(DEV)
	@$(BIN)/python release/dist.py

# What `make lint` wants of the layout.
format: build $(DEV)
	@$(BIN)/ruff check --fix -q .
	@$(BIN)/ruff format -q .
	@$(BIN)/clang-format -i $$(find benchmarks libvgpu tests -name '*.[ch]')

# Figures for people: each program prints its own table, nothing is asserted.
bench: build $(DEV)
	@for program in $(filter-out benchmarks/gpu/%,$(sort $(wildcard benchmarks/*/*.py))); do echo "== $$program"; $(BIN)/python $$program || exit 1; done

# ns per driver call, native and preloaded.
bench-hooks: build $(DEV)
	@$(BIN)/python benchmarks/hooks/bench.py

# What share of a simulated card a limit gives, against the limit: three runs, about 20 minutes. QUICK=1: one short run. JOBS=1: one machine at a
# time. ONLY=TEXT: rows with this in their name. DOCS=1: writes docs/core-limit.md.
bench-pacer: build $(DEV)
	@$(BIN)/python benchmarks/pacer/bench.py $(if $(QUICK),,--full) $(if $(JOBS),--jobs $(JOBS)) $(if $(ONLY),--only "$(ONLY)") $(if $(DOCS),--docs docs)

# What programs get whose work is hard to measure, at a limit of 20 %: six minutes. ONLY=TEXT: rows with this in their name.
bench-escapes: build $(DEV)
	@$(BIN)/python benchmarks/pacer/escapes.py $(ONLY)

# Which blocks the tier's policy would keep on a card, on traces of programs, against other ways. LIVE=1: programs under the library on a simulated
# card. ONLY=TEXT: traces with this in their name. DOCS=1: writes docs/oversubscription.md.
bench-tier: $(if $(LIVE),build,$(STAMP))
	@$(BIN)/python benchmarks/tier/$(if $(LIVE),live,bench).py $(if $(ONLY),--only "$(ONLY)") $(if $(DOCS),--docs docs)

# Random programs against the simulator: SECONDS, SEED, INPUT (plays this file 100 times), TIER=static or movable (half of each limit lies in host
# memory), FUZZER=libfuzzer (needs clang).
fuzz: build $(DEV)
	@$(BIN)/python libvgpu/tests/fuzz/run.py $(if $(filter libfuzzer,$(FUZZER)),--libfuzzer) --seconds $(or $(SECONDS),60) $(if $(TIER),--tier $(TIER)) $(if $(SEED),--seed $(SEED)) $(if $(INPUT),--replay $(INPUT))

# kill -9 at random moments, 300 starts at once, requests in lock-step.
storm: build $(DEV)
	@$(BIN)/python benchmarks/storm/bench.py

# Random work in four processes while blocks move between card and host memory, with kill -9. OPERATIONS (a million), SEED.
storm-moves: build $(DEV)
	@$(BIN)/python libvgpu/tests/storm/moves.py $(if $(OPERATIONS),--operations $(OPERATIONS)) $(if $(SEED),--seed $(SEED))

sanitize: build $(DEV)
	@$(BIN)/pytest -q -rs tests/native/test_sanitizers.py tests/native/test_ledger_storm.py
	@$(BIN)/python libvgpu/tests/sanitized.py -fsanitize=address,undefined -fsanitize=thread
	@$(BIN)/python libvgpu/tests/fuzz/run.py --flags=-fsanitize=address,undefined --seconds $(or $(SECONDS),60)
	@$(BIN)/python libvgpu/tests/fuzz/run.py --flags=-fsanitize=thread --seconds $(or $(SECONDS),60)

clean:
	rm -rf $(VENV) build dist *.egg-info vgpu/native/lib vgpu/native/_region* .pytest_cache .mypy_cache .ruff_cache .hypothesis .tox
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
