# The targets explain themselves: `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCK := .ci/lock.txt
# Two workers; who has nothing left to do takes tests from the other.
PYTEST := python -m pytest -q -n 2 --dist worksteal
NUMERICS := $(PYTEST) -m "numerics and not slow"
# Three sessions, whose workers take at most 3 GB each: what libraries keep in a process grows with every program.
SESSIONS := tests/jax_engine "tests/engines tests/evaluation" \
	"tests --ignore tests/jax_engine --ignore tests/engines --ignore tests/evaluation"
# Tests write and sync thousands of small files: in memory, if 4 GB are free there.
IN_MEMORY := $(shell test "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 4000000 2>/dev/null \
	&& echo TMPDIR=/dev/shm)
# Python's folder, and further options.
in_sessions = @status=0; for tests in $(SESSIONS); do $(IN_MEMORY) $(1)/$(PYTEST) $$tests $(2) || status=1; done; exit $$status
# Each changes the order in which float32 sums are taken, and where their terms are rounded.
ROUNDINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=2 OMP_NUM_THREADS=4

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-all test-numerics mutants test-newest test-oldest lock bench bench-scale lint fields smoke clean \
	plan-tpu plan-cuda accelerators plans

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

# The lock constrains and installs nothing itself: pip takes the CPU or the CUDA build of a release, as without it.
$(READY): pyproject.toml $(LOCK)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/pip install --quiet --quiet -c $(LOCK) -e '.[dev]'
	@touch $@

install: $(READY) ## Create .venv with everything

demo: $(READY) ## Fine-tune the demo model with QLoRA and compare its answers with the base model's
	$(BIN)/python train.py fit --config configs/sft_qlora.yaml --overwrite true
	$(BIN)/python demo/answers.py --run runs/sft_qlora

test: $(READY) ## Run the quick tests
	$(call in_sessions,$(BIN),-m "not slow")

test-all: $(READY) ## Run all tests
	$(call in_sessions,$(BIN))

test-numerics: $(READY) ## Run the tests of float32 sums with the rounding of other CPUs and numbers of threads
	@status=0; for setting in $(ROUNDINGS); do \
		echo "$$setting"; env $$setting $(BIN)/$(NUMERICS) || status=1; \
	done; exit $$status

mutants: $(READY) ## Break the product on purpose, and show which quick test notices (half an hour)
	$(BIN)/python -m tests.mutants

test-newest: ## Run the quick tests with the newest releases that pyproject.toml allows, in .venv-newest
	rm -rf .venv-newest && $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --quiet -e '.[dev]'
	$(call in_sessions,.venv-newest/bin,-m "not slow")

test-oldest: .venv-lock/bin/uv ## Run the quick tests with the oldest releases, in .venv-oldest
	rm -rf .venv-oldest && $(PYTHON) -m venv .venv-oldest
	$< pip compile --quiet --resolution lowest-direct --python .venv-oldest/bin/python --extra dev \
		pyproject.toml -o .venv-oldest/lock.txt
	.venv-oldest/bin/pip install --quiet --quiet -c .venv-oldest/lock.txt -e '.[dev]'
	$(call in_sessions,.venv-oldest/bin,-m "not slow")

lock: .venv-lock/bin/uv ## Write .ci/lock.txt again: the newest releases that pyproject.toml allows, for each Python
	UV_CUSTOM_COMPILE_COMMAND="make lock" $< pip compile --quiet --universal --python-version 3.11 --all-extras \
		--upgrade -c .ci/hold.txt pyproject.toml -o $(LOCK)

.venv-lock/bin/uv:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --quiet uv==0.13.9

smoke: $(READY) ## Run the demo recipe for a few steps
	$(BIN)/python train.py fit --config configs/sft_qlora.yaml --config configs/smoke.yaml --overwrite true

docs: $(READY) ## Build the documentation as a site with search in .site/
	@$(BIN)/pip install --quiet --quiet -c $(LOCK) -e '.[docs]'
	cd .ci && NO_MKDOCS_2_WARNING=1 ../$(BIN)/mkdocs build --strict -f mkdocs.yml
	@echo "Open .site/index.html"

fields: $(READY) ## Write the tables of keys on the pages of docs/ from the code
	$(BIN)/python .ci/fields.py

bench: $(READY) ## Compare speed and memory with other trainers (one to two hours; installs them)
	$(BIN)/python benchmarks/bench.py

bench-scale: $(READY) ## Measure how cost grows with width, depth, length, vocabulary and rows (20 minutes; plots in .scale/)
	$(BIN)/python benchmarks/scale.py --out .scale

# JAX's compiler for a device that is not here, beside the libraries of $(VENV).
compiler = test -x .plan-$(1)/bin/python || $(PYTHON) -m venv .plan-$(1); \
	.plan-$(1)/bin/pip install --quiet "jax[$(2)]==$$($(BIN)/python -c 'import jax; print(jax.__version__)')"; \
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$site" > "$$(.plan-$(1)/bin/python -c "$$site")/project.pth"

plan-tpu: $(READY) ## Install the TPU compiler for `plan --on v5e-16` (0.7 GB)
	@$(call compiler,tpu,tpu)

plan-cuda: $(READY) ## Install XLA's compiler for NVIDIA GPUs for `plan --on 8xH100` (3 GB)
	@$(call compiler,cuda,cuda12)

accelerators: plan-cuda plan-tpu ## Compile steps for H100s and TPUs, which need not be here, and compare them with budgets
	$(BIN)/python benchmarks/accelerators.py

plans: plan-cuda ## Plan the shipped recipes again and write their tables in docs/
	$(BIN)/python benchmarks/plans.py

lint: $(READY) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

clean: ## Remove the environments and the runs
	rm -rf $(VENV) .venv-* runs
