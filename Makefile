# Everything a person or CI does, by name. `make setup` is part of every target that needs it.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

# uv reads its own settings, not pip's: pass on where pip was told to look for packages.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: setup run test test-runs test-ssh test-peers test-engines check bench bench-engines bench-diagnosis lab clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet uv -c constraints.txt
	$(VENV)/bin/uv pip install --quiet --compile-bytecode --python $(RUN) -c constraints.txt -e '.[dev]'
	touch $@

run: setup
	$(RUN) -m orchestrator +experiment=layers_m1_2_30

# As many processes as cores; torch takes one thread in each, since more would wait for each other. In the
# order of the folders, since by size the few long tests of the lab would begin last.
test: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses 8 --no-loadscope-reorder -m 'not ssh and not runs and not peers and not engine'

# Whole commands that answer, fail, die, detach and are taken up again, what trains, and long searches.
test-runs: setup
	$(RUN) -m pytest -q -m runs

# Against real sshds; fails, instead of skipping, where there can be none.
test-ssh: setup
	REQUIRE_SSH=1 $(RUN) -m pytest -q -m ssh

# Against the trainers' and an engine's own code, in an environment of their own outside the clone.
test-peers: setup
	$(RUN) -m tests.peers.setup_peers
	REQUIRE_PEERS=1 $(RUN) -m pytest -q -m peers

# Against real SGLang and vLLM servers on this machine's processors, in environments outside the clone.
test-engines: setup
	$(RUN) -m tests.engines.setup_engines
	REQUIRE_ENGINES=1 $(RUN) -m pytest -q -m engine

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: setup
	$(RUN) bench/startup.py
	$(RUN) bench/push.py
	$(RUN) -m bench.wiring_search --draws 6 --seed 1
	$(RUN) -m bench.diagnosis --sample 40 --seed 1

# The advice on a drafter's flags beside what real engines then do, with delays put into them.
bench-engines: setup
	$(RUN) -m tests.engines.setup_engines
	$(RUN) -m bench.engine_advice

# Every case of the fault bench, then those that no threshold was fixed on: two hours.
bench-diagnosis: setup
	$(RUN) -m bench.diagnosis
	$(RUN) -m bench.diagnosis --held-out

# Trains the lab's target and drafters anew, all but the first in the peers' environment; two hours or more.
lab: setup
	$(RUN) -m tests.peers.setup_peers
	$(RUN) -m eagle3.lab.build --out lab --work results/lab-build

clean:
	rm -rf $(VENV)
