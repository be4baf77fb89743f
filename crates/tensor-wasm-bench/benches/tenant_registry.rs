//! Admission: looking up a tenant among many, and taking and returning a permit.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run should stop")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use tensor_wasm_exec::Config;
use tensor_wasm_exec::admission::Admission;

fn tenant_registry(c: &mut Criterion) {
    for tenants in [1, 16, 256] {
        let admission = Admission::new(Arc::new(Config::default()));
        let names: Vec<String> = (0..tenants).map(|n| format!("tenant-{n}")).collect();
        let mut next = 0;
        c.bench_function(&format!("tenant_registry/lookup/{tenants}"), |b| {
            b.iter(|| {
                next = (next + 1) % names.len();
                admission.account(&names[next])
            });
        });
    }
    let admission = Admission::new(Arc::new(Config::default()));
    let threads = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let deadline = Instant::now() + Duration::from_secs(3600);
    c.bench_function("tenant_registry/admit_release", |b| {
        b.to_async(&threads)
            .iter(async || drop(admission.admit("default", Instant::now(), deadline).await.ok().unwrap()));
    });
}

criterion_group!(benches, tenant_registry);
criterion_main!(benches);
