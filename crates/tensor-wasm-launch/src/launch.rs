//! One launch: from arguments to parameters, from a number in a record to a sentence.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tensor_wasm_gpu::{Completion, DeviceKind, Grid, Handle, LAUNCH_SPIN, Param, Params, Pinned, spin_until};
use tensor_wasm_jit::{RECORD, SHARED_ADDRESS, Trap, TrapKind, Ty, budget_ticks};

use crate::cache::{Image, Options};
use crate::module::Code;
use crate::tenant::Record;
use crate::{KernelError, KernelModule, LaunchStream};

/// Windows begin at multiples of this.
const WINDOW_ALIGN: u64 = 256;

/// Addresses that a device reads at once begin at multiples of this.
const ADDRESS_ALIGN: u64 = 16;

/// An argument of a launch.
#[derive(Debug, Clone)]
pub enum Argument {
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
    /// A whole buffer.
    Buffer(Handle),
    /// A part of memory that host and device both see.
    Pinned {
        memory: Pinned,
        offset: u64,
        bytes: u64,
    },
}

impl Argument {
    fn is_memory(&self) -> bool {
        matches!(self, Argument::Buffer(_) | Argument::Pinned { .. })
    }

    fn fits(&self, ty: Ty) -> bool {
        match self {
            Argument::I32(_) | Argument::Buffer(_) | Argument::Pinned { .. } => ty == Ty::I32,
            Argument::I64(_) => ty == Ty::I64,
            Argument::F32(_) => ty == Ty::F32,
            Argument::F64(_) => ty == Ty::F64,
        }
    }

    /// As the device takes it; memory by its address.
    fn param(&self) -> Param {
        match self {
            Argument::I32(value) => Param::I32(*value),
            Argument::I64(value) => Param::I64(*value),
            Argument::F32(value) => Param::F32(*value),
            Argument::F64(value) => Param::F64(*value),
            Argument::Buffer(handle) => Param::Buffer { handle: *handle, offset: 0 },
            Argument::Pinned { memory, offset, .. } => Param::Pinned { memory: memory.clone(), offset: *offset },
        }
    }

    fn what(&self) -> &'static str {
        match self {
            Argument::I32(_) => "an i32",
            Argument::I64(_) => "an i64",
            Argument::F32(_) => "an f32",
            Argument::F64(_) => "an f64",
            Argument::Buffer(_) => "a buffer",
            Argument::Pinned { .. } => "a pointer",
        }
    }
}

/// A launch under way. Dropping it does not stop it; cancelling does.
pub struct Launch {
    under_way: Option<(Completion, Arc<Record>)>,
    number: u64,
    image: Arc<Image>,
    /// How long it may take.
    budget: Duration,
    ended: Option<Result<(), KernelError>>,
    /// Whether the first wait spins for a moment before it parks.
    spins: bool,
    background: tokio::runtime::Handle,
}

impl LaunchStream {
    /// Launches a kernel: so many groups of so many items. Returns when it is in line.
    pub async fn launch(
        &self,
        module: &Arc<KernelModule>,
        kernel: &str,
        groups: [u32; 3],
        items: [u32; 3],
        arguments: &[Argument],
        budget: Duration,
    ) -> Result<Launch, KernelError> {
        match &module.code {
            Code::Raw(_) => return self.launch_raw(module, kernel, groups, items, arguments, budget).await,
            Code::Built(built) => check_windows(kernel, built.windows(), arguments)?,
            Code::Wasm(_) => {}
        }
        let (name, types) = module.kernel(kernel)?;
        check(name, types, arguments)?;
        let context = self.kernels.context(self.stream.index()).await?;
        let sizes = self.sizes(arguments)?;
        let windows: Vec<bool> = arguments.iter().map(Argument::is_memory).collect();
        let kind = self.stream.device().kind();
        let options = Options { kind, kernel: name.clone(), windows, is_small: false };
        let (mut loaded, mut image) = self.loaded(&context, module, options.clone()).await?;
        if image.window_bytes_min.iter().zip(&sizes).any(|(needed, size)| u64::from(*needed) > *size) {
            (loaded, image) = self.loaded(&context, module, Options { is_small: true, ..options }).await?;
        }
        let mut params = Vec::with_capacity(3 * arguments.len() + 4);
        let mut next = u64::from(image.windows_from);
        for (argument, size) in arguments.iter().zip(&sizes) {
            params.push(argument.param());
            if argument.is_memory() {
                let start = next.next_multiple_of(WINDOW_ALIGN);
                next = start + size.max(&1);
                // A CPU maps whole pages, with one between any two.
                if next + (2 * 4096) * arguments.len() as u64 > u64::from(SHARED_ADDRESS) {
                    let why = "the buffers of a launch must fit into 32-bit addresses together: 3.7 GB";
                    return Err(KernelError::Arguments(why.to_owned()));
                }
                let low = |n: u64| Param::U32(u32::try_from(n).unwrap_or(u32::MAX));
                params.extend([low(start), low(*size)]);
            }
        }
        let record = self.kernels.record(&context)?;
        let memory = record.page.clone();
        let control = context.control(self.stream.index())?;
        let sending = control.sending.lock();
        let number = context.next_launch();
        params.push(Param::Buffer { handle: control.block.handle(), offset: 0 });
        params.push(Param::Pinned { memory, offset: record.offset });
        params.push(Param::U64(number));
        params.push(Param::U32(budget_ticks(u64::try_from(budget.as_nanos()).unwrap_or(u64::MAX))));
        let grid = Grid { blocks: groups, threads: items, shared_bytes: 0 };
        let completion = self.stream.launch(&loaded, grid, &Params::new(params))?;
        drop(sending);
        let under_way = Some((completion, Arc::new(record)));
        let (ended, spins, background) = (None, kind == DeviceKind::Cuda, self.kernels.background.clone());
        Ok(Launch { under_way, number, image, budget, ended, spins, background })
    }

    /// Launches code that is not ours: buffers are addresses, and nothing stops it but the worker's end.
    async fn launch_raw(
        &self,
        module: &Arc<KernelModule>,
        kernel: &str,
        groups: [u32; 3],
        items: [u32; 3],
        arguments: &[Argument],
        budget: Duration,
    ) -> Result<Launch, KernelError> {
        let context = self.kernels.context(self.stream.index()).await?;
        let kind = self.stream.device().kind();
        let options = Options { kind, kernel: kernel.into(), windows: Vec::new(), is_small: false };
        let (loaded, image) = self.loaded(&context, module, options).await?;
        let params = Params::new(arguments.iter().map(Argument::param));
        let grid = Grid { blocks: groups, threads: items, shared_bytes: 0 };
        let record = Arc::new(self.kernels.record(&context)?);
        let completion = self.stream.launch(&loaded, grid, &params)?;
        let background = self.kernels.background.clone();
        let under_way = Some((completion, record));
        // No launch has this number, and so no record is about it.
        let (number, ended, spins) = (0, None, true);
        Ok(Launch { under_way, number, image, budget, ended, spins, background })
    }

    /// The size of each argument that is memory; zero of the others.
    fn sizes(&self, arguments: &[Argument]) -> Result<Vec<u64>, KernelError> {
        let size = |argument: &Argument| match argument {
            Argument::Buffer(handle) => Ok(self.kernels.tenant.size(*handle)?),
            Argument::Pinned { memory, offset, bytes } => {
                let is_inside = offset.checked_add(*bytes).is_some_and(|end| end <= memory.len());
                if is_inside && offset.is_multiple_of(ADDRESS_ALIGN) {
                    return Ok(*bytes);
                }
                Err(KernelError::Arguments(format!(
                    "a pointer to {bytes} bytes at {offset}: it must begin at a multiple of {ADDRESS_ALIGN} and lie \
                     inside the memory, which has {} bytes",
                    memory.len()
                )))
            }
            _ => Ok(0),
        };
        arguments.iter().map(size).collect()
    }
}

fn check(name: &str, types: &[Ty], arguments: &[Argument]) -> Result<(), KernelError> {
    if types.len() != arguments.len() {
        let why = format!("{name} takes {} arguments, and {} were given", types.len(), arguments.len());
        return Err(KernelError::Arguments(why));
    }
    for (n, (ty, argument)) in types.iter().zip(arguments).enumerate() {
        if !argument.fits(*ty) {
            let ty = format!("{ty:?}").to_lowercase();
            let why = format!("argument {n} of {name} is {ty}, and {} was given", argument.what());
            return Err(KernelError::Arguments(why));
        }
    }
    Ok(())
}

/// A kernel that was built is compiled for its windows, whatever it is given: each must be given memory, and nothing
/// else may.
fn check_windows(name: &str, windows: &[bool], arguments: &[Argument]) -> Result<(), KernelError> {
    for (n, (is_window, argument)) in windows.iter().zip(arguments).enumerate() {
        if *is_window != argument.is_memory() {
            let expected = if *is_window { "a buffer" } else { "a number" };
            let why = format!("argument {n} of {name} is {expected}, and {} was given", argument.what());
            return Err(KernelError::Arguments(why));
        }
    }
    Ok(())
}

impl Launch {
    /// Waits for the launch and says how it ended, as often as asked. May be given up and asked again.
    pub async fn wait(&mut self) -> Result<(), KernelError> {
        if let Some((completion, record)) = &mut self.under_way {
            // A short kernel is over by the time that a guest would have given its thread away and got it back.
            if std::mem::take(&mut self.spins) {
                spin_until(|| completion.is_over(), LAUNCH_SPIN);
            }
            let done = std::future::poll_fn(|cx| Future::poll(Pin::new(&mut *completion), cx)).await;
            let mut bytes = [0; RECORD.bytes as usize];
            let read = record.page.read(record.offset, &mut bytes);
            let ended = match done.and(read) {
                Err(error) => Err(error.into()),
                // Places are looked up only for a trap: there may be many.
                Ok(()) => match Trap::read(&bytes, self.number, &[]) {
                    None => Ok(()),
                    Some(bare) => {
                        let placed = Trap::read(&bytes, self.number, &self.image.sites());
                        Err(self.words(&placed.unwrap_or(bare)))
                    }
                },
            };
            self.under_way = None;
            self.ended = Some(ended);
        }
        self.ended.clone().unwrap_or(Ok(()))
    }

    fn words(&self, trap: &Trap) -> KernelError {
        match trap.kind {
            TrapKind::Deadline => KernelError::Deadline(format!("the launch took longer than {:?}", self.budget)),
            _ => KernelError::Trap(trap.to_string()),
        }
    }

    /// What stops it, whoever has it.
    pub fn canceller(&self) -> Canceller {
        let record = self.under_way.as_ref().map_or_else(Weak::new, |(_, record)| Arc::downgrade(record));
        Canceller { record, number: self.number }
    }
}

/// Stops a launch that is under way.
pub struct Canceller {
    record: Weak<Record>,
    number: u64,
}

impl Canceller {
    pub fn is_under_way(&self) -> bool {
        self.record.strong_count() > 0
    }

    /// Has the device stop the launch, within some milliseconds.
    pub fn cancel(&self) {
        if let Some(record) = self.record.upgrade() {
            let _ = record.page.write(record.offset + u64::from(RECORD.cancelled), &self.number.to_le_bytes());
        }
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        // Its record is written until it is over.
        if let Some((completion, record)) = self.under_way.take() {
            self.background.spawn(async move {
                let _ = completion.await;
                drop(record);
            });
        }
    }
}
