//! Launches from core modules, which have no components' interfaces: numbers and pointers only. Everything is done in
//! the order it was asked; how launches ended is learned by [`sync`].
//!
//! ```no_run
//! use tensor_wasm_flat::{Arguments, Buffer, Kernel, Result, sync};
//!
//! fn saxpy(kernels: &[u8], a: f32, x: &[u8], y: &mut [u8]) -> Result<()> {
//!     let n = (x.len() / 4) as i32;
//!     let kernel = Kernel::load(kernels, "saxpy")?;
//!     let (device_x, device_y) = (Buffer::from_bytes(x)?, Buffer::from_bytes(y)?);
//!     let arguments = Arguments::new().i32(n).f32(a).buffer(&device_x).buffer(&device_y);
//!     kernel.launch([(n as u32).div_ceil(256), 1, 1], [256, 1, 1], &arguments)?;
//!     sync()?;
//!     device_y.read(0, y)
//! }
//! ```

#![no_std]

extern crate alloc;

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

/// The functions as the host has them. Handles and identities are as large as their type; results below zero are
/// errors.
pub mod import {
    #[link(wasm_import_module = "wasi:cuda/host@0.2.0")]
    unsafe extern "C" {
        pub fn wasi_cuda_load_ptx(code: *const u8, code_len: usize, entry: *const u8, entry_len: usize) -> i64;
        pub fn wasi_cuda_launch(
            kernel: i64,
            groups_x: u32,
            groups_y: u32,
            groups_z: u32,
            items_x: u32,
            items_y: u32,
            items_z: u32,
            shared_bytes: u32,
            arguments: *const u8,
            arguments_len: usize,
        ) -> i32;
        pub safe fn wasi_cuda_sync() -> i32;
        pub safe fn wasi_cuda_alloc(bytes: i64) -> i64;
        pub safe fn wasi_cuda_free(handle: i64) -> i32;
        pub fn wasi_cuda_memcpy_h2d(handle: i64, offset: i64, from: *const u8, len: usize) -> i32;
        pub fn wasi_cuda_memcpy_d2h(to: *mut u8, handle: i64, offset: i64, len: usize) -> i32;
        pub safe fn wasi_cuda_last_error_len() -> i32;
        pub fn wasi_cuda_last_error_copy(to: *mut u8, len: usize) -> i32;
    }
}

pub type Result<T> = core::result::Result<T, Error>;

/// The number that a function returned, which is below zero, and the host's text for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub code: i64,
    pub text: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.code)
    }
}

impl core::error::Error for Error {}

fn check(code: impl Into<i64>) -> Result<i64> {
    let code = code.into();
    if code >= 0 {
        return Ok(code);
    }
    let len = usize::try_from(import::wasi_cuda_last_error_len()).unwrap_or(0);
    let mut text = vec![0; len];
    // SAFETY: there is room for as many bytes.
    let copied = unsafe { import::wasi_cuda_last_error_copy(text.as_mut_ptr(), text.len()) };
    text.truncate(usize::try_from(copied).unwrap_or(0));
    Err(Error { code, text: String::from_utf8_lossy(&text).into_owned() })
}

/// A kernel of a module that was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel(i64);

impl Kernel {
    /// Takes the bytes of a core Wasm module, and the name of the kernel among its exports.
    pub fn load(wasm: &[u8], name: &str) -> Result<Kernel> {
        // SAFETY: the host reads two slices.
        let id = unsafe { import::wasi_cuda_load_ptx(wasm.as_ptr(), wasm.len(), name.as_ptr(), name.len()) };
        check(id).map(Kernel)
    }

    /// Returns before the launch is done.
    pub fn launch(&self, groups: [u32; 3], items: [u32; 3], arguments: &Arguments) -> Result<()> {
        let ([gx, gy, gz], [ix, iy, iz]) = (groups, items);
        let packed = &arguments.packed;
        // SAFETY: the host reads the arguments. Whoever put a pointer among them answers for what it points to.
        let code =
            unsafe { import::wasi_cuda_launch(self.0, gx, gy, gz, ix, iy, iz, 0, packed.as_ptr(), packed.len()) };
        check(code).map(drop)
    }
}

/// Waits for everything that was asked. An error is the first of a launch since the last time.
pub fn sync() -> Result<()> {
    check(import::wasi_cuda_sync()).map(drop)
}

/// Memory on the device, zero at first. It is freed when it is dropped.
#[derive(Debug)]
pub struct Buffer(i64);

impl Buffer {
    pub fn allocate(bytes: usize) -> Result<Buffer> {
        check(import::wasi_cuda_alloc(bytes as i64)).map(Buffer)
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Buffer> {
        let buffer = Buffer::allocate(bytes.len())?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the host reads a slice.
        check(unsafe { import::wasi_cuda_memcpy_h2d(self.0, offset as i64, bytes.as_ptr(), bytes.len()) }).map(drop)
    }

    /// Waits for everything that was asked before.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the host writes a slice.
        check(unsafe { import::wasi_cuda_memcpy_d2h(bytes.as_mut_ptr(), self.0, offset as i64, bytes.len()) }).map(drop)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        import::wasi_cuda_free(self.0);
    }
}

/// Arguments of a launch, packed: for each a byte that says what it is, then its value, little endian.
#[derive(Debug, Clone, Default)]
pub struct Arguments {
    packed: Vec<u8>,
}

impl Arguments {
    pub fn new() -> Arguments {
        Arguments::default()
    }

    pub fn i32(self, value: i32) -> Arguments {
        self.put(1, &value.to_le_bytes())
    }

    pub fn i64(self, value: i64) -> Arguments {
        self.put(2, &value.to_le_bytes())
    }

    pub fn f32(self, value: f32) -> Arguments {
        self.put(3, &value.to_le_bytes())
    }

    pub fn f64(self, value: f64) -> Arguments {
        self.put(4, &value.to_le_bytes())
    }

    pub fn u32(self, value: u32) -> Arguments {
        self.put(5, &value.to_le_bytes())
    }

    pub fn u64(self, value: u64) -> Arguments {
        self.put(6, &value.to_le_bytes())
    }

    pub fn buffer(self, buffer: &Buffer) -> Arguments {
        self.put(8, &buffer.0.to_le_bytes())
    }

    /// A part of this module's own memory, which the device then works on in place. Only for functions that were
    /// deployed with `memory = "pinned"`; the address must be a multiple of 16.
    ///
    /// # Safety
    ///
    /// The kernel reads and writes there until [`sync`] has returned. Until then the memory stays allocated, and
    /// nothing else reads what the kernel writes or writes what it reads.
    pub unsafe fn memory<T>(self, memory: *mut [T]) -> Arguments {
        let offset = memory.cast::<T>().addr() as u32;
        let bytes = (memory.len() * size_of::<T>()) as u32;
        self.put(7, &offset.to_le_bytes()).append(&bytes.to_le_bytes())
    }

    fn put(mut self, tag: u8, value: &[u8]) -> Arguments {
        self.packed.push(tag);
        self.append(value)
    }

    fn append(mut self, bytes: &[u8]) -> Arguments {
        self.packed.extend_from_slice(bytes);
        self
    }
}
