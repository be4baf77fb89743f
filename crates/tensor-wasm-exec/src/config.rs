//! The configuration file: every limit with its unit in its name and its default beside it.
//!
//! `tensor-wasm serve --config FILE` reads it as TOML; unknown keys are errors, so a typing mistake cannot silently
//! leave a limit at its default. Limits are per tenant unless the name says otherwise; `[tenant.NAME]` overrides any of
//! `[limits]` for one tenant.
//!
//! Each section is one table below: a row is a key, its type, its default, its meaning and what is checked of it. The
//! structs, their defaults, the overrides, the checks and what `serve --print-config` prints all come from the row.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

const MIB: usize = 1 << 20;
const GIB: u64 = 1 << 30;

/// The largest linear memory a pooled slot can hold; a tenant's `memory_bytes_max` may not exceed it.
/// 4 GiB is the whole of a 32-bit guest, and reserving it costs address space only.
pub const SLOT_MEMORY_BYTES: u64 = 4 * GIB;

/// A launch that takes much longer would look to the device's keeper as if the device hung.
pub(crate) const GPU_KERNEL_MS_MAX: u64 = 50_000;

/// Handles that an instance has besides its tensors must have room too: `HANDLES_MAX` of `guest/state.rs`.
const TENSORS_MAX: usize = 9_000;

/// Makes a section of the file from its table of keys. `pub key: Type = default, check;` is a row; the check may be
/// left out. With `overridden by`, every key may also be set for one tenant.
macro_rules! section {
    (
        $(#[$meta:meta])*
        $name:ident overridden by $over:ident {
            $( $(#[doc = $doc:literal])+ pub $key:ident: $ty:ty = $default:expr $(, $check:expr)?; )+
        }
    ) => {
        section! {
            $(#[$meta])*
            $name { $( $(#[doc = $doc])+ pub $key: $ty = $default $(, $check)?; )+ }
        }

        #[doc = concat!("[`", stringify!($name), "`] with everything optional: what is absent is inherited.")]
        #[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $over { $( pub $key: Option<$ty>, )+ }

        impl $name {
            fn overridden(&self, over: &$over) -> $name {
                $name { $( $key: over.$key.clone().unwrap_or_else(|| self.$key.clone()), )+ }
            }
        }
    };
    (
        $(#[$meta:meta])*
        $name:ident {
            $( $(#[doc = $doc:literal])+ pub $key:ident: $ty:ty = $default:expr $(, $check:expr)?; )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $( $(#[doc = $doc])+ pub $key: $ty, )+ }

        impl Default for $name {
            fn default() -> Self {
                $name { $( $key: $default, )+ }
            }
        }

        impl $name {
            /// Every key and what it means, in the order of the table.
            const KEYS: &[(&str, &[&str])] = &[ $( (stringify!($key), &[$($doc),+]), )+ ];

            /// Refuses values that could not work, naming them.
            fn check(&self, section: &str) -> Result<(), String> {
                $( $(
                    let check: fn(&$ty) -> Result<(), String> = $check;
                    check(&self.$key).map_err(|why| format!("[{section}] {} {why}", stringify!($key)))?;
                )? )+
                Ok(())
            }
        }
    };
}

section! {
    /// The process as a whole.
    Server {
    /// Calls running at once, all tenants together. Each may hold a pooled instance, so this also sizes the pool.
    pub concurrency_max: usize = 256, positive;
    /// Calls waiting for a place, all tenants together.
    pub queue_max: usize = 4096;
    /// How long a call may wait for a place before it is refused.
    pub queue_wait_ms_max: u64 = 5_000;
    /// Open client connections; more are left in the kernel's backlog.
    pub connections_max: usize = 10_000, positive;
    /// A client must have sent its request head within this time.
    pub header_read_ms_max: u64 = 10_000;
    /// A request body may pause no longer than this between two pieces.
    pub body_idle_ms_max: u64 = 30_000;
    /// A request body that is collected (all but those streamed to a guest; a deploy's and a model's too) must be whole
    /// within this.
    pub body_ms_max: u64 = 300_000;
    /// Request bodies other than a deploy's or a model's.
    pub body_bytes_max: usize = 16 * MIB;
    /// Request bodies held in memory at once, all tenants together.
    pub bodies_bytes_max: usize = 2048 * MIB, positive;
    /// Disk that modules and models being uploaded take, all tenants together.
    pub uploads_bytes_max: usize = 4096 * MIB;
    /// Memory of all models that are loaded, all tenants together.
    pub models_loaded_bytes_max: u64 = 16 * GIB;
    /// Memory of loaded models that no instance uses at the moment, all tenants together; beyond it those used least
    /// recently are dropped, and read again when they are opened.
    pub models_idle_bytes_max: u64 = GIB;
    /// How long a shutdown waits for running calls.
    pub drain_ms_max: u64 = 30_000;
    /// Hosts that guests may call over HTTP: `host` or `host:port`; `*` for all. Empty: none.
    pub outbound_http: Vec<String> = Vec::new();
    /// Host names under which the API may be reached, besides `localhost`, IP addresses, the name in `--addr` and
    /// `domain` itself; `*` for any. A browser that sends another one was led here by a name somebody else owns (DNS
    /// rebinding).
    pub hosts: Vec<String> = Vec::new();
    /// Functions are served at `NAME.TENANT.DOMAIN`, besides `NAME.TENANT.localhost`: `fn.example.com`, or
    /// `https://fn.example.com` where a proxy in front speaks TLS.
    pub domain: Option<String> = None;
    /// Web pages that may call the API besides its own: `https://console.example.com`.
    pub allowed_origins: Vec<String> = Vec::new();
    /// Plans of functions' tensors that are computed on the CPU at once; 0: one for each core.
    pub tensor_plans_max: usize = 0;
    /// Functions with metrics of their own; the rest are counted together, as `other`.
    pub metrics_functions_max: usize = 1_000;
    /// `GET /functions/{f}/logs?follow=true` open at once, per tenant.
    pub log_followers_per_tenant_max: usize = 16;
    /// A file with the key that functions' secrets are sealed with: 32 bytes, as hexadecimal digits or base64.
    /// `TENSOR_WASM_SECRETS_KEY` goes before it.
    pub secrets_key_file: Option<PathBuf> = None;
    /// Hosts of their own for functions: `"shop.example.com" = "TENANT/FUNCTION"`, or `"example.com/shop"` for the
    /// paths below one; `https://` in front where a proxy speaks TLS.
    pub routes: BTreeMap<String, String> = BTreeMap::new();
    }
}

section! {
    /// How guests are compiled and kept.
    Engine {
    /// Cranelift's effort. Changing it changes the engine's identity: every function is recompiled from its source.
    pub optimize: Optimize = Optimize::Speed;
    /// Compiled functions that each engine keeps mapped; the least recently used is unmapped beyond this.
    pub loaded_max: usize = 512, positive;
    /// Bytes of a linear memory that stay resident between two guests (reset by copying, not by unmapping).
    pub keep_resident_bytes: usize = 2 * MIB;
    /// Stack of one guest call.
    pub stack_bytes_max: usize = MIB / 2;
    /// Compilations at once; each is a process of its own.
    pub compile_concurrency_max: usize = 2, threads;
    /// Memory one compilation may take.
    pub compile_memory_bytes_max: u64 = 4 * GIB;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimize {
    None,
    Speed,
    SpeedAndSize,
}

section! {
    /// Asynchronous invocations.
    Jobs {
    /// Jobs running at once.
    pub concurrency_max: usize = 16, threads;
    /// Unfinished jobs, all tenants together.
    pub queue_max: usize = 100_000;
    /// Attempts of a job whose guest faulted, unless the request says otherwise.
    pub attempts: u32 = 1;
    /// Size of a job's arguments and stdin together, and of its result.
    pub record_bytes_max: usize = 256 << 10;
    /// A finished job and its result are kept this long.
    pub keep_s: u64 = 24 * 3600;
    /// Finished jobs kept, all tenants together; the oldest go first.
    pub keep_max: usize = 100_000;
    }
}

section! {
    /// What one tenant may take.
    Limits overridden by LimitsOverride {
    /// Requests per second admitted on average; 0 means no limit.
    pub rate_per_second: f64 = 0.0, rate;
    /// Requests admitted at once after a quiet time.
    pub rate_burst: u32 = 1000, positive;
    /// Calls running at once.
    pub concurrency_max: usize = 128, positive;
    /// Calls waiting for a place.
    pub queue_max: usize = 1024;
    /// Share of the server's places when tenants compete, relative to the others.
    pub weight: u32 = 1, positive;
    /// Linear memory of all the tenant's running instances together, and the octets they return until those are sent.
    pub tenant_memory_bytes_max: u64 = 4 * GIB;
    /// Linear memory of one instance.
    pub memory_bytes_max: u64 = 512 << 20, fits_slot;
    /// Elements of one table.
    pub table_elements_max: u32 = 100_000;
    /// Time one call may take.
    pub deadline_ms_max: u64 = 30_000, positive;
    /// Functions deployed.
    pub functions_max: usize = 20_000;
    /// Revisions kept of one function; the oldest without traffic go first.
    pub revisions_max: usize = 16, positive;
    /// Size of one module or component. Those sent as `application/wasm` are streamed to disk; 200 MiB has been tried.
    pub module_bytes_max: usize = 64 * MIB;
    /// Disk that the tenant's uploads take before they are deployed; one of any allowed size may always run.
    pub uploads_bytes_max: usize = 512 * MIB;
    /// Size of one model. They are streamed to disk.
    pub model_bytes_max: usize = 4096 * MIB;
    /// Models kept.
    pub models_max: usize = 64;
    /// Disk that the tenant's models take.
    pub models_bytes_max: u64 = 16 * GIB;
    /// Memory of the tenant's models that are loaded: each is there once, however many instances use it.
    pub models_loaded_bytes_max: u64 = 8 * GIB;
    /// Secrets of all the tenant's functions together.
    pub secrets_max: usize = 256;
    /// Size of one secret's value. They are copied into each instance that reads its environment.
    pub secret_bytes_max: usize = 8 << 10;
    /// Time one compilation may take.
    pub compile_ms_max: u64 = 60_000;
    /// Unfinished jobs.
    pub jobs_max: usize = 10_000;
    /// stdout and stderr kept of one call.
    pub log_bytes_max: usize = 64 << 10;
    /// Result of one call (a command's stdout, an export's value).
    pub output_bytes_max: usize = 16 * MIB;
    /// Request bodies of the tenant held in memory at once.
    pub bodies_bytes_max: usize = 512 * MIB, positive;
    /// What a component hands the host in one call, an export's result among it, as it lies in the host's memory: some
    /// 40 bytes for each value. A `list<u8>` that an octet-stream call returns has `output_bytes_max` instead.
    pub hostcall_bytes_max: usize = 64 * MIB, positive;
    /// Memory of all the tenant's tensors together, as far as they are on the CPU.
    pub tensor_memory_bytes_max: u64 = GIB;
    /// Tensors that one instance holds.
    pub tensors_max: usize = 8_192, tensors;
    /// Nodes of the graphs that one instance builds, computed or not; a tensor is at least one. Planning a graph of so
    /// many takes up to a second, and 64 MiB.
    pub tensor_nodes_max: usize = 32_768, positive;
    /// Elements of one tensor.
    pub tensor_elements_max: u64 = 1 << 31, positive;
    /// Memory on the device; 0: the tenant may not use it.
    pub gpu_memory_bytes_max: u64 = GIB;
    /// Time one launch of a kernel may take.
    pub gpu_kernel_ms_max: u64 = 10_000, kernel_ms;
    /// Multiprocessors of a GPU that the tenant's kernels run on; 0: all of them.
    pub gpu_multiprocessors: u32 = 0;
    /// The tenant is trusted with the GPU: its functions may load PTX, which nothing fences. It gets a worker of its
    /// own.
    pub gpu_raw_ptx: bool = false;
    }
}

fn positive<T: Default + PartialEq>(value: &T) -> Result<(), String> {
    if *value == T::default() { Err("must be at least 1".to_owned()) } else { Ok(()) }
}

/// How many of something may run at once, where each is a thread, a task or a process.
fn threads(count: &usize) -> Result<(), String> {
    const MOST: usize = 4096;
    positive(count)?;
    if *count > MOST { Err(format!("must be at most {MOST}")) } else { Ok(()) }
}

fn fits_slot(bytes: &u64) -> Result<(), String> {
    if *bytes > SLOT_MEMORY_BYTES {
        return Err(format!("is {bytes}, more than a 32-bit guest can have ({SLOT_MEMORY_BYTES})"));
    }
    Ok(())
}

fn tensors(count: &usize) -> Result<(), String> {
    positive(count)?;
    if *count > TENSORS_MAX { Err(format!("must be at most {TENSORS_MAX}")) } else { Ok(()) }
}

fn kernel_ms(ms: &u64) -> Result<(), String> {
    positive(ms)?;
    if *ms > GPU_KERNEL_MS_MAX { Err(format!("must be at most {GPU_KERNEL_MS_MAX}")) } else { Ok(()) }
}

fn rate(per_second: &f64) -> Result<(), String> {
    // One request a day is slow enough; smaller numbers would make waiting times that no clock holds.
    const SLOWEST: f64 = 1.0 / 86_400.0;
    if *per_second == 0.0 || (*per_second >= SLOWEST && per_second.is_finite()) {
        return Ok(());
    }
    Err("must be 0 (no limit) or at least one a day".to_owned())
}

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

impl Config {
    /// Reads a configuration file's text; the message names the line and the key that are wrong.
    pub fn parse(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|e| e.to_string())?;
        config.check()?;
        Ok(config)
    }

    /// The limits of one tenant.
    pub fn limits_of(&self, tenant: &str) -> Limits {
        match self.tenant.get(tenant) {
            Some(over) => self.limits.overridden(over),
            None => self.limits.clone(),
        }
    }

    /// The largest table any tenant may have; the pool's tables are of this size.
    pub(crate) fn table_elements_max(&self) -> u32 {
        let overrides = self.tenant.values().filter_map(|over| over.table_elements_max);
        overrides.chain([self.limits.table_elements_max]).max().unwrap_or(0)
    }

    /// Refuses values that could not work, naming them.
    pub fn check(&self) -> Result<(), String> {
        self.server.check("server")?;
        self.engine.check("engine")?;
        self.jobs.check("jobs")?;
        self.limits.check("limits")?;
        self.tenant.keys().try_for_each(|name| self.limits_of(name).check(&format!("tenant.{name}")))
    }

    /// This configuration as a file, with what every key means above it. Read back, it is this configuration.
    pub fn explained(&self) -> Result<String, String> {
        type Keys = &'static [(&'static str, &'static [&'static str])];
        let sections: [(&str, Keys); 4] =
            [("server", Server::KEYS), ("engine", Engine::KEYS), ("jobs", Jobs::KEYS), ("limits", Limits::KEYS)];
        let values = toml::Table::try_from(self).map_err(|e| e.to_string())?;
        let mut text = String::new();
        for (section, keys) in sections {
            text += &format!("[{section}]\n");
            for (key, meaning) in keys {
                text += &meaning.iter().map(|line| format!("#{line}\n")).collect::<String>();
                match values.get(section).and_then(|section| section.get(key)) {
                    Some(value) => text += &format!("{key} = {value}\n"),
                    None => text += &format!("# {key} = …\n"),
                }
            }
            text.push('\n');
        }
        text += "# [tenant.NAME] takes any key of [limits], for one tenant.\n";
        let overrides = values.get("tenant").filter(|_| !self.tenant.is_empty());
        let overrides = overrides.map(|tenants| toml::Table::from_iter([("tenant".to_owned(), tenants.clone())]));
        Ok(text + &overrides.map_or_else(String::new, |overrides| overrides.to_string()))
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

    #[test]
    fn every_key_is_explained_and_reads_back() {
        let text = Config::default().explained().unwrap();
        assert_eq!(Config::parse(&text).unwrap(), Config::default());
        for line in ["# Calls running at once.", "hostcall_bytes_max = 67108864", "outbound_http = []", "[jobs]"] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        let given = Config::parse("[server]\nqueue_max = 3\n[tenant.a]\nweight = 2\n").unwrap();
        assert_eq!(Config::parse(&given.explained().unwrap()).unwrap(), given);
    }

    #[test]
    fn every_section_is_checked() {
        for (text, expect) in [
            ("[server]\nconcurrency_max = 0\n", "[server] concurrency_max must be at least 1"),
            ("[jobs]\nconcurrency_max = 0\n", "[jobs] concurrency_max must be at least 1"),
            ("[jobs]\nconcurrency_max = 6148914691236517206\n", "[jobs] concurrency_max must be at most 4096"),
            (
                "[engine]\ncompile_concurrency_max = 2305843009213693952\n",
                "[engine] compile_concurrency_max must be at most 4096",
            ),
            ("[engine]\nloaded_max = 0\n", "[engine] loaded_max must be at least 1"),
            ("[limits]\ngpu_kernel_ms_max = 50001\n", "[limits] gpu_kernel_ms_max must be at most 50000"),
            ("[tenant.a]\nhostcall_bytes_max = 0\n", "[tenant.a] hostcall_bytes_max must be at least 1"),
        ] {
            assert_eq!(Config::parse(text).unwrap_err(), expect);
        }
    }
}
