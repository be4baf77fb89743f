//! A BLAS that is on the machine, if somebody asks for one: `TENSOR_WASM_BLAS` is `none` (as if it were not set),
//! `auto` (OpenBLAS, MKL or BLIS, wherever the loader finds them), or the path of one. It multiplies large matrices
//! where it was measured to be faster here. Not without being asked: its results may depend on the number of threads.
#![expect(unsafe_code, reason = "foreign functions")]

use std::ffi::c_int;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use libloading::Library;

use super::gemm::{self, Matrix, Multiply, Product};

/// What the loader may know one by.
const NAMES: [&str; 7] = [
    "libmkl_rt.so.2",
    "libmkl_rt.so",
    "libopenblas.so.0",
    "libopenblas.so",
    "libblis.so.4",
    "libblis.so",
    "libcblas.so.3",
];

/// Prefix and suffix of its names, and whether its integers are 64 bits wide. The last are what NumPy brings along.
const SPELLINGS: [(&str, &str, bool); 3] = [("", "", false), ("", "64_", true), ("scipy_", "64_", true)];

/// Smaller products are over before a library has begun.
const WORK_MIN: usize = 128 * 128 * 128;

/// It has to be this much faster to be worth that results depend on it.
const FASTER_MIN: f64 = 1.05;

/// Side of the matrices that both are measured with.
const TRIED: usize = 512;

/// `cblas_sgemm` and `cblas_dgemm`, with integers of one size or the other.
type Gemm<T, I> = unsafe extern "C" fn(c_int, c_int, c_int, I, I, I, T, *const T, I, *const T, I, T, *mut T, I);

#[derive(Clone, Copy)]
pub(super) enum Foreign<T> {
    Narrow(Gemm<T, i32>),
    Wide(Gemm<T, i64>),
}

const ROW_MAJOR: c_int = 101;
const AS_IT_IS: c_int = 111;
const TRANSPOSED: c_int = 112;

/// What was found, and what there is to say about it.
pub(super) struct Blas {
    single: Option<Foreign<f32>>,
    double: Option<Foreign<f64>>,
    note: String,
}

static FOUND: LazyLock<Blas> = LazyLock::new(|| Blas::find(std::env::var("TENSOR_WASM_BLAS").ok().as_deref()));

/// What [`super::product_by`] says of one of the two.
pub(super) fn note(is_double: bool) -> String {
    let is_used = if is_double { FOUND.double.is_some() } else { FOUND.single.is_some() };
    match (is_used, FOUND.note.as_str()) {
        (true, note) => note.to_owned(),
        (false, "") => "own kernels".to_owned(),
        (false, note) => format!("own kernels; {note}"),
    }
}

pub(super) trait HasBlas: Multiply {
    fn foreign() -> Option<Foreign<Self>>;
}

impl HasBlas for f32 {
    fn foreign() -> Option<Foreign<f32>> {
        FOUND.single
    }
}

impl HasBlas for f64 {
    fn foreign() -> Option<Foreign<f64>> {
        FOUND.double
    }
}

/// Multiplies with it, if that is to be done; false if not.
pub(super) fn multiply<T: HasBlas + From<u8>>(product: &Product<T>) -> bool {
    let is_large = product.m.saturating_mul(product.n).saturating_mul(product.k) >= WORK_MIN;
    match T::foreign() {
        Some(foreign) if is_large => call(foreign, product),
        _ => false,
    }
}

/// Whether a matrix lies in rows or columns, and how far apart; none if in neither.
fn lying<T>(matrix: &Matrix<T>, rows: usize, columns: usize) -> Option<(c_int, usize)> {
    let apart = |stride: isize, least: usize| usize::try_from(stride).ok().filter(|stride| *stride >= least.max(1));
    if matrix.column == 1 {
        return apart(matrix.row, columns).map(|stride| (AS_IT_IS, stride));
    }
    if matrix.row == 1 { apart(matrix.column, rows).map(|stride| (TRANSPOSED, stride)) } else { None }
}

fn call<T: Copy + From<u8>>(foreign: Foreign<T>, product: &Product<T>) -> bool {
    let Product { m, n, k, left, right, to } = *product;
    let (Some((left_as, left_stride)), Some((right_as, right_stride))) = (lying(&left, m, k), lying(&right, k, n))
    else {
        return false;
    };
    let (one, zero) = (T::from(1), T::from(0));
    let numbers = [m, n, k, left_stride, right_stride, n];
    match foreign {
        Foreign::Narrow(gemm) => {
            let Some([m, n, k, lda, ldb, ldc]) = narrowed::<i32>(numbers) else { return false };
            // SAFETY: the matrices have these sizes and strides, and the result is ours to write.
            unsafe {
                gemm(ROW_MAJOR, left_as, right_as, m, n, k, one, left.start, lda, right.start, ldb, zero, to, ldc)
            };
        }
        Foreign::Wide(gemm) => {
            let Some([m, n, k, lda, ldb, ldc]) = narrowed::<i64>(numbers) else { return false };
            // SAFETY: as above.
            unsafe {
                gemm(ROW_MAJOR, left_as, right_as, m, n, k, one, left.start, lda, right.start, ldb, zero, to, ldc)
            };
        }
    }
    true
}

fn narrowed<I: TryFrom<usize> + Copy + Default>(numbers: [usize; 6]) -> Option<[I; 6]> {
    let mut narrow = [I::default(); 6];
    for (to, from) in narrow.iter_mut().zip(numbers) {
        *to = I::try_from(from).ok()?;
    }
    Some(narrow)
}

impl Blas {
    fn none(note: String) -> Blas {
        Blas { single: None, double: None, note }
    }

    fn find(asked: Option<&str>) -> Blas {
        let names: Vec<&str> = match asked {
            None | Some("" | "none") => return Blas::none(String::new()),
            Some("auto") => NAMES.to_vec(),
            Some(path) => vec![path],
        };
        let mut why = "TENSOR_WASM_BLAS: no BLAS is on this machine".to_owned();
        for name in names {
            // SAFETY: whoever names a library has it run its code.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    // Its functions are used as long as the process lives.
                    let library: &'static Library = Box::leak(Box::new(library));
                    return Blas::of(library, name);
                }
                Err(error) if asked != Some("auto") => {
                    let cause =
                        std::error::Error::source(&error).map_or_else(String::new, |cause| format!(": {cause}"));
                    why = format!("TENSOR_WASM_BLAS: {name}: {error}{cause}");
                }
                Err(_) => {}
            }
        }
        Blas::none(why)
    }

    fn of(library: &'static Library, name: &str) -> Blas {
        let (single, double) = (symbol::<f32>(library, "sgemm"), symbol::<f64>(library, "dgemm"));
        if single.is_none() && double.is_none() {
            return Blas::none(format!("TENSOR_WASM_BLAS: {name} has no cblas_sgemm"));
        }
        let (faster_single, faster_double) = (single.map(faster), double.map(faster));
        let note = format!(
            "{name}, {:.2} times as fast as own kernels in single and {:.2} in double precision",
            faster_single.unwrap_or(0.0),
            faster_double.unwrap_or(0.0)
        );
        let is_worth = |faster: Option<f64>| faster.is_some_and(|faster| faster >= FASTER_MIN);
        Blas {
            single: single.filter(|_| is_worth(faster_single)),
            double: double.filter(|_| is_worth(faster_double)),
            note,
        }
    }
}

fn symbol<T: 'static>(library: &'static Library, name: &str) -> Option<Foreign<T>> {
    for (prefix, suffix, is_wide) in SPELLINGS {
        let name = format!("{prefix}cblas_{name}{suffix}\0");
        // SAFETY: functions of these names have these parameters in every BLAS there is.
        let found = unsafe {
            if is_wide {
                library.get::<Gemm<T, i64>>(name.as_bytes()).ok().map(|f| Foreign::Wide(*f))
            } else {
                library.get::<Gemm<T, i32>>(name.as_bytes()).ok().map(|f| Foreign::Narrow(*f))
            }
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

/// How many times as fast as our own kernels it is, by the best of some runs in turns.
fn faster<T: Multiply + From<u8>>(foreign: Foreign<T>) -> f64 {
    let [left, right] = [vec![T::from(1); TRIED * TRIED], vec![T::from(2); TRIED * TRIED]];
    let mut to = vec![T::from(0); TRIED * TRIED];
    let matrix = |of: &[T]| Matrix { start: of.as_ptr(), row: TRIED.cast_signed(), column: 1 };
    let (m, n, k) = (TRIED, TRIED, TRIED);
    let product = Product { m, n, k, left: matrix(&left), right: matrix(&right), to: to.as_mut_ptr() };
    let timed = |run: &dyn Fn()| {
        let begun = Instant::now();
        run();
        begun.elapsed()
    };
    let (mut theirs, mut ours) = (Duration::MAX, Duration::MAX);
    for _ in 0..5 {
        theirs = theirs.min(timed(&|| {
            call(foreign, &product);
        }));
        ours = ours.min(timed(&|| drop(gemm::multiply(&product, None))));
    }
    ours.as_secs_f64() / theirs.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_used_says_why_and_nothing_is_used_unasked() {
        assert!(Blas::find(None).note.is_empty() && Blas::find(Some("none")).single.is_none());
        let missing = Blas::find(Some("/nowhere/libblas.so"));
        assert!(missing.single.is_none() && missing.note.contains("/nowhere/libblas.so"), "{}", missing.note);
        // Something that is a library, and not one of these.
        let other = Blas::find(Some("libm.so.6"));
        assert!(other.single.is_none() && other.note.contains("no cblas_sgemm"), "{}", other.note);
        let auto = Blas::find(Some("auto"));
        assert!(!auto.note.is_empty());
    }

    /// As a library would see it: what it is told must be the product, whichever way the matrices lie.
    #[test]
    fn a_library_is_told_what_to_multiply() {
        unsafe extern "C" fn gemm(
            order: c_int,
            a_as: c_int,
            b_as: c_int,
            m: i64,
            n: i64,
            k: i64,
            alpha: f64,
            a: *const f64,
            lda: i64,
            b: *const f64,
            ldb: i64,
            beta: f64,
            c: *mut f64,
            ldc: i64,
        ) {
            assert_eq!((order, alpha, beta), (ROW_MAJOR, 1.0, 0.0));
            let at = |of: *const f64, how: c_int, ld: i64, row: i64, column: i64| {
                let offset = if how == AS_IT_IS { row * ld + column } else { column * ld + row };
                // SAFETY: the test has as many elements.
                unsafe { *of.offset(isize::try_from(offset).unwrap()) }
            };
            for row in 0..m {
                for column in 0..n {
                    let sum = (0..k).map(|s| at(a, a_as, lda, row, s) * at(b, b_as, ldb, s, column)).sum();
                    // SAFETY: as above.
                    unsafe { *c.offset(isize::try_from(row * ldc + column).unwrap()) = sum };
                }
            }
        }
        let (m, n, k) = (5, 4, 3);
        let (a, b): (Vec<f64>, Vec<f64>) =
            ((0..64).map(f64::from).collect(), (0..64).map(|n| f64::from(n) * 0.5).collect());
        let in_rows = |of: &[f64], stride| Matrix { start: of.as_ptr(), row: stride, column: 1 };
        let in_columns = |of: &[f64], stride| Matrix { start: of.as_ptr(), row: 1, column: stride };
        for (left, right) in [
            (in_rows(&a, 3), in_rows(&b, 4)),
            (in_columns(&a, 5), in_rows(&b, 7)),
            (in_rows(&a, 6), in_columns(&b, 3)),
            (in_columns(&a, 8), in_columns(&b, 9)),
        ] {
            let (mut theirs, mut ours) = (vec![f64::NAN; m * n], vec![f64::NAN; m * n]);
            let of = |to: &mut Vec<f64>| Product { m, n, k, left, right, to: to.as_mut_ptr() };
            assert!(call(Foreign::Wide(gemm), &of(&mut theirs)));
            gemm::multiply(&of(&mut ours), None).unwrap();
            assert_eq!(theirs, ours);
        }
        // In neither rows nor columns, or backwards: not for a library.
        let mut to = vec![0.0; m * n];
        for left in [Matrix { start: a.as_ptr(), row: 6, column: 2 }, in_rows(&a, -3), in_rows(&a, 0)] {
            assert!(!call(Foreign::Wide(gemm), &Product { m, n, k, left, right: in_rows(&b, 4), to: to.as_mut_ptr() }));
        }
    }
}
