//! Models in memory: each is read once, when it is first opened, and shared by whoever opens it until nobody does.
//!
//! A file is read, not mapped: whoever cuts a mapped file off ends the server (`SIGBUS`), and what is written to it
//! changes under its readers. It is hashed as it is read, and the elements that were hashed are those that are served,
//! so that what happens to the file later is seen when it is read the next time and not before.
//!
//! Memory is charged to the model's tenant before it is taken, and for as long as the model is here: by an instance or
//! idle. Idle ones make way, those used least recently first, for models that are opened and for
//! `[server] models_idle_bytes_max`. Two tenants share no memory, even where they share the file: a charge has one
//! owner.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tensor_wasm_tensor::io::SafetensorsHeader;
use tensor_wasm_tensor::{ErrorKind, Tensor};
use tokio::runtime::Handle;

use super::{HEADER_BYTES_MAX, LoadedModel, ModelError, Models, complaint, store};
use crate::HashMap;
use crate::catalog::{Catalog, ModelHash, ModelRecord};
use crate::config::Config;
use crate::metrics::Metrics;

/// What a tensor takes beside its elements: its node in the graph, its name, its place in the map.
const TENSOR_BYTES: u64 = 512;

/// Bytes read from a file at once.
const READ_BYTES: usize = 1 << 20;

/// How often a model may be replaced while somebody opens it, before they are told that it is damaged.
const REPLACED_MAX: usize = 4;

pub(super) const CHANGED: &str = "its file is damaged, or was changed after it was added; add it again";

type Tensors = Arc<BTreeMap<String, Tensor>>;

/// Where a model's tensors are once it was read; locked while it is.
type Slot = Arc<Mutex<Option<Tensors>>>;

/// Whose, and what.
type Key = (String, ModelHash);

pub(crate) struct ModelCache {
    catalog: Arc<Catalog>,
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    background: Handle,
    held: Mutex<Held>,
    me: Weak<ModelCache>,
}

#[derive(Default)]
struct Held {
    entries: HashMap<Key, Entry>,
    /// Counts openings, which says what was used last.
    clock: u64,
}

struct Entry {
    slot: Slot,
    bytes: u64,
    users: usize,
    last_use: u64,
    /// No model has this file any more: it goes with its last user.
    is_forgotten: bool,
}

impl Entry {
    fn is_idle(&self) -> bool {
        self.users == 0
    }
}

/// An instance's part in a model: as long as there is one, the model stays where it is.
pub(super) struct ModelUse {
    cache: Weak<ModelCache>,
    key: Key,
}

impl std::fmt::Debug for ModelUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ModelUse").field(&self.key).finish()
    }
}

impl Drop for ModelUse {
    fn drop(&mut self) {
        if let Some(cache) = self.cache.upgrade() {
            cache.release(&self.key);
        }
    }
}

impl Models for ModelCache {
    fn open(&self, tenant: &str, name: &str) -> Result<Arc<LoadedModel>, ModelError> {
        let no_such = |_| ModelError::NoSuchModel { name: name.chars().take(128).collect() };
        let mut tries_left = REPLACED_MAX;
        loop {
            let model = self.catalog.model(tenant, name).map_err(no_such)?;
            let opened = self.open_record(&model);
            let is_current = self.is_current(&model);
            match opened {
                // Removed or replaced meanwhile, and its file with it: nothing is damaged.
                Err(_) if !is_current && tries_left > 0 => tries_left -= 1,
                Ok(_) if !is_current => {
                    self.forget(tenant, &model.hash);
                    return opened;
                }
                opened => return opened,
            }
        }
    }
}

impl ModelCache {
    pub(crate) fn new(
        catalog: Arc<Catalog>,
        config: Arc<Config>,
        metrics: Arc<Metrics>,
        background: Handle,
    ) -> Arc<ModelCache> {
        let held = Mutex::default();
        Arc::new_cyclic(|me| ModelCache { catalog, config, metrics, background, held, me: me.clone() })
    }

    /// Whether the model has its name still.
    fn is_current(&self, model: &ModelRecord) -> bool {
        self.catalog.model(&model.tenant, &model.name).is_ok_and(|now| now.id == model.id)
    }

    fn open_record(&self, model: &Arc<ModelRecord>) -> Result<Arc<LoadedModel>, ModelError> {
        if let Some(why) = &model.quarantined {
            return Err(ModelError::Damaged { name: model.name.clone(), why: why.clone() });
        }
        let (slot, held) = self.hold(model)?;
        let mut slot = slot.lock();
        let tensors = match &*slot {
            Some(tensors) => tensors.clone(),
            None => slot.insert(Arc::new(self.read(model)?)).clone(),
        };
        Ok(Arc::new(LoadedModel { name: model.name.clone(), tensors, _use: Some(held) }))
    }

    /// Lets go of a file that is no model of a tenant any more, once nobody uses it.
    pub(crate) fn forget(&self, tenant: &str, hash: &ModelHash) {
        if self.catalog.models(tenant).iter().any(|model| model.hash == *hash) {
            return;
        }
        let mut held = self.held.lock();
        if let Some(entry) = held.entries.get_mut(&(tenant.to_owned(), hash.clone())) {
            entry.is_forgotten = true;
        }
        self.settle(held);
    }

    /// A model's place, charged for, and a part in it.
    fn hold(&self, model: &ModelRecord) -> Result<(Slot, ModelUse), ModelError> {
        let key = (model.tenant.clone(), model.hash.clone());
        let mut held = self.held.lock();
        held.clock += 1;
        let now = held.clock;
        let mut gone = Vec::new();
        if !held.entries.contains_key(&key) {
            let bytes = loaded_bytes(model);
            let tenant_max = self.config.limits_of(&model.tenant).models_loaded_bytes_max;
            let server_max = self.config.server.models_loaded_bytes_max;
            let made = held
                .make_room(bytes, tenant_max, |(tenant, _)| *tenant == model.tenant, &mut gone)
                .map_err(|taken| (taken, tenant_max, "the tenant's models", "[limits]"))
                .and_then(|()| {
                    held.make_room(bytes, server_max, |_| true, &mut gone)
                        .map_err(|taken| (taken, server_max, "all models", "[server]"))
                });
            if let Err((taken, max, whose, section)) = made {
                let why = format!(
                    "it takes {bytes} bytes of memory; {whose} in use have {taken} and may have {max} ({section} \
                     models_loaded_bytes_max)"
                );
                self.settle(held);
                return Err(ModelError::TooLarge { name: model.name.clone(), why });
            }
            let entry = Entry { slot: Arc::default(), bytes, users: 0, last_use: now, is_forgotten: false };
            held.entries.insert(key.clone(), entry);
        }
        let slot = match held.entries.get_mut(&key) {
            Some(entry) => {
                entry.users += 1;
                entry.last_use = now;
                entry.is_forgotten = false;
                entry.slot.clone()
            }
            None => Arc::default(),
        };
        self.settle(held);
        Ok((slot, ModelUse { cache: self.me.clone(), key }))
    }

    fn release(&self, key: &Key) {
        let mut held = self.held.lock();
        let Some(entry) = held.entries.get_mut(key) else { return };
        entry.users -= 1;
        // Without its lock nobody reads it: whoever does is a user.
        let was_read = entry.slot.try_lock().is_none_or(|slot| slot.is_some());
        entry.is_forgotten |= !was_read && entry.is_idle();
        self.settle(held);
    }

    /// Drops what nobody has or may have any more, and says how much is left.
    fn settle(&self, mut held: parking_lot::MutexGuard<'_, Held>) {
        let is_gone = |_: &Key, entry: &mut Entry| entry.is_forgotten && entry.is_idle();
        let mut gone: Vec<Entry> = held.entries.extract_if(is_gone).map(|(_, entry)| entry).collect();
        held.trim_idle(self.config.server.models_idle_bytes_max, &mut gone);
        let bytes: u64 = held.entries.values().map(|entry| entry.bytes).sum();
        self.metrics.models_loaded.set(i64::try_from(held.entries.len()).unwrap_or(i64::MAX));
        self.metrics.models_loaded_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        drop(held);
        self.drop_elsewhere(gone);
    }

    /// Gives memory back where nobody waits: unmapping gigabytes takes a while, and an instance may end on a thread
    /// that serves.
    fn drop_elsewhere(&self, gone: Vec<Entry>) {
        if !gone.is_empty() {
            self.background.spawn_blocking(move || drop(gone));
        }
    }

    fn read(&self, model: &Arc<ModelRecord>) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let path = self.catalog.files.model(&model.hash);
        let damaged = |why: &str| {
            let (catalog, metrics, model, why) =
                (self.catalog.clone(), self.metrics.clone(), model.clone(), format!("{}: {why}", path.display()));
            let name = model.name.clone();
            // The file of a model that was removed is missing because nobody wants it any more.
            if self.is_current(&model) {
                self.background.spawn(async move { store::quarantine(&catalog, &metrics, &model, &why).await });
            }
            ModelError::Damaged { name, why: CHANGED.to_owned() }
        };
        let unreadable = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => damaged("missing"),
            _ => {
                tracing::error!(file = %path.display(), %error, "a model cannot be read");
                ModelError::Damaged { name: model.name.clone(), why: format!("it cannot be read now: {error}") }
            }
        };
        let file = File::open(&path).map_err(unreadable)?;
        let bytes = file.metadata().map_err(unreadable)?.len();
        if bytes != model.bytes {
            return Err(damaged(&format!("it has {bytes} bytes, and was added with {}", model.bytes)));
        }
        let mut reader =
            HashingReader { from: BufReader::with_capacity(READ_BYTES, file), hasher: blake3::Hasher::new() };
        let read = SafetensorsHeader::read(&mut reader, bytes, HEADER_BYTES_MAX)
            .and_then(|header| header.read_elements(&mut reader));
        match read {
            Ok(read) if ModelHash::from(reader.hasher.finalize()) == model.hash => {
                self.metrics.model_loads.inc();
                Ok(read.tensors)
            }
            Ok(_) => Err(damaged("the content does not match its hash")),
            Err(error) if matches!(&*error.what, ErrorKind::OutOfMemory { .. }) => {
                Err(ModelError::TooLarge { name: model.name.clone(), why: complaint(&error) })
            }
            // It said something else when it was added.
            Err(error) => Err(damaged(&complaint(&error))),
        }
    }
}

impl Held {
    /// Takes idle entries out until those that are meant have room for so many bytes more, the one used least recently
    /// first. Says how much those in use take where that is too much.
    fn make_room(
        &mut self,
        bytes: u64,
        max: u64,
        is_meant: impl Fn(&Key) -> bool,
        gone: &mut Vec<Entry>,
    ) -> Result<(), u64> {
        let meant = |entries: &HashMap<Key, Entry>, counts: fn(&Entry) -> bool| -> u64 {
            let meant = entries.iter().filter(|(key, entry)| is_meant(key) && counts(entry));
            meant.map(|(_, entry)| entry.bytes).sum()
        };
        let in_use = meant(&self.entries, |entry| !entry.is_idle());
        if in_use.saturating_add(bytes) > max {
            return Err(in_use);
        }
        while meant(&self.entries, |_| true).saturating_add(bytes) > max {
            let Some(entry) = self.take_least_recent(&is_meant) else { return Err(in_use) };
            gone.push(entry);
        }
        Ok(())
    }

    /// Takes idle entries out until they have no more than so many bytes together.
    fn trim_idle(&mut self, max: u64, gone: &mut Vec<Entry>) {
        while self.entries.values().filter(|entry| entry.is_idle()).map(|entry| entry.bytes).sum::<u64>() > max {
            let Some(entry) = self.take_least_recent(&|_| true) else { return };
            gone.push(entry);
        }
    }

    fn take_least_recent(&mut self, is_meant: &impl Fn(&Key) -> bool) -> Option<Entry> {
        let idle = self.entries.iter().filter(|(key, entry)| entry.is_idle() && is_meant(key));
        let key = idle.min_by_key(|(_, entry)| entry.last_use)?.0.clone();
        self.entries.remove(&key)
    }
}

/// What a model takes in memory.
fn loaded_bytes(model: &ModelRecord) -> u64 {
    model.bytes.saturating_add((model.tensors as u64).saturating_mul(TENSOR_BYTES))
}

/// Hashes what is read through it.
struct HashingReader<R> {
    from: R,
    hasher: blake3::Hasher,
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.from.read(into)?;
        self.hasher.update(&into[..read]);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::SecretsAccess;
    use crate::catalog::upload::{Upload, UploadKind};
    use crate::config::Limits;
    use tensor_wasm_tensor::DType;

    /// Elements of a model of this test; its file has a header beside them.
    const ELEMENTS: usize = 10_000;

    struct Fixture {
        cache: Arc<ModelCache>,
        catalog: Arc<Catalog>,
        metrics: Arc<Metrics>,
        threads: tokio::runtime::Runtime,
        _data: tempfile::TempDir,
    }

    impl Fixture {
        fn new(config: impl FnOnce(&mut Config)) -> Fixture {
            let data = tempfile::tempdir().unwrap();
            let mut made = Config::default();
            config(&mut made);
            let catalog = Arc::new(Catalog::open(data.path(), SecretsAccess::default()).unwrap().0);
            let threads = tokio::runtime::Runtime::new().unwrap();
            let (metrics, handle) = (Arc::<Metrics>::default(), threads.handle().clone());
            let cache = ModelCache::new(catalog.clone(), Arc::new(made), metrics.clone(), handle);
            Fixture { cache, catalog, metrics, threads, _data: data }
        }

        /// A model whose elements are all the same.
        fn add(&self, tenant: &str, name: &str, element: f32) -> Arc<ModelRecord> {
            let tensor = Tensor::full(&[ELEMENTS], element, DType::F32);
            let mut file = Vec::new();
            tensor_wasm_tensor::io::write_safetensors(&mut file, [("w", tensor)], &BTreeMap::new()).unwrap();
            let added = self.threads.block_on(async {
                let mut upload = Upload::begin(&self.catalog.files, UploadKind::Model, usize::MAX).unwrap();
                upload.write(&file).await.unwrap();
                self.catalog.add_model(tenant, name, upload.finish().await.unwrap(), 1, &Limits::default()).await
            });
            let added = added.unwrap();
            if let Some(old) = added.replaced.filter(|old| old.hash != added.model.hash) {
                self.cache.forget(tenant, &old.hash);
            }
            added.model
        }

        fn remove(&self, tenant: &str, name: &str) {
            let removed = self.threads.block_on(self.catalog.remove_model(tenant, name, true)).unwrap();
            self.cache.forget(tenant, &removed.hash);
        }

        fn loaded(&self) -> (i64, i64) {
            (self.metrics.models_loaded.get(), self.metrics.models_loaded_bytes.get())
        }

        fn loads(&self) -> u64 {
            self.metrics.model_loads.get()
        }
    }

    fn first(model: &LoadedModel) -> f32 {
        model.tensors["w"].narrow(0, 0, 1).item::<f32>().unwrap()
    }

    #[test]
    fn a_model_is_read_once_and_shared_until_it_makes_way() {
        let one = std::cell::Cell::new(0);
        let fixture = Fixture::new(|config| config.server.models_idle_bytes_max = 100_000);
        for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
            one.set(loaded_bytes(&fixture.add("t", name, n as f32)));
        }
        let one = i64::try_from(one.get()).unwrap();
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = || scope.spawn(|| fixture.cache.open("t", "a").unwrap());
            let threads: Vec<_> = (0..8).map(|_| open()).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(opened.iter().all(|model| Arc::ptr_eq(&model.tensors, &opened[0].tensors)));
        assert_eq!((fixture.loads(), fixture.loaded()), (1, (1, one)));
        drop(opened);
        // Idle ones stay, two of them: a third makes the one used least recently go.
        for name in ["b", "a"] {
            fixture.cache.open("t", name).unwrap();
        }
        assert_eq!((fixture.loads(), fixture.loaded()), (2, (2, 2 * one)));
        assert_eq!(first(&fixture.cache.open("t", "c").unwrap()), 2.0);
        assert_eq!((fixture.loads(), fixture.loaded()), (3, (2, 2 * one)));
        fixture.cache.open("t", "a").unwrap();
        assert_eq!(fixture.loads(), 3);
        fixture.cache.open("t", "b").unwrap();
        assert_eq!(fixture.loads(), 4);
    }

    #[test]
    fn memory_is_charged_to_the_tenant_and_the_server_and_comes_back() {
        let fixture = Fixture::new(|config| {
            config.limits.models_loaded_bytes_max = 100_000;
            config.server.models_loaded_bytes_max = 130_000;
        });
        for (n, (tenant, name)) in [("s", "a"), ("t", "a"), ("t", "b"), ("t", "c")].into_iter().enumerate() {
            fixture.add(tenant, name, n as f32);
        }
        let a = fixture.cache.open("t", "a").unwrap();
        let b = fixture.cache.open("t", "b").unwrap();
        let refused = fixture.cache.open("t", "c").unwrap_err().to_string();
        assert!(
            refused.contains("the tenant's models") && refused.contains("[limits] models_loaded_bytes_max"),
            "{refused}"
        );
        let other = fixture.cache.open("s", "a").unwrap();
        drop(b);
        fixture.cache.open("t", "c").unwrap();
        assert_eq!(fixture.loaded().0, 3, "what was idle made way");
        // A model that is gone is charged as long as somebody has it, and then no more.
        fixture.remove("t", "a");
        assert_eq!(fixture.cache.open("t", "a").unwrap_err(), ModelError::NoSuchModel { name: "a".to_owned() });
        assert_eq!((fixture.loaded().0, first(&a)), (3, 1.0));
        drop(a);
        assert_eq!(fixture.loaded().0, 2);
        fixture.remove("t", "c");
        drop(other);
        fixture.remove("s", "a");
        assert_eq!(fixture.loaded(), (0, 0));
    }

    #[test]
    fn a_server_full_of_models_says_so() {
        let fixture = Fixture::new(|config| config.server.models_loaded_bytes_max = 50_000);
        fixture.add("s", "a", 1.0);
        fixture.add("t", "a", 2.0);
        let own = fixture.cache.open("s", "a").unwrap();
        let refused = fixture.cache.open("t", "a").unwrap_err().to_string();
        assert!(refused.contains("all models") && refused.contains("[server] models_loaded_bytes_max"), "{refused}");
        drop(own);
        assert_eq!(first(&fixture.cache.open("t", "a").unwrap()), 2.0);
    }

    #[test]
    fn what_is_removed_or_replaced_while_it_is_opened_is_not_damaged() {
        let fixture = Fixture::new(|_| {});
        let old = fixture.add("t", "m", 1.0);
        fixture.add("t", "m", 2.0);
        // As whoever had looked it up before sees it: the file went with its last model.
        assert!(matches!(fixture.cache.open_record(&old), Err(ModelError::Damaged { .. })));
        assert_eq!(first(&fixture.cache.open("t", "m").unwrap()), 2.0);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| {
                let mut opened = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) || opened == 0 {
                    match fixture.cache.open("t", "m") {
                        Ok(model) => {
                            opened += 1;
                            assert!(first(&model) >= 2.0);
                        }
                        Err(refused) => assert!(matches!(refused, ModelError::NoSuchModel { .. }), "{refused}"),
                    }
                }
            });
            for n in 0..60_u8 {
                if n % 3 == 0 {
                    fixture.remove("t", "m");
                }
                fixture.add("t", "m", f32::from(n) + 2.0);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            opening.join().unwrap();
        });
        assert_eq!(fixture.metrics.quarantined.get(), 0);
        assert!(fixture.catalog.model("t", "m").unwrap().quarantined.is_none());
        fixture.remove("t", "m");
        assert_eq!(fixture.loaded(), (0, 0), "nothing is kept of files that are no models any more");
    }

    #[test]
    fn a_model_that_is_added_again_while_its_file_is_set_aside_is_whole() {
        let fixture = Fixture::new(|_| {});
        let old = fixture.add("t", "m", 3.0);
        let other = fixture.add("u", "m", 3.0);
        std::fs::write(fixture.catalog.files.model(&old.hash), b"damaged").unwrap();
        let damaged = fixture.threads.block_on(fixture.catalog.set_model_aside(&old.hash, CHANGED)).unwrap();
        fixture.add("t", "m", 3.0);
        fixture.threads.block_on(fixture.catalog.mark_models(&damaged, CHANGED));
        assert_eq!(first(&fixture.cache.open("t", "m").unwrap()), 3.0);
        // The other was never added again, but its file is the same, and is there.
        let marked = fixture.catalog.model("u", "m").unwrap();
        assert!(marked.quarantined.is_some() && marked.id == other.id);
    }

    #[test]
    fn a_file_that_changed_is_refused_and_set_aside_and_what_was_read_stays() {
        let fixture = Fixture::new(|config| config.server.models_idle_bytes_max = 0);
        for (what, change) in [
            (
                "a bit",
                (|path: &std::path::Path| {
                    let mut bytes = std::fs::read(path).unwrap();
                    *bytes.last_mut().unwrap() ^= 1;
                    std::fs::write(path, bytes).unwrap();
                }) as fn(&std::path::Path),
            ),
            ("its header", |path| {
                let mut bytes = std::fs::read(path).unwrap();
                bytes[9] = b'x';
                std::fs::write(path, bytes).unwrap();
            }),
            ("cut off", |path| {
                std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1000).unwrap();
            }),
            ("removed", |path| std::fs::remove_file(path).unwrap()),
        ] {
            let model = fixture.add("t", "m", 5.0);
            let path = fixture.catalog.files.model(&model.hash);
            let open = fixture.cache.open("t", "m").unwrap();
            change(&path);
            // It was read: what happens to the file is not seen by whoever has it open.
            assert_eq!(open.tensors["w"].sum(()).item::<f32>().unwrap(), 5.0 * ELEMENTS as f32, "{what}");
            drop(open);
            let refused = fixture.cache.open("t", "m").unwrap_err();
            assert!(matches!(&refused, ModelError::Damaged { why, .. } if why == CHANGED), "{what}: {refused}");
            let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while fixture.catalog.model("t", "m").unwrap().quarantined.is_none() {
                assert!(std::time::Instant::now() < until, "{what}: it is not set aside");
                std::thread::yield_now();
            }
            assert!(!path.exists(), "{what}");
            assert!(matches!(fixture.cache.open("t", "m"), Err(ModelError::Damaged { .. })), "{what}");
            assert_eq!(fixture.loaded(), (0, 0), "{what}");
        }
        assert_eq!(fixture.metrics.quarantined.get(), 4);
    }
}
