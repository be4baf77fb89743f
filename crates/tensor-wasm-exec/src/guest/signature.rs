//! What a loaded function exports and imports, as text for people: names with their WIT or core types.
//!
//! A guest chooses its types, and a type that uses another one twice prints twice as long: twenty such definitions are
//! a megabyte of text. Hundreds of exports may share one type of a thousand parameters. So the text of a type, the
//! number of exports and the listing as a whole are bounded; `…` stands for what is left out.

use std::fmt::{self, Write};

use wasmtime::component::Component;
use wasmtime::component::types::{ComponentItem, Type};
use wasmtime::{ExternType, Module};

use crate::engine::pool::EntryPoint;

/// Exports listed of one function: an SDK's worth of them, not a hostile module's million.
pub const EXPORTS_LISTED_MAX: usize = 1_000;

/// Text of one type or name. The longest of the examples' (an image's result) has some 200.
pub const TEXT_BYTES_MAX: usize = 1_000;

/// Text of a whole listing. A thousand exports of the examples' size have some 100 KiB.
pub const LISTING_BYTES_MAX: usize = 256 << 10;

/// What each name and type costs besides its text: the keys and quotes around it in JSON, a `String` in memory.
const PIECE_BYTES: usize = 32;

const LEFT_OUT: &str = "…";

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

/// The functions a revision exports: at most [`EXPORTS_LISTED_MAX`] and [`LISTING_BYTES_MAX`] of text. Where there are
/// more, the last one is called `…`.
pub(crate) fn exports(entry: &EntryPoint) -> Vec<ExportSignature> {
    match code(entry) {
        LinkedCode::Module(module) => core_exports(module),
        LinkedCode::Component(component) => component_exports(component),
    }
}

fn core_exports(module: &Module) -> Vec<ExportSignature> {
    let function = |export: wasmtime::ExportType<'_>| match export.ty() {
        ExternType::Func(ty) => Some((export.name().to_owned(), ty)),
        _ => None,
    };
    let mut listing = Listing::default();
    listing.exports(module.exports().filter_map(function), |listing, (name, ty)| ExportSignature {
        name: listing.text(&name),
        params: listing.list(ty.params().enumerate(), left_out_param(), |listing, (at, ty)| {
            (listing.text(&format_args!("p{at}")), listing.text(&ty))
        }),
        results: listing.list(ty.results(), LEFT_OUT.to_owned(), |listing, ty| listing.text(&ty)),
    })
}

fn component_exports(component: &Component) -> Vec<ExportSignature> {
    let found = super::component::exports(component).into_iter();
    let mut listing = Listing::default();
    listing.exports(found, |listing, export| ExportSignature {
        name: listing.text(&export.name),
        params: listing.list(export.ty.params(), left_out_param(), |listing, (name, ty)| {
            (listing.text(&name), listing.text(&Shown(&ty)))
        }),
        results: listing.list(export.ty.results(), LEFT_OUT.to_owned(), |listing, ty| listing.text(&Shown(&ty))),
    })
}

fn left_out_param() -> (String, String) {
    (LEFT_OUT.to_owned(), LEFT_OUT.to_owned())
}

/// The room that is left in a listing.
struct Listing {
    room_bytes: usize,
}

impl Default for Listing {
    fn default() -> Listing {
        Listing { room_bytes: LISTING_BYTES_MAX }
    }
}

impl Listing {
    fn exports<T>(
        &mut self,
        all: impl Iterator<Item = T>,
        signature: impl FnMut(&mut Listing, T) -> ExportSignature,
    ) -> Vec<ExportSignature> {
        let mut all = all;
        let rest = ExportSignature { name: LEFT_OUT.to_owned(), params: Vec::new(), results: Vec::new() };
        let mut listed = self.list(all.by_ref().take(EXPORTS_LISTED_MAX), rest.clone(), signature);
        if listed.len() == EXPORTS_LISTED_MAX && all.next().is_some() {
            listed.push(rest);
        }
        listed
    }

    /// The items there is room for, and `rest` for those there is none for.
    fn list<T, U>(
        &mut self,
        items: impl Iterator<Item = T>,
        rest: U,
        mut show: impl FnMut(&mut Listing, T) -> U,
    ) -> Vec<U> {
        let mut shown = Vec::new();
        for item in items {
            if self.room_bytes == 0 {
                shown.push(rest);
                break;
            }
            shown.push(show(self, item));
        }
        shown
    }

    fn text(&mut self, shown: &dyn fmt::Display) -> String {
        let mut bounded = Bounded { text: String::new(), bytes_max: TEXT_BYTES_MAX.min(self.room_bytes) };
        if write!(bounded, "{shown}").is_err() {
            bounded.text.push_str(LEFT_OUT);
        }
        self.room_bytes = self.room_bytes.saturating_sub(bounded.text.len() + PIECE_BYTES);
        bounded.text
    }
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
            imports.find(|name| name.starts_with(super::gpu::component::PACKAGE))
        }
    }
}

/// Writes until there is no more room, then fails, which ends a type's expansion early.
struct Bounded {
    text: String,
    bytes_max: usize,
}

impl Write for Bounded {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let room = self.bytes_max - self.text.len();
        if more.len() <= room {
            self.text.push_str(more);
            return Ok(());
        }
        self.text.push_str(&more[..more.floor_char_boundary(room)]);
        Err(fmt::Error)
    }
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
        let listed = core_exports(&module);
        assert_eq!((listed.len(), listed[EXPORTS_LISTED_MAX].name.as_str()), (EXPORTS_LISTED_MAX + 1, LEFT_OUT));
    }

    fn text_bytes(listed: &[ExportSignature]) -> usize {
        let of = |export: &ExportSignature| {
            let params: usize = export.params.iter().map(|(name, ty)| name.len() + ty.len()).sum();
            export.name.len() + params + export.results.iter().map(String::len).sum::<usize>()
        };
        listed.iter().map(of).sum()
    }

    #[test]
    fn a_wide_type_exported_many_times_fits_the_listing() {
        // A larger product of the two is refused by Wasmtime's validation.
        let (params, exports) = ("i32 ".repeat(1000), 450);
        let export = |n: usize| format!(r#"(export "f{n}" (func 0))"#);
        let text = format!(
            "(module (func (param {params}) (result {params}) unreachable) {})",
            (0..exports).map(export).collect::<String>()
        );
        let module = Module::new(&wasmtime::Engine::default(), wat::parse_str(text).unwrap()).unwrap();
        let listed = core_exports(&module);
        assert!(text_bytes(&listed) < LISTING_BYTES_MAX, "{}", text_bytes(&listed));
        assert_eq!((listed[0].params.len(), listed[0].results.len()), (1000, 1000));
        assert_eq!(listed.last().unwrap().name, LEFT_OUT);
        let cut = &listed[listed.len() - 2];
        assert!(cut.params.last() == Some(&left_out_param()) || cut.results.last().unwrap() == LEFT_OUT, "{cut:?}");

        // A component's functions have 16 parameters at most when lifted flat; its types are as long as they like.
        let case = |n: usize| format!(r#""case-with-a-long-name-{n}" "#);
        let cases: String = (0..200).map(case).collect();
        let export = |n: usize| {
            format!(r#"(func (export "f{n}") (param "a" $long) (param "b" $long) (canon lift (core func $i "f")))"#)
        };
        let wit = component(&format!(
            r#"(component
                (core module $m (func (export "f") (param i32 i32) unreachable))
                (core instance $i (instantiate $m))
                (type $long' (enum {cases}))
                (export $long "long" (type $long'))
                {})"#,
            (0..900).map(export).collect::<String>()
        ));
        let listed = component_exports(&wit);
        assert!(text_bytes(&listed) < LISTING_BYTES_MAX, "{}", text_bytes(&listed));
        assert_eq!(listed.last().unwrap().name, LEFT_OUT);
    }
}
