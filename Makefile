# Everything a person or CI does with this repository. `make run` and `make test` need only Rust and a C compiler.

.PHONY: help build run guests ptxas test schemathesis test-kills model fuzz fuzz-seeds bench compare fmt fmt-check lint lint-guests check \
	tidy deny doc doc-sdk ci clean

.DEFAULT_GOAL := build

# Every target that says what it is.
help:
	@awk '/^# / { what = substr($$0, 3); next } /^[a-z-]+:/ { if (what) printf "make %-12s %s\n", substr($$1, 1, length($$1) - 1), what } { what = "" }' Makefile

# The binary, target/release/tensor-wasm.
build:
	cargo build --release -p tensor-wasm-cli

# Builds everything, starts a server, deploys four examples, calls each, prints a table; Ctrl-C ends it.
run: build
	cargo xtask demo

# The guests of tests, examples and benchmarks, into target/guests.
guests:
	cargo xtask guests

# NVIDIA's assembler for the tests, where Python can install it.
ptxas:
	cargo xtask ptxas

# All tests.
test: guests ptxas
	cargo test --workspace

# What /openapi.json promises, tried against a server; installs into target/, skips itself where there is no Python.
schemathesis:
	bash .ci/schemathesis

# The long version of the durability test: 200 kills.
test-kills: guests
	TENSOR_WASM_TEST_KILLS=200 cargo test --workspace --test it -- --nocapture kill_9

# Every interleaving of the lock-free parts, by the model checker.
model:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p tensor-wasm-gpu -p tensor-wasm-ring --lib

# Fuzzing of the kernel compiler, a minute of each target; needs cargo-fuzz and a nightly compiler.
fuzz:
	cd fuzz && for target in read differential emulate files; do mkdir -p corpus/$$target; cargo +nightly fuzz run -s none $$target corpus/$$target seeds/$$target -- -timeout=20 -max_len=4096 -len_control=0 -max_total_time=60 || exit 1; done

# The fuzz targets, built by the stable compiler without coverage, run once on each of their seeds; needs a C++ compiler.
fuzz-seeds:
	cd fuzz && cargo build --locked
	cd fuzz && for target in read differential emulate files; do target/debug/$$target -timeout=60 seeds/$$target/* || exit 1; done

# Microbenchmarks.
bench:
	cargo bench -p tensor-wasm-bench

# Comparisons with peers; installs them into bench-cache/ (needs wrk and npm), writes bench-results/.
compare: build guests
	cargo run --release -p tensor-wasm-bench -- invoke
	cargo run --release -p tensor-wasm-bench -- cold
	cargo run --release -p tensor-wasm-bench -- run
	cargo run --release -p tensor-wasm-bench -- serve
	cargo run --release -p tensor-wasm-bench -- kernels
	cargo xtask results

# Formats every workspace: this one, the guests with the SDK, the fuzz targets.
fmt:
	cargo fmt --all
	cd guests && cargo fmt --all
	cd fuzz && cargo fmt --all

# Says what `make fmt` would change.
fmt-check:
	cargo fmt --all --check
	cd guests && cargo fmt --all --check
	cd fuzz && cargo fmt --all --check

# Lints of the workspace.
lint:
	cargo clippy --workspace --all-targets --locked -- -D warnings

# Lints of the guests and the SDK, each for what it is built for.
lint-guests: guests
	cd guests && cargo clippy --release --locked --target wasm32-wasip2 -- -D warnings
	cd guests && cargo clippy --release --locked --target wasm32-wasip2 -p tensor-wasm-sdk -- -D warnings
	cd guests && cargo clippy --release --locked --target wasm32-unknown-unknown \
		-p kernels -p example-kernels -p gpu-saxpy-core -p tensor-wasm-kernel -p tensor-wasm-flat -- -D warnings

# Whether the papers match the code, and the code its own rules.
tidy:
	cargo xtask tidy

# Licences, bans and sources of all dependencies, by deny.toml.
deny:
	cargo xtask deny

# Whether everything compiles, without making anything of it.
check:
	cargo check --workspace --all-targets

# Documentation of the workspace.
doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

# Documentation of the SDK, into guests/target.
doc-sdk:
	cd guests && RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --target wasm32-wasip2 -p tensor-wasm-sdk
	cd guests && RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --target wasm32-unknown-unknown \
		-p tensor-wasm-kernel -p tensor-wasm-flat

# What must hold before anything lands.
ci:
	.ci/run

# Removes everything that was built.
clean:
	cargo clean
	rm -rf guests/target fuzz/target bench-cache
