# Everything runs in a virtual environment of its own: nothing else is touched.
#
#   make demo                 8 ranks on this machine, with MPI from a wheel
#   make demo MPI=system      with the mpirun on your PATH instead
#   make demo RANKS=4 ARGS="--steps 50"

PYTHON ?= python3
RANKS ?= 8
MPI ?= wheel
ARGS ?=

ifeq ($(MPI),wheel)
VENV := .venv
DEMO_EXTRAS := cpu,plot
MPIRUN := $(VENV)/bin/mpirun
else ifeq ($(MPI),system)
# Apart from the other one, whose MPI wheel would hide the machine's MPI.
VENV := .venv/system
DEMO_EXTRAS := mpi,plot
MPIRUN := mpirun
else
$(error MPI=$(MPI): expected MPI=wheel or MPI=system)
endif

BIN := $(VENV)/bin
BENCHES := $(shell grep -l '^if __name__ == "__main__"' kernels/*.py kernels/*/*.py 2>/dev/null)

# Programs that Python starts, mpirun above all, are the environment's own.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test lint bench pictures clean

help:
	@echo 'make demo   train a small GPT, cut over RANKS=8 ranks (ARGS="..." go to it)'
	@echo 'make test   run every test, those on several ranks too (ARGS="-k name")'
	@echo 'make lint   ruff and mypy'
	@echo 'make bench  check each kernel against its reference, then time it'
	@echo 'make pictures  draw the pictures of docs/ again'
	@echo 'make clean  remove caches and the virtual environment'

demo: $(VENV)/installed-demo
	$(MPIRUN) -n $(RANKS) $(BIN)/python examples/gpt_tp.py $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/installed-demo
	@set -e; for bench in $(subst /,.,$(basename $(BENCHES))); do \
	    echo "python -m mpiscale.$$bench"; $(BIN)/python -m mpiscale.$$bench; \
	done

# The pictures of docs/pipeline_parallel.md, from the schedules themselves.
pictures: $(VENV)/installed-demo
	@set -e; for schedule in gpipe 1f1b zb_h1 zb_h2 zb_v dualpipe dualpipe_v; do \
	    $(BIN)/mpiscale draw --schedule $$schedule --out docs/pictures/$$schedule.svg; \
	done; for schedule in interleaved_1f1b looped_bfs; do \
	    $(BIN)/mpiscale draw --schedule $$schedule --chunks 2 \
	        --out docs/pictures/$$schedule.svg; \
	done
	$(MPIRUN) -n 2 $(BIN)/python examples/gpt_pp.py --steps 20 --out runs/pictures
	cp runs/pictures/timeline.png docs/pictures/

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: EXTRAS := $(DEMO_EXTRAS)
$(VENV)/installed-test: EXTRAS := test
$(VENV)/installed-dev: EXTRAS := dev
$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[$(EXTRAS)]'
	touch $@
