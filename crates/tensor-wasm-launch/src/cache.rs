//! Compiled kernels, kept in memory and on disk under what they were made from: the module, what was asked of it, and
//! the compiler. A file that is not what was written is thrown away and made again.

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use lru::LruCache;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tensor_wasm_gpu::DeviceKind;
use tensor_wasm_jit::{HostImage, KernelImage, Program, Refusal, SourceLocation};

use crate::module::Code;

/// Images in memory; beyond this, those that were not asked for the longest go.
const MEMORY_BYTES_MAX: usize = 64 << 20;

/// Images on disk; beyond this, those that were not read the longest go. They can be compiled again.
const DISK_BYTES_MAX: u64 = 256 << 20;

/// What a file begins with.
const MAGIC: &[u8; 8] = b"TWKERN1\n";

/// What makes an image what it is, besides its module.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Options {
    pub kind: DeviceKind,
    pub kernel: Arc<str>,
    /// Which parameters are given buffers, and whether those may be smaller than an access.
    pub windows: Vec<bool>,
    pub is_small: bool,
}

/// A kernel for one kind of device, ready to be loaded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// PTX, or Wasm for a CPU. Kept beside the rest in a file.
    #[serde(skip)]
    pub code: Vec<u8>,
    pub entry: String,
    pub window_bytes_min: Vec<u32>,
    pub windows_from: u32,
    /// The least compute capability that has all its instructions; zeros of a CPU's.
    pub capability_min: (u32, u32),
    sites: Vec<(String, Option<usize>)>,
}

impl Image {
    /// Code of a GPU that is taken as it is has no image.
    pub fn compile(code: &Code, options: &Options) -> Result<Image, Refusal> {
        let Options { kind, kernel, windows, is_small } = options;
        let read;
        let built = match code {
            Code::Wasm(wasm) => {
                read = Program::read(wasm)?.built(kernel, windows)?;
                &read
            }
            Code::Built(built) => built,
            Code::Raw(_) => return Err(Refusal::NoSuchKernel { name: kernel.to_string(), known: String::new() }),
        };
        Ok(match (kind, is_small) {
            (DeviceKind::Cuda, false) => Image::from(built.compile()?),
            (DeviceKind::Cuda, true) => Image::from(built.compile_small()?),
            (DeviceKind::Cpu, _) => Image::from(built.compile_host()?),
        })
    }

    /// Refuses a GPU that lacks some of its instructions, before a driver does so in words of its own.
    pub fn check_gpu(&self, capability: (u32, u32)) -> Result<(), Refusal> {
        if self.capability_min <= capability {
            return Ok(());
        }
        Err(Refusal::OlderGpu { needed: self.capability_min, found: capability })
    }

    pub fn sites(&self) -> Vec<SourceLocation> {
        // As people wrote them, without the hash that mangled names end with.
        let name = |function: &str| format!("{:#}", rustc_demangle::demangle(function));
        self.sites
            .iter()
            .map(|(function, offset)| SourceLocation { function: name(function), offset: *offset })
            .collect()
    }

    fn bytes(&self) -> usize {
        let site = |(function, _): &(String, Option<usize>)| function.len() + size_of::<(String, Option<usize>)>();
        self.code.len() + self.sites.iter().map(site).sum::<usize>() + 256
    }
}

impl From<KernelImage> for Image {
    fn from(image: KernelImage) -> Image {
        Image {
            code: image.ptx.into_bytes(),
            entry: image.entry,
            window_bytes_min: image.window_bytes_min,
            windows_from: image.windows_from,
            capability_min: image.target.capability(),
            sites: image.sites.into_iter().map(|place| (place.function, place.offset)).collect(),
        }
    }
}

impl From<HostImage> for Image {
    fn from(image: HostImage) -> Image {
        Image {
            code: image.wasm,
            entry: image.name,
            window_bytes_min: Vec::new(),
            windows_from: image.layout.windows_from,
            capability_min: (0, 0),
            sites: image.sites.into_iter().map(|place| (place.function, place.offset)).collect(),
        }
    }
}

/// The cache. Looking something up in memory takes well under a microsecond (`jit_compile/cache/warm_hit`).
pub struct Images {
    folder: Option<PathBuf>,
    memory: Mutex<Memory>,
    /// Bytes of the files in the folder, as far as is known.
    disk_bytes: AtomicU64,
    pub compiled: AtomicU64,
    pub from_disk: AtomicU64,
}

/// Images in memory, and their bytes together.
struct Memory {
    images: LruCache<(blake3::Hash, Options), Arc<Image>, foldhash::quality::RandomState>,
    bytes: usize,
}

impl Images {
    /// `folder` is where images are kept between two runs; without one they are kept in memory only.
    pub fn new(folder: Option<PathBuf>) -> Images {
        if let Some(folder) = &folder
            && let Err(error) = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
        {
            tracing::warn!(folder = %folder.display(), %error, "compiled kernels cannot be kept");
        }
        let disk_bytes =
            AtomicU64::new(folder.as_deref().map_or(0, |folder| files(folder).iter().map(|file| file.1).sum()));
        let (compiled, from_disk) = (AtomicU64::new(0), AtomicU64::new(0));
        let images = LruCache::unbounded_with_hasher(foldhash::quality::RandomState::default());
        let memory = Mutex::new(Memory { images, bytes: 0 });
        Images { folder, memory, disk_bytes, compiled, from_disk }
    }

    /// An image that is in memory.
    pub fn get(&self, module: blake3::Hash, options: &Options) -> Option<Arc<Image>> {
        // The key is borrowed: nothing is copied for a hit.
        self.memory.lock().images.get(&(module, options) as &dyn Key).cloned()
    }

    /// Reads an image from disk, or makes it. Takes milliseconds.
    pub fn make(&self, module: blake3::Hash, code: &Code, options: &Options) -> Result<Arc<Image>, Refusal> {
        let path = self.folder.as_ref().map(|folder| folder.join(name(module, options)));
        let found = path.as_deref().and_then(read);
        let image = match found {
            Some(image) => {
                self.from_disk.fetch_add(1, Ordering::Relaxed);
                Arc::new(image)
            }
            None => {
                let image = Arc::new(Image::compile(code, options)?);
                self.compiled.fetch_add(1, Ordering::Relaxed);
                if let Some(path) = &path {
                    match write(path, &image) {
                        Ok(bytes) => self.written(path, bytes),
                        Err(error) => tracing::warn!(file = %path.display(), %error, "a compiled kernel was not kept"),
                    }
                }
                image
            }
        };
        self.keep(module, options.clone(), image.clone());
        Ok(image)
    }

    /// Makes room on disk, if there is more than there should be.
    fn written(&self, path: &Path, bytes: u64) {
        let Some(folder) = path.parent() else { return };
        if self.disk_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes <= DISK_BYTES_MAX {
            return;
        }
        let mut files = files(folder);
        files.sort_by_key(|(_, _, modified)| *modified);
        let mut left: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (path, bytes, _) in files {
            // Well below, so that this is not done for every file from now on.
            if left <= DISK_BYTES_MAX / 4 * 3 {
                break;
            }
            if std::fs::remove_file(path).is_ok() {
                left -= bytes;
            }
        }
        self.disk_bytes.store(left, Ordering::Relaxed);
    }

    fn keep(&self, module: blake3::Hash, options: Options, image: Arc<Image>) {
        let mut memory = self.memory.lock();
        memory.bytes += image.bytes();
        if let Some(before) = memory.images.put((module, options), image) {
            memory.bytes -= before.bytes();
        }
        while memory.bytes > MEMORY_BYTES_MAX && memory.images.len() > 1 {
            let Some((_, oldest)) = memory.images.pop_lru() else { break };
            memory.bytes -= oldest.bytes();
        }
    }
}

/// A key that may be borrowed from its parts.
trait Key {
    fn parts(&self) -> (&blake3::Hash, &Options);
}

impl Key for (blake3::Hash, Options) {
    fn parts(&self) -> (&blake3::Hash, &Options) {
        (&self.0, &self.1)
    }
}

impl Key for (blake3::Hash, &Options) {
    fn parts(&self) -> (&blake3::Hash, &Options) {
        (&self.0, self.1)
    }
}

impl<'a> std::borrow::Borrow<dyn Key + 'a> for (blake3::Hash, Options) {
    fn borrow(&self) -> &(dyn Key + 'a) {
        self
    }
}

impl std::hash::Hash for dyn Key + '_ {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.parts().hash(state);
    }
}

impl PartialEq for dyn Key + '_ {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for dyn Key + '_ {}

/// The name of an image's file.
fn name(module: blake3::Hash, options: &Options) -> String {
    let mut hasher = blake3::Hasher::new();
    let Options { kind, kernel, windows, is_small } = options;
    for part in [tensor_wasm_jit::VERSION.as_bytes(), module.as_bytes(), kind.as_str().as_bytes(), kernel.as_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    let bits: Vec<u8> = windows.iter().chain([is_small]).map(|bit| u8::from(*bit)).collect();
    hasher.update(&bits);
    hasher.finalize().to_hex().to_string()
}

/// A file is what it begins with, the hash of the rest, the length of the description, the description, and the code.
fn write(path: &Path, image: &Image) -> std::io::Result<u64> {
    let description = serde_json::to_vec(image)?;
    let mut rest = (description.len() as u64).to_le_bytes().to_vec();
    rest.extend_from_slice(&description);
    rest.extend_from_slice(&image.code);
    // Whole or not at all, whoever else writes the same.
    let folder = path.parent().unwrap_or(Path::new("."));
    let name = format!("{}-{}", path.file_name().unwrap_or_default().to_string_lossy(), uuid::Uuid::now_v7());
    let temporary = folder.join(format!(".{name}"));
    // A tenant's code: for this user only, whatever the umask.
    let created = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary);
    let result = created.and_then(|mut file| {
        file.write_all(MAGIC)?;
        file.write_all(blake3::hash(&rest).as_bytes())?;
        file.write_all(&rest)?;
        std::fs::rename(&temporary, path)
    });
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    result.map(|()| (MAGIC.len() + blake3::OUT_LEN + rest.len()) as u64)
}

/// Files of a folder: their paths, sizes, and when they were last written or read.
fn files(folder: &Path) -> Vec<(PathBuf, u64, SystemTime)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let file = |entry: std::fs::DirEntry| {
        let metadata = entry.metadata().ok().filter(std::fs::Metadata::is_file)?;
        Some((entry.path(), metadata.len(), metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH)))
    };
    entries.filter_map(file).collect()
}

/// Reads a file; none if it is not there or not what was written.
fn read(path: &Path) -> Option<Image> {
    let bytes = std::fs::read(path).ok()?;
    let image = whole(&bytes);
    if image.is_some() {
        // Files that are read stay longest.
        let touched =
            std::fs::File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
        if let Err(error) = touched {
            tracing::debug!(file = %path.display(), %error, "a kept kernel was not touched");
        }
    }
    if image.is_none() {
        tracing::warn!(file = %path.display(), "a kept kernel is damaged; compiling it again");
        let _ = std::fs::remove_file(path);
    }
    image
}

fn whole(bytes: &[u8]) -> Option<Image> {
    let (digest, rest) = bytes.strip_prefix(MAGIC)?.split_at_checked(blake3::OUT_LEN)?;
    if blake3::hash(rest).as_bytes() != digest {
        return None;
    }
    let (len, rest) = rest.split_at_checked(8)?;
    let len = usize::try_from(u64::from_le_bytes(len.try_into().ok()?)).ok()?;
    let (description, code) = rest.split_at_checked(len)?;
    let image: Image = serde_json::from_slice(description).ok()?;
    Some(Image { code: code.to_vec(), ..image })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options { kind: DeviceKind::Cuda, kernel: "k".into(), windows: vec![true], is_small: false }
    }

    #[test]
    fn a_gpu_that_cannot_multiply_matrices_is_told_apart() {
        let image = |call: &str| {
            let text = format!(
                r#"(module (import "kernel" "mma_f16_f32" (func $multiply (param i32 i32 i32 i32 i32 i32 f32 f32 f32 f32)))
                    (memory 1) (func (export "k") (param i32) {call}))"#
            );
            Image::compile(&Code::Wasm(wat::parse_str(text).unwrap()), &options()).unwrap()
        };
        let zeros = "(i32.const 0)".repeat(6) + &"(f32.const 0)".repeat(4);
        let product = image(&format!("(call $multiply {zeros})"));
        let refused = product.check_gpu((7, 5)).unwrap_err().to_string();
        assert!(refused.contains("from compute capability 8.0 on; this one has 7.5"), "{refused}");
        assert!(product.check_gpu((8, 0)).is_ok() && product.check_gpu((9, 0)).is_ok());
        assert!(image("").check_gpu((7, 5)).is_ok());
    }

    fn module() -> (Code, blake3::Hash) {
        let text = r#"(module (memory 1) (func (export "k") (param i32) (i32.store (local.get 0) (i32.const 7))))"#;
        let wasm = wat::parse_str(text).unwrap();
        let hash = blake3::hash(&wasm);
        (Code::Wasm(wasm), hash)
    }

    #[test]
    fn images_are_kept_in_memory_and_on_disk_and_damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let ((wasm, hash), options) = (module(), options());
        let images = Images::new(Some(folder.path().to_owned()));
        assert!(images.get(hash, &options).is_none());
        let made = images.make(hash, &wasm, &options).unwrap();
        assert!(Arc::ptr_eq(&made, &images.get(hash, &options).unwrap()));
        let counts =
            |images: &Images| (images.compiled.load(Ordering::Relaxed), images.from_disk.load(Ordering::Relaxed));
        assert_eq!(counts(&images), (1, 0));
        // Another run finds it on disk.
        let again = Images::new(Some(folder.path().to_owned()));
        assert_eq!(again.make(hash, &wasm, &options).unwrap(), made);
        assert_eq!(counts(&again), (0, 1));
        // Every byte counts.
        let file = folder.path().join(name(hash, &options));
        let good = std::fs::read(&file).unwrap();
        for at in [0, 9, 40, 50, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&file, &bad).unwrap();
            let third = Images::new(Some(folder.path().to_owned()));
            assert_eq!(third.make(hash, &wasm, &options).unwrap(), made, "byte {at}");
            assert_eq!(counts(&third), (1, 0), "byte {at}");
            assert_eq!(std::fs::read(&file).unwrap(), good, "it was written again");
        }
        for cut in [0, 7, 20, good.len() - 1] {
            std::fs::write(&file, &good[..cut]).unwrap();
            let third = Images::new(Some(folder.path().to_owned()));
            assert_eq!(third.make(hash, &wasm, &options).unwrap(), made, "cut to {cut}");
        }
        // Other options are another image.
        let small = Options { is_small: true, ..options.clone() };
        assert!(images.get(hash, &small).is_none());
        assert_ne!(images.make(hash, &wasm, &small).unwrap(), made);
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_nothing_but_time() {
        let images = Images::new(Some("/proc/nowhere".into()));
        let (wasm, hash) = module();
        images.make(hash, &wasm, &options()).unwrap();
        assert!(images.get(hash, &options()).is_some());
    }
}
