# Each target builds the environment that it needs, inside the checkout, when it is missing or out of date.
# Needed beforehand: Python 3.10 or newer with pip, make, gcc.

PYTHON ?= python3
ARGS ?=

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
NEXT_TORCH := 2.14.1

VENV := .venv
NEXT_VENV := .venv-torch214
STAMP := $(VENV)/.installed
NEXT_STAMP := $(NEXT_VENV)/.installed

CODE := collector analysis tests benchmarks fixtures
# What depends on torch; the rest of the tests would only be run twice.
TORCH_TESTS := tests/collector tests/end_to_end
# Slow, and about libraries on top of torch: on the second torch only with ONCE= given on make's command line.
ONCE := tests/end_to_end/test_deepspeed.py tests/end_to_end/test_frameworks.py

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# A stamp holds the path of its checkout. An environment that came along with a copied or moved checkout has the old
# path in it, so its stamp is void.
$(shell for stamp in $(STAMP) $(NEXT_STAMP); do grep -qsxF "$(CURDIR)" $$stamp || rm -f $$stamp; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-torch214 modes check bench eval clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-22s%s\n", $$1, $$2 }'

demo: $(STAMP) ## record and diagnose a real training with one slow rank (ARGS="--fault data --rank 2")
	@$(VENV)/bin/ddpan demo $(ARGS)

test: $(STAMP) ## run all tests (ARGS="-k overlap")
	@$(VENV)/bin/python -m pytest $(ARGS)

test-torch214: $(NEXT_STAMP) ## run the tests that need torch on torch 2.14
	@$(NEXT_VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	@$(NEXT_VENV)/bin/python -m pytest $(TORCH_TESTS) $(addprefix --ignore=,$(ONCE)) $(ARGS)

modes: $(STAMP) $(NEXT_STAMP) ## try all ways of using DDP on both torches, and write the table in docs/collector.md
	@$(VENV)/bin/python tests/end_to_end/write_modes_table.py $(VENV)/bin/python $(NEXT_VENV)/bin/python

check: $(STAMP) ## lint, formatting, types, layers
	@$(VENV)/bin/ruff check $(CODE)
	@$(VENV)/bin/ruff format --check $(CODE)
	@$(VENV)/bin/mypy --strict $(CODE)
	@$(VENV)/bin/lint-imports --no-logo

bench: $(STAMP) ## measure overhead, size and throughput
	@$(VENV)/bin/python benchmarks/overhead.py
	@$(VENV)/bin/python benchmarks/size.py
	@$(VENV)/bin/python benchmarks/throughput.py

eval: $(STAMP) ## judge the verdict on runs whose answer is known (ARGS="--quick", or "--real 50" for real trainings)
	@$(VENV)/bin/python -m benchmarks.diagnosis $(ARGS)

clean: ## remove the environments and all that was built
	rm -rf $(VENV) $(NEXT_VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(VENV),dev,$(TORCH))

$(NEXT_STAMP): pyproject.toml constraints.txt
	$(call install,$(NEXT_VENV),test,$(NEXT_TORCH))

# $(call install,FOLDER,EXTRA,TORCH): bring the environment up to date, or make it anew unless its stamp says that it is
# whole. The stamp comes last: without it the next `make` begins again. The second way to make an environment is for
# systems that package `venv` apart from Python.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	echo "ddpan needs Python 3.10 or newer and $(PYTHON) is not: name another one with PYTHON=..." >&2; exit 1; }
@echo "installing ddpan[$(2)] with torch $(3) into $(1): a minute or more"
@test -f $@ || $(PYTHON) -m venv --clear $(1) || { \
	$(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }
@rm -f $@
@sed 's/^torch==.*/torch==$(3)/' constraints.txt > $(1)/constraints.txt
@{ $(1)/bin/python -m pip install -c $(1)/constraints.txt hatchling setuptools && \
	$(1)/bin/python -m pip install -c $(1)/constraints.txt --no-build-isolation -e '.[$(2)]'; } > $(1)/install.log 2>&1 || { \
	tail -n 25 $(1)/install.log >&2; echo "installing into $(1) failed; all of pip's output is in $(1)/install.log" >&2; exit 1; }
@echo "$(CURDIR)" > $@
endef
