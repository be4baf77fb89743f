//! The configuration file: every limit with its unit in its name and its default beside it.
//!
//! `tensor-wasm serve --config FILE` reads it as TOML; unknown keys are errors, so a typing mistake cannot silently
//! leave a limit at its default. Limits are per tenant unless the name says otherwise; `[tenant.NAME]` overrides any of
//! `[limits]` for one tenant.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Everything an operator can set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub server: Server,
    pub engine: Engine,
    pub jobs: Jobs,
    /// The defaults for every tenant.
    pub limits: Limits,
    /// Overrides by tenant name.
    pub tenant: BTreeMap<String, LimitsOverride>,
}

/// The process as a whole.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Calls running at once, all tenants together. Each may hold a pooled instance, so this also sizes the pool.
    pub concurrency_max: usize,
    /// Calls waiting for a place, all tenants together.
    pub queue_max: usize,
    /// How long a call may wait for a place before it is refused.
    pub queue_wait_ms_max: u64,
    /// Open client connections; more are left in the kernel's backlog.
    pub connections_max: usize,
    /// A client must have sent its request head within this time.
    pub header_read_ms_max: u64,
    /// A request body may pause no longer than this between two pieces.
    pub body_idle_ms_max: u64,
    /// A request body that is collected (all but those streamed to a guest; a deploy's too) must be whole within this.
    pub body_ms_max: u64,
    /// Request bodies other than a deploy's.
    pub body_bytes_max: usize,
    /// Disk that modules being uploaded take, all tenants together.
    pub uploads_bytes_max: usize,
    /// How long a shutdown waits for running calls.
    pub drain_ms_max: u64,
    /// Hosts that guests may call over HTTP: `host` or `host:port`; `*` for all. Empty: none.
    pub outbound_http: Vec<String>,
    /// A file with the key that functions' secrets are sealed with: 32 bytes, as hexadecimal digits or base64.
    /// `TENSOR_WASM_SECRETS_KEY` goes before it.
    pub secrets_key_file: Option<PathBuf>,
}

/// How guests are compiled and kept.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Engine {
    /// Cranelift's effort. Changing it changes the engine's identity: every function is recompiled from its source.
    pub optimize: Optimize,
    /// Compiled functions kept mapped; the least recently used is unmapped beyond this.
    pub loaded_max: usize,
    /// Bytes of a linear memory that stay resident between two guests (reset by copying, not by unmapping).
    pub keep_resident_bytes: usize,
    /// Stack of one guest call.
    pub stack_bytes_max: usize,
    /// Compilations at once; each is a process of its own.
    pub compile_concurrency_max: usize,
    /// Memory one compilation may take.
    pub compile_memory_bytes_max: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimize {
    None,
    Speed,
    SpeedAndSize,
}

/// Asynchronous invocations.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Jobs {
    /// Jobs running at once.
    pub concurrency_max: usize,
    /// Unfinished jobs, all tenants together.
    pub queue_max: usize,
    /// Attempts of a job whose guest faulted, unless the request says otherwise.
    pub attempts: u32,
    /// Size of a job's arguments and stdin together, and of its result.
    pub record_bytes_max: usize,
    /// A finished job and its result are kept this long.
    pub keep_s: u64,
    /// Finished jobs kept, all tenants together; the oldest go first.
    pub keep_max: usize,
}

/// What one tenant may take.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Requests per second admitted on average; 0 means no limit.
    pub rate_per_second: f64,
    /// Requests admitted at once after a quiet time.
    pub rate_burst: u32,
    /// Calls running at once.
    pub concurrency_max: usize,
    /// Calls waiting for a place.
    pub queue_max: usize,
    /// Share of the server's places when tenants compete, relative to the others.
    pub weight: u32,
    /// Linear memory of all the tenant's running instances together.
    pub tenant_memory_bytes_max: u64,
    /// Linear memory of one instance.
    pub memory_bytes_max: u64,
    /// Elements of one table.
    pub table_elements_max: u32,
    /// Time one call may take.
    pub deadline_ms_max: u64,
    /// Functions deployed.
    pub functions_max: usize,
    /// Revisions kept of one function; the oldest without traffic go first.
    pub revisions_max: usize,
    /// Size of one module or component. Those sent as `application/wasm` are streamed to disk; 1 GiB has been tried.
    pub module_bytes_max: usize,
    /// Disk that the tenant's uploads take before they are deployed; one of any allowed size may always run.
    pub uploads_bytes_max: usize,
    /// Secrets of all the tenant's functions together.
    pub secrets_max: usize,
    /// Size of one secret's value. They are copied into each instance that reads its environment.
    pub secret_bytes_max: usize,
    /// Time one compilation may take.
    pub compile_ms_max: u64,
    /// Unfinished jobs.
    pub jobs_max: usize,
    /// stdout and stderr kept of one call.
    pub log_bytes_max: usize,
    /// Result of one call (a command's stdout, an export's value).
    pub output_bytes_max: usize,
    /// Memory on the device; 0: the tenant may not use it.
    pub gpu_memory_bytes_max: u64,
    /// Time one launch of a kernel may take.
    pub gpu_kernel_ms_max: u64,
    /// Multiprocessors of a GPU that the tenant's kernels run on; 0: all of them.
    pub gpu_multiprocessors: u32,
    /// The tenant is trusted with the GPU: its functions may load PTX, which nothing fences. It gets a worker of its own.
    pub gpu_raw_ptx: bool,
}

/// [`Limits`] with everything optional: what is absent is inherited.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsOverride {
    pub rate_per_second: Option<f64>,
    pub rate_burst: Option<u32>,
    pub concurrency_max: Option<usize>,
    pub queue_max: Option<usize>,
    pub weight: Option<u32>,
    pub tenant_memory_bytes_max: Option<u64>,
    pub memory_bytes_max: Option<u64>,
    pub table_elements_max: Option<u32>,
    pub deadline_ms_max: Option<u64>,
    pub functions_max: Option<usize>,
    pub revisions_max: Option<usize>,
    pub module_bytes_max: Option<usize>,
    pub uploads_bytes_max: Option<usize>,
    pub secrets_max: Option<usize>,
    pub secret_bytes_max: Option<usize>,
    pub compile_ms_max: Option<u64>,
    pub jobs_max: Option<usize>,
    pub log_bytes_max: Option<usize>,
    pub output_bytes_max: Option<usize>,
    pub gpu_memory_bytes_max: Option<u64>,
    pub gpu_kernel_ms_max: Option<u64>,
    pub gpu_multiprocessors: Option<u32>,
    pub gpu_raw_ptx: Option<bool>,
}

const MIB: usize = 1 << 20;
const GIB: u64 = 1 << 30;

/// The largest linear memory a pooled slot can hold; a tenant's `memory_bytes_max` may not exceed it.
/// 4 GiB is the whole of a 32-bit guest, and reserving it costs address space only.
pub const SLOT_MEMORY_BYTES: u64 = 4 * GIB;

/// A launch that takes much longer would look to the device's keeper as if the device hung.
const GPU_KERNEL_MS_MAX: u64 = 50_000;

impl Default for Server {
    fn default() -> Self {
        Server {
            concurrency_max: 256,
            queue_max: 4096,
            queue_wait_ms_max: 5_000,
            connections_max: 10_000,
            header_read_ms_max: 10_000,
            body_idle_ms_max: 30_000,
            body_ms_max: 300_000,
            body_bytes_max: 16 * MIB,
            uploads_bytes_max: 4096 * MIB,
            drain_ms_max: 30_000,
            outbound_http: Vec::new(),
            secrets_key_file: None,
        }
    }
}

impl Default for Engine {
    fn default() -> Self {
        Engine {
            optimize: Optimize::Speed,
            loaded_max: 512,
            keep_resident_bytes: 2 * MIB,
            stack_bytes_max: MIB / 2,
            compile_concurrency_max: 2,
            compile_memory_bytes_max: 4 * GIB,
        }
    }
}

impl Default for Jobs {
    fn default() -> Self {
        Jobs {
            concurrency_max: 16,
            queue_max: 100_000,
            attempts: 1,
            record_bytes_max: 256 << 10,
            keep_s: 24 * 3600,
            keep_max: 100_000,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            rate_per_second: 0.0,
            rate_burst: 1000,
            concurrency_max: 128,
            queue_max: 1024,
            weight: 1,
            tenant_memory_bytes_max: 4 * GIB,
            memory_bytes_max: 512 << 20,
            table_elements_max: 100_000,
            deadline_ms_max: 30_000,
            functions_max: 20_000,
            revisions_max: 16,
            module_bytes_max: 64 * MIB,
            uploads_bytes_max: 512 * MIB,
            secrets_max: 256,
            secret_bytes_max: 8 << 10,
            compile_ms_max: 60_000,
            jobs_max: 10_000,
            log_bytes_max: 64 << 10,
            output_bytes_max: 16 * MIB,
            gpu_memory_bytes_max: GIB,
            gpu_kernel_ms_max: 10_000,
            gpu_multiprocessors: 0,
            gpu_raw_ptx: false,
        }
    }
}

macro_rules! inherit {
    ($base:expr, $over:expr, $($field:ident),+) => {
        Limits { $($field: $over.$field.clone().unwrap_or_else(|| $base.$field.clone()),)+ }
    };
}

impl Config {
    /// Reads a configuration file's text; the message names the line and the key that are wrong.
    pub fn parse(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|e| e.to_string())?;
        config.check()?;
        Ok(config)
    }

    /// The limits of one tenant.
    pub fn limits_of(&self, tenant: &str) -> Limits {
        let Some(over) = self.tenant.get(tenant) else {
            return self.limits.clone();
        };
        inherit!(
            self.limits,
            over,
            rate_per_second,
            rate_burst,
            concurrency_max,
            queue_max,
            weight,
            tenant_memory_bytes_max,
            memory_bytes_max,
            table_elements_max,
            deadline_ms_max,
            functions_max,
            revisions_max,
            module_bytes_max,
            uploads_bytes_max,
            secrets_max,
            secret_bytes_max,
            compile_ms_max,
            jobs_max,
            log_bytes_max,
            output_bytes_max,
            gpu_memory_bytes_max,
            gpu_kernel_ms_max,
            gpu_multiprocessors,
            gpu_raw_ptx
        )
    }

    /// The largest table any tenant may have; the pool's tables are of this size.
    pub(crate) fn table_elements_max(&self) -> u32 {
        let overrides = self.tenant.values().filter_map(|over| over.table_elements_max);
        overrides.chain([self.limits.table_elements_max]).max().unwrap_or(0)
    }

    /// Refuses values that could not work, naming them.
    pub fn check(&self) -> Result<(), String> {
        let tenants = self.tenant.keys().map(|name| (format!("tenant.{name}"), self.limits_of(name)));
        for (section, limits) in std::iter::once(("limits".to_owned(), self.limits.clone())).chain(tenants) {
            let positive = [
                ("concurrency_max", limits.concurrency_max as u64),
                ("weight", limits.weight.into()),
                ("rate_burst", limits.rate_burst.into()),
                ("deadline_ms_max", limits.deadline_ms_max),
                ("revisions_max", limits.revisions_max as u64),
                ("gpu_kernel_ms_max", limits.gpu_kernel_ms_max),
            ];
            if let Some((key, _)) = positive.iter().find(|(_, value)| *value == 0) {
                return Err(format!("[{section}] {key} must be at least 1"));
            }
            if limits.memory_bytes_max > SLOT_MEMORY_BYTES {
                return Err(format!(
                    "[{section}] memory_bytes_max is {}, more than a 32-bit guest can have ({SLOT_MEMORY_BYTES})",
                    limits.memory_bytes_max
                ));
            }
            if limits.gpu_kernel_ms_max > GPU_KERNEL_MS_MAX {
                return Err(format!("[{section}] gpu_kernel_ms_max must be at most {GPU_KERNEL_MS_MAX}"));
            }
            // One request a day is slow enough; smaller numbers would make waiting times that no clock holds.
            let slowest = 1.0 / 86_400.0;
            if limits.rate_per_second != 0.0
                && !(limits.rate_per_second >= slowest && limits.rate_per_second.is_finite())
            {
                return Err(format!("[{section}] rate_per_second must be 0 (no limit) or at least one a day"));
            }
        }
        for (key, value) in [
            ("[server] concurrency_max", self.server.concurrency_max),
            ("[server] connections_max", self.server.connections_max),
            ("[engine] loaded_max", self.engine.loaded_max),
            ("[engine] compile_concurrency_max", self.engine.compile_concurrency_max),
            ("[jobs] concurrency_max", self.jobs.concurrency_max),
        ] {
            if value == 0 {
                return Err(format!("{key} must be at least 1"));
            }
        }
        Ok(())
    }
}

impl Server {
    pub fn queue_wait(&self) -> Duration {
        Duration::from_millis(self.queue_wait_ms_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_overrides_only_what_it_names() {
        let config = Config::parse("[limits]\nqueue_max = 7\n[tenant.a]\nconcurrency_max = 3\n").unwrap();
        assert_eq!(config.limits_of("a").concurrency_max, 3);
        assert_eq!(config.limits_of("a").queue_max, 7);
        assert_eq!(config.limits_of("b").concurrency_max, Limits::default().concurrency_max);
    }

    #[test]
    fn mistakes_are_named() {
        let unknown = Config::parse("[limits]\nqueue_maxx = 7\n").unwrap_err();
        assert!(unknown.contains("queue_maxx") && unknown.contains("line 2"), "{unknown}");
        let zero = Config::parse("[tenant.a]\nweight = 0\n").unwrap_err();
        assert_eq!(zero, "[tenant.a] weight must be at least 1");
        let nan = Config::parse("[limits]\nrate_per_second = nan\n").unwrap_err();
        assert!(nan.contains("rate_per_second"), "{nan}");
    }
}
