//! The kernel profile, at the level of a module: what a kernel module may contain and what its parts are. What
//! functions may contain is decided where they are lowered (`lower/mod.rs`), and only for functions that a kernel
//! reaches: compilers leave much behind that nothing calls.

use std::collections::HashMap;

use wasmparser::{
    CompositeInnerType, ConstExpr, DataKind, ElementItems, ElementKind, ExternalKind, FuncType, FunctionBody, Name,
    NameSectionReader, Operator, Parser, Payload, TypeRef, ValType, Validator, WasmFeatures,
};

use crate::ir::Ty;
use crate::refusal::Refusal;

/// More than any kernel has; compiling takes time that grows with it.
pub const MODULE_BYTES_MAX: usize = 4 << 20;

/// Static data of a module. It is copied to the device with every image.
const DATA_BYTES_MAX: u64 = 1 << 20;

const TABLE_ENTRIES_MAX: u64 = 1 << 12;

/// Of a function's name, in messages.
const NAME_CHARS_MAX: usize = 120;

/// A kernel module that was read and validated.
pub struct Program<'a> {
    pub(crate) types: Vec<Option<FuncType>>,
    /// Imported functions come first in the index space.
    pub(crate) imports: Vec<Import<'a>>,
    pub(crate) functions: Vec<FunctionCode<'a>>,
    pub(crate) globals: Vec<Global>,
    /// Function indices; `None` where the table has none.
    pub(crate) table: Vec<Option<u32>>,
    pub(crate) data: Vec<Segment<'a>>,
    /// What the memory has at first, in bytes.
    pub(crate) memory_bytes: u64,
    exports: Vec<(&'a str, u32)>,
    names: HashMap<u32, &'a str>,
}

pub(crate) struct Import<'a> {
    pub module: &'a str,
    pub name: &'a str,
    pub ty: u32,
}

pub(crate) struct FunctionCode<'a> {
    pub ty: u32,
    pub body: FunctionBody<'a>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Global {
    pub ty: Ty,
    pub bits: u64,
    /// It is what compilers keep the address of the stack in.
    pub is_stack_pointer: bool,
}

/// A data segment with a place in memory.
pub(crate) struct Segment<'a> {
    pub address: u64,
    pub bytes: &'a [u8],
}

/// Everything the validator may accept; what kernels may not use is refused by name later, which says more.
fn features() -> WasmFeatures {
    WasmFeatures::WASM2 | WasmFeatures::THREADS
}

impl<'a> Program<'a> {
    pub fn read(wasm: &'a [u8]) -> Result<Program<'a>, Refusal> {
        if wasm.len() > MODULE_BYTES_MAX {
            return Err(Refusal::TooLarge { bytes: wasm.len(), bytes_max: MODULE_BYTES_MAX });
        }
        if Parser::is_component(wasm) {
            return Err(Refusal::NotWasm { why: "it is a component, and kernels are core modules".to_owned() });
        }
        Validator::new_with_features(features()).validate_all(wasm).map_err(not_wasm)?;
        let mut program = Program {
            types: Vec::new(),
            imports: Vec::new(),
            functions: Vec::new(),
            globals: Vec::new(),
            table: Vec::new(),
            data: Vec::new(),
            memory_bytes: 0,
            exports: Vec::new(),
            names: HashMap::new(),
        };
        let mut declared = Vec::new();
        for payload in Parser::new(0).parse_all(wasm) {
            program.take(payload.map_err(not_wasm)?, &mut declared)?;
        }
        let first = program.data.iter().map(|segment| segment.address).min().unwrap_or(0);
        let end = program.data.iter().map(|segment| segment.address + segment.bytes.len() as u64).max().unwrap_or(0);
        if end - first.min(end) > DATA_BYTES_MAX {
            return refuse(&format!("static data spread over more than {DATA_BYTES_MAX} bytes"));
        }
        Ok(program)
    }

    fn take(&mut self, payload: Payload<'a>, declared: &mut Vec<u32>) -> Result<(), Refusal> {
        match payload {
            Payload::TypeSection(types) => {
                for group in types {
                    for sub in group.map_err(not_wasm)?.into_types() {
                        self.types.push(match sub.composite_type.inner {
                            CompositeInnerType::Func(func) => Some(func),
                            _ => None,
                        });
                    }
                }
            }
            Payload::ImportSection(imports) => {
                for import in imports.into_imports() {
                    let import = import.map_err(not_wasm)?;
                    match import.ty {
                        TypeRef::Func(ty) => {
                            self.imports.push(Import { module: import.module, name: import.name, ty });
                        }
                        TypeRef::Memory(memory) => self.memory_bytes = memory.initial.saturating_mul(1 << 16),
                        TypeRef::Table(_) => return refuse("an imported table"),
                        _ => return refuse(&format!("the import {}.{}", import.module, import.name)),
                    }
                }
            }
            Payload::FunctionSection(functions) => {
                for ty in functions {
                    declared.push(ty.map_err(not_wasm)?);
                }
            }
            Payload::TableSection(tables) => {
                for (n, table) in tables.into_iter().enumerate() {
                    let table = table.map_err(not_wasm)?;
                    if n > 0 || table.ty.initial > TABLE_ENTRIES_MAX {
                        return refuse("more than one table, or one of more than 4096 entries");
                    }
                    self.table = vec![None; usize::try_from(table.ty.initial).unwrap_or(0)];
                }
            }
            Payload::MemorySection(memories) => {
                for memory in memories {
                    let memory = memory.map_err(not_wasm)?;
                    if memory.memory64 {
                        return refuse("a 64-bit memory");
                    }
                    self.memory_bytes = memory.initial.saturating_mul(1 << 16);
                }
            }
            Payload::GlobalSection(globals) => {
                for global in globals {
                    let global = global.map_err(not_wasm)?;
                    let Some(ty) = Ty::of(global.ty.content_type) else {
                        return refuse("a global that is not a number");
                    };
                    let bits = self.constant(&global.init_expr)?;
                    // Compilers make it the first mutable one, and say so in its name only where names are kept.
                    let is_first = !self.globals.iter().any(|global| global.is_stack_pointer);
                    let is_stack_pointer = global.ty.mutable && ty == Ty::I32 && is_first && bits != 0;
                    self.globals.push(Global { ty, bits, is_stack_pointer });
                }
            }
            Payload::ExportSection(exports) => {
                for export in exports {
                    let export = export.map_err(not_wasm)?;
                    if export.kind == ExternalKind::Func {
                        self.exports.push((export.name, export.index));
                        // Its name, unless the section of names has another, which comes later.
                        self.names.entry(export.index).or_insert(export.name);
                    }
                }
            }
            Payload::StartSection { .. } => return refuse("a start function"),
            Payload::ElementSection(elements) => {
                for element in elements {
                    let element = element.map_err(not_wasm)?;
                    let ElementKind::Active { offset_expr, .. } = element.kind else { continue };
                    let at = usize::try_from(self.constant(&offset_expr)?).unwrap_or(usize::MAX);
                    self.fill_table(at, element.items)?;
                }
            }
            Payload::DataSection(segments) => {
                let mut bytes = 0;
                for segment in segments {
                    let segment = segment.map_err(not_wasm)?;
                    bytes += segment.data.len() as u64;
                    if bytes > DATA_BYTES_MAX {
                        return refuse(&format!("more than {DATA_BYTES_MAX} bytes of static data"));
                    }
                    if let DataKind::Active { offset_expr, .. } = segment.kind {
                        let address = self.constant(&offset_expr)? & 0xffff_ffff;
                        if address + segment.data.len() as u64 > self.memory_bytes {
                            return refuse("a data segment outside the memory");
                        }
                        self.data.push(Segment { address, bytes: segment.data });
                    }
                }
            }
            Payload::CodeSectionEntry(body) => {
                let ty = declared.get(self.functions.len()).copied().unwrap_or(0);
                self.functions.push(FunctionCode { ty, body });
            }
            Payload::CustomSection(section) if section.name() == "name" => {
                let reader = wasmparser::BinaryReader::new(section.data(), section.data_offset());
                self.take_names(NameSectionReader::new(reader));
            }
            _ => {}
        }
        Ok(())
    }

    /// Names are a courtesy: what is wrong with them is ignored.
    fn take_names(&mut self, names: NameSectionReader<'a>) {
        for name in names.into_iter().flatten() {
            if let Name::Function(functions) = name {
                for naming in functions.into_iter().flatten() {
                    self.names.insert(naming.index, naming.name);
                }
            }
        }
    }

    fn fill_table(&mut self, at: usize, items: ElementItems<'a>) -> Result<(), Refusal> {
        let mut functions = Vec::new();
        match items {
            ElementItems::Functions(indices) => {
                for index in indices {
                    functions.push(Some(index.map_err(not_wasm)?));
                }
            }
            ElementItems::Expressions(_, expressions) => {
                for expression in expressions {
                    let mut ops = expression.map_err(not_wasm)?.get_operators_reader();
                    functions.push(match ops.read().map_err(not_wasm)? {
                        Operator::RefFunc { function_index } => Some(function_index),
                        _ => None,
                    });
                }
            }
        }
        match self.table.get_mut(at..at.saturating_add(functions.len())) {
            Some(entries) => entries.copy_from_slice(&functions),
            None => return refuse("an element segment outside the table"),
        }
        Ok(())
    }

    /// The value of a constant expression, as bits.
    fn constant(&self, expression: &ConstExpr<'_>) -> Result<u64, Refusal> {
        let mut ops = expression.get_operators_reader();
        let bits = match ops.read().map_err(not_wasm)? {
            Operator::I32Const { value } => u64::from(value.cast_unsigned()),
            Operator::I64Const { value } => value.cast_unsigned(),
            Operator::F32Const { value } => u64::from(value.bits()),
            Operator::F64Const { value } => value.bits(),
            Operator::GlobalGet { global_index } => match self.globals.get(global_index as usize) {
                Some(global) => global.bits,
                None => return refuse("an imported global"),
            },
            _ => return refuse("a constant that is computed"),
        };
        match ops.read().map_err(not_wasm)? {
            Operator::End => Ok(bits),
            _ => refuse("a constant that is computed"),
        }
    }

    pub(crate) fn ty(&self, index: u32) -> Option<&FuncType> {
        self.types.get(index as usize)?.as_ref()
    }

    /// The type of a function, imported or not.
    pub(crate) fn type_of(&self, function: u32) -> Option<(u32, &FuncType)> {
        let ty = match self.imports.get(function as usize) {
            Some(import) => import.ty,
            None => self.functions.get(function as usize - self.imports.len())?.ty,
        };
        self.ty(ty).map(|func| (ty, func))
    }

    /// A function's name as people know it.
    pub(crate) fn name(&self, function: u32) -> String {
        match self.names.get(&function) {
            // Cut where somebody has written a book.
            Some(name) => name.chars().take(NAME_CHARS_MAX).collect(),
            None => format!("function {function}"),
        }
    }

    /// Exported functions: their names, and whether they can be kernels or why not.
    pub fn exports(&self) -> impl Iterator<Item = (&'a str, Result<Vec<Ty>, Refusal>)> {
        self.exports.iter().map(|(name, index)| (*name, self.signature(name, *index)))
    }

    fn signature(&self, name: &str, index: u32) -> Result<Vec<Ty>, Refusal> {
        let not = |why: &str| Refusal::NotAKernel { name: name.to_owned(), why: why.to_owned() };
        if (index as usize) < self.imports.len() {
            return Err(not("it is an import"));
        }
        let (_, ty) = self.type_of(index).ok_or_else(|| not("it has no type"))?;
        if !ty.results().is_empty() {
            return Err(not("it returns a value, and kernels return nothing"));
        }
        if ty.params().len() > PARAMS_MAX {
            return Err(not(&format!("it has more than {PARAMS_MAX} parameters")));
        }
        let params = ty.params().iter().map(|ty| Ty::of(*ty));
        params.collect::<Option<_>>().ok_or_else(|| not("a parameter is not a number"))
    }

    /// Any exported function that is not an import.
    pub(crate) fn exported(&self, name: &str) -> Result<(u32, &FuncType), Refusal> {
        let found =
            self.exports.iter().find(|(export, index)| *export == name && *index as usize >= self.imports.len());
        let found = found.and_then(|(_, index)| self.type_of(*index).map(|(_, ty)| (*index, ty)));
        found.ok_or_else(|| Refusal::NoSuchKernel { name: name.to_owned(), known: String::new() })
    }

    /// What the memory holds at first: its size, and what is where.
    pub fn memory(&self) -> (u64, impl Iterator<Item = (u64, &'a [u8])>) {
        (self.memory_bytes, self.data.iter().map(|segment| (segment.address, segment.bytes)))
    }

    /// What the globals are at first.
    pub fn globals(&self) -> impl Iterator<Item = u64> {
        self.globals.iter().map(|global| global.bits)
    }

    /// An exported function that is a kernel, and the types of its parameters.
    pub(crate) fn kernel(&self, name: &str) -> Result<(u32, Vec<Ty>), Refusal> {
        match self.exports.iter().find(|(export, _)| *export == name) {
            Some((_, index)) => Ok((*index, self.signature(name, *index)?)),
            None => {
                let is_kernel = |(name, index): &&(&str, u32)| self.signature(name, *index).is_ok();
                let known: Vec<&str> = self.exports.iter().filter(is_kernel).map(|(name, _)| *name).collect();
                Err(Refusal::NoSuchKernel { name: name.to_owned(), known: known.join(", ") })
            }
        }
    }
}

/// What a launch can pass: a window takes four words of a parameter block of 4 KiB.
pub(crate) const PARAMS_MAX: usize = 128;

fn refuse<T>(what: &str) -> Result<T, Refusal> {
    Err(Refusal::Module { what: what.to_owned() })
}

fn not_wasm(error: wasmparser::BinaryReaderError) -> Refusal {
    // On one line, as it may be shown anywhere.
    Refusal::NotWasm { why: error.to_string().split_whitespace().collect::<Vec<_>>().join(" ") }
}

impl Ty {
    pub(crate) fn of(ty: ValType) -> Option<Ty> {
        match ty {
            ValType::I32 => Some(Ty::I32),
            ValType::I64 => Some(Ty::I64),
            ValType::F32 => Some(Ty::F32),
            ValType::F64 => Some(Ty::F64),
            ValType::V128 | ValType::Ref(_) => None,
        }
    }
}
