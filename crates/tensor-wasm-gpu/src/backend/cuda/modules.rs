//! Kernel modules of a CUDA device: PTX through the driver's compiler, cubins as they are, or products by a library
//! (`products.rs`).

use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUresult;
use object::LittleEndian;
use object::elf::{FileHeader64, PN_XNUM, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use parking_lot::Mutex;

use super::driver::{Context, attribute, check};
use super::products::{PreparedProduct, Products};
use crate::backend::modules::{FoundKernel, ModuleLoader};
use crate::backend::residents::Residents;
use crate::error::DeviceError;
use crate::product::Product;
use crate::slab::PAYLOAD_BYTES_MAX;

/// Room for the complaints of the driver's PTX compiler.
const COMPILER_LOG_BYTES: usize = 4096;

pub(super) struct CudaLoader {
    device: cu::CUdevice,
    context: Arc<Context>,
    residents: Arc<Residents>,
    products: Products,
    /// Held while the stacks of threads grow.
    growing: Mutex<()>,
}

#[derive(Clone)]
pub(super) enum CudaModule {
    Library(Library),
    Product(Arc<PreparedProduct>),
}

#[derive(Clone, Copy)]
pub(super) struct Library(cu::CUlibrary);

#[derive(Clone)]
pub(super) enum CudaKernel {
    Compiled(CompiledKernel),
    Product(Arc<PreparedProduct>),
}

/// A kernel, and its function in the worker's own context.
#[derive(Clone, Copy)]
pub(super) struct CompiledKernel {
    pub kernel: cu::CUkernel,
    pub function: cu::CUfunction,
}

// SAFETY: the driver's handles of libraries, kernels and functions may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Send for CompiledKernel {}

impl CudaLoader {
    pub(super) fn new(device: cu::CUdevice, context: Arc<Context>, residents: Arc<Residents>) -> CudaLoader {
        CudaLoader { device, context, residents, products: Products::default(), growing: Mutex::new(()) }
    }

    fn shared_bytes_max(&self) -> u32 {
        attribute(self.device, cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// Has the driver set aside so much local memory for every thread that the device can run at once. It would when
    /// such a kernel is first launched, and wait for everything on the device then.
    fn make_room(&self, local_bytes: u64) -> Result<(), DeviceError> {
        const STACK: cu::CUlimit = cu::CUlimit::CU_LIMIT_STACK_SIZE;
        let bytes = usize::try_from(local_bytes).unwrap_or(usize::MAX);
        let mut room = 0;
        let _growing = self.growing.lock();
        // SAFETY: writes one integer to a variable of ours.
        check(unsafe { cu::cuCtxGetLimit(&mut room, STACK) })?;
        if bytes <= room {
            return Ok(());
        }
        let _pause = self.residents.pause()?;
        // SAFETY: a limit of the current context.
        check(unsafe { cu::cuCtxSetLimit(STACK, bytes) }).map_err(|error| match error {
            lost @ DeviceError::DeviceLost { .. } => lost,
            other => {
                let why = format!("the device has no room for {bytes} bytes of local memory per thread: {other}");
                DeviceError::BadModule { why }
            }
        })
    }
}

/// Loads everything in a library now: the driver would otherwise wait for a kernel's first launch, and for everything
/// on the device then, and complain then.
fn load_whole(library: cu::CUlibrary) -> Result<(), DeviceError> {
    let (mut module, mut count) = (null_mut(), 0);
    // SAFETY: a library of ours, and variables of ours to write to.
    unsafe {
        check(cu::cuLibraryGetModule(&mut module, library))?;
        check(cu::cuLibraryGetKernelCount(&mut count, library))?;
    }
    if count == 0 {
        return Ok(());
    }
    let mut kernels = vec![null_mut(); count as usize];
    // SAFETY: as many as there is room for.
    check(unsafe { cu::cuLibraryEnumerateKernels(kernels.as_mut_ptr(), count, library) })?;
    kernels.into_iter().try_for_each(|kernel| {
        let mut function = null_mut();
        // SAFETY: a kernel of the library, and its function in the current context.
        unsafe {
            check(cu::cuKernelGetFunction(&mut function, kernel))?;
            check(cu::cuFuncLoad(function))
        }
    })
}

impl ModuleLoader for CudaLoader {
    type Module = CudaModule;
    type Kernel = CudaKernel;

    /// PTX ends with a NUL.
    const IMAGE_PADDING_BYTES: usize = 1;

    fn enter(&self) -> Result<(), DeviceError> {
        self.context.enter()
    }

    fn load(&self, _lane: usize, mut image: Vec<u8>) -> Result<CudaModule, DeviceError> {
        if Product::is_image(&image) {
            let product = Product::from_image(&image[..image.len() - Self::IMAGE_PADDING_BYTES]);
            let product = product.ok_or_else(|| DeviceError::BadModule { why: "it is no product".to_owned() })?;
            // Opening the library, and its choice of an algorithm, wait for the device.
            let _pause = self.residents.pause()?;
            return self.products.prepare(&product).map(|product| CudaModule::Product(Arc::new(product)));
        }
        let compiled = if !image.starts_with(b"\x7fELF") {
            compile(&mut image)?
        } else if is_whole_elf(&image[..image.len() - Self::IMAGE_PADDING_BYTES]) {
            image
        } else {
            return Err(DeviceError::BadModule { why: "the cubin is cut off or damaged".to_owned() });
        };
        // Loading waits for everything on the device; compiling does not.
        let _pause = self.residents.pause()?;
        let mut library = null_mut();
        let (bytes, no) = (compiled.as_ptr().cast(), null_mut());
        // SAFETY: an image from the driver's own compiler, or one whose parts were checked to lie inside it, and no
        // options.
        let result =
            unsafe { check(cu::cuLibraryLoadData(&mut library, bytes, null_mut(), null_mut(), 0, null_mut(), no, 0)) };
        if let Err(error) = result.and_then(|()| load_whole(library)) {
            if !library.is_null() {
                // SAFETY: just loaded, and not used by anything.
                unsafe { cu::cuLibraryUnload(library) };
            }
            return Err(bad_module(error, ""));
        }
        Ok(CudaModule::Library(Library(library)))
    }

    fn unload(&self, modules: Vec<CudaModule>) -> Result<(), DeviceError> {
        let _pause = self.residents.pause()?;
        modules.into_iter().try_for_each(|module| match module {
            // SAFETY: libraries of ours that nobody can name any more.
            CudaModule::Library(library) => check(unsafe { cu::cuLibraryUnload(library.0) }),
            CudaModule::Product(_) => Ok(()),
        })
    }

    fn find(&self, module: &CudaModule, name: &[u8]) -> Result<FoundKernel<CudaKernel>, DeviceError> {
        use cu::CUfunction_attribute as Attribute;
        let missing = || DeviceError::NoSuchKernel { name: String::from_utf8_lossy(name).into_owned() };
        let module = match module {
            CudaModule::Library(library) => library,
            CudaModule::Product(product) if name == Product::ENTRY.as_bytes() => {
                return Ok(FoundKernel {
                    kernel: CudaKernel::Product(product.clone()),
                    params: Product::PARAMS.to_vec(),
                    threads_max: 1,
                    shared_bytes: 0,
                    registers: 0,
                    blocks_per_multiprocessor: 1,
                });
            }
            CudaModule::Product(_) => return Err(missing()),
        };
        let text = CString::new(name).map_err(|_| missing())?;
        let (mut kernel, mut function) = (null_mut(), null_mut());
        // SAFETY: a library of ours and a string that ends with a NUL.
        match unsafe { cu::cuLibraryGetKernel(&mut kernel, module.0, text.as_ptr()) } {
            CUresult::CUDA_ERROR_NOT_FOUND => return Err(missing()),
            result => check(result)?,
        }
        let attribute = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: writes one integer to a variable of ours.
            check(unsafe { cu::cuKernelGetAttribute(&mut value, attribute, kernel, self.device) })?;
            Ok::<u64, DeviceError>(u64::try_from(value).unwrap_or(0))
        };
        let threads_max = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        let shared_bytes = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let registers = attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        self.make_room(attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?)?;
        let dynamic = u64::from(self.shared_bytes_max()).saturating_sub(shared_bytes);
        // SAFETY: an attribute of a kernel of ours. More than the default 48 KiB has to be asked for.
        check(unsafe {
            cu::cuKernelSetAttribute(
                Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                c_int::try_from(dynamic).unwrap_or(c_int::MAX),
                kernel,
                self.device,
            )
        })?;
        let params = params(kernel)?;
        // SAFETY: the kernel's function in the worker's own context, which is quicker to launch than the kernel.
        check(unsafe { cu::cuKernelGetFunction(&mut function, kernel) })?;
        let mut blocks = 0;
        let block = c_int::try_from(threads_max).unwrap_or(c_int::MAX);
        // SAFETY: writes one integer to a variable of ours, about a function of ours.
        check(unsafe { cu::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, block, 0) })?;
        let blocks_per_multiprocessor = u64::try_from(blocks).unwrap_or(0);
        let kernel = CudaKernel::Compiled(CompiledKernel { kernel, function });
        Ok(FoundKernel { kernel, params, threads_max, shared_bytes, registers, blocks_per_multiprocessor })
    }
}

/// Offset and size of each parameter.
fn params(kernel: cu::CUkernel) -> Result<Vec<(u32, u32)>, DeviceError> {
    let mut params = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: writes two integers to variables of ours; an index beyond the last parameter is an error, not a
        // fault.
        match unsafe { cu::cuKernelGetParamInfo(kernel, params.len(), &mut offset, &mut size) } {
            CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(params),
            result => check(result)?,
        }
        if params.len() >= PAYLOAD_BYTES_MAX / 8 {
            // More than an answer has room for, which is found out there.
            return Ok(params);
        }
        let half = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        params.push((half(offset), half(size)));
    }
}

/// Whether everything an ELF file's header and tables point to lies inside it: the driver is not told its length.
fn is_whole_elf(image: &[u8]) -> bool {
    let check = || -> object::Result<bool> {
        let header = FileHeader64::<LittleEndian>::parse(image)?;
        let endian = header.endian()?;
        // Counts that stand elsewhere, and tables at offset 0, are read otherwise by one reader than by the next.
        let (segments, sections) = (header.e_phnum(endian), header.e_shnum(endian));
        let is_plain = |offset: u64, count: u16| if offset == 0 { count == 0 } else { count < PN_XNUM };
        if !is_plain(header.e_phoff(endian), segments) || !is_plain(header.e_shoff(endian), sections) || sections == 0 {
            return Ok(false);
        }
        let has_bytes = |segment: &ProgramHeader64<LittleEndian>| segment.data(endian, image).is_ok();
        let segments_are_inside = header.program_headers(endian, image)?.iter().all(has_bytes);
        let sections = header.section_headers(endian, image)?;
        Ok(segments_are_inside && sections.iter().all(|section| section.data(endian, image).is_ok()))
    };
    check().unwrap_or(false)
}

/// Compiles PTX, which ends with a NUL, for the current device. The compiler's first complaints are in the error.
fn compile(ptx: &mut [u8]) -> Result<Vec<u8>, DeviceError> {
    let mut log = vec![0_u8; COMPILER_LOG_BYTES];
    let mut options = [cu::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, cu::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
    let (mut linker, mut image, mut size) = (null_mut(), null_mut(), 0);
    // SAFETY: options and values are as many as said; the log, its size, the options and the PTX outlive the linker,
    // which is destroyed before this returns; what it made is copied before.
    let (result, compiled) = unsafe {
        let mut result = cu::cuLinkCreate_v2(2, options.as_mut_ptr(), values.as_mut_ptr(), &mut linker);
        if result != CUresult::CUDA_SUCCESS {
            return Err(bad_module(
                check(result).err().unwrap_or_else(|| DeviceError::Refused { why: format!("{result:?}") }),
                "",
            ));
        }
        result = cu::cuLinkAddData_v2(
            linker,
            cu::CUjitInputType::CU_JIT_INPUT_PTX,
            ptx.as_mut_ptr().cast(),
            ptx.len(),
            c"kernel".as_ptr(),
            0,
            null_mut(),
            null_mut(),
        );
        if result == CUresult::CUDA_SUCCESS {
            result = cu::cuLinkComplete(linker, &mut image, &mut size);
        }
        let compiled = match result {
            CUresult::CUDA_SUCCESS => std::slice::from_raw_parts(image.cast::<u8>(), size).to_vec(),
            _ => Vec::new(),
        };
        let _ = cu::cuLinkDestroy(linker);
        (result, compiled)
    };
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    check(result).map_err(|error| bad_module(error, String::from_utf8_lossy(&log[..end]).trim()))?;
    Ok(compiled)
}

/// An error while loading is the module's, unless the device is lost.
fn bad_module(error: DeviceError, log: &str) -> DeviceError {
    match error {
        DeviceError::DeviceLost { why } => DeviceError::DeviceLost { why },
        DeviceError::Refused { why } if log.is_empty() => DeviceError::BadModule { why },
        DeviceError::Refused { why } => DeviceError::BadModule { why: format!("{why}: {log}") },
        other => DeviceError::BadModule { why: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::is_whole_elf;

    #[test]
    fn a_cut_off_cubin_is_told_from_a_whole_one() {
        let mut elf = vec![0; 0x100];
        // Magic number, 64 bits, little endian, version 1.
        elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        elf[0x28..0x30].copy_from_slice(&0x40_u64.to_le_bytes());
        elf[0x3a..0x3c].copy_from_slice(&0x40_u16.to_le_bytes());
        elf[0x3c..0x3e].copy_from_slice(&2_u16.to_le_bytes());
        // Two sections: one of 0x40 bytes at 0xc0, one that has no bytes whatever it says.
        elf[0x58..0x60].copy_from_slice(&0xc0_u64.to_le_bytes());
        elf[0x60..0x68].copy_from_slice(&0x40_u64.to_le_bytes());
        elf[0x44..0x48].copy_from_slice(&1_u32.to_le_bytes());
        elf[0x84..0x88].copy_from_slice(&8_u32.to_le_bytes());
        elf[0xa0..0xa8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(is_whole_elf(&elf));
        assert!((0..0x100).all(|len| !is_whole_elf(&elf[..len])));
        let with = |at: usize, bytes: &[u8]| {
            let mut elf = elf.clone();
            elf[at..at + bytes.len()].copy_from_slice(bytes);
            elf
        };
        assert!(!is_whole_elf(&with(0x60, &0x41_u64.to_le_bytes())), "a section beyond the end");
        assert!(!is_whole_elf(&with(0x58, &u64::MAX.to_le_bytes())), "a section that wraps");
        assert!(!is_whole_elf(&with(0x3c, &4_u16.to_le_bytes())), "a table beyond the end");
        assert!(!is_whole_elf(&with(0x38, &9_u16.to_le_bytes())), "segments at offset 0");
        assert!(!is_whole_elf(&with(0x3c, &0_u16.to_le_bytes())), "a count that stands elsewhere");
        assert!(!is_whole_elf(&with(5, &[2])), "big endian");
        assert!(!is_whole_elf(b"\x7fELF"));
    }
}
