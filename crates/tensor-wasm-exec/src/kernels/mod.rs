//! Kernels of guests, from their Wasm to a launch that is over: compiled here, for the device there is, loaded by its worker,
//! launched with buffers of the same tenant, and what they trapped with turned into words.
//!
//! `cache.rs` keeps what was compiled; `launch.rs` is one launch; `host.rs` is what a CPU device runs kernels with, which is
//! the worker's side and not the server's.

pub mod cache;
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
    /// Opens another worker of the device, for a tenant that is trusted with it.
    opener: Option<Opener>,
    /// Where what takes long is done.
    background: Handle,
}

/// Opens a device. Takes as long as that takes.
pub type Opener = Arc<dyn Fn() -> Result<Device, String> + Send + Sync>;

/// A module whose exports are kernels.
pub struct KernelModule {
    /// Wasm, or code of a GPU as it is.
    code: Vec<u8>,
    is_raw: bool,
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
    bench: Arc<Mutex<Option<Arc<Bench>>>>,
    /// Held while a kernel of the tenant is compiled and loaded: one after the other, and each once.
    loading: Arc<tokio::sync::Mutex<()>>,
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
        Kernels { device, images, modules: Mutex::default(), seats: Mutex::default(), opener: None, background }
    }

    /// Lets trusted tenants have workers of their own.
    pub fn with_opener(self, opener: Opener) -> Kernels {
        Kernels { opener: Some(opener), ..self }
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
            let why = "this is code of a GPU; kernels here are Wasm, and code that is not fenced is for trusted tenants \
                       ([limits] gpu_raw_ptx)";
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

    /// The same for a tenant that is trusted: code of a GPU is taken as it is.
    pub fn trusted_module(&self, code: Vec<u8>) -> Result<Arc<KernelModule>, KernelError> {
        match is_device_code(&code) {
            false => self.module(code),
            true => {
                let hash = blake3::hash(&code);
                Ok(Arc::new(KernelModule { code, is_raw: true, hash, kernels: Vec::new(), others: Vec::new() }))
            }
        }
    }

    /// The place of a trusted tenant, on a worker that is its alone: what it loads may break it. Takes as long as opening a
    /// device does.
    pub fn trusted_seat(&self, name: &str, limits: TenantLimits) -> Result<Arc<Seat>, KernelError> {
        let Some(opener) = &self.opener else {
            return Err(KernelError::Denied("no worker can be opened for a trusted tenant here".to_owned()));
        };
        if let Some(seat) = self.seats.lock().get(name) {
            return Ok(seat.clone());
        }
        let device = opener().map_err(|why| DeviceError::DeviceLost { why })?;
        let seat = self.seat_on(&device, name, limits)?;
        Ok(self.seats.lock().entry(name.into()).or_insert(seat).clone())
    }

    fn seat_on(&self, device: &Device, name: &str, limits: TenantLimits) -> Result<Arc<Seat>, KernelError> {
        let tenant = device.tenant(name, limits)?;
        let (images, background) = (self.images.clone(), self.background.clone());
        Ok(Arc::new(Seat { tenant, images, background, bench: Arc::default(), loading: Arc::default() }))
    }

    /// The place of a tenant, with these limits if it is new. Places nobody uses are given up when there are no more.
    pub fn seat(&self, name: &str, limits: TenantLimits) -> Result<Arc<Seat>, KernelError> {
        let mut seats = self.seats.lock();
        if let Some(seat) = seats.get(name) {
            return Ok(seat.clone());
        }
        let seat = self.seat_on(&self.device, name, limits).or_else(|error| {
            seats.retain(|_, seat| Arc::strong_count(seat) > 1);
            self.seat_on(&self.device, name, limits).map_err(|_| error)
        })?;
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
        Ok(KernelModule { code: wasm, is_raw: false, hash, kernels, others })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|(name, _)| &**name)
    }

    /// Whether it has a kernel of that name, and if not why.
    pub fn has(&self, name: &str) -> Result<(), KernelError> {
        match self.is_raw {
            // Its device says so when it is launched.
            true => Ok(()),
            false => self.kernel(name).map(drop),
        }
    }

    fn kernel(&self, name: &str) -> Result<&(Arc<str>, Vec<Ty>), KernelError> {
        if self.is_raw {
            return Err(KernelError::Arguments("it is code of a GPU, whose kernels are not known here".to_owned()));
        }
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
    async fn bench(&self) -> Result<Arc<Bench>, KernelError> {
        let worker = self.tenant.device().restarts();
        if let Some(bench) = self.bench.lock().as_ref().filter(|bench| bench.worker == worker) {
            return Ok(bench.clone());
        }
        // Making one allocates, which may wait.
        let (tenant, place) = (self.tenant.clone(), self.bench.clone());
        let make = move || {
            let mut bench = place.lock();
            if let Some(bench) = bench.as_ref().filter(|bench| bench.worker == worker) {
                return Ok(bench.clone());
            }
            let control = tenant.buffer(u64::from(CONTROL.bytes))?;
            let (records, loaded, launches) = (Mutex::default(), Mutex::default(), Mutex::new(0));
            let made = Arc::new(Bench { worker, control, records, loaded, launches });
            *bench = Some(made.clone());
            Ok(made)
        };
        self.background.spawn_blocking(make).await.map_err(ended)?
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
        bench: &Arc<Bench>,
        module: &Arc<KernelModule>,
        options: Options,
    ) -> Result<(Kernel, Arc<cache::Image>), KernelError> {
        let image = self.images.get(module.hash, &options);
        let key = (module.hash, options);
        if let Some((image, kernel)) = image.zip(bench.loaded.lock().get(&key)) {
            return Ok((kernel, image));
        }
        // In a task of its own: whoever asked may give up half way, and what was loaded would be nobody's.
        let (tenant, images, bench) = (self.tenant.clone(), self.images.clone(), bench.clone());
        let (module, loading, background) = (module.clone(), self.loading.clone(), self.background.clone());
        let load = async move {
            let _one_at_a_time = loading.lock().await;
            let image = match images.get(module.hash, &key.1) {
                Some(image) => image,
                None => {
                    let (module, options) = (module.clone(), key.1.clone());
                    let make = move || images.make(module.hash, &module.code, &options);
                    background.spawn_blocking(make).await.map_err(ended)??
                }
            };
            let known = bench.loaded.lock().get(&key);
            let kernel = match known {
                Some(kernel) => kernel,
                None => {
                    let loaded = tenant.load(&image.code).await?;
                    let kernel = tenant.kernel(&loaded, &image.entry).await?;
                    bench.loaded.lock().insert(key, kernel.clone());
                    kernel
                }
            };
            Ok((kernel, image))
        };
        self.background.spawn(load).await.map_err(ended)?
    }
}

fn ended(error: tokio::task::JoinError) -> KernelError {
    DeviceError::Refused { why: format!("a task ended: {error}") }.into()
}

impl Loaded {
    fn get(&mut self, key: &(blake3::Hash, Options)) -> Option<Kernel> {
        self.uses += 1;
        let (kernel, last_use) = self.kernels.get_mut(key)?;
        *last_use = self.uses;
        Some(kernel.clone())
    }

    fn insert(&mut self, key: (blake3::Hash, Options), kernel: Kernel) {
        self.uses += 1;
        self.kernels.insert(key, (kernel, self.uses));
        if self.kernels.len() > LOADED_MAX {
            let oldest = self.kernels.iter().min_by_key(|(_, (_, last_use))| *last_use).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.kernels.remove(&key));
        }
    }
}
