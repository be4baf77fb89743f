//! Who launches: a device that kernels run on, the tenants on it, and what each keeps there between two launches (compiled
//! kernels that stay loaded, the control block, slots for trap records).

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tensor_wasm_gpu::{Buffer, Device, DeviceError, Kernel, Pinned, Tenant, TenantLimits};
use tensor_wasm_jit::{CONTROL, RECORD};
use tokio::runtime::Handle;

use crate::cache::{Image, Images, Options};
use crate::module::{KernelModule, is_device_code};
use crate::{HashMap, KernelError};

/// Kernels of one tenant that stay loaded; the device's compiler takes milliseconds for each.
const LOADED_MAX: usize = 64;

/// Bytes of a page of records, which is what pinned memory is handed out in.
const RECORDS_PAGE_BYTES: u32 = 4096;

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

/// A tenant's place on the device.
pub struct Seat {
    pub tenant: Tenant,
    images: Arc<Images>,
    pub(crate) background: Handle,
    bench: Arc<Mutex<Option<Arc<Bench>>>>,
    /// Held while a kernel of the tenant is compiled and loaded: one after the other, and each once.
    loading: Arc<tokio::sync::Mutex<()>>,
}

/// What a tenant's launches need, for as long as one worker lives.
pub(crate) struct Bench {
    worker: u32,
    /// What launches of the tenant's stream share on the device.
    pub(crate) control: Buffer,
    records: Mutex<Records>,
    loaded: Mutex<Loaded>,
    /// The number of the last launch. Held while one is sent: numbers grow in the order of the stream.
    pub(crate) launches: Mutex<u64>,
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
pub(crate) struct Record {
    pub(crate) page: Pinned,
    pub(crate) offset: u64,
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
        if is_device_code(&code) { Ok(Arc::new(KernelModule::raw(code))) } else { self.module(code) }
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

impl Seat {
    /// What launches need from the worker of the moment.
    pub(crate) async fn bench(&self) -> Result<Arc<Bench>, KernelError> {
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

    pub(crate) fn record(&self, bench: &Arc<Bench>) -> Result<Record, KernelError> {
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
    pub(crate) async fn loaded(
        &self,
        bench: &Arc<Bench>,
        module: &Arc<KernelModule>,
        options: Options,
    ) -> Result<(Kernel, Arc<Image>), KernelError> {
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
    KernelError::Bug(format!("a task ended: {error}"))
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
