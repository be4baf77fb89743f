//! What a loaded function exports and imports, as text for people: names with their WIT or core types.
//!
//! A guest chooses its types, and a type that uses another one twice prints twice as long: twenty such definitions are
//! a megabyte of text. So both the text of a type and the number of exports listed are bounded; what is cut ends in
//! `…`.

use std::fmt::{self, Write};

use wasmtime::component::Component;
use wasmtime::component::types::{ComponentItem, Type};
use wasmtime::{ExternType, Module};

use crate::engine::pool::EntryPoint;

/// Exports listed of one function: an SDK's worth of them, not a hostile module's million.
pub const EXPORTS_LISTED_MAX: usize = 1_000;

/// Text of one type or name. The longest of the examples' (an image's result) has some 200.
pub const TEXT_BYTES_MAX: usize = 1_000;

/// An exported function as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportSignature {
    /// `function`, or `interface#function` as in `demo:math/vectors#dot`.
    pub name: String,
    /// Names and types. Parameters of core modules have no names and are called `p0`, `p1`…
    pub params: Vec<(String, String)>,
    pub results: Vec<String>,
}

enum LinkedCode<'a> {
    Module(&'a Module),
    Component(&'a Component),
}

fn code(entry: &EntryPoint) -> LinkedCode<'_> {
    match entry {
        EntryPoint::Core { pre, .. } | EntryPoint::CoreCommand(pre) => LinkedCode::Module(pre.module()),
        EntryPoint::Component { pre, .. } => LinkedCode::Component(pre.component()),
        EntryPoint::CommandP2(pre) => LinkedCode::Component(pre.instance_pre().component()),
        EntryPoint::CommandP3(pre) => LinkedCode::Component(pre.instance_pre().component()),
        EntryPoint::HttpP2(pre) => LinkedCode::Component(pre.instance_pre().component()),
        EntryPoint::HttpP3(pre) => LinkedCode::Component(pre.instance_pre().component()),
    }
}

/// The functions a revision exports, at most [`EXPORTS_LISTED_MAX`].
pub(crate) fn exports(entry: &EntryPoint) -> Vec<ExportSignature> {
    match code(entry) {
        LinkedCode::Module(module) => core_exports(module),
        LinkedCode::Component(component) => component_exports(component),
    }
}

fn core_exports(module: &Module) -> Vec<ExportSignature> {
    let function = |export: wasmtime::ExportType<'_>| match export.ty() {
        ExternType::Func(ty) => Some(ExportSignature {
            name: bounded(&export.name()),
            params: ty.params().enumerate().map(|(at, ty)| (format!("p{at}"), bounded(&ty))).collect(),
            results: ty.results().map(|ty| bounded(&ty)).collect(),
        }),
        _ => None,
    };
    module.exports().filter_map(function).take(EXPORTS_LISTED_MAX).collect()
}

fn component_exports(component: &Component) -> Vec<ExportSignature> {
    let found = super::component::exports(component).into_iter().take(EXPORTS_LISTED_MAX);
    let signature = |export: super::component::ComponentExport| ExportSignature {
        name: bounded(&export.name),
        params: export.ty.params().map(|(name, ty)| (bounded(&name), bounded(&Shown(&ty)))).collect(),
        results: export.ty.results().map(|ty| bounded(&Shown(&ty))).collect(),
    };
    found.map(signature).collect()
}

/// The first import by which a revision reaches the device, if it has one.
pub(crate) fn gpu_import(entry: &EntryPoint) -> Option<String> {
    match code(entry) {
        LinkedCode::Module(module) => {
            let mut modules = module.imports().map(|import| import.module().to_owned());
            modules.find(|name| name.starts_with("wasi:cuda/"))
        }
        LinkedCode::Component(component) => {
            let engine = component.engine();
            let ty = component.component_type();
            let uses = |item: &ComponentItem| matches!(item, ComponentItem::ComponentInstance(_));
            let mut imports =
                ty.imports(engine).filter(|(_, import)| uses(&import.ty)).map(|(name, _)| name.to_owned());
            imports.find(|name| name.starts_with("tensor-wasm:gpu/"))
        }
    }
}

/// Writes until there is no more room, then fails, which ends a type's expansion early.
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = TEXT_BYTES_MAX - self.0.len();
        if text.len() <= room {
            self.0.push_str(text);
            return Ok(());
        }
        self.0.push_str(&text[..text.floor_char_boundary(room)]);
        Err(fmt::Error)
    }
}

fn bounded(shown: &dyn fmt::Display) -> String {
    let mut text = Bounded(String::new());
    if write!(text, "{shown}").is_err() {
        text.0.push('…');
    }
    text.0
}

/// A type in the syntax of WIT, its definition written out: types have no names once they are compiled.
struct Shown<'a>(&'a Type);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = match self.0 {
            Type::Bool => "bool",
            Type::S8 => "s8",
            Type::U8 => "u8",
            Type::S16 => "s16",
            Type::U16 => "u16",
            Type::S32 => "s32",
            Type::U32 => "u32",
            Type::S64 => "s64",
            Type::U64 => "u64",
            Type::Float32 => "f32",
            Type::Float64 => "f64",
            Type::Char => "char",
            Type::String => "string",
            Type::ErrorContext => "error-context",
            Type::Own(_) => "own<resource>",
            Type::Borrow(_) => "borrow<resource>",
            Type::List(list) => return write!(f, "list<{}>", Shown(&list.ty())),
            Type::FixedLengthList(list) => return write!(f, "list<{}, {}>", Shown(&list.ty()), list.len()),
            Type::Map(map) => return write!(f, "map<{}, {}>", Shown(&map.key()), Shown(&map.value())),
            Type::Option(option) => return write!(f, "option<{}>", Shown(&option.ty())),
            Type::Future(future) => return one_of("future", future.ty(), f),
            Type::Stream(stream) => return one_of("stream", stream.ty(), f),
            Type::Result(result) => {
                return match (result.ok(), result.err()) {
                    (None, None) => f.write_str("result"),
                    (Some(ok), None) => write!(f, "result<{}>", Shown(&ok)),
                    (None, Some(err)) => write!(f, "result<_, {}>", Shown(&err)),
                    (Some(ok), Some(err)) => write!(f, "result<{}, {}>", Shown(&ok), Shown(&err)),
                };
            }
            Type::Tuple(tuple) => {
                return listed(f, "tuple<", tuple.types(), ">", |f, ty| Shown(&ty).fmt(f));
            }
            Type::Record(record) => {
                let field = |f: &mut fmt::Formatter<'_>, field: wasmtime::component::types::Field<'_>| {
                    write!(f, "{}: {}", field.name, Shown(&field.ty))
                };
                return listed(f, "record { ", record.fields(), " }", field);
            }
            Type::Variant(variant) => {
                let case = |f: &mut fmt::Formatter<'_>, case: wasmtime::component::types::Case<'_>| match case.ty {
                    Some(ty) => write!(f, "{}({})", case.name, Shown(&ty)),
                    None => f.write_str(case.name),
                };
                return listed(f, "variant { ", variant.cases(), " }", case);
            }
            Type::Enum(cases) => return listed(f, "enum { ", cases.names(), " }", |f, name| f.write_str(name)),
            Type::Flags(flags) => return listed(f, "flags { ", flags.names(), " }", |f, name| f.write_str(name)),
        };
        f.write_str(plain)
    }
}

fn one_of(name: &str, ty: Option<Type>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match ty {
        Some(ty) => write!(f, "{name}<{}>", Shown(&ty)),
        None => f.write_str(name),
    }
}

fn listed<T>(
    f: &mut fmt::Formatter<'_>,
    open: &str,
    items: impl Iterator<Item = T>,
    close: &str,
    mut write: impl FnMut(&mut fmt::Formatter<'_>, T) -> fmt::Result,
) -> fmt::Result {
    f.write_str(open)?;
    for (at, item) in items.enumerate() {
        if at > 0 {
            f.write_str(", ")?;
        }
        write(f, item)?;
    }
    f.write_str(close)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn component(text: &str) -> Component {
        Component::new(&wasmtime::Engine::default(), wat::parse_str(text).unwrap()).unwrap()
    }

    #[test]
    fn types_are_written_as_wit() {
        let module = r#"(module (memory (export "m") 1)
            (func (export "r") (param i32 i32 i32 i32) (result i32) unreachable)
            (func (export "f") (param i32 i64) (result f32 f64) unreachable))"#;
        let core = Module::new(&wasmtime::Engine::default(), wat::parse_str(module).unwrap()).unwrap();
        let f = core_exports(&core).pop().unwrap();
        let param = |name: &str, ty: &str| (name.to_owned(), ty.to_owned());
        assert_eq!(f.params, [param("p0", "i32"), param("p1", "i64")]);
        assert_eq!(f.results, ["f32", "f64"]);
        let wit = component(
            r#"(component
                (core module $m (memory (export "memory") 1)
                    (func (export "r") (param i32 i32 i32 i32) (result i32) unreachable)
                    (func (export "f") (param i32 f32 i32) (result i32) unreachable))
                (core instance $i (instantiate $m))
                (type $shape' (variant (case "dot") (case "circle" f32)))
                (export $shape "shape" (type $shape'))
                (func (export "f") (param "a" $shape) (param "b" u8) (result (result (list u8) (error string)))
                    (canon lift (core func $i "f") (memory (core memory $i "memory")))))"#,
        );
        let f = component_exports(&wit).pop().unwrap();
        assert_eq!(f.params, [param("a", "variant { dot, circle(f32) }"), param("b", "u8")]);
        assert_eq!(f.results, ["result<list<u8>, string>"]);
    }

    #[test]
    fn a_type_that_doubles_and_a_flood_of_exports_are_cut() {
        let mut types = String::from("(type $t0 (tuple u8 u8))");
        for n in 1..16 {
            types += &format!("(type $t{n} (tuple $t{} $t{}))", n - 1, n - 1);
        }
        let text = format!(
            r#"(component
                (core module $m (memory (export "memory") 1) (func (export "f") (param i32) unreachable)
                    (func (export "r") (param i32 i32 i32 i32) (result i32) unreachable))
                (core instance $i (instantiate $m)) {types}
                (func (export "f") (param "x" $t15) (canon lift (core func $i "f")
                    (memory (core memory $i "memory")) (realloc (core func $i "r")))))"#
        );
        let f = component_exports(&component(&text)).pop().unwrap();
        let ty = &f.params[0].1;
        assert!(ty.starts_with("tuple<tuple<") && ty.ends_with('…') && ty.len() < TEXT_BYTES_MAX + 4, "{ty}");

        let many: String = (0..5000).map(|n| format!(r#"(export "f{n}" (func 0))"#)).collect();
        let module = wat::parse_str(format!("(module (func) {many})")).unwrap();
        let module = Module::new(&wasmtime::Engine::default(), module).unwrap();
        assert_eq!(core_exports(&module).len(), EXPORTS_LISTED_MAX);
    }
}
