//! A module or a model on its way in: written to a scratch file of the data directory while it is hashed, so that it
//! takes as much memory as one piece of it, however large it is.
//!
//! The file goes when the upload is dropped, whatever the reason; what a crash leaves is removed at the next start with
//! the rest of `tmp/`. Only [`Catalog::pin_source`](super::Catalog) and `pin_model` keep one, by moving it to where its
//! hash belongs.

use std::path::{Path, PathBuf};

use tokio::io::AsyncWriteExt;

use super::files::{Files, create_private};
use super::record::{ModelHash, SourceHash};
use crate::config::Limits;
use crate::failure::Rejection;

/// What is sent to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadKind {
    Module,
    Model,
}

impl UploadKind {
    /// The largest that a tenant may send.
    pub fn bytes_max(self, limits: &Limits) -> usize {
        match self {
            UploadKind::Module => limits.module_bytes_max,
            UploadKind::Model => limits.model_bytes_max,
        }
    }

    pub fn too_large(self, bytes: usize, bytes_max: usize) -> Rejection {
        match self {
            UploadKind::Module => Rejection::ModuleTooLarge { bytes, bytes_max },
            UploadKind::Model => {
                Rejection::TooLarge { what: "the model", bytes_max, limit: "[limits] model_bytes_max" }
            }
        }
    }
}

/// Being received.
pub struct Upload {
    kind: UploadKind,
    file: tokio::fs::File,
    scratch: Scratch,
    hasher: blake3::Hasher,
    bytes: usize,
    bytes_max: usize,
}

/// Received whole.
pub struct Uploaded {
    scratch: Scratch,
    hash: blake3::Hash,
    bytes: usize,
}

/// A file that is removed with its name.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // Not there any more where it was installed.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Upload {
    pub(crate) fn begin(files: &Files, kind: UploadKind, bytes_max: usize) -> Result<Upload, Rejection> {
        let scratch = Scratch(files.scratch());
        let file = create_private(&scratch.0).map_err(|e| storage(&e))?;
        let file = tokio::fs::File::from_std(file);
        Ok(Upload { kind, file, scratch, hasher: blake3::Hasher::new(), bytes: 0, bytes_max })
    }

    /// Takes the next piece. A thread that may block writes it; waits only while the piece before is not on its way.
    pub async fn write(&mut self, piece: &[u8]) -> Result<(), Rejection> {
        self.bytes = self.bytes.saturating_add(piece.len());
        if self.bytes > self.bytes_max {
            return Err(self.kind.too_large(self.bytes, self.bytes_max));
        }
        self.hasher.update(piece);
        self.file.write_all(piece).await.map_err(|e| storage(&e))
    }

    pub async fn finish(mut self) -> Result<Uploaded, Rejection> {
        self.file.flush().await.map_err(|e| storage(&e))?;
        let Upload { scratch, hasher, bytes, .. } = self;
        Ok(Uploaded { scratch, hash: hasher.finalize(), bytes })
    }
}

impl Uploaded {
    /// What it is called as a module or component.
    pub fn source(&self) -> SourceHash {
        self.hash.into()
    }

    /// What it is called as a model.
    pub(super) fn model(&self) -> ModelHash {
        self.hash.into()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn path(&self) -> &Path {
        &self.scratch.0
    }
}

fn storage(error: &std::io::Error) -> Rejection {
    Rejection::Storage { why: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_upload_is_hashed_bounded_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::open(dir.path()).unwrap();
        let left = || std::fs::read_dir(dir.path().join("tmp")).unwrap().count();
        let mut upload = Upload::begin(&files, UploadKind::Module, 10).unwrap();
        upload.write(b"hello ").await.unwrap();
        upload.write(b"you").await.unwrap();
        let uploaded = upload.finish().await.unwrap();
        assert_eq!((uploaded.source(), uploaded.bytes()), (SourceHash::of(b"hello you"), 9));
        assert_eq!(std::fs::read(uploaded.path()).unwrap(), b"hello you");
        assert_eq!(left(), 1);
        drop(uploaded);
        let mut upload = Upload::begin(&files, UploadKind::Module, 10).unwrap();
        upload.write(b"hello ").await.unwrap();
        let refused = upload.write(b"world").await.unwrap_err();
        assert!(matches!(refused, Rejection::ModuleTooLarge { bytes: 11, bytes_max: 10 }), "{refused}");
        drop(upload);
        assert_eq!(left(), 0);
    }
}
