//! Matrix products by cuBLASLt, which is opened when the first of them is loaded: `TENSOR_WASM_CUBLASLT` is `none`, or
//! the path of one; without it, the loader is asked. Which of its algorithms is used is decided when a product is
//! loaded, on the lane of whoever loads it: finding the library takes half a second.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys as cu;
use parking_lot::Mutex;

use crate::choice::CUBLASLT_NAMES;
use crate::error::DeviceError;
use crate::product::{Product, ProductElement, ProductEpilogue, ProductOperand};
use crate::worker::exit;

type Status = c_int;
type Opaque = *mut c_void;

const SUCCESS: Status = 0;

// Types of elements and of sums, attributes and their values: the numbers of its headers, the same since CUDA 11.
const R_32F: c_int = 0;
const R_64F: c_int = 1;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const COMPUTE_64F: c_int = 70;
const COMPUTE_32F_FAST_TF32: c_int = 77;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const LAYOUT_BATCH_COUNT: c_int = 5;
const LAYOUT_STRIDED_BATCH_OFFSET: c_int = 6;
const PREFERENCE_MAX_WORKSPACE_BYTES: c_int = 1;
const PREFERENCE_REDUCTION_SCHEMES: c_int = 3;
const PREFERENCE_MIN_ALIGNMENT_A: c_int = 5;
const PREFERENCE_MIN_ALIGNMENT_B: c_int = 6;
const PREFERENCE_MIN_ALIGNMENT_C: c_int = 7;
/// Partial sums of a product that is split along its depth stay in the precision of sums. In that of the result, as the
/// other schemes have them, a product of 1001×1003 in `bf16` had ten times the error.
const REDUCED_IN_COMPUTE_TYPE: u32 = 2;
const EPILOGUE_DEFAULT: c_int = 1;
const EPILOGUE_RELU: c_int = 2;
const EPILOGUE_BIAS: c_int = 4;
const EPILOGUE_GELU: c_int = 32;
/// What results begin at multiples of.
const RESULT_ALIGNMENT: u32 = 256;
const AS_IT_IS: c_int = 0;
const TRANSPOSED: c_int = 1;

/// An algorithm that the library chose, and what it needs.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// The library's functions, by their names.
macro_rules! functions {
    ($($field:ident $name:literal ($($type:ty),*);)+) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($type),*) -> Status,)+
            /// What the functions are of; never unloaded while there is one of them.
            #[expect(dead_code, reason = "held, not read")]
            library: libloading::Library,
        }

        impl Functions {
            /// # Safety
            ///
            /// The library is cuBLASLt, whose functions have these types.
            unsafe fn of(library: libloading::Library) -> Result<Functions, libloading::Error> {
                // SAFETY: by this function's contract.
                unsafe {
                    Ok(Functions { $($field: *library.get(concat!($name, "\0").as_bytes())?,)+ library })
                }
            }
        }
    };
}

functions! {
    create "cublasLtCreate" (*mut Opaque);
    desc_create "cublasLtMatmulDescCreate" (*mut Opaque, c_int, c_int);
    desc_destroy "cublasLtMatmulDescDestroy" (Opaque);
    desc_set "cublasLtMatmulDescSetAttribute" (Opaque, c_int, *const c_void, usize);
    layout_create "cublasLtMatrixLayoutCreate" (*mut Opaque, c_int, u64, u64, i64);
    layout_destroy "cublasLtMatrixLayoutDestroy" (Opaque);
    layout_set "cublasLtMatrixLayoutSetAttribute" (Opaque, c_int, *const c_void, usize);
    preference_create "cublasLtMatmulPreferenceCreate" (*mut Opaque);
    preference_destroy "cublasLtMatmulPreferenceDestroy" (Opaque);
    preference_set "cublasLtMatmulPreferenceSetAttribute" (Opaque, c_int, *const c_void, usize);
    choose "cublasLtMatmulAlgoGetHeuristic"
        (Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Heuristic, *mut c_int);
    multiply "cublasLtMatmul" (
        Opaque, Opaque, *const c_void, *const c_void, Opaque, *const c_void, Opaque, *const c_void, *const c_void,
        Opaque, *mut c_void, Opaque, *const [u64; 8], *mut c_void, usize, cu::CUstream
    );
}

/// The library, opened in the worker's context. It stays for as long as the process: closing it takes long, and what it
/// has on the device is some megabytes.
struct CublasLt {
    functions: Functions,
    handle: Opaque,
}

// SAFETY: the library's handle may be used by several threads at once.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// Products of one device: the library once it is needed, or why there is none.
#[derive(Default)]
pub(super) struct Products(Mutex<Option<Result<Arc<CublasLt>, String>>>);

impl Products {
    /// Makes a product ready to be launched, in the current context.
    pub(super) fn prepare(&self, product: &Product) -> Result<PreparedProduct, DeviceError> {
        let library = self.0.lock().get_or_insert_with(|| CublasLt::open().map(Arc::new)).clone();
        let library =
            library.map_err(|why| DeviceError::Unsupported { what: format!("a product by cuBLASLt ({why})") })?;
        PreparedProduct::new(library, product)
    }
}

impl CublasLt {
    fn open() -> Result<CublasLt, String> {
        let asked = std::env::var("TENSOR_WASM_CUBLASLT").ok().filter(|name| !name.is_empty());
        let names: Vec<&str> = match asked.as_deref() {
            Some("none") => return Err("TENSOR_WASM_CUBLASLT is none".to_owned()),
            Some(path) => vec![path],
            None => CUBLASLT_NAMES.to_vec(),
        };
        let mut why = String::new();
        for name in names {
            // SAFETY: opening the library runs its initialisers, which need nothing but the driver.
            let library = match unsafe { libloading::Library::new(name) } {
                Ok(library) => library,
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    why = cause.unwrap_or_else(|| error.to_string());
                    continue;
                }
            };
            // SAFETY: a library of this name is cuBLASLt, or somebody vouched for it in the environment.
            let functions = unsafe { Functions::of(library) }.map_err(|error| format!("{name}: {error}"))?;
            let mut handle = null_mut();
            // SAFETY: writes a handle to a variable of ours; a context is current.
            let status = unsafe { (functions.create)(&mut handle) };
            exit::loaded_a_library();
            return match status {
                SUCCESS => Ok(CublasLt { functions, handle }),
                status => Err(format!("{name}: it cannot be used: status {status}")),
            };
        }
        Err(why)
    }
}

/// Something of the library's that is destroyed when it is not needed any more.
struct Owned {
    what: Opaque,
    destroy: unsafe extern "C" fn(Opaque) -> Status,
}

impl Owned {
    fn new(
        create: impl FnOnce(*mut Opaque) -> Status,
        destroy: unsafe extern "C" fn(Opaque) -> Status,
    ) -> Result<Owned, DeviceError> {
        let mut what = null_mut();
        done(create(&mut what))?;
        Ok(Owned { what, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the library, and ours alone.
        let _ = unsafe { (self.destroy)(self.what) };
    }
}

fn done(status: Status) -> Result<(), DeviceError> {
    match status {
        SUCCESS => Ok(()),
        // What went wrong on the device, and whatever it does not know, is not told apart from here.
        13 | 14 => Err(DeviceError::DeviceLost { why: format!("cuBLASLt failed: status {status}") }),
        other => Err(DeviceError::Unsupported { what: format!("this product by cuBLASLt (status {other})") }),
    }
}

/// A product with everything the library has to be told.
pub(super) struct PreparedProduct {
    library: Arc<CublasLt>,
    description: Owned,
    left: Owned,
    right: Owned,
    to: Owned,
    algorithm: [u64; 8],
    workspace_bytes: usize,
    is_double: bool,
    has_bias: bool,
    has_residual: bool,
    /// The bias's address is part of the description.
    launching: Mutex<()>,
}

// SAFETY: the library's descriptions may be used by any thread; who changes one holds `launching`.
unsafe impl Send for PreparedProduct {}
// SAFETY: as above.
unsafe impl Sync for PreparedProduct {}

impl PreparedProduct {
    /// The library counts along columns: what it is told is that the result's transpose is the product of the
    /// transposes, in the other order.
    fn new(library: Arc<CublasLt>, product: &Product) -> Result<PreparedProduct, DeviceError> {
        let f = &library.functions;
        let (element, compute, scale) = match product.element {
            ProductElement::F16 => (R_16F, COMPUTE_32F, R_32F),
            ProductElement::BF16 => (R_16BF, COMPUTE_32F, R_32F),
            ProductElement::F32 => (R_32F, COMPUTE_32F, R_32F),
            ProductElement::Tf32 => (R_32F, COMPUTE_32F_FAST_TF32, R_32F),
            ProductElement::F64 => (R_64F, COMPUTE_64F, R_64F),
        };
        let Product { rows, columns, depth, batches, left, right, has_bias, has_residual, .. } = *product;
        // SAFETY: each call writes a handle to a variable of `Owned::new`'s.
        let description = Owned::new(|to| unsafe { (f.desc_create)(to, compute, scale) }, f.desc_destroy)?;
        let set = |attribute: c_int, value: c_int| {
            // SAFETY: an attribute of four bytes.
            done(unsafe { (f.desc_set)(description.what, attribute, (&raw const value).cast(), size_of::<c_int>()) })
        };
        let transposed = |operand: &ProductOperand| if operand.is_by_columns { TRANSPOSED } else { AS_IT_IS };
        set(DESC_TRANSA, transposed(&right))?;
        set(DESC_TRANSB, transposed(&left))?;
        let activation = match product.epilogue {
            ProductEpilogue::None => 0,
            ProductEpilogue::Relu => EPILOGUE_RELU,
            ProductEpilogue::Gelu => EPILOGUE_GELU,
        };
        let epilogue = activation | if has_bias { EPILOGUE_BIAS } else { 0 };
        set(DESC_EPILOGUE, if epilogue == 0 { EPILOGUE_DEFAULT } else { epilogue })?;
        let layout = |rows: u64, columns: u64, operand: &ProductOperand| {
            // As columns of its transpose are rows of ours.
            let (first, second) = if operand.is_by_columns { (rows, columns) } else { (columns, rows) };
            let stride = operand.stride.cast_signed();
            // SAFETY: as above.
            let made =
                Owned::new(|to| unsafe { (f.layout_create)(to, element, first, second, stride) }, f.layout_destroy)?;
            let count = c_int::try_from(batches).unwrap_or(c_int::MAX);
            let apart = operand.batch_stride.cast_signed();
            // SAFETY: attributes of four and eight bytes.
            unsafe {
                done((f.layout_set)(made.what, LAYOUT_BATCH_COUNT, (&raw const count).cast(), size_of::<c_int>()))?;
                let size = size_of::<i64>();
                done((f.layout_set)(made.what, LAYOUT_STRIDED_BATCH_OFFSET, (&raw const apart).cast(), size))?;
            }
            Ok::<Owned, DeviceError>(made)
        };
        let result = ProductOperand {
            is_by_columns: false,
            stride: columns,
            batch_stride: rows * columns,
            alignment: RESULT_ALIGNMENT.into(),
        };
        let (left_layout, right_layout) = (layout(rows, depth, &left)?, layout(depth, columns, &right)?);
        let to = layout(rows, columns, &result)?;
        // SAFETY: as above.
        let preference = Owned::new(|to| unsafe { (f.preference_create)(to) }, f.preference_destroy)?;
        let alignment = |operand: &ProductOperand| u32::try_from(operand.alignment.min(256)).unwrap_or(256);
        let (align_a, align_b, workspace) = (alignment(&right), alignment(&left), product.workspace_bytes);
        let align_c = if has_residual { Product::ADDED_ALIGNMENT } else { RESULT_ALIGNMENT };
        let mut heuristic = Heuristic { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut count = 0;
        // SAFETY: attributes of eight and four bytes; there is room for the one algorithm that is asked for.
        unsafe {
            let at = preference.what;
            done((f.preference_set)(at, PREFERENCE_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), 8))?;
            let schemes = REDUCED_IN_COMPUTE_TYPE;
            done((f.preference_set)(at, PREFERENCE_REDUCTION_SCHEMES, (&raw const schemes).cast(), 4))?;
            done((f.preference_set)(at, PREFERENCE_MIN_ALIGNMENT_A, (&raw const align_a).cast(), 4))?;
            done((f.preference_set)(at, PREFERENCE_MIN_ALIGNMENT_B, (&raw const align_b).cast(), 4))?;
            done((f.preference_set)(at, PREFERENCE_MIN_ALIGNMENT_C, (&raw const align_c).cast(), 4))?;
            done((f.choose)(
                library.handle,
                description.what,
                right_layout.what,
                left_layout.what,
                to.what,
                to.what,
                at,
                1,
                &mut heuristic,
                &mut count,
            ))?;
        }
        if count < 1 || heuristic.state != SUCCESS {
            return Err(DeviceError::Unsupported { what: "this product by cuBLASLt (it has no algorithm)".to_owned() });
        }
        let (algorithm, is_double) = (heuristic.algorithm, product.element == ProductElement::F64);
        let workspace_bytes = heuristic.workspace_bytes.min(usize::try_from(workspace).unwrap_or(usize::MAX));
        let (left, right, launching) = (left_layout, right_layout, Mutex::default());
        Ok(PreparedProduct {
            description,
            left,
            right,
            to,
            algorithm,
            workspace_bytes,
            is_double,
            has_bias,
            has_residual,
            launching,
            library,
        })
    }

    /// Puts it on a stream. The parameters are the addresses that [`Product`] names.
    pub(super) fn launch(&self, stream: cu::CUstream, params: &[u8]) -> Result<(), DeviceError> {
        let mut addresses = params.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let mut next = || addresses.next().unwrap_or(0);
        let [left, right, to, bias, residual, workspace] = [next(), next(), next(), next(), next(), next()];
        let pointer = |address: u64| address as *mut c_void;
        let (ones, zeros) = ((1.0_f64, 1.0_f32), (0.0_f64, 0.0_f32));
        let number = |(double, single): &(f64, f32)| -> *const c_void {
            if self.is_double { (&raw const *double).cast() } else { (&raw const *single).cast() }
        };
        // What is added has the result's layout. Without it nothing is read, so that it may be the result itself.
        let (added, factor) = if self.has_residual { (residual, &ones) } else { (to, &zeros) };
        let f = &self.library.functions;
        let _launching = self.launching.lock();
        if self.has_bias {
            // SAFETY: an attribute of eight bytes.
            done(unsafe { (f.desc_set)(self.description.what, DESC_BIAS_POINTER, (&raw const bias).cast(), 8) })?;
        }
        // SAFETY: descriptions of ours, and memory that whoever launches vouches for, on a stream of ours. The library
        // reads the two numbers before it returns.
        done(unsafe {
            (f.multiply)(
                self.library.handle,
                self.description.what,
                number(&ones),
                pointer(right),
                self.right.what,
                pointer(left),
                self.left.what,
                number(factor),
                pointer(added),
                self.to.what,
                pointer(to),
                self.to.what,
                &self.algorithm,
                pointer(workspace),
                self.workspace_bytes,
                stream,
            )
        })
    }
}
