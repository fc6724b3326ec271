# The course's commands. `make run` needs git, make and Python 3.11 or newer; nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
TEST_READY := $(VENV)/test-ready
LOWEST := .venv-lowest
SITE   := .venv-site
DEEPSPEED := -r source_code/requirements-deepspeed.txt
JAX := -r source_code/requirements-jax.txt

# Python keeps what it has compiled. Without that, importing torch takes five seconds instead of two, at every start.
unexport PYTHONDONTWRITEBYTECODE

# DATA=mnist EPOCHS=1 RANKS=4 BATCH_SIZE=16 and the like pass through to the ladder
LADDER := $(if $(DATA),--data $(DATA)) $(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(RANKS),--ranks $(RANKS)) \
          $(if $(BATCH_SIZE),--batch-size $(BATCH_SIZE))

# Notebooks and test files run side by side, one for every two cores and one more: tests often wait for ranks to start or
# to end. One worker runs all of a file.
CORES   := $(shell getconf _NPROCESSORS_ONLN)
aside    = $(if $(filter-out 0 1,$(1)),-n $(1) --dist loadfile --no-loadscope-reorder)
TESTS   := python -m pytest -v $(call aside,$(shell expr $(CORES) / 2 + 1))

# From files of requirements, and not from pyproject.toml's extras, which say the same (tests/test_packaging.py): pip would
# build the planner's wheel to install an extra, and install a copy of the planner next to the checkout's.
# $(call install,VENV,WORDS): uv takes a quarter of pip's time; where it cannot be had or used, pip does the same.
pip     = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
install = { $(call pip,$(1)) uv && $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2); } || \
          { echo "uv cannot install here, so pip does: two minutes"; $(call pip,$(1)) $(2); }

.PHONY: run check types test nightly coverage test-cluster test-lowest lab learner class-check notebooks site gpu bench drill deepspeed jax constraints slurm slurm-down help

run: $(READY)           ## climb the ladder on this machine: eight runs, a table and a picture
	cd source_code && ../$(BIN)/python ladder.py $(LADDER)

# -p: the tests' own set-up, which pytest would look for beside the notebooks. Their kernels doubt verdicts by it.
check: $(TEST_READY)    ## before a commit, in a few minutes: lint, links, arithmetic, few ranks, the chapters you changed
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/$(TESTS) -m "not long and not slurm and not browser" tests
	@changed="$$($(BIN)/python tests/changed.py)"; [ -z "$$changed" ] || $(BIN)/$(TESTS) -p tests.conftest --nbval-lax $$changed

# uv keeps pyright, and the Node.js that it runs on, in a cache of its own.
types: $(READY)         ## read the planner's types with pyright (basic), which is fetched once; CI does it, too
	$(BIN)/uv tool run --quiet --from 'pyright[nodejs]==1.1.414' pyright

# Of the tests that break a notebook, and of a long test's sets of parameters, every sixteenth: they take longest. Each
# notebook's verdicts are doubted as it runs (tests/doubts.py), and make nightly takes all.
test: export FSDP_LABS_ONE_IN ?= 16
test: $(TEST_READY)     ## run everything a contributor must keep green
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/$(TESTS) --durations=30 --nbval-lax -m "not slurm and not browser and not chance and not nightly" notebooks tests

# A failure is repeated with make nightly SEED=…, the number that pytest prints first
nightly: SEED ?= $(shell od -An -N3 -tu4 /dev/urandom)
nightly: $(TEST_READY)  ## all long tests, and what draws at random, with a new seed (SEED=7: with this one)
	FSDP_LABS_SEED=$(strip $(SEED)) $(BIN)/$(TESTS) -m "(drawn or chance or long or nightly) and not slurm and not browser" tests

# Every process writes a file; ranks, too ([tool.coverage.run] in pyproject.toml)
coverage: $(TEST_READY)         ## run the short tests, list the lines for a GPU that none of their processes executes
	@rm -rf build/coverage && mkdir -p build/coverage
	-$(BIN)/$(subst python -m,python -m coverage run -m,$(TESTS)) -m "not long and not slurm and not browser" tests
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python tests/gpu_branches.py

test-cluster: $(TEST_READY)     ## what needs a Slurm to start, and a browser (SHORT=1: without long tests, as CI runs it)
	$(BIN)/python -m pytest -v -m "(slurm or browser)$(if $(SHORT), and not long)" tests

test-lowest: $(LOWEST)/ready    ## arithmetic, equality, memory, checkpoints, pipelines and tensor parallelism on the oldest supported versions (SHORT=1: without long tests)
	$(LOWEST)/bin/$(TESTS) -m "not slurm$(if $(SHORT), and not long)" tests/test_models.py tests/test_predict.py tests/test_equality.py \
	  tests/test_memory.py tests/test_mesh.py tests/test_zero_plan.py tests/test_pipeline.py tests/test_tensor_parallel.py \
	  tests/test_checkpoints.py tests/test_saving.py tests/test_ownership.py

# From here, not from notebooks/: Jupyter serves nothing above the folder it starts in, and the pictures are in images/.
lab: $(READY)           ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

# Where the course is installed once for a class. Beside the copies lies what the notebooks expect beside their folder:
# a link to the code, and the pictures, which Jupyter does not fetch through a link. Runs of the labs go there too
# (labkit/measuring/records.py).
LEARNER ?= $(HOME)/my-fsdp-labs
learner:                ## copy the notebooks into a folder of your own, ~/my-fsdp-labs (LEARNER=...); never over your work
	@mkdir -p "$(LEARNER)/notebooks" "$(LEARNER)/images"
	@ln -sfn "$(CURDIR)/source_code" "$(LEARNER)/"
	@install -m 644 images/*.svg images/*.png "$(LEARNER)/images/"
	@install -m 644 notebooks/glossary.md "$(LEARNER)/notebooks/"
	@for each in notebooks/*.ipynb; do \
	  [ -e "$(LEARNER)/$$each" ] || install -m 644 "$$each" "$(LEARNER)/$$each" || exit 2; done
	@echo "The notebooks are in $(LEARNER)/notebooks, for you to change. Open them with"
	@echo "  $(CURDIR)/$(BIN)/jupyter lab $(LEARNER)"
	@echo "or in JupyterHub with the kernel FSDP Labs, which this makes once:"
	@echo "  $(CURDIR)/$(BIN)/python -m ipykernel install --user --name fsdp-labs --display-name 'FSDP Labs'"

class-check: $(TEST_READY)  ## before a class, on its cluster: what a learner would stumble over, and what to do about it
	cd source_code && ../$(BIN)/python class_check.py

notebooks: $(READY)     ## run every notebook again, in place
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False \
	  --ExecutePreprocessor.coalesce_streams=True notebooks/*.ipynb

site: $(SITE)/ready     ## write the course as pages into build/site, for any web server: python3 -m http.server -d build/site
	@rm -rf build/site
	@$(SITE)/bin/python docs/site_parts.py
	$(SITE)/bin/python -m sphinx -b html -q -j auto -w build/warnings.txt -c docs -d build/doctrees . build/site

gpu:                    ## what only GPUs can show, in parts of 8 minutes (PART=smoke: one of them; DRY=1: what it would run)
	cd source_code && $(if $(wildcard $(READY)),../$(BIN)/python,$(PYTHON)) -m proofs.gpu $(if $(PART),--part $(PART)) $(if $(DRY),--dry-run)

bench: $(READY)         ## measure ratios: data loaders, and what FSDP costs on one rank
	cd source_code && ../$(BIN)/python -m proofs.ratios

drill: $(READY)         ## kill a rank at a random moment, saving included, resume, and compare bit by bit: 60 times
	cd source_code && ../$(BIN)/python -m proofs.crash

deepspeed: $(READY)     ## install DeepSpeed, for gpt_zero.py --engine deepspeed and notebook 13: 20 MB; nothing is compiled
	@$(call install,$(VENV),$(DEEPSPEED) -c constraints.txt)

jax: $(READY)         ## install JAX, for gpt_jax.py and notebook 14: 0.6 GB
	@$(call install,$(VENV),$(JAX) -c constraints.txt)

constraints: $(READY)   ## take the newest versions of everything into constraints.txt (commit it if CI passes)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-annotate --no-header \
	  requirements.txt source_code/requirements-deepspeed.txt source_code/requirements-jax.txt tests/requirements.txt \
	  docs/requirements.txt -o constraints.txt
	$(MAKE) $(TEST_READY)

slurm:                  ## bring up a two-node practice Slurm on this machine (LINK=200mbit: two hosts and a link)
	source_code/slurm/practice_cluster.sh up $(if $(LINK),--link '$(LINK)')

slurm-down:             ## stop the practice Slurm and remove it
	source_code/slurm/practice_cluster.sh down

help:                   ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 14

# Installed once, and again only when what to install changes.
$(READY): requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make run PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing: on Debian and Ubuntu, sudo apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@$(call install,$(VENV),-r requirements.txt -c constraints.txt)
	@touch $@

$(TEST_READY): tests/requirements.txt source_code/requirements-deepspeed.txt source_code/requirements-jax.txt $(READY)
	@$(call install,$(VENV),-r tests/requirements.txt $(DEEPSPEED) $(JAX) -c constraints.txt)
	@touch $@

$(SITE)/ready: docs/requirements.txt constraints.txt
	$(PYTHON) -m venv $(SITE)
	@$(call install,$(SITE),-r docs/requirements.txt -c constraints.txt)
	@touch $@

$(LOWEST)/ready: requirements.txt tests/requirements.txt source_code/requirements-deepspeed.txt $(READY)
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	  -r requirements.txt -r tests/requirements.txt $(DEEPSPEED)
	@touch $@
