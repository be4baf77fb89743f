//! The data directory: content-addressed files, written by rename after fsync, so that a file is there whole or not
//! at all.
//!
//! ```text
//! catalog.redb                    the store
//! sources/ab/abcd….wasm           what was deployed, named by its BLAKE3 hash
//! artifacts/ENGINE/abcd….cwasm    compiled from it by the engine with that identity
//! manifests/ID.json               a copy of each function's record, from which the catalog can be rebuilt
//! quarantine/                     what was found damaged, moved here with a reason beside it
//! tmp/                            files being written; emptied at start
//! ```

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::record::SourceHash;

pub(crate) struct Files {
    root: PathBuf,
    serial: AtomicU64,
}

impl Files {
    pub(crate) fn open(root: &Path) -> io::Result<Files> {
        let files = Files { root: root.to_owned(), serial: AtomicU64::new(0) };
        for dir in ["sources", "artifacts", "manifests", "quarantine"] {
            fs::create_dir_all(root.join(dir))?;
        }
        let tmp = root.join("tmp");
        match fs::remove_dir_all(&tmp) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => fs::create_dir_all(&tmp)?,
        }
        Ok(files)
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
        let written = fs::File::create(&scratch).and_then(|mut file| file.write_all(bytes));
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
            fs::create_dir_all(dir)?;
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
        let noted = fs::write(target.with_added_extension("reason"), format!("{}: {why}\n", path.display()));
        if let Err(e) = moved.and(noted) {
            tracing::error!(file = %path.display(), error = %e, "could not move a damaged file into the quarantine");
        }
    }

    /// Keeps damaged bytes that are no file of their own.
    pub(crate) fn quarantine_bytes(&self, name: &str, bytes: &[u8], why: &str) {
        let target = self.quarantine_path(name);
        let kept = fs::write(&target, bytes)
            .and_then(|()| fs::write(target.with_added_extension("reason"), format!("{why}\n")));
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

fn sync_dir(dir: &Path) -> io::Result<()> {
    fs::File::open(dir)?.sync_all()
}
