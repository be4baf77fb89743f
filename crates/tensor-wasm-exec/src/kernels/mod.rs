//! Kernels of guests, from their Wasm to a launch that is over: compiled here, for the device there is, loaded by its worker,
//! launched with buffers of the same tenant, and what they trapped with turned into words.
//!
//! `cache.rs` keeps what was compiled; `launch.rs` is one launch; `host.rs` is what a CPU device runs kernels with, which is
//! the worker's side and not the server's.

mod cache;
pub mod host;
mod launch;

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tensor_wasm_gpu::{Buffer, Device, DeviceError, Kernel, Pinned, Tenant, TenantLimits};
use tensor_wasm_jit::{CONTROL, Program, RECORD, Refusal, Ty};
use tokio::runtime::Handle;

use self::cache::{Images, Options};
use crate::HashMap;

pub use self::launch::{Argument, Canceller, Launch};

/// Kernels of one tenant that stay loaded; the device's compiler takes milliseconds for each.
const LOADED_MAX: usize = 64;

/// Bytes of a page of records, which is what pinned memory is handed out in.
const RECORDS_PAGE_BYTES: u32 = 4096;

/// Why a kernel was not run, or did not end as it should.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KernelError {
    #[error("{0}")]
    Refused(#[from] Refusal),
    #[error("{0}")]
    Device(#[from] DeviceError),
    #[error("{0}")]
    Arguments(String),
    #[error("{0}")]
    Trap(String),
    #[error("{0}")]
    Deadline(String),
    #[error("{0}")]
    Denied(String),
    #[error("{0}")]
    Busy(String),
}

/// Kernels on one device, for all tenants.
pub struct Kernels {
    device: Device,
    images: Arc<Images>,
    modules: Mutex<HashMap<blake3::Hash, Weak<KernelModule>>>,
    seats: Mutex<HashMap<Arc<str>, Arc<Seat>>>,
    /// Where what takes long is done.
    background: Handle,
}

/// A module whose exports are kernels.
pub struct KernelModule {
    wasm: Vec<u8>,
    hash: blake3::Hash,
    kernels: Vec<(Arc<str>, Vec<Ty>)>,
    /// Exports that are no kernels, and why.
    others: Vec<(String, String)>,
}

/// A tenant's place on the device.
pub struct Seat {
    pub tenant: Tenant,
    images: Arc<Images>,
    background: Handle,
    bench: Mutex<Option<Arc<Bench>>>,
}

/// What a tenant's launches need, for as long as one worker lives.
struct Bench {
    worker: u32,
    /// What launches of the tenant's stream share on the device.
    control: Buffer,
    records: Mutex<Records>,
    loaded: Mutex<Loaded>,
    /// The number of the last launch. Held while one is sent: numbers grow in the order of the stream.
    launches: Mutex<u64>,
}

#[derive(Default)]
struct Records {
    free: Vec<(Pinned, u64)>,
}

#[derive(Default)]
struct Loaded {
    kernels: HashMap<(blake3::Hash, Options), (Kernel, u64)>,
    uses: u64,
}

/// A place for the record of one launch.
struct Record {
    page: Pinned,
    offset: u64,
    bench: Arc<Bench>,
}

impl Drop for Record {
    fn drop(&mut self) {
        self.bench.records.lock().free.push((self.page.clone(), self.offset));
    }
}

impl Kernels {
    /// `folder` is where compiled kernels are kept.
    pub fn new(device: Device, folder: Option<PathBuf>, background: Handle) -> Kernels {
        let images = Arc::new(Images::new(folder));
        Kernels { device, images, modules: Mutex::default(), seats: Mutex::default(), background }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How many images were compiled, and how many were found on disk.
    pub fn counts(&self) -> (u64, u64) {
        use std::sync::atomic::Ordering::Relaxed;
        (self.images.compiled.load(Relaxed), self.images.from_disk.load(Relaxed))
    }

    /// Reads a kernel module; the same bytes are read once while anybody has them.
    pub fn module(&self, wasm: Vec<u8>) -> Result<Arc<KernelModule>, KernelError> {
        if is_device_code(&wasm) {
            let why = "this is code of a GPU; kernels here are Wasm, and code that is not fenced is for trusted tenants";
            return Err(KernelError::Denied(why.to_owned()));
        }
        let hash = blake3::hash(&wasm);
        if let Some(module) = self.modules.lock().get(&hash).and_then(Weak::upgrade) {
            return Ok(module);
        }
        let module = Arc::new(KernelModule::read(wasm, hash)?);
        let mut modules = self.modules.lock();
        modules.retain(|_, module| module.strong_count() > 0);
        modules.insert(hash, Arc::downgrade(&module));
        Ok(module)
    }

    /// The place of a tenant, with these limits if it is new. Places nobody uses are given up when there are no more.
    pub fn seat(&self, name: &str, limits: TenantLimits) -> Result<Arc<Seat>, KernelError> {
        let mut seats = self.seats.lock();
        if let Some(seat) = seats.get(name) {
            return Ok(seat.clone());
        }
        let tenant = self.device.tenant(name, limits).or_else(|error| {
            seats.retain(|_, seat| Arc::strong_count(seat) > 1);
            self.device.tenant(name, limits).map_err(|_| error)
        })?;
        let (images, background) = (self.images.clone(), self.background.clone());
        let seat = Arc::new(Seat { tenant, images, background, bench: Mutex::new(None) });
        seats.insert(name.into(), seat.clone());
        Ok(seat)
    }
}

/// PTX, a cubin or a fat binary: what a driver would load.
fn is_device_code(bytes: &[u8]) -> bool {
    let text = bytes.trim_ascii_start();
    let starts = [&b"//"[..], b".version", b".target", b"\x50\xed\x55\xba"];
    // The machine that an ELF file is for.
    let is_cubin = bytes.starts_with(b"\x7fELF") && bytes.get(18..20) == Some(&[190, 0]);
    is_cubin || starts.iter().any(|start| text.starts_with(start))
}

impl KernelModule {
    fn read(wasm: Vec<u8>, hash: blake3::Hash) -> Result<KernelModule, Refusal> {
        let program = Program::read(&wasm)?;
        let (mut kernels, mut others) = (Vec::new(), Vec::new());
        for (name, types) in program.exports() {
            match types {
                Ok(types) => kernels.push((name.into(), types)),
                Err(why) => others.push((name.to_owned(), why.to_string())),
            }
        }
        Ok(KernelModule { wasm, hash, kernels, others })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|(name, _)| &**name)
    }

    /// Whether it has a kernel of that name, and if not why.
    pub fn has(&self, name: &str) -> Result<(), KernelError> {
        self.kernel(name).map(drop)
    }

    fn kernel(&self, name: &str) -> Result<&(Arc<str>, Vec<Ty>), KernelError> {
        if let Some(kernel) = self.kernels.iter().find(|(own, _)| &**own == name) {
            return Ok(kernel);
        }
        if let Some((_, why)) = self.others.iter().find(|(own, _)| own == name) {
            return Err(KernelError::Arguments(why.clone()));
        }
        let known = self.names().collect::<Vec<_>>().join(", ");
        Err(Refusal::NoSuchKernel { name: name.chars().take(64).collect(), known }.into())
    }
}

impl Seat {
    /// What launches need from the worker of the moment.
    fn bench(&self) -> Result<Arc<Bench>, KernelError> {
        let worker = self.tenant.device().restarts();
        let mut bench = self.bench.lock();
        if let Some(bench) = &*bench
            && bench.worker == worker
        {
            return Ok(bench.clone());
        }
        let control = self.tenant.buffer(u64::from(CONTROL.bytes))?;
        let made = Arc::new(Bench {
            worker,
            control,
            records: Mutex::default(),
            loaded: Mutex::default(),
            launches: Mutex::new(0),
        });
        *bench = Some(made.clone());
        Ok(made)
    }

    fn record(&self, bench: &Arc<Bench>) -> Result<Record, KernelError> {
        let mut records = bench.records.lock();
        if records.free.is_empty() {
            let page = self.tenant.device().pinned(u64::from(RECORDS_PAGE_BYTES))?;
            let offsets = (0..RECORDS_PAGE_BYTES).step_by(RECORD.bytes as usize);
            records.free.extend(offsets.map(|offset| (page.clone(), u64::from(offset))));
        }
        let (page, offset) = records.free.pop().ok_or(DeviceError::OutOfMemory { asked_bytes: 64 })?;
        Ok(Record { page, offset, bench: bench.clone() })
    }

    /// The kernel loaded on the device, and what it was made from.
    async fn loaded(
        &self,
        bench: &Bench,
        module: &Arc<KernelModule>,
        options: Options,
    ) -> Result<(Kernel, Arc<cache::Image>), KernelError> {
        let image = match self.images.get(module.hash, &options) {
            Some(image) => image,
            None => {
                let (images, module, options) = (self.images.clone(), module.clone(), options.clone());
                let made = self.background.spawn_blocking(move || images.make(module.hash, &module.wasm, &options));
                let ended = |e: tokio::task::JoinError| DeviceError::Refused { why: format!("compiling ended: {e}") };
                made.await.map_err(ended)??
            }
        };
        let key = (module.hash, options);
        {
            let mut loaded = bench.loaded.lock();
            loaded.uses += 1;
            let now = loaded.uses;
            if let Some((kernel, last_use)) = loaded.kernels.get_mut(&key) {
                *last_use = now;
                return Ok((kernel.clone(), image));
            }
        }
        let loaded = self.tenant.load(&image.code).await?;
        let kernel = self.tenant.kernel(&loaded, &image.entry).await?;
        let mut loaded = bench.loaded.lock();
        loaded.uses += 1;
        let now = loaded.uses;
        loaded.kernels.insert(key, (kernel.clone(), now));
        if loaded.kernels.len() > LOADED_MAX {
            let oldest = loaded.kernels.iter().min_by_key(|(_, (_, last_use))| *last_use).map(|(key, _)| key.clone());
            oldest.and_then(|key| loaded.kernels.remove(&key));
        }
        Ok((kernel, image))
    }
}
