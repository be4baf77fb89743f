//! The data directory: content-addressed files, written by rename after fsync, so that a file is there whole or not
//! at all.
//!
//! ```text
//! catalog.redb                    the store
//! sources/ab/abcd….wasm           what was deployed, named by its BLAKE3 hash
//! artifacts/ENGINE/abcd….cwasm    compiled from it by the engine with that identity
//! models/ab/abcd….safetensors     models, named by their BLAKE3 hash
//! manifests/ID.json               a copy of each function's record, from which the catalog can be rebuilt
//! model-manifests/ID.json         the same of each model's
//! quarantine/                     what was found damaged, moved here with a reason beside it
//! kernels/                        compiled kernels (`tensor-wasm-launch`)
//! tmp/                            files being written; emptied at start, once no other server can be writing them
//! ```
//!
//! All of it is for this user only, whatever the umask: folders 0700, files 0600. Functions' environments, jobs'
//! results and tenants' code are in there.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::record::{ModelHash, SourceHash};

const FILE_MODE: u32 = 0o600;
const DIR_MODE: u32 = 0o700;

pub(crate) struct Files {
    root: PathBuf,
    serial: AtomicU64,
}

impl Files {
    pub(crate) fn open(root: &Path) -> io::Result<Files> {
        let files = Files { root: root.to_owned(), serial: AtomicU64::new(0) };
        create_private_dir(root)?;
        let folders =
            ["sources", "artifacts", "models", "manifests", "model-manifests", "quarantine", "kernels", "tmp"];
        let folders = folders.map(|dir| root.join(dir));
        for dir in [root].into_iter().chain(folders.iter().map(PathBuf::as_path)) {
            create_private_dir(dir)?;
            match make_private(dir) {
                // Somebody else's folder that we may write to: what we make in it is private all the same.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    tracing::warn!(folder = %dir.display(), %error, "cannot be made private");
                }
                other => other?,
            }
        }
        Ok(files)
    }

    /// Removes what an earlier server left half written. Only for who holds the store's lock: without it the files may
    /// be a live server's uploads.
    pub(crate) fn empty_tmp(&self) -> io::Result<()> {
        let tmp = self.root.join("tmp");
        match fs::remove_dir_all(&tmp) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => create_private_dir(&tmp),
        }
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.root.join("catalog.redb")
    }

    pub(crate) fn source(&self, source: &SourceHash) -> PathBuf {
        let name = source.as_str();
        self.root.join("sources").join(&name[..2]).join(format!("{name}.wasm"))
    }

    pub(crate) fn artifact(&self, source: &SourceHash, engine: &str) -> PathBuf {
        self.root.join("artifacts").join(engine).join(format!("{}.cwasm", source.as_str()))
    }

    /// Removes what was compiled from a source; returns the engines it was compiled for.
    pub(crate) fn remove_artifacts(&self, source: &SourceHash) -> Vec<String> {
        let engines = fs::read_dir(self.root.join("artifacts")).into_iter().flatten().flatten();
        let engines = engines.map(|engine| engine.file_name().to_string_lossy().into_owned());
        engines.filter(|engine| fs::remove_file(self.artifact(source, engine)).is_ok()).collect()
    }

    pub(crate) fn manifest(&self, id: &str) -> PathBuf {
        self.root.join("manifests").join(format!("{id}.json"))
    }

    pub(crate) fn manifests(&self) -> PathBuf {
        self.root.join("manifests")
    }

    /// Where models are, in a folder for each beginning of a hash.
    pub(crate) fn models(&self) -> PathBuf {
        self.root.join("models")
    }

    pub(crate) fn model(&self, hash: &ModelHash) -> PathBuf {
        let name = hash.as_str();
        self.models().join(&name[..2]).join(format!("{name}.safetensors"))
    }

    pub(crate) fn model_manifest(&self, id: &str) -> PathBuf {
        self.model_manifests().join(format!("{id}.json"))
    }

    pub(crate) fn model_manifests(&self) -> PathBuf {
        self.root.join("model-manifests")
    }

    /// Compiled kernels, which can be compiled again.
    pub(crate) fn kernels(&self) -> PathBuf {
        self.root.join("kernels")
    }

    /// A fresh name under `tmp/`, for a file that `install` will move into place.
    pub(crate) fn scratch(&self) -> PathBuf {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        self.root.join("tmp").join(format!("{}-{serial}", std::process::id()))
    }

    /// Writes `bytes` to `path` so that after a crash it is either absent (or as before) or complete.
    pub(crate) fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let scratch = self.scratch();
        let written = create_private(&scratch).and_then(|mut file| file.write_all(bytes));
        let installed = written.and_then(|()| self.install(&scratch, path));
        if installed.is_err() {
            let _ = fs::remove_file(&scratch);
        }
        installed
    }

    /// Moves a finished scratch file into place: fsync, rename, fsync of the directory.
    pub(crate) fn install(&self, scratch: &Path, path: &Path) -> io::Result<()> {
        let dir = path.parent().unwrap_or(&self.root);
        if !dir.is_dir() {
            create_private_dir(dir)?;
            sync_dir(dir.parent().unwrap_or(&self.root))?;
        }
        fs::File::open(scratch)?.sync_all()?;
        fs::rename(scratch, path)?;
        sync_dir(dir)
    }

    /// Moves a damaged file out of the way, with the reason beside it.
    pub(crate) fn quarantine(&self, path: &Path, why: &str) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let target = self.quarantine_path(&name);
        let moved = fs::rename(path, &target);
        let noted =
            write_private(&target.with_added_extension("reason"), format!("{}: {why}\n", path.display()).as_bytes());
        if let Err(e) = moved.and(noted) {
            tracing::error!(file = %path.display(), error = %e, "could not move a damaged file into the quarantine");
        }
    }

    /// Keeps damaged bytes that are no file of their own.
    pub(crate) fn quarantine_bytes(&self, name: &str, bytes: &[u8], why: &str) {
        let target = self.quarantine_path(name);
        let kept = write_private(&target, bytes)
            .and_then(|()| write_private(&target.with_added_extension("reason"), format!("{why}\n").as_bytes()));
        if let Err(e) = kept {
            tracing::error!(record = name, error = %e, "could not keep a damaged record in the quarantine");
        }
    }

    fn quarantine_path(&self, name: &str) -> PathBuf {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let stamp = super::now_ms();
        self.root.join("quarantine").join(format!("{name}.{stamp}-{serial}"))
    }
}

/// The hash of a file's content, read piece by piece: it may be larger than the memory there is.
pub(crate) fn hash(path: &Path) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(fs::File::open(path)?)?;
    Ok(hasher.finalize())
}

/// A file that only this user may read or write, made if it is not there.
pub(crate) fn create_private(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new().write(true).create(true).truncate(false).mode(FILE_MODE).open(path)
}

pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    create_private(path)?.write_all(bytes)
}

/// A folder that only this user may enter, with the folders above it where they are missing.
fn create_private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(dir)
}

/// Tightens what an earlier version or another umask left. A folder that is private already has private contents.
fn make_private(dir: &Path) -> io::Result<()> {
    if fs::metadata(dir)?.permissions().mode() & 0o777 == DIR_MODE {
        return Ok(());
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            make_private(&entry.path())?;
        } else if kind.is_file() {
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(FILE_MODE))?;
        }
    }
    // Last: a crash in between begins again.
    fs::set_permissions(dir, fs::Permissions::from_mode(DIR_MODE))
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    fs::File::open(dir)?.sync_all()
}
