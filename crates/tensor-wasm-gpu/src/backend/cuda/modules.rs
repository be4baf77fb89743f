//! Kernel modules of a CUDA device.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUresult;
use parking_lot::Mutex;

use super::{Context, check, unknown};
use crate::backend::lane::{Loader, uploaded};
use crate::error::DeviceError;
use crate::queue::job::{Answer, Cell, Job};
use crate::slab::{PAYLOAD_BYTES_MAX, Slab};

/// Room for the complaints of the driver's PTX compiler.
const COMPILER_LOG_BYTES: usize = 4096;

/// What is loaded, for the worker and for every lane.
pub(super) struct Modules {
    device: cu::CUdevice,
    context: Arc<Context>,
    table: Mutex<Table>,
}

impl Drop for Modules {
    fn drop(&mut self) {
        // The worker and every lane are over; what the context has left is finished before it lets go of a library.
        let _ = self.context.enter().and_then(|()| self.unload(|_, _| true));
    }
}

#[derive(Default)]
struct Table {
    /// By their numbers, with the lanes they belong to.
    libraries: HashMap<u32, (usize, Library)>,
    kernels: slab::Slab<Entry>,
    /// Uploaded and not loaded yet, by their numbers, with their lanes.
    images: HashMap<u32, (usize, Vec<u8>)>,
    next_number: u32,
}

impl Table {
    fn number(&mut self) -> u32 {
        self.next_number = self.next_number.wrapping_add(1);
        self.next_number
    }
}

struct Library(cu::CUlibrary);

struct Entry {
    lane: usize,
    module: u32,
    kernel: cu::CUkernel,
    function: cu::CUfunction,
}

// SAFETY: the driver's handles of libraries, kernels and functions may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Send for Entry {}

impl Loader for Modules {
    fn enter(&self) -> Result<(), DeviceError> {
        self.context.enter()
    }

    fn execute(&self, lane: usize, slab: &Slab, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError> {
        match job {
            Job::Load { image } => self.load(lane, self.take_image(lane, image).ok_or_else(unknown)?),
            Job::ForgetImage { image } => self.take_image(lane, image).map(|_| Answer::default()).ok_or_else(unknown),
            Job::Kernel { module } => self.find(lane, slab, module, payload, cell),
            Job::Unload { module } => match self.unload(|number, owner| number == module && owner == lane)? {
                0 => Err(unknown()),
                _ => Ok(Answer::default()),
            },
            Job::Clear => {
                self.table.lock().images.retain(|_, (owner, _)| *owner != lane);
                self.unload(|_, owner| owner == lane).map(|_| Answer::default())
            }
            _ => Err(unknown()),
        }
    }
}

impl Modules {
    pub(super) fn new(device: cu::CUdevice, context: Arc<Context>) -> Modules {
        Modules { device, context, table: Mutex::default() }
    }

    /// A kernel of a lane, and its function in the worker's own context.
    pub(super) fn kernel(&self, lane: usize, number: u32) -> Option<(cu::CUkernel, cu::CUfunction)> {
        let table = self.table.lock();
        let entry = table.kernels.get(number as usize).filter(|entry| entry.lane == lane)?;
        Some((entry.kernel, entry.function))
    }

    /// Takes a copy of an image, with the NUL that ends PTX: what the driver parses must not change under it.
    pub(super) fn upload(&self, lane: usize, slab: &Slab, offset: u64, bytes: u64) -> Result<Answer, DeviceError> {
        let image = uploaded(slab, offset, bytes, 1).ok_or_else(unknown)?;
        let mut table = self.table.lock();
        let number = table.number();
        table.images.insert(number, (lane, image));
        Ok(Answer { values: [u64::from(number), 0, 0, 0, 0, 0] })
    }

    fn take_image(&self, lane: usize, image: u32) -> Option<Vec<u8>> {
        let images = &mut self.table.lock().images;
        images.get(&image).filter(|(owner, _)| *owner == lane)?;
        images.remove(&image).map(|(_, bytes)| bytes)
    }

    /// Unloads some modules; the server sees to it that nothing on the device uses them. Returns how many.
    fn unload(&self, which: impl Fn(u32, usize) -> bool) -> Result<usize, DeviceError> {
        let mut gone = Vec::new();
        {
            let Table { libraries, kernels, .. } = &mut *self.table.lock();
            libraries.retain(|number, (owner, library)| {
                let goes = which(*number, *owner);
                if goes {
                    kernels.retain(|_, entry| entry.module != *number);
                    gone.push(library.0);
                }
                !goes
            });
        }
        for library in &gone {
            // SAFETY: a library of ours, forgotten above.
            check(unsafe { cu::cuLibraryUnload(*library) })?;
        }
        Ok(gone.len())
    }

    fn shared_bytes_max(&self) -> u64 {
        let attribute = cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let mut value = 0;
        // SAFETY: writes one integer to a variable of ours.
        let result = unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, self.device) };
        if result == CUresult::CUDA_SUCCESS { u64::try_from(value).unwrap_or(0) } else { 0 }
    }

    fn load(&self, lane: usize, mut image: Vec<u8>) -> Result<Answer, DeviceError> {
        let compiled = match image.starts_with(b"\x7fELF") {
            true if !is_whole_elf(&image[..image.len() - 1]) => {
                return Err(DeviceError::BadModule { why: "the cubin is cut off or damaged".to_owned() });
            }
            true => image,
            false => compile(&mut image)?,
        };
        let (mut library, mut module) = (null_mut(), null_mut());
        // SAFETY: an image from the driver's own compiler, or one whose parts were checked to lie inside it, and no options. Asking for the module loads it now: the driver
        // would otherwise wait for the first kernel, and complain then.
        let result = unsafe {
            match cu::cuLibraryLoadData(
                &mut library,
                compiled.as_ptr().cast(),
                null_mut(),
                null_mut(),
                0,
                null_mut(),
                null_mut(),
                0,
            ) {
                CUresult::CUDA_SUCCESS => cu::cuLibraryGetModule(&mut module, library),
                error => error,
            }
        };
        if let Err(error) = check(result) {
            if !library.is_null() {
                // SAFETY: just loaded, and not used by anything.
                unsafe { cu::cuLibraryUnload(library) };
            }
            return Err(bad_module(error, ""));
        }
        let mut table = self.table.lock();
        let number = table.number();
        table.libraries.insert(number, (lane, Library(library)));
        Ok(Answer { values: [u64::from(number), 0, 0, 0, 0, 0] })
    }

    fn find(&self, lane: usize, slab: &Slab, module: u32, name: &[u8], cell: u32) -> Result<Answer, DeviceError> {
        use cu::CUfunction_attribute as Attribute;
        let library = match self.table.lock().libraries.get(&module) {
            Some((owner, library)) if *owner == lane => library.0,
            _ => return Err(unknown()),
        };
        let missing = || DeviceError::NoSuchKernel { name: String::from_utf8_lossy(name).into_owned() };
        let text = CString::new(name).map_err(|_| missing())?;
        let mut kernel = null_mut();
        // SAFETY: a library of ours and a string that ends with a NUL.
        match unsafe { cu::cuLibraryGetKernel(&mut kernel, library, text.as_ptr()) } {
            CUresult::CUDA_ERROR_NOT_FOUND => return Err(missing()),
            result => check(result)?,
        }
        let attribute = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: writes one integer to a variable of ours.
            check(unsafe { cu::cuKernelGetAttribute(&mut value, attribute, kernel, self.device) })?;
            Ok::<u64, DeviceError>(u64::try_from(value).unwrap_or(0))
        };
        let threads = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        let shared = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let registers = attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let dynamic = self.shared_bytes_max().saturating_sub(shared);
        // SAFETY: an attribute of a kernel of ours. More than the default 48 KiB has to be asked for.
        check(unsafe {
            cu::cuKernelSetAttribute(
                Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                c_int::try_from(dynamic).unwrap_or(c_int::MAX),
                kernel,
                self.device,
            )
        })?;
        let mut layout = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: writes two integers to variables of ours; an index beyond the last parameter is an error, not a fault.
            match unsafe { cu::cuKernelGetParamInfo(kernel, layout.len() / 8, &mut offset, &mut size) } {
                CUresult::CUDA_ERROR_INVALID_VALUE => break,
                result => check(result)?,
            }
            layout.extend_from_slice(&u32::try_from(offset).unwrap_or(u32::MAX).to_le_bytes());
            layout.extend_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_le_bytes());
            if layout.len() >= PAYLOAD_BYTES_MAX {
                return Err(DeviceError::Unsupported { what: "a kernel with that many parameters".to_owned() });
            }
        }
        Cell(slab.cell(cell)).put_payload(&layout);
        let mut function = null_mut();
        // SAFETY: the kernel's function in the worker's own context, which is quicker to launch than the kernel.
        check(unsafe { cu::cuKernelGetFunction(&mut function, kernel) })?;
        let mut resident = 0;
        let block = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: writes one integer to a variable of ours, about a function of ours.
        check(unsafe { cu::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut resident, function, block, 0) })?;
        let resident = u64::try_from(resident).unwrap_or(0);
        let number = self.table.lock().kernels.insert(Entry { lane, module, kernel, function }) as u64;
        Ok(Answer { values: [number, layout.len() as u64 / 8, threads, shared, registers, resident] })
    }
}

/// Whether everything an ELF file's header and tables point to lies inside it: the driver is not told its length.
fn is_whole_elf(image: &[u8]) -> bool {
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let field = image.get(at..at.checked_add(bytes)?)?;
        let mut whole = [0; 8];
        whole[..bytes].copy_from_slice(field);
        Some(u64::from_le_bytes(whole))
    };
    let is_inside = |offset: u64, len: u64| offset.checked_add(len).is_some_and(|end| end <= image.len() as u64);
    // Offsets of the fields of the 64-bit header: tables of segments and of sections, sizes and counts of their entries.
    let tables = [(0x20, 0x36, 0x38, 0x08, 0x20), (0x28, 0x3a, 0x3c, 0x18, 0x20)];
    tables.iter().all(|(at, entry_at, count_at, offset_at, size_at)| {
        let header = (number(*at, 8), number(*entry_at, 2), number(*count_at, 2));
        let (Some(table), Some(entry), Some(count)) = header else { return false };
        if count == 0 {
            return true;
        }
        if entry < 0x38 || !is_inside(table, entry * count) {
            return false;
        }
        (0..count).all(|n| {
            let entry = (table + n * entry) as usize;
            let has_no_bytes = *at == 0x28 && number(entry + 4, 4) == Some(8);
            let (offset, size) = (number(entry + offset_at, 8), number(entry + size_at, 8));
            has_no_bytes || offset.zip(size).is_some_and(|(offset, size)| is_inside(offset, size))
        })
    })
}

/// Compiles PTX, which ends with a NUL, for the current device. The compiler's first complaints are in the error.
fn compile(ptx: &mut [u8]) -> Result<Vec<u8>, DeviceError> {
    let mut log = vec![0_u8; COMPILER_LOG_BYTES];
    let mut options = [cu::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, cu::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
    let (mut linker, mut image, mut size) = (null_mut(), null_mut(), 0);
    // SAFETY: options and values are as many as said; the log, its size, the options and the PTX outlive the linker, which is
    // destroyed before this returns; what it made is copied before.
    let (result, compiled) = unsafe {
        let mut result = cu::cuLinkCreate_v2(2, options.as_mut_ptr(), values.as_mut_ptr(), &mut linker);
        if result != CUresult::CUDA_SUCCESS {
            return Err(bad_module(check(result).err().unwrap_or_else(unknown), ""));
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
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[0x28..0x30].copy_from_slice(&0x40_u64.to_le_bytes());
        elf[0x3a..0x3c].copy_from_slice(&0x40_u16.to_le_bytes());
        elf[0x3c..0x3e].copy_from_slice(&2_u16.to_le_bytes());
        // Two sections: one of 0x40 bytes at 0xc0, one that has no bytes whatever it says.
        elf[0x58..0x60].copy_from_slice(&0xc0_u64.to_le_bytes());
        elf[0x60..0x68].copy_from_slice(&0x40_u64.to_le_bytes());
        elf[0x84..0x88].copy_from_slice(&8_u32.to_le_bytes());
        elf[0xa0..0xa8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(is_whole_elf(&elf));
        assert!((0..0x100).all(|len| !is_whole_elf(&elf[..len]) || len == 0x100));
        elf[0x60..0x68].copy_from_slice(&0x41_u64.to_le_bytes());
        assert!(!is_whole_elf(&elf), "a section beyond the end");
        assert!(!is_whole_elf(b"\x7fELF"));
    }
}
