# The course's commands. `make run` needs git, make and Python 3.11 or newer; nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
TEST_READY := $(VENV)/test-ready

# DATA=mnist-5k EPOCHS=1 RANKS=4 BATCH_SIZE=16 and the like pass through to the ladder
LADDER := $(if $(DATA),--data $(DATA)) $(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(RANKS),--ranks $(RANKS)) \
          $(if $(BATCH_SIZE),--batch-size $(BATCH_SIZE))

.PHONY: run test lab notebooks bench slurm slurm-down help

run: $(READY)           ## climb the ladder on this machine: eight runs, a table and a picture
	cd source_code && ../$(BIN)/python ladder.py $(LADDER)

test: $(READY) $(TEST_READY)    ## run everything a contributor must keep green
	$(BIN)/python -m pytest --nbval-lax tests notebooks

lab: $(READY)           ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

notebooks: $(READY)     ## run every notebook again, in place
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False \
	  notebooks/*.ipynb

bench: $(READY)         ## measure ratios: data loaders, and what FSDP costs on one rank
	cd source_code && ../$(BIN)/python bench.py

slurm:                  ## bring up a two-node practice Slurm on this machine (LINK=200mbit: two hosts and a link)
	source_code/slurm/practice_cluster.sh up $(if $(LINK),--link '$(LINK)')

slurm-down:             ## stop the practice Slurm and remove it
	source_code/slurm/practice_cluster.sh down

help:                   ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 14

# Installed once, and again only when requirements.txt changes.
$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make run PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing: on Debian and Ubuntu, sudo apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(TEST_READY): tests/requirements.txt $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	@touch $@
