# Everything a person or CI does with this repository. `make run` and `make test` need only Rust and a C compiler.

.PHONY: build test model test-kills bench compare fmt fmt-check lint check doc ci clean run guests ptxas

build:
	cargo build --release -p tensor-wasm-cli

# Builds everything, starts a server, deploys three examples, calls each, prints a table; Ctrl-C ends it.
run: build
	cargo xtask demo

guests:
	cargo xtask guests

ptxas:
	cargo xtask ptxas

test: guests ptxas
	cargo test --workspace

# The long version of the durability test: 200 kills.
test-kills: guests
	TENSOR_WASM_TEST_KILLS=200 cargo test --workspace --test it -- --nocapture kill_9

# Every interleaving of the lock-free parts, by the model checker.
model:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --release -p tensor-wasm-gpu --lib

bench:
	cargo bench -p tensor-wasm-bench

# Comparisons with peers; installs them into bench-cache/ (needs wrk and npm), writes bench-results/.
compare: build guests
	cargo run --release -p tensor-wasm-bench -- invoke
	cargo run --release -p tensor-wasm-bench -- cold
	cargo run --release -p tensor-wasm-bench -- run
	cargo run --release -p tensor-wasm-bench -- serve
	cargo xtask results

fmt:
	cargo fmt --all
	cd guests && cargo fmt --all

fmt-check:
	cargo fmt --all --check
	cd guests && cargo fmt --all --check

lint:
	cargo clippy --workspace --all-targets -- -D warnings

check:
	cargo check --workspace --all-targets

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

ci:
	bash .ci/run

clean:
	cargo clean
	rm -rf guests/target bench-cache
