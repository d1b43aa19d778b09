# Everything a developer types. The first target that needs .venv makes it; later ones find it fresh.
SHELL := /bin/sh
.DEFAULT_GOAL := help
bin := .venv/bin

# A Java runtime that ensure-java.sh had to fetch for us goes before the machine's own.
with_java := if [ -d .venv/jdk ]; then export JAVA_HOME="$$PWD/.venv/jdk"; fi;

compile := $(bin)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

# What deploy/Containerfile installs: all that long-running commands need, without Spark.
container_extras := $(foreach each,console grpc http kafka mcp nats otel postgres rabbitmq redis schedule serve views,--extra $(each))

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.PHONY: .venv
.venv: .venv/ready

.venv/ready: pyproject.toml requirements/lock.txt requirements/uv.txt scripts/setup.sh
	@scripts/setup.sh
	@touch $@

.venv/java-ready: .venv/ready scripts/ensure-java.sh
	@scripts/ensure-java.sh
	@touch $@

# Halves the CPU time that Spark's JVMs take to start; tests pass without it, too.
.venv/spark-classes.jsa: .venv/java-ready scripts/spark_class_archive.py
	-@$(with_java) $(bin)/python scripts/spark_class_archive.py $@

# Many tests wait for servers: four workers keep two cores busy.
WORKERS ?= 4

.PHONY: demo demo-cluster example test test-extended test-pythons bench bench-spark bench-cluster
demo: .venv ## Send, receive, crash, rebuild, search and show the console
	@$(bin)/postroom demo

DEMO ?=

demo-cluster: .venv ## Kill the runner of a mailbox while messages flow: leases in three NATS servers, admins, proxies and runners
	@$(bin)/python -m docs.examples.cluster.run $(DEMO)

example: .venv ## Place an order, crash, and see it shipped once: outbox and inbox on real servers
	@$(bin)/python -m docs.examples.orders.run

# Tests that are marked as extended run in test-extended only.
# A worker that ended is not replaced: its successor would be given the same files, or none, and the run not end.
# Files in the order of collection: xdist's own order, the number of tests, would start the slowest files last.
test: .venv/spark-classes.jsa ## Run the test suite
	@scripts/ensure-programs.sh
	@$(with_java) $(bin)/pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test-extended: .venv/spark-classes.jsa ## Run the tests that take long: long drills, Spark clusters, harnesses with defects put in
	@scripts/ensure-programs.sh
	@$(with_java) $(bin)/pytest -m extended -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

# Those that are not installed are skipped; scripts/test-pythons.sh names them.
PYTHONS ?= 3.11 3.12 3.13 3.14

test-pythons: .venv/java-ready ## Run unit and conformance tests on every Python from 3.11 to 3.14 that is installed
	@$(with_java) WORKERS=$(WORKERS) scripts/test-pythons.sh $(PYTHONS)

# The targets are in tests/fuzz/target.py; TARGETS="records tokens" names some of them.
SECONDS ?= 60

.PHONY: fuzz
fuzz: .venv ## Fuzz every parser for SECONDS (60) each, guided by coverage where atheris has a wheel
	@$(bin)/python -m tests.fuzz --seconds $(SECONDS) $(TARGETS)

# SEEDS=1 repeats the SEED and prints all that happened.
SEED ?= 0
SEEDS ?= 10000

.PHONY: simulation
simulation: .venv ## Simulate SEEDS (10000) clusters with crashes, pauses, bad networks and bad clocks
	@$(bin)/python -m tests.simulation.cluster --seed $(SEED) --seeds $(SEEDS)

ROUNDS ?= 10

.PHONY: linearizability
linearizability: .venv ## Kill, pause and cut off processes of a cluster for ROUNDS (10), and check their histories
	@$(bin)/python -m tests.linearizability $(ROUNDS)

.PHONY: drill
drill: .venv ## Let everything fail that can, twice, of a store in JetStream, and check what it promised
	@$(bin)/python -m tests.linearizability.drill

bench: .venv/java-ready ## Measure, and write bench.json
	@$(with_java) $(bin)/python -m tests.benchmarks

bench-spark: .venv/java-ready ## Measure Spark beside its peers at 1M and 5M messages, and write bench-spark.json
	@$(with_java) $(bin)/python -m tests.benchmarks spark. follow. spark.rebuild.postgres.5m spark.rebuild.sqlite.5m --output bench-spark.json

bench-cluster: .venv ## Measure leases, routes and forwarding on a cluster of this machine, and write bench-cluster.json
	@GRPC_ENABLE_FORK_SUPPORT=false $(bin)/python -m tests.benchmarks cluster. --output bench-cluster.json

.PHONY: screenshots
screenshots: .venv ## Take pictures of the console's pages into docs/images/console; PICTURES="search log" takes some of them
	@scripts/ensure-programs.sh
	@$(bin)/python -m tests.screenshots $(PICTURES)

.PHONY: pictures
pictures: .venv ## Draw the pictures of docs/reports.md from a sample store
	@$(bin)/python -m scripts.report_pictures

.PHONY: spark-bundle
spark-bundle: .venv ## Build what a Spark cluster needs into dist/: code, packages, entry points
	@scripts/spark-bundle.sh

.PHONY: check types imports walks lint format openapi openapi-check proto proto-check operations operations-check lock
check: lint openapi-check proto-check operations-check types imports walks ## Lint, type-check, and verify imports, generated code and walks

lint: .venv
	@$(bin)/ruff check
	@$(bin)/ruff format --check

types: .venv
	@$(bin)/mypy

imports: .venv
	@$(bin)/lint-imports --no-logo

walks: .venv
	@$(bin)/python -m tests.architecture walk --check

format: .venv ## Fix what ruff can fix, and format
	@$(bin)/ruff check --fix
	@$(bin)/ruff format

openapi: .venv ## Write the contract of the HTTP interface to docs/reference/openapi.json
	@$(bin)/python scripts/openapi.py

openapi-check: .venv
	@$(bin)/python scripts/openapi.py --check

operations: .venv ## Generate the operations of SyncMailbox from the port Mailbox, and the pages of docs/reference from the code
	@$(bin)/python scripts/operations.py
	@$(bin)/python -m scripts.reference

operations-check: .venv
	@$(bin)/python scripts/operations.py --check
	@$(bin)/python -m scripts.reference --check

proto: .venv ## Generate Python code from the .proto files
	@scripts/proto.sh

proto-check: .venv
	@scripts/proto.sh --check

lock: .venv ## Pin every dependency by hash; UPGRADE=--upgrade takes the newest versions
	@$(compile) $(UPGRADE) --extra all --extra demo --group dev --output-file requirements/lock.txt pyproject.toml
	@echo 'hatchling>=1.27' | $(compile) --constraint requirements/lock.txt $(container_extras) \
		--output-file requirements/container.txt pyproject.toml -
	@echo uv | $(compile) --constraint requirements/lock.txt --output-file requirements/uv.txt -
	@$(compile) $(UPGRADE) --group docs --output-file requirements/docs.txt
	@$(compile) $(UPGRADE) --group release --output-file requirements/release.txt

.venv-docs/ready: requirements/docs.txt | .venv
	@$(bin)/uv venv --quiet --clear --python $(bin)/python .venv-docs
	@$(bin)/uv pip sync --quiet --python .venv-docs --require-hashes requirements/docs.txt
	@touch $@

# POSTROOM_SITE_URL and POSTROOM_REPOSITORY_URL are the addresses of the site and of the repository, if known.
VERSION ?= dev
SITE ?= dist/site

.PHONY: docs docs-serve
docs: .venv-docs/ready ## Build the site of the documentation in SITE/VERSION (dist/site/dev); a link that leads nowhere fails
	@.venv-docs/bin/python -m scripts.site --version $(VERSION) $(if $(LATEST),--latest) --output $(SITE)

docs-serve: .venv-docs/ready ## Serve the site at ADDRESS (127.0.0.1:8000), and build it again when a page changes
	@.venv-docs/bin/python -m scripts.site --serve $(or $(ADDRESS),127.0.0.1:8000)

.venv-release/ready: requirements/release.txt | .venv
	@$(bin)/uv venv --quiet --clear --no-project --python $(bin)/python .venv-release
	@$(bin)/uv pip sync --quiet --python .venv-release --require-hashes requirements/release.txt
	@touch $@

.PHONY: release
release: .venv .venv-release/ready ## Build this version in dist/ and check it; CUT=0.3.0 cuts it first, TAG=1 tags it
	@$(bin)/python -m scripts.release $(if $(CUT),--cut $(CUT)) $(if $(TAG),--tag) $(PYTHONS)

.PHONY: clean
clean: ## Remove the environment and every cache
	rm -rf .venv .venv-docs .venv-release .site .uv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
