//! Who launches: a device that kernels run on, the tenants on it, and what each keeps there between two launches:
//! compiled kernels that stay loaded, slots for trap records, and the control block of each of its streams.

use std::any::Any;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use lru::LruCache;
use parking_lot::Mutex;
use tensor_wasm_gpu::{Buffer, Device, DeviceError, Kernel, Payer, Pinned, Stream, Tenant, TenantLimits};
use tensor_wasm_jit::{CONTROL, LAUNCHES_MAX, RECORD};
use tokio::runtime::Handle;

use crate::cache::{Image, Images, Options};
use crate::module::{Code, KernelModule, is_device_code};
use crate::{HashMap, KernelError};

/// Kernels of one tenant that stay loaded; the device's compiler takes milliseconds for each.
const LOADED_MAX: std::num::NonZeroUsize = std::num::NonZeroUsize::MIN.saturating_add(63);

/// Tenants without an instance that are given up at once when there is no room for another: closing one takes
/// milliseconds.
const EVICTED_AT_ONCE: usize = 16;

/// Bytes of a page of records, which is what pinned memory is handed out in.
const RECORDS_PAGE_BYTES: u32 = 4096;

type Seed = foldhash::quality::RandomState;

/// Kernels on one device, for all tenants.
pub struct Kernels {
    device: Device,
    images: Arc<Images>,
    modules: Mutex<HashMap<blake3::Hash, Weak<KernelModule>>>,
    /// Tenants that have used the device, those that used it last first.
    tenants: Tenants,
    /// Those that are trusted, each on a worker of its own: nobody is both by its name alone.
    trusted: Tenants,
    /// Opens another worker of the device, for a tenant that is trusted with it.
    opener: Option<Opener>,
    /// Held while it does.
    opening: Mutex<()>,
    /// Where what takes long is done.
    background: Handle,
}

type Tenants = Mutex<LruCache<Arc<str>, Arc<TenantKernels>, Seed>>;

/// Opens a device. Takes as long as that takes.
pub type Opener = Arc<dyn Fn() -> Result<Device, String> + Send + Sync>;

/// What a tenant has on the device for all its instances.
pub struct TenantKernels {
    pub tenant: Tenant,
    images: Arc<Images>,
    pub(crate) background: Handle,
    context: Arc<Mutex<Option<Arc<LaunchContext>>>>,
    /// Held while a kernel of the tenant is compiled and loaded: one after the other, and each once.
    loading: Arc<tokio::sync::Mutex<()>>,
    companion: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// What one who launches holds: an instance, a plan. Its launches are in order; those of two are not.
#[derive(Clone)]
pub struct LaunchStream {
    pub kernels: Arc<TenantKernels>,
    pub stream: Stream,
    /// What it launched last: whoever launches in a loop launches the same again, and nothing is looked up.
    pub(crate) last: Arc<Mutex<Option<LastLaunch>>>,
}

/// A kernel as it was launched, and for which worker. It keeps both, so a tenant has at most one more kernel loaded for
/// each of its streams than it has otherwise, and lets go of a lost worker's memory with its next launch.
#[derive(Clone)]
pub(crate) struct LastLaunch {
    context: Arc<LaunchContext>,
    module: Arc<KernelModule>,
    options: Options,
    kernel: Kernel,
    image: Arc<Image>,
}

/// What a tenant's launches need, for as long as one worker lives.
pub(crate) struct LaunchContext {
    worker: u32,
    /// The number of the last launch, on whichever stream: a record is used by one after the other, and what it says
    /// is about the launch whose number it has.
    launches: AtomicU64,
    /// By the streams' indices.
    controls: [OnceLock<StreamControl>; Stream::INDEX_MAX],
    records: Mutex<Records>,
    loaded: Mutex<LruCache<(blake3::Hash, Options), Kernel, Seed>>,
}

/// What launches of one stream share on the device.
pub(crate) struct StreamControl {
    pub(crate) block: Buffer,
    /// Held while a launch is numbered and sent: numbers grow in the order of the stream.
    pub(crate) sending: Mutex<()>,
}

#[derive(Default)]
struct Records {
    free: Vec<(Pinned, u64)>,
}

/// Memory for the record of one launch.
pub(crate) struct Record {
    pub(crate) page: Pinned,
    pub(crate) offset: u64,
    context: Arc<LaunchContext>,
}

impl Drop for Record {
    fn drop(&mut self) {
        self.context.records.lock().free.push((self.page.clone(), self.offset));
    }
}

impl Kernels {
    /// `folder` is where compiled kernels are kept.
    pub fn new(device: Device, folder: Option<PathBuf>, background: Handle) -> Kernels {
        let images = Arc::new(Images::new(folder));
        let none = || Mutex::new(LruCache::unbounded_with_hasher(Seed::default()));
        let (tenants, trusted) = (none(), none());
        let (modules, opening) = (Mutex::default(), Mutex::default());
        Kernels { device, images, modules, tenants, trusted, opener: None, opening, background }
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
            let why = "this is code of a GPU; kernels here are Wasm, and code that is not fenced is for trusted \
                       tenants ([limits] gpu_raw_ptx)";
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

    /// A trusted tenant, on a worker that is its alone: what it loads may break it. Takes as long as opening a device
    /// does.
    pub fn trusted_tenant(&self, name: &str, limits: TenantLimits) -> Result<Arc<TenantKernels>, KernelError> {
        let Some(opener) = &self.opener else {
            return Err(KernelError::Denied("no worker can be opened for a trusted tenant here".to_owned()));
        };
        let known = || self.trusted.lock().get(name).cloned();
        if let Some(kernels) = known() {
            return Ok(kernels);
        }
        // Of many first calls at once, one starts a worker.
        let _one_at_a_time = self.opening.lock();
        if let Some(kernels) = known() {
            return Ok(kernels);
        }
        let device = opener().map_err(|why| DeviceError::DeviceLost { why })?;
        let tenant = device.tenant(name, limits)?;
        Ok(self.keep(&self.trusted, name, tenant))
    }

    /// A tenant, with these limits if it is new. Where there is no room for another, tenants that have no instance are
    /// given up, those that were not used the longest first; that may wait for half a second.
    pub fn tenant(&self, name: &str, limits: TenantLimits) -> Result<Arc<TenantKernels>, KernelError> {
        loop {
            if let Some(kernels) = self.try_tenant(name, limits) {
                return Ok(kernels);
            }
            let is_evicted = self.evict();
            match self.device.tenant(name, limits) {
                Ok(tenant) => return Ok(self.keep(&self.tenants, name, tenant)),
                // Others took what was given up: as long as there are tenants to give up, try again.
                Err(_) if is_evicted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The same without waiting; none if there is no room for another tenant now.
    pub fn try_tenant(&self, name: &str, limits: TenantLimits) -> Option<Arc<TenantKernels>> {
        if let Some(kernels) = self.tenants.lock().get(name) {
            return Some(kernels.clone());
        }
        let tenant = self.device.try_tenant(name, limits)?;
        Some(self.keep(&self.tenants, name, tenant))
    }

    fn keep(&self, among: &Tenants, name: &str, tenant: Tenant) -> Arc<TenantKernels> {
        let (images, background) = (self.images.clone(), self.background.clone());
        let made = TenantKernels {
            tenant,
            images,
            background,
            context: Arc::default(),
            loading: Arc::default(),
            companion: OnceLock::new(),
        };
        among.lock().get_or_insert(name.into(), || Arc::new(made)).clone()
    }

    /// Gives up tenants that have no instance. Whether there were any.
    fn evict(&self) -> bool {
        let mut tenants = self.tenants.lock();
        let idle = tenants.iter().rev().filter(|(_, kernels)| Arc::strong_count(kernels) == 1);
        let names: Vec<Arc<str>> = idle.take(EVICTED_AT_ONCE).map(|(name, _)| name.clone()).collect();
        let gone: Vec<_> = names.iter().filter_map(|name| tenants.pop(name)).collect();
        drop(tenants);
        // Outside the lock: their memory goes back here.
        !gone.is_empty()
    }
}

impl TenantKernels {
    /// What somebody else keeps for the tenant on this device for as long as the tenant is here, as tensors do. Made
    /// when it is first asked for; none if it is something else.
    pub fn companion<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Option<Arc<T>> {
        self.companion.get_or_init(|| Arc::new(make())).clone().downcast().ok()
    }

    /// A stream for one who launches.
    pub fn stream(self: &Arc<Self>) -> LaunchStream {
        LaunchStream { kernels: self.clone(), stream: self.tenant.stream(), last: Arc::default() }
    }

    /// What launches on a stream need from the worker of the moment.
    pub(crate) async fn context(&self, index: usize) -> Result<Arc<LaunchContext>, KernelError> {
        let worker = self.tenant.device().restarts();
        let is_ready = move |context: &&Arc<LaunchContext>| {
            context.serves(worker) && context.controls.get(index).is_some_and(|control| control.get().is_some())
        };
        if let Some(context) = self.context.lock().as_ref().filter(is_ready) {
            return Ok(context.clone());
        }
        // Making one allocates, which may wait.
        let (tenant, slot) = (self.tenant.clone(), self.context.clone());
        let make = move || {
            let context = {
                let mut slot = slot.lock();
                match slot.as_ref().filter(|context| context.serves(worker)) {
                    Some(context) => context.clone(),
                    None => slot.insert(Arc::new(LaunchContext::new(worker))).clone(),
                }
            };
            let control = context.controls.get(index).ok_or(DeviceError::StaleHandle)?;
            // Without the lock, which serving threads take for every launch.
            if control.get().is_none() {
                let block = tenant.buffer(u64::from(CONTROL.bytes))?;
                control.get_or_init(|| StreamControl { block, sending: Mutex::default() });
            }
            Ok(context)
        };
        self.background.spawn_blocking(make).await.map_err(ended)?
    }

    pub(crate) fn record(&self, context: &Arc<LaunchContext>) -> Result<Record, KernelError> {
        let mut records = context.records.lock();
        if records.free.is_empty() {
            let page = self.tenant.device().pinned(u64::from(RECORDS_PAGE_BYTES))?;
            let offsets = (0..RECORDS_PAGE_BYTES).step_by(RECORD.bytes as usize);
            records.free.extend(offsets.map(|offset| (page.clone(), u64::from(offset))));
        }
        let (page, offset) = records.free.pop().ok_or(DeviceError::OutOfMemory { asked_bytes: 64 })?;
        Ok(Record { page, offset, context: context.clone() })
    }

    /// The kernel loaded on the device, and what it was made from: nothing for code that is taken as it is.
    pub(crate) async fn loaded(
        &self,
        context: &Arc<LaunchContext>,
        module: &Arc<KernelModule>,
        options: Options,
    ) -> Result<(Kernel, Arc<Image>), KernelError> {
        let image_of = |images: &Images, module: &KernelModule, options: &Options| match module.code {
            Code::Raw(_) => Some(Arc::default()),
            Code::Wasm(_) | Code::Built(_) => images.get(module.hash, options),
        };
        let image = image_of(&self.images, module, &options);
        let key = (module.hash, options);
        if let Some((image, kernel)) = image.zip(context.loaded.lock().get(&key).cloned()) {
            return Ok((kernel, image));
        }
        // Whoever gives up while others are loaded leaves nothing behind.
        let one_at_a_time = self.loading.clone().lock_owned().await;
        // In a task of its own: whoever asked may give up half way, and what was loaded would be nobody's.
        let (tenant, images, context) = (self.tenant.clone(), self.images.clone(), context.clone());
        let (module, background) = (module.clone(), self.background.clone());
        let load = async move {
            let _one_at_a_time = one_at_a_time;
            let image = match image_of(&images, &module, &key.1) {
                Some(image) => image,
                None => {
                    let (module, options) = (module.clone(), key.1.clone());
                    let make = move || images.make(module.hash, &module.code, &options);
                    background.spawn_blocking(make).await.map_err(ended)??
                }
            };
            image.check_gpu(tenant.device().info().compute_capability)?;
            let known = context.loaded.lock().get(&key).cloned();
            let kernel = match known {
                Some(kernel) => kernel,
                None => {
                    let (code, entry) = match &module.code {
                        Code::Raw(code) => (code, &*key.1.kernel),
                        Code::Wasm(_) | Code::Built(_) => (&image.code, &*image.entry),
                    };
                    let loaded = tenant.load(code).await?;
                    let kernel = tenant.kernel(&loaded, entry).await?;
                    context.loaded.lock().put(key, kernel.clone());
                    kernel
                }
            };
            Ok((kernel, image))
        };
        self.background.spawn(load).await.map_err(ended)?
    }
}

impl LaunchStream {
    /// The same stream for a call, which is charged for what is launched by it.
    pub fn paid_by(self, payer: Arc<dyn Payer>) -> LaunchStream {
        LaunchStream { stream: self.stream.paid_by(payer), ..self }
    }

    /// The kernel loaded on the device, and what it was made from, as the tenant has it or as it was launched before.
    pub(crate) async fn loaded(
        &self,
        context: &Arc<LaunchContext>,
        module: &Arc<KernelModule>,
        options: Options,
    ) -> Result<(Kernel, Arc<Image>), KernelError> {
        let is_same = |last: &&LastLaunch| {
            Arc::ptr_eq(&last.context, context) && Arc::ptr_eq(&last.module, module) && last.options == options
        };
        if let Some(last) = self.last.lock().as_ref().filter(is_same) {
            return Ok((last.kernel.clone(), last.image.clone()));
        }
        let (kernel, image) = self.kernels.loaded(context, module, options.clone()).await?;
        let (context, module) = (context.clone(), module.clone());
        let own = LastLaunch { context, module, options, kernel: kernel.clone(), image: image.clone() };
        let before = self.last.lock().replace(own);
        // Outside the lock: the last of a module's owners unloads it.
        drop(before);
        Ok((kernel, image))
    }
}

impl LaunchContext {
    fn new(worker: u32) -> LaunchContext {
        LaunchContext {
            worker,
            launches: AtomicU64::new(0),
            controls: [const { OnceLock::new() }; Stream::INDEX_MAX],
            records: Mutex::default(),
            loaded: Mutex::new(LruCache::with_hasher(LOADED_MAX, Seed::default())),
        }
    }

    /// Whether launches on that worker may use it: there are numbers left for them.
    fn serves(&self, worker: u32) -> bool {
        self.worker == worker && self.launches.load(Ordering::Relaxed) < LAUNCHES_MAX / 2
    }

    /// A number that no other launch has. Asked for by whoever holds the stream's `sending`.
    pub(crate) fn next_launch(&self) -> u64 {
        self.launches.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The control block of a stream; `TenantKernels::context` has made it.
    pub(crate) fn control(&self, index: usize) -> Result<&StreamControl, KernelError> {
        let control = self.controls.get(index).and_then(OnceLock::get);
        control.ok_or_else(|| KernelError::Bug(format!("stream {index} has no control block")))
    }
}

/// A task of ours that panicked, or was dropped with its runtime: nobody's fault but ours.
pub fn ended(error: tokio::task::JoinError) -> KernelError {
    KernelError::Bug(format!("a task ended: {error}"))
}

#[cfg(test)]
mod tests {
    use tensor_wasm_gpu::{DeviceChoice, OpenOptions};

    use super::*;

    /// More than the 511 that a device has room for.
    const TENANTS: usize = 600;

    fn kernels(background: &tokio::runtime::Runtime) -> Kernels {
        let device = Device::open(&OpenOptions { choice: DeviceChoice::Cpu, ..OpenOptions::default() }).unwrap();
        Kernels::new(device, None, background.handle().clone())
    }

    /// What an instance does: a stream, a buffer, a copy there and back.
    fn use_once(kernels: &Kernels, name: &str) -> Arc<TenantKernels> {
        let tenant = kernels.tenant(name, TenantLimits::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let stream = tenant.stream().stream;
        let buffer = tenant.tenant.buffer(100).unwrap();
        stream.write_blocking(buffer.handle(), 0, name.as_bytes()).unwrap();
        let mut seen = vec![0; name.len()];
        stream.read_blocking(buffer.handle(), 0, &mut seen).unwrap();
        assert_eq!(seen, name.as_bytes());
        tenant
    }

    #[test]
    fn tenants_that_use_the_device_once_make_room_for_others() {
        let background = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let kernels = kernels(&background);
        for n in 0..TENANTS {
            use_once(&kernels, &format!("alone-{n}"));
        }
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let kernels = &kernels;
                scope.spawn(move || {
                    (0..TENANTS / 8).for_each(|n| drop(use_once(kernels, &format!("beside-{thread}-{n}"))))
                });
            }
        });
    }

    #[test]
    fn tenants_that_have_instances_are_not_given_up() {
        let background = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let kernels = kernels(&background);
        let mut held = Vec::new();
        let refused = loop {
            match kernels.tenant(&format!("held-{}", held.len()), TenantLimits::default()) {
                Ok(tenant) => held.push(tenant),
                Err(error) => break error,
            }
            assert!(held.len() < TENANTS, "never full");
        };
        let is_full = |why: &str| why.contains("511 tenants already");
        assert!(matches!(&refused, KernelError::Device(DeviceError::Refused { why }) if is_full(why)), "{refused}");
        // One that goes makes room for one.
        held.swap_remove(0);
        use_once(&kernels, "another");
        // And those that are held are the ones they were.
        assert!(
            held.iter()
                .all(|own| Arc::ptr_eq(own, &kernels.tenant(own.tenant.name(), TenantLimits::default()).unwrap()))
        );
    }

    #[test]
    fn launches_are_numbered_anew_before_their_numbers_run_out() {
        let background = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let tenant = kernels(&background).tenant("long", TenantLimits::default()).unwrap();
        let index = tenant.stream().stream.index();
        let context = || background.block_on(tenant.context(index)).unwrap();
        let first = context();
        assert_eq!((first.next_launch(), context().next_launch()), (1, 2));
        first.launches.store(LAUNCHES_MAX / 2, Ordering::Relaxed);
        assert!(first.next_launch() < LAUNCHES_MAX, "whoever has it may still launch");
        assert_eq!(context().next_launch(), 1);
    }

    #[test]
    fn many_first_calls_of_a_trusted_tenant_start_one_worker() {
        let background = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let opened = Arc::new(AtomicU64::new(0));
        let count = opened.clone();
        let opener: Opener = Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
            let options = OpenOptions { choice: DeviceChoice::Cpu, ..OpenOptions::default() };
            Device::open(&options).map_err(|error| error.to_string())
        });
        let kernels = kernels(&background).with_opener(opener);
        let open = || kernels.trusted_tenant("trusted", TenantLimits::default()).unwrap();
        let first = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).reduce(|a, b| {
                assert!(Arc::ptr_eq(&a, &b));
                a
            })
        });
        assert!(first.is_some() && opened.load(Ordering::Relaxed) == 1);
    }
}
