//! The durable key-value store behind the catalog and the jobs: one `redb` file, one writer thread.
//!
//! Writes are group-committed: the writer takes whatever is waiting, applies it in one transaction, syncs once and then
//! answers everyone, so that a hundred concurrent acknowledgements cost one fsync. A write is acknowledged only after
//! its commit is on disk; `kill -9` at any moment loses nothing acknowledged.
//!
//! Every value carries a checksum, so that a damaged record is found by itself and set aside by its key, rather than
//! taking the others with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;

use parking_lot::RwLock;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

/// Writes taken into one transaction at most; bounds the latency of the last one in the batch.
const BATCH_MAX: usize = 512;

/// Writes waiting for the writer; beyond it `write` waits, which is the back-pressure on deploys and jobs.
const WAITING_MAX: usize = 4096;

/// Pages redb keeps in memory. The catalog is read once at start and jobs by key, so little is enough.
const CACHE_BYTES: usize = 8 << 20;

const CHECKSUM_BYTES: usize = 8;

/// How long an earlier holder of the file may still hold its lock when it is opened.
const LOCK_PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Table {
    /// `tenant NUL name` → function record.
    Functions,
    /// `source/engine` → digest of the compiled artifact.
    Artifacts,
    /// Job id → job record.
    Jobs,
    /// `tenant NUL key` → the job an idempotency key stands for.
    IdempotencyKeys,
    /// `tenant NUL function id NUL name` → a secret's sealed value.
    Secrets,
    /// `tenant NUL name` → model record.
    Models,
}

pub(crate) const TABLES: [Table; 6] =
    [Table::Functions, Table::Artifacts, Table::Jobs, Table::IdempotencyKeys, Table::Secrets, Table::Models];

impl Table {
    fn definition(self) -> TableDefinition<'static, &'static str, &'static [u8]> {
        TableDefinition::new(match self {
            Table::Functions => "functions",
            Table::Artifacts => "artifacts",
            Table::Jobs => "jobs",
            Table::IdempotencyKeys => "idempotency_keys",
            Table::Secrets => "secrets",
            Table::Models => "models",
        })
    }
}

/// One change; a `Vec` of them is applied whole or not at all.
#[derive(Debug)]
pub(crate) enum Change {
    Put(Table, String, Vec<u8>),
    Delete(Table, String),
}

impl Change {
    pub(crate) fn put(table: Table, key: impl Into<String>, value: &impl Serialize) -> Change {
        Change::Put(table, key.into(), encode(value))
    }
}

/// Why the store cannot do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    #[error("{path}: in use by another server; stop it or choose another --data-dir", path = path.display())]
    InUse { path: PathBuf },
    #[error("{path}: damaged: {why}", path = path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("{path}: {why}", path = path.display())]
    Io { path: PathBuf, why: String },
    #[error(
        "{path}: {why}; give the right one in TENSOR_WASM_SECRETS_KEY or [server] secrets_key_file, or give the secrets up \
         with `serve --forget-secrets` and set them again",
        path = path.display()
    )]
    Secrets { path: PathBuf, why: String },
}

impl StoreError {
    pub(crate) fn without_path(self) -> String {
        match self {
            StoreError::InUse { .. } => "it is in use by another server".to_owned(),
            StoreError::Damaged { why, .. } | StoreError::Io { why, .. } | StoreError::Secrets { why, .. } => why,
        }
    }
}

struct Request {
    changes: Vec<Change>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

pub(crate) struct Store {
    file: Arc<File>,
    requests: mpsc::SyncSender<Request>,
}

/// The database, which must be closed and opened again after an I/O error.
struct File {
    path: PathBuf,
    database: RwLock<Option<Database>>,
}

/// A record as it was read.
pub(crate) enum Read<T> {
    Good(T),
    /// The bytes as found, for the quarantine, and what is wrong with them.
    Damaged(Vec<u8>, String),
}

impl Store {
    pub(crate) fn open(path: &Path) -> Result<Store, StoreError> {
        let file = Arc::new(File { path: path.to_owned(), database: RwLock::new(None) });
        file.reopen_when_free()?;
        let (requests, incoming) = mpsc::sync_channel(WAITING_MAX);
        let writer = file.clone();
        std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || writer.run(&incoming))
            .map_err(|e| StoreError::Io { path: path.to_owned(), why: e.to_string() })?;
        Ok(Store { file, requests })
    }

    /// Applies the changes; returns once they are on disk.
    pub(crate) async fn write(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let (done, answer) = oneshot::channel();
        let mut request = Request { changes, done };
        loop {
            match self.requests.try_send(request) {
                Ok(()) => break,
                Err(mpsc::TrySendError::Full(back)) => {
                    request = back;
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                Err(mpsc::TrySendError::Disconnected(_)) => return Err(self.gone()),
            }
        }
        answer.await.unwrap_or_else(|_| Err(self.gone()))
    }

    /// The same for a thread that may block, before anything is served.
    pub(crate) fn write_blocking(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let (done, answer) = oneshot::channel();
        self.requests.send(Request { changes, done }).map_err(|_| self.gone())?;
        answer.blocking_recv().unwrap_or_else(|_| Err(self.gone()))
    }

    /// Asks for changes whose fate nobody waits for: clean-up that a later start would repeat.
    pub(crate) fn write_later(&self, changes: Vec<Change>) {
        if !changes.is_empty() {
            let (done, _) = oneshot::channel();
            let _ = self.requests.try_send(Request { changes, done });
        }
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, table: Table, key: &str) -> Result<Option<Read<T>>, StoreError> {
        self.file.with(|database| {
            let transaction = database.begin_read()?;
            let table = transaction.open_table(table.definition())?;
            Ok(table.get(key)?.map(|value| decode(value.value())))
        })
    }

    /// Every record of a table in key order.
    pub(crate) fn all<T: DeserializeOwned>(&self, table: Table) -> Result<Vec<(String, Read<T>)>, StoreError> {
        let mut records = Vec::new();
        self.each(table, |key, read| records.push((key, read)))?;
        Ok(records)
    }

    /// The same, one at a time: for tables that need not fit into memory.
    pub(crate) fn each<T: DeserializeOwned>(
        &self,
        table: Table,
        mut visit: impl FnMut(String, Read<T>),
    ) -> Result<(), StoreError> {
        self.file.with(|database| {
            let transaction = database.begin_read()?;
            let table = transaction.open_table(table.definition())?;
            for entry in table.iter()? {
                let (key, value) = entry?;
                visit(key.value().to_owned(), decode(value.value()));
            }
            Ok(())
        })
    }

    /// The last records whose keys begin with `prefix`, in descending order.
    pub(crate) fn newest<T: DeserializeOwned>(
        &self,
        table: Table,
        prefix: &str,
        limit: usize,
    ) -> Result<Vec<(String, Read<T>)>, StoreError> {
        self.file.with(|database| {
            let transaction = database.begin_read()?;
            let table = transaction.open_table(table.definition())?;
            let mut records = Vec::new();
            for entry in table
                .range(prefix..)?
                .rev()
                .skip_while(|e| e.as_ref().is_ok_and(|(k, _)| !k.value().starts_with(prefix)))
            {
                let (key, value) = entry?;
                if !key.value().starts_with(prefix) || records.len() == limit {
                    break;
                }
                records.push((key.value().to_owned(), decode(value.value())));
            }
            Ok(records)
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.file.path
    }

    fn gone(&self) -> StoreError {
        StoreError::Io { path: self.file.path.clone(), why: "the writer has stopped".to_owned() }
    }
}

impl File {
    fn run(&self, incoming: &mpsc::Receiver<Request>) {
        while let Ok(first) = incoming.recv() {
            let mut batch = vec![first];
            batch.extend(incoming.try_iter().take(BATCH_MAX - 1));
            let result = self.commit(&batch).or_else(|error| {
                // redb refuses further work after an I/O error until the file is opened anew; a disk that has room
                // again must not need a restart.
                tracing::error!(%error, "a commit failed; opening the store again");
                self.reopen()?;
                Err(error)
            });
            for request in batch {
                let _ = request.done.send(result.clone());
            }
        }
    }

    fn commit(&self, batch: &[Request]) -> Result<(), StoreError> {
        self.with(|database| {
            let mut transaction = database.begin_write()?;
            // Recovery after a crash then needs no scan of the whole file, so a restart stays fast at any size.
            transaction.set_quick_repair(true);
            for change in batch.iter().flat_map(|request| &request.changes) {
                match change {
                    Change::Put(table, key, value) => {
                        transaction.open_table(table.definition())?.insert(key.as_str(), value.as_slice())?;
                    }
                    Change::Delete(table, key) => {
                        transaction.open_table(table.definition())?.remove(key.as_str())?;
                    }
                }
            }
            transaction.commit()?;
            Ok(())
        })
    }

    fn with<T>(&self, work: impl FnOnce(&Database) -> Result<T, redb::Error>) -> Result<T, StoreError> {
        let mut guard = self.database.read();
        if guard.is_none() {
            // Opening it again failed when it was tried; the disk may have recovered since.
            drop(guard);
            self.reopen()?;
            guard = self.database.read();
        }
        let database = guard.as_ref().ok_or_else(|| self.error(&"not open"))?;
        // redb asserts its own invariants; on a damaged file an assertion is one more way of saying so.
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(database))) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(redb::Error::Corrupted(why))) => Err(StoreError::Damaged { path: self.path.clone(), why }),
            Ok(Err(error)) => Err(self.error(&error)),
            Err(_) => Err(StoreError::Damaged { path: self.path.clone(), why: "its structure is inconsistent".into() }),
        }
    }

    /// As `reopen`, but gives an earlier holder `LOCK_PATIENCE` to let go of the lock. A killed server's child
    /// between fork and exec still has the server's descriptors, and with them its lock; so has a writer thread that
    /// has not yet seen its channel close.
    fn reopen_when_free(&self) -> Result<(), StoreError> {
        let begun = std::time::Instant::now();
        loop {
            match self.reopen() {
                Err(StoreError::InUse { .. }) if begun.elapsed() < LOCK_PATIENCE => {
                    std::thread::park_timeout(std::time::Duration::from_millis(10));
                }
                opened => return opened,
            }
        }
    }

    fn reopen(&self) -> Result<(), StoreError> {
        let mut guard = self.database.write();
        // Closing a damaged database may panic as reading it did.
        let old = guard.take();
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(old)));
        let path = self.path.clone();
        let opened = std::panic::catch_unwind(move || {
            super::files::create_private(&path)?;
            let database = Database::builder().set_cache_size(CACHE_BYTES).create(&path)?;
            let transaction = database.begin_write().map_err(|e| DatabaseError::Storage(into_storage(e.into())))?;
            for table in TABLES {
                transaction
                    .open_table(table.definition())
                    .map_err(|e| DatabaseError::Storage(into_storage(e.into())))?;
            }
            transaction.commit().map_err(|e| DatabaseError::Storage(into_storage(e.into())))?;
            Ok(database)
        });
        *guard = Some(match opened {
            Ok(Ok(database)) => database,
            Ok(Err(DatabaseError::DatabaseAlreadyOpen)) => return Err(StoreError::InUse { path: self.path.clone() }),
            Ok(Err(DatabaseError::Storage(StorageError::Io(e)))) if e.kind() != std::io::ErrorKind::InvalidData => {
                return Err(self.error(&e));
            }
            // Of another version of redb: the operator's business, and no reason to set it aside.
            Ok(Err(error @ DatabaseError::UpgradeRequired(_))) => return Err(self.error(&error)),
            Ok(Err(error)) => {
                return Err(StoreError::Damaged { path: self.path.clone(), why: error.to_string() });
            }
            Err(_) => {
                let why = "its structure is inconsistent".to_owned();
                return Err(StoreError::Damaged { path: self.path.clone(), why });
            }
        });
        Ok(())
    }

    fn error(&self, why: &dyn std::fmt::Display) -> StoreError {
        StoreError::Io { path: self.path.clone(), why: why.to_string() }
    }
}

fn into_storage(error: redb::Error) -> StorageError {
    match error {
        redb::Error::Io(e) => StorageError::Io(e),
        other => StorageError::Corrupted(other.to_string()),
    }
}

/// Checksum, then JSON.
pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_vec(value).unwrap_or_default();
    let mut bytes = blake3::hash(&json).as_bytes()[..CHECKSUM_BYTES].to_vec();
    bytes.extend(json);
    bytes
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Read<T> {
    let damaged = |why: String| Read::Damaged(bytes.to_vec(), why);
    let Some((checksum, json)) = bytes.split_at_checked(CHECKSUM_BYTES) else {
        return damaged("the record is too short".to_owned());
    };
    if blake3::hash(json).as_bytes()[..CHECKSUM_BYTES] != *checksum {
        return damaged("the checksum does not match".to_owned());
    }
    match serde_json::from_slice(json) {
        Ok(value) => Read::Good(value),
        Err(e) => damaged(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn concurrent_writes_are_all_there_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.redb");
        let store = Arc::new(Store::open(&path).unwrap());
        let writes = (0..200).map(|n| {
            let store = store.clone();
            tokio::spawn(async move { store.write(vec![Change::put(Table::Jobs, format!("{n:03}"), &n)]).await })
        });
        for write in writes.collect::<Vec<_>>() {
            write.await.unwrap().unwrap();
        }
        assert!(matches!(Store::open(&path), Err(StoreError::InUse { .. })));
        drop(Arc::into_inner(store));
        let reopened = Store::open(&path).unwrap();
        let all = reopened.all::<u32>(Table::Jobs).unwrap();
        assert_eq!(all.len(), 200);
        assert!(all.iter().zip(0..).all(|((_, value), n)| matches!(value, Read::Good(v) if *v == n)));
    }

    #[test]
    fn a_flipped_bit_is_found() {
        let mut bytes = encode(&"hello");
        assert!(matches!(decode::<String>(&bytes), Read::Good(s) if s == "hello"));
        bytes[10] ^= 1;
        assert!(matches!(decode::<String>(&bytes), Read::Damaged(..)));
        assert!(matches!(decode::<String>(b"abc"), Read::Damaged(..)));
    }
}
