# Everything a person or CI does with this repository. `make run` and `make test` need only Rust and a C compiler.

.PHONY: build test model test-kills fuzz bench compare fmt fmt-check lint check doc ci clean run guests ptxas

build:
	cargo build --release -p tensor-wasm-cli

# Builds everything, starts a server, deploys four examples, calls each, prints a table; Ctrl-C ends it.
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

# Fuzzing of the kernel compiler, a minute of each target; needs cargo-fuzz and a nightly compiler.
fuzz:
	cd fuzz && for target in read differential emulate; do mkdir -p corpus/$$target; cargo +nightly fuzz run -s none $$target corpus/$$target seeds/$$target -- -timeout=20 -max_len=4096 -len_control=0 -max_total_time=60 || exit 1; done

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
