//! `tensor-wasm:tensor`, for components.

use std::ops::Range;
use std::sync::Arc;

use tensor_wasm_gpu::{READ_SPIN, spin_until};
use tensor_wasm_tensor::operations::{Argument, Operation};
use tensor_wasm_tensor::{
    DType, Device, Element, RANK_MAX, Scalar, Tensor, TensorError, TensorRead, expression, grad, io,
};
use tokio::task::JoinHandle;
use wasmtime::component::{HasSelf, Linker, Resource};
use wasmtime_wasi::WasiView;
use wasmtime_wasi::p2::{DynPollable, Pollable, subscribe};

pub(super) use self::bindings::tensor_wasm::tensor::tensors::Error;
use self::bindings::tensor_wasm::tensor::tensors::{self, DeviceInfo, DeviceKind, Dtype, Elements, Value};
use super::error::TensorFailure;
use super::plan::Now;
use super::{HeldTensor, State, TensorPlace};
use crate::models::LoadedModel;

/// Interfaces of it begin with this.
pub(crate) const PACKAGE: &str = "tensor-wasm:tensor/";

/// What one call may read: it is copied through the host's memory.
const READ_BYTES_MAX: u64 = 16 << 20;

/// What is copied on the serving thread: it takes some ten microseconds.
const COPIED_AT_ONCE_BYTES_MAX: u64 = 256 << 10;

/// Expressions up to this are read on the serving thread: some hundred operations.
const EVALUATED_AT_ONCE_BYTES_MAX: usize = 2 << 10;

/// Expressions up to this are repeated in errors.
const EXPRESSION_SHOWN_BYTES_MAX: usize = 512;

/// Bytes of a safetensors file's header: reading it takes some ten times as much memory.
const HEADER_BYTES_MAX: u64 = 1 << 20;

/// Characters of a guest's own words that are repeated to it.
const REPEATED_MAX: usize = 64;

mod bindings {
    wasmtime::component::bindgen!({
        path: "../../wit/tensor",
        world: "tensor-wasm:tensor/imports",
        imports: { default: async | trappable },
        with: {
            "wasi:io": wasmtime_wasi::p2::bindings::io,
            "tensor-wasm:tensor/tensors.tensor": super::super::HeldTensor,
            "tensor-wasm:tensor/tensors.computation": super::Computation,
            "tensor-wasm:tensor/tensors.model": super::OpenModel,
        },
    });
}

#[allow(unreachable_pub, reason = "the bindings name it")]
pub struct OpenModel(Arc<LoadedModel>);

/// Tensors that are being computed, or how that ended.
#[allow(unreachable_pub, reason = "the bindings name it")]
pub struct Computation {
    computing: Option<JoinHandle<Result<(), TensorFailure>>>,
    ended: Result<(), TensorFailure>,
}

#[wasmtime_wasi::async_trait]
impl Pollable for Computation {
    async fn ready(&mut self) {
        if let Some(computing) = &mut self.computing {
            self.ended = computing.await.unwrap_or_else(|error| Err(TensorFailure::ended(&error)));
            self.computing = None;
        }
    }
}

pub(crate) fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    tensors::add_to_linker::<State, HasSelf<State>>(linker, |state| state)
}

/// What a host function answers: an error of the guest's to handle, or one that ends it.
type HostResult<T> = wasmtime::Result<Result<T, Error>>;

/// The same before it is known which.
fn answered<T>(done: Result<T, TensorFailure>) -> HostResult<T> {
    match done {
        Ok(value) => Ok(Ok(value)),
        Err(failure) => Ok(Err(failure.answer()?)),
    }
}

/// Entries of one list that a guest hands over: they are looked up and copied by a serving thread, uncharged.
const LIST_MAX: usize = 4096;

/// Names of an expression: each word of it is looked for among them.
const NAMES_MAX: usize = 256;

/// Characters of a name of a guest's choosing.
const NAME_BYTES_MAX: usize = 256;

fn check_list(len: usize, what: &str, max: usize) -> Result<(), TensorFailure> {
    if len > max {
        return Err(TensorFailure::too_many(format!("{len} {what} at once; at most {max} are taken")));
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), TensorFailure> {
    if name.len() > NAME_BYTES_MAX {
        let why = format!("a name of {} bytes; it has at most {NAME_BYTES_MAX}", name.len());
        return Err(TensorFailure::invalid(why));
    }
    Ok(())
}

/// Whether lists and names of arguments are as long as they may be.
fn check_arguments(operation: &str, arguments: &[tensors::Argument]) -> Result<(), TensorFailure> {
    check_name(operation)?;
    check_list(arguments.len(), "arguments", NAMES_MAX)?;
    for tensors::Argument { name, value } in arguments {
        name.iter().try_for_each(|name| check_name(name))?;
        match value {
            Value::Tensors(list) => check_list(list.len(), "tensors", LIST_MAX)?,
            Value::Integers(list) => check_list(list.len(), "numbers", LIST_MAX)?,
            Value::Tensor(_) | Value::Integer(_) | Value::Number(_) | Value::Boolean(_) | Value::Dtype(_) => {}
        }
    }
    Ok(())
}

fn shortened(text: &str) -> String {
    text.chars().take(REPEATED_MAX).collect()
}

fn dtype_of(dtype: Dtype) -> DType {
    match dtype {
        Dtype::Bool => DType::Bool,
        Dtype::U8 => DType::U8,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
    }
}

fn guest_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::Bool => Dtype::Bool,
        DType::U8 => Dtype::U8,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
    }
}

fn sizes_of(shape: &[u64]) -> Result<Vec<usize>, TensorFailure> {
    check_list(shape.len(), "axes", RANK_MAX)?;
    let size = |size: &u64| {
        usize::try_from(*size)
            .map_err(|_| TensorFailure::invalid(format!("a size of {size} is more than there can be")))
    };
    shape.iter().map(size).collect()
}

/// What a guest reads of a tensor.
enum Read<T> {
    There(Vec<T>),
    UnderWay(TensorRead<T>),
}

impl<T: Element> Read<T> {
    async fn all(self) -> Result<Vec<T>, TensorFailure> {
        match self {
            Read::There(found) => Ok(found),
            Read::UnderWay(read) => {
                // Short plans are over by the time that a guest would have given its thread away and got it back.
                spin_until(|| read.is_over(), READ_SPIN);
                Ok(read.await?)
            }
        }
    }
}

/// Computes a tensor and begins to read some bytes of it. None where that is not a matter of a moment.
fn begin_bytes(held: &Tensor, range: &Range<usize>) -> Result<Option<Read<u8>>, TensorError> {
    held.realize()?;
    // What is read in parts is copied once.
    let is_all = range.len() == held.numel() * held.dtype().size();
    if is_all && let Some(read) = held.begin_read(range.clone())? {
        return Ok(Some(Read::UnderWay(read)));
    }
    Ok(held.try_bytes(range.clone()).map(Read::There))
}

/// The same of all of its elements.
fn begin_elements<T: Element>(held: &Tensor) -> Result<Read<T>, TensorError> {
    held.realize()?;
    match held.begin_read(0..held.numel() * held.dtype().size())? {
        Some(read) => Ok(Read::UnderWay(read)),
        None => Ok(Read::There(held.to_vec()?)),
    }
}

/// Numbers that are bytes as they are read in parts.
fn numbers<T, const SIZE: usize>(bytes: &[u8], number: fn([u8; SIZE]) -> T) -> Vec<T> {
    let (numbers, _) = bytes.as_chunks::<SIZE>();
    numbers.iter().map(|bytes| number(*bytes)).collect()
}

impl State {
    fn held(&mut self, tensor: &Resource<HeldTensor>) -> wasmtime::Result<&mut HeldTensor> {
        Ok(self.ctx().table.get_mut(tensor)?)
    }

    fn tensor_of(&mut self, tensor: &Resource<HeldTensor>) -> wasmtime::Result<Tensor> {
        Ok(self.held(tensor)?.tensor.clone())
    }

    fn tensors_of(&mut self, tensors: &[Resource<HeldTensor>]) -> wasmtime::Result<Vec<Tensor>> {
        tensors.iter().map(|tensor| self.tensor_of(tensor)).collect()
    }

    /// Hands something to the guest.
    fn give<T: Send + 'static>(&mut self, given: T) -> Result<Resource<T>, TensorFailure> {
        let full = |_| TensorFailure::too_many("the instance holds as many handles as it may; drop some first");
        self.ctx().table.push(given).map_err(full)
    }

    fn give_tensor(&mut self, tensor: Tensor, place: TensorPlace) -> Result<Resource<HeldTensor>, TensorFailure> {
        self.give(HeldTensor { tensor, straight: None, _place: place })
    }

    /// Makes a tensor and hands it to the guest.
    async fn make(
        &mut self,
        make: impl FnOnce() -> Result<Tensor, TensorFailure> + Send,
    ) -> Result<Resource<HeldTensor>, TensorFailure> {
        let place = self.tensor_place().await?;
        let made = self.record(make).await?;
        self.give_tensor(made, place)
    }

    /// The same of something that takes too long for a serving thread.
    async fn make_elsewhere(
        &mut self,
        make: impl FnOnce() -> Result<Tensor, TensorFailure> + Send + 'static,
    ) -> Result<Resource<HeldTensor>, TensorFailure> {
        let made = self.plan().await?.run(move || Ok(make())).await??;
        self.make(|| Ok(made)).await
    }

    /// Hands several to the guest, or none.
    async fn give_all(&mut self, tensors: Vec<Tensor>) -> Result<Vec<Resource<HeldTensor>>, TensorFailure> {
        let mut given = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let one = match self.tensor_place().await {
                Ok(place) => self.give_tensor(tensor, place),
                Err(failure) => Err(failure),
            };
            match one {
                Ok(one) => given.push(one),
                Err(failure) => {
                    given.into_iter().for_each(|one: Resource<HeldTensor>| drop(self.ctx().table.delete(one)));
                    return Err(failure);
                }
            }
        }
        Ok(given)
    }

    async fn apply_operation(
        &mut self,
        name: &str,
        unnamed: Vec<Argument>,
        named: Vec<(String, Argument)>,
    ) -> Result<Resource<HeldTensor>, TensorFailure> {
        let Some(operation) = Operation::named(name) else {
            let why = format!("there is no operation {:?}; docs/TENSORS.md lists all there are", shortened(name));
            return Err(TensorFailure::invalid(why));
        };
        let call = || operation.call(&unnamed, &named, DType::F32);
        self.make(|| call().map_err(|why| TensorFailure::invalid(format!("{name}: {why}")))).await
    }

    async fn evaluate_text(
        &mut self,
        text: String,
        inputs: Vec<(String, Tensor)>,
    ) -> Result<Resource<HeldTensor>, TensorFailure> {
        let is_short = text.len() <= EVALUATED_AT_ONCE_BYTES_MAX;
        let evaluate = move || {
            let inputs: Vec<(&str, Tensor)> =
                inputs.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
            expression::evaluate(&text, &inputs, DType::F32).map_err(|error| {
                // With the line it is in, unless that is a book.
                let is_short = text.len() <= EXPRESSION_SHOWN_BYTES_MAX;
                let why = || format!("{}, at byte {} of the expression", error.why, error.at);
                TensorFailure::invalid(if is_short { error.to_string() } else { why() })
            })
        };
        if is_short { self.make(evaluate).await } else { self.make_elsewhere(evaluate).await }
    }

    async fn read_bytes(
        &mut self,
        tensor: &Resource<HeldTensor>,
        held: Tensor,
        (offset, bytes): (u64, u64),
    ) -> Result<Vec<u8>, TensorFailure> {
        let size = held.numel() as u64 * held.dtype().size() as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(TensorFailure::invalid(format!("{bytes} bytes from {offset} on of a tensor that has {size}")));
        }
        if bytes > READ_BYTES_MAX {
            let why = format!("{bytes} bytes at once; read at most {READ_BYTES_MAX} and then the next");
            return Err(TensorFailure::invalid(why));
        }
        // Both fit: they are inside of something that is in memory, or will be.
        let part = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let range = part(offset)..part(offset + bytes);
        if bytes <= COPIED_AT_ONCE_BYTES_MAX {
            if let Some(found) = held.try_bytes(range.clone()) {
                return Ok(found);
            }
            if let Some(Now { done: Some(read), turn: _turn }) =
                self.plan().await?.try_run(|| begin_bytes(&held, &range))?
            {
                return read.all().await;
            }
        }
        let read = move || {
            held.realize()?;
            let straight = if held.is_contiguous() { held } else { held.contiguous() };
            Ok((straight.to_bytes(range)?, straight))
        };
        let (found, straight) = self.plan().await?.run(read).await?;
        if let Ok(held) = self.held(tensor) {
            held.straight = Some(straight);
        }
        Ok(found)
    }

    /// Elements from the first one on, as many as are read at once.
    async fn read_elements(
        &mut self,
        tensor: &Resource<HeldTensor>,
        held: Tensor,
        first: u64,
    ) -> Result<Elements, TensorFailure> {
        let (dtype, numel) = (held.dtype(), held.numel() as u64);
        let size = dtype.size() as u64;
        if first > numel {
            return Err(TensorFailure::invalid(format!("elements from {first} on of a tensor that has {numel}")));
        }
        let count = (numel - first).min(READ_BYTES_MAX / size);
        if count == numel {
            match dtype {
                DType::U8 => return Ok(Elements::U8(self.read_all(held).await?)),
                DType::I32 => return Ok(Elements::I32(self.read_all(held).await?)),
                DType::I64 => return Ok(Elements::I64(self.read_all(held).await?)),
                DType::F32 => return Ok(Elements::F32(self.read_all(held).await?)),
                DType::F64 => return Ok(Elements::F64(self.read_all(held).await?)),
                DType::Bool | DType::F16 | DType::BF16 => {}
            }
        }
        let bytes = self.read_bytes(tensor, held, (first * size, count * size)).await?;
        Ok(match dtype {
            DType::Bool => Elements::Bool(numbers(&bytes, |[byte]| byte != 0)),
            DType::U8 => Elements::U8(bytes),
            DType::I32 => Elements::I32(numbers(&bytes, i32::from_le_bytes)),
            DType::I64 => Elements::I64(numbers(&bytes, i64::from_le_bytes)),
            DType::F16 => Elements::F16(numbers(&bytes, u16::from_le_bytes)),
            DType::BF16 => Elements::Bf16(numbers(&bytes, u16::from_le_bytes)),
            DType::F32 => Elements::F32(numbers(&bytes, f32::from_le_bytes)),
            DType::F64 => Elements::F64(numbers(&bytes, f64::from_le_bytes)),
        })
    }

    /// All elements of a tensor that has so few that they are read at once.
    async fn read_all<T: Element>(&mut self, held: Tensor) -> Result<Vec<T>, TensorFailure> {
        let plan = self.plan().await?;
        if size_of::<T>() as u64 * held.numel() as u64 <= COPIED_AT_ONCE_BYTES_MAX
            && let Some(Now { done: read, turn: _turn }) = plan.try_run(|| begin_elements(&held))?
        {
            return read.all().await;
        }
        plan.run(move || held.to_vec()).await
    }

    async fn load_tensors(&mut self, data: Vec<u8>) -> Result<Vec<(String, Resource<HeldTensor>)>, TensorFailure> {
        let header_bytes = data.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
        if header_bytes > HEADER_BYTES_MAX && header_bytes <= data.len() as u64 {
            let why = format!("its header has {header_bytes} bytes, and at most {HEADER_BYTES_MAX} are read here");
            return Err(TensorFailure::invalid(why));
        }
        let read = move || io::read_safetensors(&data);
        let loaded = self.plan().await?.run(read).await?;
        let (names, tensors): (Vec<String>, Vec<Tensor>) = loaded.tensors.into_iter().unzip();
        let given = self.give_all(tensors).await?;
        Ok(names.into_iter().zip(given).collect())
    }

    async fn open_model(&mut self, name: String) -> Result<Resource<OpenModel>, TensorFailure> {
        let call = self.call().clone();
        if !call.serving.revision().settings.models.contains(&name) {
            let name = shortened(&name);
            let why = format!("the function was not deployed with model {name:?}; deploy it with --model {name}");
            return Err(TensorFailure::denied(why));
        }
        let Some(models) = call.surroundings.models.get().cloned() else {
            return Err(TensorFailure::denied("no models are kept here"));
        };
        let tenant = call.account.name.clone();
        // Whoever stops waiting leaves a thread behind that reads, or waits for who reads: only so many of a tenant's.
        let permit = call.account.model_openings.clone().acquire_owned().await;
        let opening = call.surroundings.background.spawn_blocking(move || {
            let _permit = permit;
            models.open(&tenant, &name)
        });
        let opened = opening.await.map_err(|error| TensorFailure::ended(&error))??;
        let session = self.tensors().await?;
        // Once, however often it is opened.
        if session.models.iter().all(|held| !Arc::ptr_eq(&held.tensors, &opened.tensors)) {
            session.models.push(opened.clone());
        }
        self.give(OpenModel(opened))
    }
}

impl tensors::Host for State {
    async fn device(&mut self) -> HostResult<DeviceInfo> {
        let (device, own) = match self.tensors().await {
            Ok(session) => (session.device.clone(), session.account.clone()),
            Err(failure) => return Ok(Err(failure.answer()?)),
        };
        let limits = &self.call().account.limits;
        Ok(Ok(match &device {
            Device::Cpu | Device::Auto => {
                let memory_bytes_max = limits.tensor_memory_bytes_max;
                let free = own.room().1 as u64;
                let memory_bytes_used = memory_bytes_max.saturating_sub(free);
                DeviceInfo { kind: DeviceKind::Cpu, name: "cpu".to_owned(), memory_bytes_max, memory_bytes_used }
            }
            Device::Cuda(cuda) => DeviceInfo {
                kind: DeviceKind::Cuda,
                name: cuda.name().to_owned(),
                memory_bytes_max: limits.gpu_memory_bytes_max,
                memory_bytes_used: cuda.used_bytes(),
            },
        }))
    }

    async fn apply(
        &mut self,
        operation: String,
        arguments: Vec<tensors::Argument>,
    ) -> HostResult<Resource<HeldTensor>> {
        if let Err(failure) = check_arguments(&operation, &arguments) {
            return answered(Err(failure));
        }
        let (mut unnamed, mut named) = (Vec::new(), Vec::new());
        for tensors::Argument { name, value } in arguments {
            let value = match value {
                Value::Tensor(tensor) => Argument::Tensor(self.tensor_of(&tensor)?),
                Value::Tensors(tensors) => {
                    Argument::List(self.tensors_of(&tensors)?.into_iter().map(Argument::Tensor).collect())
                }
                Value::Integer(value) => Argument::Number(Scalar::Int(value)),
                Value::Number(value) => Argument::Number(Scalar::Float(value)),
                Value::Boolean(value) => Argument::Number(Scalar::Bool(value)),
                Value::Integers(values) => {
                    Argument::List(values.into_iter().map(|value| Argument::Number(Scalar::Int(value))).collect())
                }
                Value::Dtype(dtype) => Argument::DType(dtype_of(dtype)),
            };
            match name {
                Some(name) => named.push((name, value)),
                None => unnamed.push(value),
            }
        }
        answered(self.apply_operation(&operation, unnamed, named).await)
    }

    async fn evaluate(
        &mut self,
        text: String,
        names: Vec<(String, Resource<HeldTensor>)>,
    ) -> HostResult<Resource<HeldTensor>> {
        let mut checked = check_list(names.len(), "names", NAMES_MAX);
        checked = names.iter().fold(checked, |checked, (name, _)| checked.and_then(|()| check_name(name)));
        if let Err(failure) = checked {
            return answered(Err(failure));
        }
        let mut inputs = Vec::with_capacity(names.len());
        for (name, tensor) in names {
            inputs.push((name, self.tensor_of(&tensor)?));
        }
        answered(self.evaluate_text(text, inputs).await)
    }

    async fn gradient(
        &mut self,
        of: Resource<HeldTensor>,
        with_respect_to: Vec<Resource<HeldTensor>>,
    ) -> HostResult<Vec<Resource<HeldTensor>>> {
        if let Err(failure) = check_list(with_respect_to.len(), "tensors", LIST_MAX) {
            return answered(Err(failure));
        }
        let (of, inputs) = (self.tensor_of(&of)?, self.tensors_of(&with_respect_to)?);
        let plan = match self.plan().await {
            Ok(plan) => plan,
            Err(failure) => return Ok(Err(failure.answer()?)),
        };
        // As many nodes again as there are: too many for a serving thread.
        let backward = move || grad(&of, &inputs.iter().collect::<Vec<_>>());
        let given = match plan.run(backward).await {
            Ok(gradients) => self.give_all(gradients).await,
            Err(failure) => Err(failure),
        };
        answered(given)
    }

    async fn compute(&mut self, tensors: Vec<Resource<HeldTensor>>) -> HostResult<Resource<Computation>> {
        if let Err(failure) = check_list(tensors.len(), "tensors", LIST_MAX) {
            return answered(Err(failure));
        }
        let tensors = self.tensors_of(&tensors)?;
        let given = match self.begin(tensors).await {
            Ok(computing) => self.give(Computation { computing, ended: Ok(()) }),
            Err(failure) => Err(failure),
        };
        answered(given)
    }

    async fn load_safetensors(&mut self, data: Vec<u8>) -> HostResult<Vec<(String, Resource<HeldTensor>)>> {
        answered(self.load_tensors(data).await)
    }
}

impl tensors::HostTensor for State {
    async fn from_bytes(&mut self, data: Vec<u8>, shape: Vec<u64>, dtype: Dtype) -> HostResult<Resource<HeldTensor>> {
        let is_small = data.len() as u64 <= COPIED_AT_ONCE_BYTES_MAX;
        let copy = move || Ok(Tensor::from_bytes(&data, &sizes_of(&shape)?, dtype_of(dtype)));
        answered(if is_small { self.make(copy).await } else { self.make_elsewhere(copy).await })
    }

    async fn shape(&mut self, tensor: Resource<HeldTensor>) -> wasmtime::Result<Vec<u64>> {
        Ok(self.held(&tensor)?.tensor.shape().iter().map(|size| *size as u64).collect())
    }

    async fn dtype(&mut self, tensor: Resource<HeldTensor>) -> wasmtime::Result<Dtype> {
        Ok(guest_dtype(self.held(&tensor)?.tensor.dtype()))
    }

    async fn realize(&mut self, tensor: Resource<HeldTensor>) -> HostResult<()> {
        let tensor = self.tensor_of(&tensor)?;
        let done = match self.plan().await {
            Ok(plan) => plan.run_soon(move || tensor.realize()).await,
            Err(failure) => Err(failure),
        };
        answered(done)
    }

    async fn read(&mut self, tensor: Resource<HeldTensor>, offset: u64, bytes: u64) -> HostResult<Vec<u8>> {
        let held = self.held(&tensor)?;
        let held = held.straight.as_ref().unwrap_or(&held.tensor).clone();
        answered(self.read_bytes(&tensor, held, (offset, bytes)).await)
    }

    async fn elements(&mut self, tensor: Resource<HeldTensor>, first: u64) -> HostResult<Elements> {
        let held = self.held(&tensor)?;
        let held = held.straight.as_ref().unwrap_or(&held.tensor).clone();
        answered(self.read_elements(&tensor, held, first).await)
    }

    async fn with_grad(&mut self, tensor: Resource<HeldTensor>) -> HostResult<Resource<HeldTensor>> {
        let tensor = self.tensor_of(&tensor)?;
        answered(self.make(|| Ok(tensor.with_grad())).await)
    }

    async fn drop(&mut self, tensor: Resource<HeldTensor>) -> wasmtime::Result<()> {
        self.ctx().table.delete(tensor)?;
        Ok(())
    }
}

impl tensors::HostComputation for State {
    async fn subscribe(&mut self, computation: Resource<Computation>) -> wasmtime::Result<Resource<DynPollable>> {
        subscribe(self.ctx().table, computation)
    }

    async fn wait(&mut self, computation: Resource<Computation>) -> HostResult<()> {
        let computation = self.ctx().table.get_mut(&computation)?;
        computation.ready().await;
        answered(computation.ended.clone())
    }

    async fn drop(&mut self, computation: Resource<Computation>) -> wasmtime::Result<()> {
        self.ctx().table.delete(computation)?;
        Ok(())
    }
}

impl tensors::HostModel for State {
    async fn open(&mut self, name: String) -> HostResult<Resource<OpenModel>> {
        answered(self.open_model(name).await)
    }

    async fn names(&mut self, model: Resource<OpenModel>) -> wasmtime::Result<Vec<String>> {
        Ok(self.ctx().table.get(&model)?.0.tensors.keys().cloned().collect())
    }

    async fn get(&mut self, model: Resource<OpenModel>, name: String) -> HostResult<Resource<HeldTensor>> {
        let model = self.ctx().table.get(&model)?.0.clone();
        let found = model.tensors.get(&name).cloned();
        let no_such = || TensorFailure::invalid(format!("model {:?} has no tensor {:?}", model.name, shortened(&name)));
        let given = match (self.tensor_place().await, found.ok_or_else(no_such)) {
            (Ok(place), Ok(tensor)) => self.give_tensor(tensor, place),
            (Err(failure), _) | (_, Err(failure)) => Err(failure),
        };
        answered(given)
    }

    async fn drop(&mut self, model: Resource<OpenModel>) -> wasmtime::Result<()> {
        self.ctx().table.delete(model)?;
        Ok(())
    }
}
